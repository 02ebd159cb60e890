//! PBS-Attn: keys reordered inside segments by the attention of the last block, then whole blocks chosen.

use std::ops::Range;

use candle_core::Result;
use s2o::{Permutation, causal_tiles, position_tiles};

use crate::head::{Head, softmax};
use crate::panel::{Band, KeyOrder, Panel};

/// Keys that are reordered among themselves.
const SEGMENT: usize = 256;
/// Queries and keys that are chosen together.
const BLOCK: usize = 128;
/// The estimated mass at which no further blocks are chosen.
const COVERAGE: f32 = 0.9;

/// The keys as PBS-Attn permutes them, with the blocks that it chooses.
pub fn panel(head: &Head) -> Result<Panel> {
    let order = key_order(head)?;
    let mut places = vec![0; order.len()];
    for (place, &key) in order.iter().enumerate() {
        places[key] = place;
    }

    let q = head.q.squeeze(2)?.squeeze(0)?.to_vec2::<f32>()?;
    let k = head.k.squeeze(2)?.squeeze(0)?.to_vec2::<f32>()?;
    let pooled_keys: Vec<Vec<f32>> =
        order.chunks(BLOCK).map(|block| mean(block.iter().map(|&key| k[key].as_slice()))).collect();
    let (mut computed, mut causal) = (0, 0);
    let mut bands = Vec::new();
    for queries in position_tiles(0..head.q_len(), head.kv_offset(), BLOCK) {
        let last = head.kv_offset() + queries.end - 1;
        let pooled_query = mean(q[queries.clone()].iter().map(Vec::as_slice));
        let blocks = chosen(&pooled_query, &pooled_keys, last, head.softmax_scale);
        computed += blocks.len();
        causal += causal_tiles(0, last, BLOCK);
        let keys = |block: usize| block * BLOCK..((block + 1) * BLOCK).min(head.k_len());
        bands.push(Band { queries, keys: blocks.into_iter().map(keys).collect() });
    }
    Ok(Panel {
        title: "(b) K/V-permuted by PBS-Attn",
        key_label: format!("key, permuted in segments of {SEGMENT}"),
        query_places: (0..head.q_len()).collect(),
        key_orders: vec![KeyOrder { queries: 0..head.q_len(), places }],
        bands,
        density: computed as f64 / causal as f64,
        ..Panel::original(head)
    })
}

/// The keys, each segment in descending order of the mean probability that the last block of queries gives them.
fn key_order(head: &Head) -> Result<Vec<usize>> {
    let rows = head.probabilities(head.q_len().saturating_sub(BLOCK)..head.q_len())?;
    let mut scores = vec![0.0; head.k_len()];
    for row in &rows {
        scores.iter_mut().zip(row).for_each(|(score, &probability)| *score += f64::from(probability));
    }
    let segments = scores.chunks(SEGMENT).enumerate();
    let sorted = segments.flat_map(|(segment, scores)| {
        let order = Permutation::argsort_desc(scores);
        order.as_slice().iter().map(|&key| segment * SEGMENT + key as usize).collect::<Vec<_>>()
    });
    Ok(sorted.collect())
}

/// The blocks of keys for a block of queries that ends at position `last`: those of its own segment, the first, and the
/// best of the others until together they are estimated to hold enough of the mass.
fn chosen(query: &[f32], keys: &[Vec<f32>], last: usize, scale: f32) -> Vec<usize> {
    let own: Range<usize> = last / SEGMENT * SEGMENT / BLOCK..((last / SEGMENT + 1) * SEGMENT / BLOCK).min(keys.len());
    let dot = |key: &[f32]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
    let mut mass: Vec<f32> = keys[..own.end].iter().map(|key| scale * dot(key)).collect();
    softmax(&mut mass);

    let order = Permutation::argsort_desc(&mass.iter().map(|&share| f64::from(share)).collect::<Vec<_>>());
    let mut is_chosen = vec![false; own.end];
    let mut covered = 0.0;
    for block in order.as_slice().iter().map(|&block| block as usize) {
        if covered >= COVERAGE {
            break;
        }
        is_chosen[block] = true;
        covered += mass[block];
    }
    is_chosen[0] = true;
    is_chosen[own].fill(true);
    (0..is_chosen.len()).filter(|&block| is_chosen[block]).collect()
}

fn mean<'a>(rows: impl ExactSizeIterator<Item = &'a [f32]>) -> Vec<f32> {
    let count = rows.len() as f32;
    let mut mean = Vec::new();
    for row in rows {
        mean.resize(row.len(), 0.0);
        mean.iter_mut().zip(row).for_each(|(mean, value)| *mean += value / count);
    }
    mean
}
