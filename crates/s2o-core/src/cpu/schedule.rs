//! Work items that rayon's threads take one at a time.

use rayon::prelude::*;

use super::tile::Workspace;

/// Runs `work` on every item in ascending order of `key` and returns the results in no particular order. `key` should
/// put the longest items first, so that no thread starts a long item at the end. Each worker has one workspace.
pub(super) fn run<Item: Send, Key: Ord, R: Send>(
    mut items: Vec<Item>,
    key: impl Fn(&Item) -> Key,
    workspace: impl Fn() -> Workspace + Sync,
    work: impl Fn(&Item, &mut Workspace) -> R + Sync,
) -> Vec<R> {
    items.sort_by_key(key);
    // Rayon prepares more workers than it may need, so a worker creates its workspace with its first item.
    let workers = items.into_iter().par_bridge();
    workers.map_init(|| None, |held, item| work(&item, held.get_or_insert_with(&workspace))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once() {
        let items: Vec<usize> = (0..1000).collect();
        let mut done = run(items.clone(), |_| (), || Workspace::new(8, 8), |&item, _| item);
        done.sort_unstable();
        assert_eq!(done, items);
        assert!(run(Vec::<usize>::new(), |_| (), || Workspace::new(8, 8), |_, _| ()).is_empty());
    }
}
