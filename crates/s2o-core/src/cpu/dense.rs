//! Dense attention: the method for short prompts, and the baseline of every comparison.

use rayon::prelude::*;

use super::microkernel::OutputRows;
use super::pass1::pass1;
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use super::tile_run::tiles_per_run;
use crate::segment::query_tiles;
use crate::shape::Mask;

/// Exact attention, written to the contiguous `out` (batch, q_len, num_heads, head_dim). Under [`Mask::Causal`] the
/// queries are the last `q_len` positions of the keys, and each sees the keys up to its own. Otherwise each query sees
/// all keys.
///
/// # Panics
/// If the length of `out` is not `batch * q_len * num_heads * head_dim`.
pub fn dense<T: Element>(inputs: &Inputs<'_, T>, mask: Mask, out: &mut [T]) {
    const TILE: usize = 128;
    let shape = inputs.shape;
    let tiles: Vec<_> = query_tiles(0..shape.q_len(), TILE).collect();
    let total_tiles = shape.batch() * shape.num_heads() * tiles.len();
    let tiles_per_run = tiles_per_run(shape.head_dim(), TILE, total_tiles);
    let mut runs = Vec::new();
    for batch in 0..shape.batch() {
        for head in 0..shape.num_heads() {
            runs.extend(tiles.chunks(tiles_per_run).map(|tiles| (batch, head, tiles)));
        }
    }
    let mut out = OutputRows::new(out, shape.head_dim());
    runs.sort_by_key(|(.., tiles)| std::cmp::Reverse(tiles[0].start));
    runs.into_iter().par_bridge().for_each_init(
        || None,
        |held, (batch, head, tiles)| {
            let workspace = Workspace::held(held, shape.head_dim(), TILE);
            workspace.load(inputs, (batch, head), tiles);
            pass1(inputs, (batch, shape.kv_head(head)), 0, mask, TILE, workspace, tiles.len());
            for tile in &workspace.tiles[..tiles.len()] {
                tile.finish(&mut workspace.rows, |lane, values| {
                    out.write(inputs.output_row(batch, tile.rows[lane], head), |dst| T::narrow(values, dst));
                });
            }
        },
    );
    assert!(out.is_complete());
}
