//! Dense attention: the engine of short prompts and of the dense tail, and the baseline of every comparison.

use super::microkernel::OutputRows;
use super::pass1::contiguous;
use super::schedule;
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::segment::query_tiles;

/// Exact attention into `out` (batch, q_len, num_heads, head_dim), contiguous. If `causal`, queries are the last
/// `q_len` positions of the keys, and each sees the keys up to its own; else each sees all keys.
///
/// # Panics
/// If `out` has not `batch * q_len * num_heads * head_dim` elements.
pub fn dense<T: Element>(inputs: &Inputs<'_, T>, causal: bool, out: &mut [T]) {
    const TILE: usize = 128;
    let shape = inputs.shape;
    let tiles: Vec<_> = query_tiles(0..shape.q_len(), TILE).collect();
    let total_tiles = shape.batch() * shape.num_heads() * tiles.len();
    let tiles_per_item = schedule::tiles_per_item(shape.head_dim(), TILE, total_tiles);
    let mut items = Vec::new();
    for batch in 0..shape.batch() {
        for head in 0..shape.num_heads() {
            items.extend(tiles.chunks(tiles_per_item).map(|tiles| ((batch, head), tiles)));
        }
    }
    items.sort_by_key(|(_, tiles)| std::cmp::Reverse(tiles[0].start));
    let mut out = OutputRows::new(out, shape.head_dim());
    schedule::run(
        &items,
        || Workspace::new(shape.head_dim(), TILE),
        |((batch, head), tiles), workspace, _: &mut Vec<()>| {
            contiguous(inputs, (*batch, *head), tiles, 0, causal, TILE, workspace);
            for tile in &workspace.tiles[..tiles.len()] {
                tile.finish(&out, |row| output_row(inputs, *batch, row, *head), &mut workspace.rows);
            }
        },
    );
    assert!(out.is_complete());
}

/// Number of the output row of a query, in (batch, q_len, num_heads).
pub(super) fn output_row<T: Element>(inputs: &Inputs<'_, T>, batch: usize, row: usize, head: usize) -> usize {
    (batch * inputs.shape.q_len() + row) * inputs.shape.num_heads() + head
}
