//! Work items, longest first, pulled by as many workers as rayon has threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `work` on every item and returns what it pushed, in no particular order. Each worker makes one workspace.
/// Items should come longest first, so that no long one is left for the end.
pub(super) fn run<Item: Sync, W, R: Send>(
    items: &[Item],
    workspace: impl Fn() -> W + Sync,
    work: impl Fn(&Item, &mut W, &mut Vec<R>) + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let worker = || {
        let mut own = Vec::new();
        let mut workspace = workspace();
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item, &mut workspace, &mut own);
        }
        // A worker that panics poisons nothing of value: rayon hands the panic on to the caller.
        results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).append(&mut own);
    };
    rayon::scope(|scope| {
        for _ in 1..rayon::current_num_threads().min(items.len()) {
            scope.spawn(|_| worker());
        }
        worker();
    });
    results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Query tiles that one item takes together: they share gathered keys, and their states should stay in the L2 cache;
/// but every thread should find several items.
pub(super) fn tiles_per_item(head_dim: usize, tile_q: usize, total_tiles: usize) -> usize {
    const STATE_BYTES: usize = 512 << 10;
    let per_tile = 2 * head_dim * tile_q * size_of::<f32>();
    let items_wanted = 4 * rayon::current_num_threads();
    (STATE_BYTES / per_tile).min(total_tiles / items_wanted).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once() {
        let items: Vec<usize> = (0..1000).collect();
        let mut done = run(
            &items,
            || 0,
            |&item, count, out| {
                *count += 1;
                out.push(item);
            },
        );
        done.sort_unstable();
        assert_eq!(done, items);
        assert!(run(&[] as &[usize], || (), |_, _, out| out.push(())).is_empty());
    }

    #[test]
    fn items_shrink_when_there_is_little_work() {
        assert_eq!(tiles_per_item(128, 128, 1), 1);
        assert_eq!(tiles_per_item(128, 128, 1 << 20), 4);
        assert_eq!(tiles_per_item(64, 64, 1 << 20), 16);
    }
}
