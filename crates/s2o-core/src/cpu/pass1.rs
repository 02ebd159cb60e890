//! Pass 1 (Algorithm 2): keys in natural order, causal or not. It computes the local window and dense attention.

use std::ops::Range;

use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::mask::Mask;

/// Loads the query tiles `cut` (consecutive ranges of rows) and updates them with the keys from `start`, `tile_k` at a
/// time, each query with the keys that `mask` lets it see. The tiles are the first in `workspace.tiles`.
pub(super) fn pass1<T: Element>(
    inputs: &Inputs<'_, T>,
    (batch, head): (usize, usize),
    cut: &[Range<usize>],
    start: usize,
    mask: Mask,
    tile_k: usize,
    workspace: &mut Workspace,
) {
    let shape = inputs.shape;
    let (head_dim, q_offset, kv_head) = (shape.head_dim(), shape.q_offset(), shape.kv_head(head));
    let Workspace { tiles, scores, keys, values, rows: row_buffer, .. } = workspace;
    let tiles = Workspace::at_least(tiles, cut.len());
    for (tile, rows) in tiles.iter_mut().zip(cut) {
        tile.load(inputs, (batch, head), rows.clone(), row_buffer);
    }
    let row_end = cut.last().map_or(0, |rows| rows.end);
    let end = if mask.is_causal() { q_offset + row_end } else { shape.k_len() };
    for first in (start..end).step_by(tile_k) {
        let positions = first..(first + tile_k).min(end);
        let keys = inputs.k.gather((batch, kv_head), positions.clone(), keys);
        let values = inputs.v.gather((batch, kv_head), positions, values);
        for tile in tiles.iter_mut() {
            let (first_row, last_row) = (tile.rows[0], tile.rows[tile.rows.len() - 1]);
            // Only the keys that this tile can see: its result must not depend on the other tiles of the run.
            let seen = if mask.is_causal() { (q_offset + last_row + 1).saturating_sub(first) } else { usize::MAX };
            if seen == 0 {
                continue;
            }
            let len = keys.len().min(seen.saturating_mul(head_dim));
            let diagonal = mask.is_causal().then_some((q_offset + first_row) as isize - first as isize);
            tile.score(&keys[..len], diagonal, scores);
            tile.update(scores, &values[..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::Strided;
    use crate::reference::{self, Head};
    use crate::{AttnShape, S2oConfig, SegmentLen, segments};

    fn wave(dims: [usize; 4], sharpness: f32, phase: f32) -> Vec<f32> {
        (0..dims.iter().product()).map(|i| sharpness * (i as f32 * 0.37 + phase * (i % 7) as f32).sin()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn states_equal_the_references(
            [kv_heads, group, chunk_start, more, segment_tiles] in [1..3usize, 1..4, 0..300, 1..300, 1..4],
            head_dim in prop_oneof![Just(8usize), Just(40), Just(128)],
            [tile_q, tile_k] in [prop_oneof![Just(16usize), Just(48)], prop_oneof![Just(16usize), Just(32)]],
            [sharpness, phase] in [0.1..3.0f32, 0.0..6.0],
            q_perm in any::<bool>(),
        ) {
            let k_len = chunk_start + more;
            let q_dims = [1, more, kv_heads * group, head_dim];
            let kv_dims = [1, k_len, kv_heads, head_dim];
            let shape = AttnShape::of(q_dims, kv_dims, kv_dims).unwrap();
            let (q, k, v) = (wave(q_dims, sharpness, phase), wave(kv_dims, 1.0, 0.3), wave(kv_dims, 1.0, phase + 1.0));
            let inputs = Inputs::new(
                Strided::contiguous("q", &q, q_dims).unwrap(),
                Strided::contiguous("k", &k, kv_dims).unwrap(),
                Strided::contiguous("v", &v, kv_dims).unwrap(),
                shape.default_softmax_scale(),
            ).unwrap();
            let segment_len = SegmentLen::Fixed(96 * segment_tiles);
            let config =
                S2oConfig::builder().tile_q(tile_q).tile_k(tile_k).segment_len(segment_len).q_perm(q_perm).build();
            let config = config.unwrap();
            for head in 0..shape.num_heads() {
                let exact = Head::new(&shape, [&q, &k, &v], inputs.softmax_scale, 0, head);
                for segment in segments(chunk_start, more, segment_len.resolve(0), k_len - more / 3) {
                    let cut = segment.ranked_tiles(chunk_start, &config);
                    let mut workspace = Workspace::new(head_dim, tile_k);
                    pass1(&inputs, (0, head), &cut, segment.start, Mask::Causal, tile_k, &mut workspace);
                    let tiles = &workspace.tiles[..cut.len()];
                    let got: Vec<_> =
                        tiles.iter().flat_map(|tile| (0..tile.rows.len()).map(|i| tile.state(i))).collect();
                    let want = reference::pass1(&exact, &segment, tile_k);
                    prop_assert_eq!(got.len(), want.len());
                    for (got, want) in got.iter().zip(&want) {
                        let (lse, want_lse) = (got.row_max + got.row_sum.ln(), want.row_max + want.row_sum.ln());
                        prop_assert!((lse - want_lse).abs() <= 4e-6 * (1.0 + want_lse.abs()), "{} {}", lse, want_lse);
                        let rescale = (got.row_max - want.row_max).exp();
                        prop_assert!((got.row_sum * rescale / want.row_sum - 1.0).abs() < 1e-5);
                        let norm = want.finish().iter().map(|x| x * x).sum::<f64>().sqrt();
                        for (got, want) in got.finish().iter().zip(want.finish()) {
                            prop_assert!((got - want).abs() <= 5e-6 * norm, "{} {}", got, want);
                        }
                    }
                }
            }
        }
    }
}
