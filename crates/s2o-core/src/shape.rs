//! [`AttnShape`]: the sizes of one attention call, checked, and the map from query heads to KV heads; [`Mask`].

use thiserror::Error;

/// The reason the sizes of an attention call were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum ShapeError {
    /// Every size must be at least 1.
    #[error("{name}: expected at least 1, got 0")]
    Empty { name: &'static str },
    /// More heads than any model has, and as many as keys or more: heads and tokens are swapped, in `q` alone or in all
    /// tensors.
    #[error(
        "q: expected (batch, length, heads, head_dim), got {got:?}, which has {} heads for {k_len} keys; \
         tensors in (batch, heads, length, head_dim) need transpose(1, 2)",
        .got[2]
    )]
    HeadsFirst { got: [usize; 4], k_len: usize },
    /// `num_heads` must be a multiple of `num_kv_heads`.
    #[error("num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")]
    Heads { num_heads: usize, num_kv_heads: usize },
    /// Queries are the last `q_len` positions of the keys, so `q_len` cannot exceed `k_len`.
    #[error(
        "q_len: expected at most k_len = {k_len}, got {q_len}; tensors in (batch, heads, length, head_dim) need \
         transpose(1, 2)"
    )]
    MoreQueriesThanKeys { q_len: usize, k_len: usize },
    /// `head_dim` must be a multiple of 8, at most 256.
    #[error("head_dim: expected a multiple of 8 up to 256, got {got}")]
    HeadDim { got: usize },
    /// Key indices are 32-bit, which limits the number of keys.
    #[error("k_len: expected at most {max}, got {got}")]
    TooManyKeys { max: usize, got: usize },
    /// A tensor's sizes do not fit those of another.
    #[error("{name}: expected sizes {expected:?}, got {got:?}")]
    Mismatch { name: &'static str, expected: [usize; 4], got: [usize; 4] },
    /// A buffer is shorter than its shape and strides require.
    #[error("{name}: expected at least {expected} elements, got {got}")]
    Buffer { name: &'static str, expected: usize, got: usize },
}

/// More heads than any model has. A call with more heads than this and than keys has its dimensions in another order.
/// If `q` alone has, its heads are as many as the keys, and its length, which is the number of heads, is shorter.
const MOST_HEADS: usize = 256;

/// Sizes of one attention call: `q` is `(batch, q_len, num_heads, head_dim)`, `k` and `v` are
/// `(batch, k_len, num_kv_heads, head_dim)`. Queries are the last `q_len` of the `k_len` positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttnShape {
    batch: usize,
    num_heads: usize,
    num_kv_heads: usize,
    q_len: usize,
    k_len: usize,
    head_dim: usize,
}

impl AttnShape {
    /// Checks the sizes of `q` (`[batch, q_len, num_heads, head_dim]`) against those of `k`
    /// (`[k_len, num_kv_heads]`).
    ///
    /// # Errors
    /// A [`ShapeError`] that names the size at fault.
    pub fn new(
        [batch, q_len, num_heads, head_dim]: [usize; 4],
        [k_len, num_kv_heads]: [usize; 2],
    ) -> Result<Self, ShapeError> {
        let names = ["batch", "q_len", "num_heads", "head_dim", "k_len", "num_kv_heads"];
        let sizes = [batch, q_len, num_heads, head_dim, k_len, num_kv_heads];
        if let Some(empty) = sizes.iter().position(|&size| size == 0) {
            return Err(ShapeError::Empty { name: names[empty] });
        }
        if !head_dim.is_multiple_of(8) || head_dim > 256 {
            return Err(ShapeError::HeadDim { got: head_dim });
        }
        if num_heads > MOST_HEADS && (num_heads > k_len || (num_heads == k_len && q_len < k_len)) {
            let got = [batch, q_len, num_heads, head_dim];
            return Err(ShapeError::HeadsFirst { got, k_len });
        }
        if q_len > k_len {
            return Err(ShapeError::MoreQueriesThanKeys { q_len, k_len });
        }
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(ShapeError::Heads { num_heads, num_kv_heads });
        }
        if i32::try_from(k_len).is_err() {
            return Err(ShapeError::TooManyKeys { max: i32::MAX as usize, got: k_len });
        }
        Ok(Self { batch, num_heads, num_kv_heads, q_len, k_len, head_dim })
    }

    /// Checks the sizes of `q` (batch, q_len, num_heads, head_dim), `k` and `v` (batch, k_len, num_kv_heads, head_dim).
    ///
    /// # Errors
    /// A [`ShapeError`] that names the size or tensor at fault.
    pub fn of(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self, ShapeError> {
        let expected = [q[0], k[1], k[2], q[3]];
        for (name, got) in [("k", k), ("v", v)] {
            if got != expected {
                return Err(ShapeError::Mismatch { name, expected, got });
            }
        }
        Self::new(q, [k[1], k[2]])
    }

    /// Number of sequences in the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Number of query heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Number of KV heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Number of queries of this call, per sequence.
    pub fn q_len(&self) -> usize {
        self.q_len
    }

    /// Number of keys per sequence, including those before this call.
    pub fn k_len(&self) -> usize {
        self.k_len
    }

    /// Size of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Position of the first query: `k_len - q_len`.
    pub fn q_offset(&self) -> usize {
        self.k_len - self.q_len
    }

    /// Number of query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// KV head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / self.group_size()
    }

    /// `1 / sqrt(head_dim)`, the usual factor on `q . k`.
    pub fn default_softmax_scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }
}

/// The keys that a query may attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// The keys up to its own position, where the queries are the last positions (bottom-right causal).
    Causal,
    /// All keys.
    Full,
}

impl Mask {
    /// Whether later keys are hidden.
    pub fn is_causal(self) -> bool {
        self == Self::Causal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_query_heads_read_one_kv_head() {
        let shape = AttnShape::new([2, 5, 6, 64], [7, 2]).unwrap();
        assert_eq!([shape.batch(), shape.q_len(), shape.num_heads(), shape.head_dim()], [2, 5, 6, 64]);
        assert_eq!([shape.k_len(), shape.num_kv_heads(), shape.q_offset(), shape.group_size()], [7, 2, 2, 3]);
        assert_eq!([0, 2, 3, 5].map(|head| shape.kv_head(head)), [0, 0, 1, 1]);
    }
}
