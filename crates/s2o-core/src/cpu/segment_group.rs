//! [`SegmentGroup`]: segments that are ranked together because their orders fit the workspace cap.

use std::ops::Range;

use crate::error::S2oError;
use crate::plan::Plan;
use crate::shape::AttnShape;

/// Bytes for ranking one segment for `group_size` heads: two 64-bit sort keys and a 32-bit index per key and head.
fn workspace_bytes(group_size: usize, prefix_len: usize) -> usize {
    20 * group_size * prefix_len
}

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
}

/// Segments whose orders are in memory at the same time.
#[derive(Debug, Default)]
pub(super) struct SegmentGroup {
    /// Segments with queries outside the dense tail.
    pub(super) ranked: Vec<SegmentHeads>,
    /// Segments that lie in the dense tail. They need no order.
    pub(super) tail_only: Vec<SegmentHeads>,
}

impl SegmentGroup {
    /// All segments of a call as one group.
    pub(super) fn whole(shape: &AttnShape, plan: &Plan) -> Self {
        let mut group = Self::default();
        SegmentHeads::all(shape, plan).into_iter().for_each(|segment| group.push(plan, segment));
        group
    }

    /// Cuts the segments of a call into groups whose orders take at most `cap` bytes. Heads are ranked one by one if
    /// the heads of their KV head do not fit together.
    ///
    /// # Errors
    /// [`S2oError::WorkspaceTooSmall`] if the order of one segment for one head does not fit.
    pub(super) fn cut(shape: &AttnShape, plan: &Plan, cap: usize) -> Result<Vec<Self>, S2oError> {
        let mut groups = Vec::new();
        let (mut group, mut used) = (Self::default(), 0);
        for all_heads in SegmentHeads::all(shape, plan) {
            let segment = &plan.segments[all_heads.segment];
            let bytes = |heads| if segment.rows.is_empty() { 0 } else { workspace_bytes(heads, segment.start) };
            if bytes(1) > cap {
                return Err(S2oError::WorkspaceTooSmall { expected: bytes(1), got: cap, prefix_len: segment.start });
            }
            let parts = if bytes(all_heads.heads.len()) <= cap {
                vec![all_heads]
            } else {
                all_heads
                    .heads
                    .clone()
                    .map(|head| SegmentHeads { heads: head..head + 1, ..all_heads.clone() })
                    .collect()
            };
            for part in parts {
                let bytes = bytes(part.heads.len());
                if used + bytes > cap {
                    groups.push(std::mem::take(&mut group));
                    used = 0;
                }
                used += bytes;
                group.push(plan, part);
            }
        }
        groups.push(group);
        Ok(groups)
    }

    fn push(&mut self, plan: &Plan, segment: SegmentHeads) {
        let needs_order = !plan.segments[segment.segment].rows.is_empty();
        if needs_order { &mut self.ranked } else { &mut self.tail_only }.push(segment);
    }
}
