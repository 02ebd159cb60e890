//! PBS-Attn: keys are reordered inside segments by the attention of the last block, then whole blocks are chosen.

use anyhow::Result;
use candle_s2o::{AttnShape, BLOCK_Q, Mask, PrefillCall, query_blocks};
use s2o_baselines::{BlockSelector, Pbs};

use super::head::Head;
use super::panel::{Band, KeyOrder, Panel};

/// Number of keys that are reordered together, as published.
const SEGMENT: usize = 256;

/// The keys in PBS-Attn's order, with the blocks that it chooses.
pub fn panel(head: &Head) -> Result<Panel> {
    let call = PrefillCall { layer: 0, softmax_scale: head.softmax_scale, prompt_len: head.k_len() };
    let method = Pbs::default().segment(SEGMENT)?;
    let shape = AttnShape::of(head.q.dims4()?.into(), head.k.dims4()?.into(), head.v.dims4()?.into())?;
    let selection = method.select(&call, &head.q, &head.k, &head.v)?;
    // Nothing is reordered before the first segment is complete.
    let order = match &selection.reordered {
        Some(_) => method.key_order(&call, &head.q, &head.k, &head.v)?.flatten_all()?.to_vec1::<u32>()?,
        None => Vec::new(),
    };
    let mut places = vec![0; order.len()];
    for (place, &key) in order.iter().enumerate() {
        places[key as usize] = place;
    }

    let reordered_blocks = order.len() / BLOCK_Q;
    let lists = selection.keys.lists()?;
    let bands = query_blocks(&shape, Mask::Causal).enumerate().map(|(list, queries)| {
        let position = shape.q_offset() + queries.start;
        let segment = position / SEGMENT * SEGMENT;
        let earlier = lists.blocks.list(list).iter().map(|&block| block as usize);
        let earlier =
            earlier.filter(|&block| block < reordered_blocks).map(|block| block * BLOCK_Q..(block + 1) * BLOCK_Q);
        // A block's own segment is in prompt order. The picture shows this order only for the last segment.
        let own_end = if segment < order.len() { segment + SEGMENT } else { shape.q_offset() + queries.end };
        let mut keys: Vec<_> = earlier.collect();
        keys.push(segment..own_end.min(head.k_len()));
        Band { queries, keys }
    });
    let work = lists.work(&shape);
    Ok(Panel {
        title: "(b) K/V-permuted by PBS-Attn",
        key_label: format!("key, permuted in segments of {SEGMENT}"),
        query_places: (0..head.q_len()).collect(),
        key_orders: vec![KeyOrder { queries: 0..head.q_len(), places }],
        bands: bands.collect(),
        density: work[0].density(),
        ..Panel::original(head)
    })
}
