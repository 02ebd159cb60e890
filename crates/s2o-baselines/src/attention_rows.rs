//! Exact attention of a few queries, from which methods estimate the attention of the others.

use std::ops::Range;

use candle_core::{DType, Tensor};
use candle_s2o::AttnShape;

use crate::MAX_INTERMEDIATE;
use crate::error::BaselineError;
use crate::pooling::softmax_of_seen;

/// Softmax attention of the queries `rows` (ascending) of a call to all keys that they see. `reduce` is called with a
/// bounded number of heads at a time: their numbers (`b * num_heads + h`) and their attention `(heads, rows, k_len)` of
/// f32. It returns the tensors to keep, `(heads, ..)`, which are concatenated over all heads.
pub(crate) fn attention_rows<const N: usize>(
    [q, k]: [&Tensor; 2],
    shape: &AttnShape,
    scale: f32,
    rows: &[u32],
    reduce: impl Fn(Range<usize>, &Tensor) -> Result<[Tensor; N], BaselineError>,
) -> Result<[Tensor; N], BaselineError> {
    let (k_len, device) = (shape.k_len(), q.device());
    let offset = shape.q_offset() as u32;
    let positions: Vec<u32> = rows.iter().map(|row| offset + row).collect();
    let positions = Tensor::new(positions, device)?.unsqueeze(1)?;
    let visible = Tensor::arange(0u32, k_len as u32, device)?.unsqueeze(0)?.broadcast_le(&positions)?;
    let q = take_rows(q, rows)?;

    let group = shape.num_heads() / shape.num_kv_heads();
    let heads_at_once = (MAX_INTERMEDIATE / (rows.len() * k_len)).max(1);
    // With few rows, the keys in f32 are the largest tensor.
    let kv_heads_at_once = (heads_at_once / group).min(MAX_INTERMEDIATE / (k_len * shape.head_dim())).max(1);
    let mut parts: [Vec<Tensor>; N] = std::array::from_fn(|_| Vec::new());
    for batch in 0..shape.batch() {
        let (q, k) = (q.get(batch)?, k.get(batch)?);
        for kv_head in (0..shape.num_kv_heads()).step_by(kv_heads_at_once) {
            let kv_heads = kv_heads_at_once.min(shape.num_kv_heads() - kv_head);
            let keys = k.narrow(1, kv_head, kv_heads)?.to_dtype(DType::F32)?.permute((1, 2, 0))?.contiguous()?;
            // Several KV heads are taken with all their query heads; the query heads of a single KV head may be split.
            let step = if kv_heads == 1 { heads_at_once.min(group) } else { kv_heads * group };
            let end = (kv_head + kv_heads) * group;
            for head in (kv_head * group..end).step_by(step) {
                let heads = step.min(end - head);
                let queries = q.narrow(1, head, heads)?.to_dtype(DType::F32)?.transpose(0, 1)?.contiguous()?;
                let queries = queries.reshape((kv_heads, heads / kv_heads * rows.len(), shape.head_dim()))?;
                let scores = queries.matmul(&keys)?.reshape((heads, rows.len(), k_len))?;
                let number = batch * shape.num_heads() + head;
                let kept = reduce(number..number + heads, &softmax_of_seen(&scores, scale.into(), Some(&visible))?)?;
                parts.iter_mut().zip(kept).for_each(|(parts, kept)| parts.push(kept));
            }
        }
    }
    let whole = parts.iter().map(|parts| Tensor::cat(parts, 0)).collect::<Result<Vec<_>, _>>()?;
    Ok(whole.try_into().expect("one tensor for each kept"))
}

/// The last `count` queries of a call, or all if it has fewer.
pub(crate) fn last_rows(shape: &AttnShape, count: usize) -> Vec<u32> {
    (shape.q_len().saturating_sub(count) as u32..shape.q_len() as u32).collect()
}

/// Selects the ascending `rows` of dimension 1. Candle's index_select would need all of `x` to be contiguous.
fn take_rows(x: &Tensor, rows: &[u32]) -> Result<Tensor, BaselineError> {
    let runs = rows.chunk_by(|a, b| a + 1 == *b);
    let runs: Vec<Tensor> = runs.map(|run| x.narrow(1, run[0] as usize, run.len())).collect::<Result<_, _>>()?;
    Ok(Tensor::cat(&runs, 1)?)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use candle_core::Device;

    use super::*;
    use crate::attention::shape_of;

    #[test]
    fn heads_taken_in_parts_have_the_attention_of_each_alone() {
        // Query heads, KV heads, queries and keys of two sequences. With many queries and keys one part holds two heads.
        for ([heads, kv_heads, rows, k_len], expected) in [
            ([3, 3, 512, 24_000], vec![0..2, 2..3, 3..5, 5..6]),
            ([3, 1, 512, 24_000], vec![0..2, 2..3, 3..5, 5..6]),
            ([6, 2, 5, 40], vec![0..6, 6..12]),
        ] {
            let rand = |len: usize, heads: usize| Tensor::rand(-1f32, 1.0, (2, len, heads, 8), &Device::Cpu).unwrap();
            let (q, k) = (rand(rows, heads), rand(k_len, kv_heads));
            let means = |q: &Tensor, k: &Tensor| {
                let (shape, parts) = (shape_of(q, k, k).unwrap(), RefCell::new(Vec::new()));
                let [means] = attention_rows([q, k], &shape, 1.0, &last_rows(&shape, rows), |heads, attention| {
                    parts.borrow_mut().push(heads);
                    Ok([attention.mean(1)?])
                })
                .unwrap();
                (means, parts.into_inner())
            };
            let (all, parts) = means(&q, &k);
            assert_eq!(parts, expected);
            for (sequence, head) in [(0, 1), (1, heads - 1)] {
                let alone = |x: &Tensor, head| x.narrow(0, sequence, 1).and_then(|x| x.narrow(2, head, 1)).unwrap();
                let (alone, _) = means(&alone(&q, head), &alone(&k, head / (heads / kv_heads)));
                let difference = (all.narrow(0, sequence * heads + head, 1).unwrap() - alone).unwrap().abs().unwrap();
                assert!(difference.max_all().unwrap().to_scalar::<f32>().unwrap() < 1e-7);
            }
        }
    }
}
