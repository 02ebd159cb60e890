//! S2O: for each segment of queries, the earlier keys in the order of their rank, and the tiles that were visited
//! before the method stopped.

use anyhow::Result;
use candle_s2o::{S2oConfig, S2oOp};
use s2o_core::{AttnShape, Plan, query_tiles};

use super::head::Head;
use super::panel::{Band, KeyOrder, Panel};

pub fn panel(title: &'static str, head: &Head, config: &S2oConfig) -> Result<Panel> {
    let op = S2oOp::new(head.softmax_scale, config.clone());
    let ranking = op.clone().rank(&head.q, &head.k)?;
    let (_, stats) = op.apply_with_stats(&head.q, &head.k, &head.v)?;
    let shape = AttnShape::of(head.q.dims4()?.into(), head.k.dims4()?.into(), head.v.dims4()?.into())?;
    let plan = Plan::new(config, &shape, head.k_len(), S2oConfig::CPU_BREAK_EVEN)?;

    let mut panel = Panel { title, density: stats.density(), probes: stats.probes(), ..Panel::original(head) };
    if plan.is_dense() {
        return Ok(panel);
    }
    panel.key_label = format!("key, ranked per segment of {}", plan.segment_len);
    if config.q_perm() {
        panel.query_label = "query, permuted per segment";
    }
    panel.key_orders.clear();
    // The tiles are in the order of the plan: segment by segment, each with its dense tail first.
    let mut visited = stats.heads[0].tiles.iter().map(|tile| tile.visited);
    for (segment, order) in plan.segments.iter().zip(&ranking[0]) {
        let mut places = vec![0; segment.start];
        for (place, &key) in order.kv_perm.as_slice().iter().enumerate() {
            places[key as usize] = place;
        }
        panel.key_orders.push(KeyOrder { queries: segment.all_rows(), places });
        for (place, &query) in segment.rows.clone().zip(order.q_perm.as_slice()) {
            panel.query_places[segment.rows.start + query as usize] = place;
        }

        let tail = query_tiles(segment.tail_rows.clone(), config.tile_q());
        let is_permuted = |rows: &std::ops::Range<usize>| config.q_perm() && segment.rows.contains(&rows.start);
        for rows in tail.chain(segment.ranked_tiles(head.q_offset(), config)) {
            let visited = visited.next().unwrap_or(0);
            let prefix = 0..(visited * config.tile_k()).min(segment.start);
            // Pass 1 visited the window before the queries were permuted, tile by tile in prompt order.
            let last = if is_permuted(&rows) { segment.rows.end } else { rows.end };
            let window = segment.start..head.q_offset() + last;
            panel.bands.push(Band { queries: rows, keys: vec![prefix, window] });
        }
    }
    panel.bands.sort_by_key(|band| band.queries.start);
    Ok(panel)
}
