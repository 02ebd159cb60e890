//! [`groups`]: segments that are ranked together because their orders fit the workspace cap.

use std::ops::Range;

use crate::error::S2oError;
use crate::plan::Plan;
use crate::shape::AttnShape;

/// One segment with the query heads that are ranked together: all heads of one KV head, or one of them.
#[derive(Debug, Clone)]
pub(super) struct SegmentHeads {
    pub(super) batch: usize,
    pub(super) heads: Range<usize>,
    /// Index into `plan.segments`.
    pub(super) segment: usize,
}

impl SegmentHeads {
    /// Every segment of a call for all heads of each KV head, later segments (with the longer prefixes) first.
    pub(super) fn all(shape: &AttnShape, plan: &Plan) -> Vec<Self> {
        let group = shape.group_size();
        let mut all = Vec::new();
        for segment in (0..plan.segments.len()).rev() {
            for batch in 0..shape.batch() {
                all.extend((0..shape.num_kv_heads()).map(|kv_head| {
                    let heads = kv_head * group..(kv_head + 1) * group;
                    Self { batch, heads, segment }
                }));
            }
        }
        all
    }

    /// Those with queries outside the dense tail.
    pub(super) fn ranked(shape: &AttnShape, plan: &Plan) -> Vec<Self> {
        let mut ranked = Self::all(shape, plan);
        ranked.retain(|heads| !plan.segments[heads.segment].rows.is_empty());
        ranked
    }
}

/// Cuts the segments with queries outside the dense tail into groups whose orders take at most `cap` bytes, at least
/// one group. Heads are ranked one by one if the heads of their KV head do not fit together.
///
/// # Errors
/// [`S2oError::WorkspaceTooSmall`] if the order of one segment for one head does not fit.
pub(super) fn groups(shape: &AttnShape, plan: &Plan, cap: usize) -> Result<Vec<Vec<SegmentHeads>>, S2oError> {
    let (mut groups, mut group, mut used) = (Vec::new(), Vec::new(), 0);
    for all_heads in SegmentHeads::ranked(shape, plan) {
        let prefix_len = plan.segments[all_heads.segment].start;
        // Two 64-bit sort keys and a 32-bit index per key and head.
        let bytes = |heads| 20 * heads * prefix_len;
        if bytes(1) > cap {
            return Err(S2oError::WorkspaceTooSmall { expected: bytes(1), got: cap, prefix_len });
        }
        let parts = if bytes(all_heads.heads.len()) <= cap {
            vec![all_heads]
        } else {
            let one = |head| SegmentHeads { heads: head..head + 1, ..all_heads.clone() };
            all_heads.heads.clone().map(one).collect()
        };
        for part in parts {
            let bytes = bytes(part.heads.len());
            if used + bytes > cap {
                groups.push(std::mem::take(&mut group));
                used = 0;
            }
            used += bytes;
            group.push(part);
        }
    }
    groups.push(group);
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{S2oConfig, SegmentLen};

    #[test]
    fn a_group_fills_the_cap() {
        let shape = AttnShape::new([1, 768, 4, 64], [768, 2]).unwrap();
        let config = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_tail(0).build().unwrap();
        let plan = Plan::new(&config, &shape, 768, 0).unwrap();
        let parts =
            |group: Vec<SegmentHeads>| group.into_iter().map(|part| (part.segment, part.heads)).collect::<Vec<_>>();
        let cut = |cap| groups(&shape, &plan, cap).map(|groups| groups.into_iter().map(parts).collect::<Vec<_>>());
        // The order of a head takes 10240 bytes for segment 2, 5120 for segment 1 and none for segment 0.
        let expected = [vec![(2, 0..2)], vec![(2, 2..4), (1, 0..2)], vec![(1, 2..4), (0, 0..2), (0, 2..4)]];
        assert_eq!(cut(3 * 10240).unwrap(), expected);
        let last = vec![(1, 2..4), (0, 0..2), (0, 2..4)];
        let expected = [vec![(2, 0..1)], vec![(2, 1..2)], vec![(2, 2..3)], vec![(2, 3..4)], vec![(1, 0..2)], last];
        assert_eq!(cut(10240).unwrap(), expected);
        let too_small = S2oError::WorkspaceTooSmall { expected: 10240, got: 10239, prefix_len: 512 };
        assert_eq!(cut(10239).unwrap_err(), too_small);
    }
}
