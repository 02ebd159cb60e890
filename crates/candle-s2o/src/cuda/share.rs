//! [`Share`]: the heads of a call that one stream computes.

use s2o_cuda::{Aside, Launcher};

use super::call::Call;

/// Some of the heads of a call. Their results have the bits of the whole call, because no head depends on another.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// The call of these heads.
    pub(super) call: Call,
    /// Heads of the whole call before these, of all sequences.
    pub(super) heads_before: usize,
    /// KV heads likewise.
    pub(super) kv_heads_before: usize,
}

impl Share {
    /// Shares of a call at most: one for each stream.
    pub(super) const MOST: usize = 1 + Aside::STREAMS;

    /// All heads.
    pub(super) fn whole(call: &Call) -> Self {
        Self { call: call.clone(), heads_before: 0, kv_heads_before: 0 }
    }

    /// At most `most` shares of about the same size: sequences, or KV heads of a single sequence.
    pub(super) fn parts(call: &Call, most: usize) -> Vec<Self> {
        let (batch, kv_heads, group) = (call.shape.batch(), call.shape.num_kv_heads(), call.shape.group_size());
        let whole = if batch == 1 { kv_heads } else { batch };
        let count = most.min(whole);
        let share = |number: usize| {
            let range = whole * number / count..whole * (number + 1) / count;
            let kv_heads_before = if batch == 1 { range.start } else { range.start * kv_heads };
            let call = if batch == 1 { call.part(0..1, range) } else { call.part(range, 0..kv_heads) };
            Self { call, heads_before: kv_heads_before * group, kv_heads_before }
        };
        (0..count).map(share).collect()
    }

    /// The same share by another launcher.
    pub(super) fn by(self, launcher: &Launcher) -> Self {
        Self { call: self.call.by(launcher.clone()), ..self }
    }
}
