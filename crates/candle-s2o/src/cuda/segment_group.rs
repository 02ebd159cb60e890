//! [`SegmentGroup`]: segments that are ranked and attended together, under the cap on the workspace.

use s2o_core::{S2oError, Segment};
use s2o_kernels::ranking::SCORE_BLOCK;

/// Bytes of the order of `keys` keys for one head: an index and a score per key, and the ranges of the scores.
pub(super) fn order_bytes(keys: usize) -> usize {
    keys * (size_of::<i32>() + size_of::<u16>()) + keys / SCORE_BLOCK * size_of::<[f32; 2]>()
}

/// Segments that are ranked and attended together: indices into `plan.segments`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SegmentGroup {
    pub(super) first: usize,
    pub(super) end: usize,
    /// Length in keys of the orders of all segments, for one head.
    pub(super) keys: usize,
}

impl SegmentGroup {
    /// Number of segments.
    pub(super) fn len(&self) -> usize {
        self.end - self.first
    }
}

/// Cuts the segments with ranked rows into groups whose orders for `heads` heads fit the cap, the last segments first.
pub(super) fn groups(segments: &[Segment], heads: usize, cap: usize) -> Result<Vec<SegmentGroup>, S2oError> {
    let fits = |keys: usize| heads * order_bytes(keys) <= cap;
    let mut groups: Vec<SegmentGroup> = Vec::new();
    for (number, segment) in segments.iter().enumerate().rev().filter(|(_, segment)| !segment.rows.is_empty()) {
        if !fits(segment.start) {
            let expected = heads * order_bytes(segment.start);
            return Err(S2oError::WorkspaceTooSmall { expected, got: cap, prefix_len: segment.start });
        }
        match groups.last_mut() {
            Some(group) if fits(group.keys + segment.start) => {
                group.first = number;
                group.keys += segment.start;
            }
            _ => groups.push(SegmentGroup { first: number, end: number + 1, keys: segment.start }),
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use s2o_core::segments;

    #[test]
    fn groups_fit_the_cap_and_cover_what_is_ranked() {
        let segments = segments(300, 724, 128, 1000);
        let keys = |range: std::ops::Range<usize>| segments[range].iter().map(|segment| segment.start).sum();
        assert_eq!(segments.len(), 6);
        let all = groups(&segments, 2, usize::MAX).unwrap();
        assert_eq!(all, [SegmentGroup { first: 0, end: 6, keys: keys(0..6) }]);
        let cap = 2 * order_bytes(896 + 768);
        let cut = groups(&segments, 2, cap).unwrap();
        assert_eq!(cut[0], SegmentGroup { first: 4, end: 6, keys: 896 + 768 });
        assert_eq!(cut.last().unwrap().first, 0);
        assert!(cut.iter().all(|group| 2 * order_bytes(group.keys) <= cap));
        assert_eq!(
            groups(&segments, 2, 1000),
            Err(S2oError::WorkspaceTooSmall { expected: 2 * order_bytes(896), got: 1000, prefix_len: 896 })
        );
    }

    #[test]
    fn segments_in_the_tail_are_not_ranked() {
        assert_eq!(groups(&segments(0, 256, 128, 0), 1, 0), Ok(vec![]));
        let ranked = groups(&segments(0, 512, 128, 200), 1, usize::MAX).unwrap();
        assert_eq!(ranked, [SegmentGroup { first: 0, end: 2, keys: 128 }]);
    }
}
