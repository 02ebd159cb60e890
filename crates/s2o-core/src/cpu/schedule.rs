//! Work items that rayon's threads take one at a time.

use rayon::prelude::*;

/// The items in ascending order of `key`, for rayon's threads to take one at a time. `key` should put the longest items
/// first, so that no thread starts a long item at the end. Rayon prepares more workers than it may need, so a worker
/// should create its workspace with its first item.
pub(super) fn in_order<Item: Send, Key: Ord>(
    mut items: Vec<Item>,
    key: impl Fn(&Item) -> Key,
) -> impl ParallelIterator<Item = Item> {
    items.sort_by_key(key);
    items.into_iter().par_bridge()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once() {
        let items: Vec<usize> = (0..1000).collect();
        let mut taken: Vec<usize> = in_order(items.clone(), |&item| std::cmp::Reverse(item)).collect();
        taken.sort_unstable();
        assert_eq!(taken, items);
        assert_eq!(in_order(Vec::<usize>::new(), |_| ()).count(), 0);
    }
}
