//! Attention to the key blocks and columns that a method has selected.

use std::ops::Range;

use rayon::prelude::*;

use super::microkernel::OutputRows;
use super::strided::{Element, Inputs};
use super::tile::Workspace;
use crate::blocks::{BLOCK_Q, BlockSelection, query_blocks};
use crate::error::S2oError;
use crate::shape::Mask;

/// Attention of each query block to the keys in `selection`, written to the contiguous `out` (batch, q_len, num_heads,
/// head_dim). Rows that see no key get zeros. Returns, for each head (`b * num_heads + h`), the number of tiles whose
/// values [`BlockSelection::value_threshold`] skipped.
///
/// # Errors
/// If the selection does not fit the call.
///
/// # Panics
/// If the length of `out` is not `batch * q_len * num_heads * head_dim`.
pub fn block_sparse<T: Element>(
    inputs: &Inputs<'_, T>,
    mask: Mask,
    selection: &BlockSelection,
    out: &mut [T],
) -> Result<Vec<f64>, S2oError> {
    let shape = inputs.shape;
    selection.check(&shape, mask)?;
    let cut: Vec<_> = query_blocks(&shape, mask).collect();
    let heads = shape.batch() * shape.num_heads();
    let mut out = OutputRows::new(out, shape.head_dim());
    let mut lists: Vec<usize> = (0..heads * cut.len()).collect();
    lists.sort_by_key(|&list| std::cmp::Reverse(selection.blocks.list(list).len()));
    let skipped = lists.into_iter().par_bridge().map_init(
        || None,
        |held, list| {
            let workspace = Workspace::held(held, shape.head_dim(), BLOCK_Q);
            let head = list / cut.len();
            let at = (head / shape.num_heads(), head % shape.num_heads());
            let rows = cut[list % cut.len()].clone();
            (head, run_block(inputs, mask, selection, (list, at), rows, workspace, &out))
        },
    );
    let skipped: Vec<(usize, f64)> = skipped.collect();
    assert!(out.is_complete());
    let mut by_head = vec![0.0; heads];
    skipped.into_iter().for_each(|(head, tiles)| by_head[head] += tiles);
    Ok(by_head)
}

/// Computes one query block. Returns the number of tiles whose values were skipped.
fn run_block<T: Element>(
    inputs: &Inputs<'_, T>,
    mask: Mask,
    selection: &BlockSelection,
    (list, (batch, head)): (usize, (usize, usize)),
    rows: Range<usize>,
    workspace: &mut Workspace,
    out: &OutputRows<'_, T>,
) -> f64 {
    let shape = inputs.shape;
    let (blocks, block_k) = (selection.blocks.list(list), selection.blocks.block_k());
    let columns = selection.columns_of(batch * shape.num_heads() + head, list, shape.q_offset() + rows.start);
    // Queries before the first selected key see nothing.
    let seeing = match (columns.is_empty(), blocks.last()) {
        (false, _) => rows.start,
        (true, None) => rows.end,
        (true, Some(&lowest)) if mask.is_causal() => {
            (lowest as usize * block_k).saturating_sub(shape.q_offset()).clamp(rows.start, rows.end)
        }
        (true, Some(_)) => rows.start,
    };
    for row in rows.start..seeing {
        out.write(inputs.output_row(batch, row, head), |dst| dst.fill(T::default()));
    }
    let rows = seeing..rows.end;
    if rows.is_empty() {
        return 0.0;
    }
    let at = (batch, shape.kv_head(head));
    let first_row = rows.start;
    let key_end = if mask.is_causal() { shape.q_offset() + rows.end } else { shape.k_len() };
    let Workspace { tiles, scores, keys, values, rows: row_buffer, .. } = workspace;
    let tile = &mut Workspace::at_least(tiles, 1)[0];
    tile.load(inputs, (batch, head), rows, row_buffer);
    let mut skipped = 0;
    let mut visit = |keys: &[f32], values: &[f32], first_row| {
        tile.score(keys, first_row, scores);
        if let Some(threshold) = selection.value_threshold {
            skipped += tile.skip_values(scores, threshold) * (keys.len() / shape.head_dim());
        }
        tile.update(scores, values);
    };
    // The keys that every query sees come first, so every running maximum is finite before the diagonal hides keys.
    for columns in columns.chunks(BLOCK_Q) {
        let columns = columns.iter().copied();
        visit(inputs.k.gather(at, columns.clone(), keys), inputs.v.gather(at, columns, values), None);
    }
    for start in blocks.iter().rev().map(|&block| block as usize * block_k) {
        let positions = start..(start + block_k).min(key_end);
        let start_row = start as isize - shape.q_offset() as isize;
        let is_hidden = mask.is_causal() && positions.end > shape.q_offset() + first_row + 1;
        let (keys, values) = (inputs.k.gather(at, positions.clone(), keys), inputs.v.gather(at, positions, values));
        visit(keys, values, is_hidden.then_some(start_row));
    }
    tile.finish(row_buffer, |lane, values| {
        out.write(inputs.output_row(batch, tile.rows[lane], head), |dst| T::narrow(values, dst));
    });
    skipped as f64 / (BLOCK_Q * BLOCK_Q) as f64
}
