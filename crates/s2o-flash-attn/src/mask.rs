//! [`Window`]: the keys that a query sees.

use std::ops::Range;

/// Number of keys that a query sees to the left and to the right of its own position; `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    left: Option<usize>,
    right: Option<usize>,
}

/// The effect of a window for given lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Full,
    Causal,
    Local,
}

impl Window {
    /// The sizes as FlashAttention takes them: a size beyond `max_k_len` is no limit, and a limit on the left alone
    /// also limits the right to `max_k_len`, which affects only queries before the first key.
    pub(crate) fn new(left: Option<usize>, right: Option<usize>, max_k_len: usize) -> Self {
        let [left, right] = [left, right].map(|size| size.filter(|&size| size <= max_k_len));
        match (left, right) {
            (Some(left), None) => Self { left: Some(left), right: Some(max_k_len) },
            _ => Self { left, right },
        }
    }

    /// The sizes to the left and to the right.
    #[cfg(feature = "cuda")]
    pub(crate) fn limits(&self) -> [Option<usize>; 2] {
        [self.left, self.right]
    }

    pub(crate) fn reach(&self, q_len: usize, k_len: usize) -> Reach {
        let hides_left = self.left.is_some_and(|left| left + 1 < k_len);
        let hides_right = self.right.is_some_and(|right| right + 1 < q_len);
        match (hides_left, hides_right, self.right) {
            (false, false, _) => Reach::Full,
            (false, true, Some(0)) => Reach::Causal,
            _ => Reach::Local,
        }
    }

    /// The keys, out of `k_len`, that a query at `position` sees. Positions before the first key are negative.
    pub(crate) fn keys(&self, position: i64, k_len: usize) -> Range<usize> {
        let bound = |key: i64| key.clamp(0, k_len as i64) as usize;
        let start = self.left.map_or(0, |left| bound(position - left as i64));
        let end = self.right.map_or(k_len, |right| bound(position + 1 + right as i64));
        start..end.max(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_hides_nothing_is_none() {
        let reach = |left, right, q_len, k_len| Window::new(left, right, k_len).reach(q_len, k_len);
        assert_eq!(reach(None, None, 4, 9), Reach::Full);
        assert_eq!(reach(None, Some(0), 4, 9), Reach::Causal);
        assert_eq!(reach(Some(8), Some(0), 4, 9), Reach::Causal);
        assert_eq!(reach(Some(7), Some(0), 4, 9), Reach::Local);
        assert_eq!(reach(None, Some(0), 1, 9), Reach::Full);
        assert_eq!(reach(None, Some(3), 4, 9), Reach::Full);
        assert_eq!(reach(None, Some(2), 4, 9), Reach::Local);
        assert_eq!(reach(Some(100), Some(100), 4, 9), Reach::Full);
    }
}
