//! [`HeadTiles`]: the work of each KV head, by which ranks share the heads evenly.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_s2o::{AttnStats, HeadStats};
use serde::{Deserialize, Serialize};

use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};

/// Key tiles that S2O computed for each KV head of each layer, of one prompt. Heads differ, and the ranks wait in each
/// layer for the one with the most tiles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadTiles {
    /// `by_layer[layer][kv_head]`
    by_layer: Vec<Vec<f64>>,
}

impl HeadTiles {
    /// Those of a prompt's statistics by layer, which have all heads of the model
    /// ([`Parallel::all_heads`](crate::Parallel::all_heads)). Layers without statistics have no tiles.
    pub fn of(stats: &BTreeMap<usize, AttnStats>, config: &DecoderConfig) -> Self {
        let of_layer = |layer: usize| {
            let mut tiles = vec![0.0; config.num_kv_heads];
            let Some(stats) = stats.get(&layer) else { return tiles };
            for (index, head) in stats.heads.iter().enumerate() {
                tiles[index % config.num_heads * config.num_kv_heads / config.num_heads] +=
                    HeadStats::tiles_computed(head);
            }
            tiles
        };
        Self { by_layer: (0..config.num_layers).map(of_layer).collect() }
    }

    /// Refuses those of another model.
    pub(crate) fn check(&self, config: &DecoderConfig) -> Result<()> {
        let refused = |expected: String, got: String| Err(ModelError::input("tiles of the heads", expected, got));
        if self.by_layer.len() != config.num_layers {
            return refused(format!("{} layers", config.num_layers), format!("{}", self.by_layer.len()));
        }
        for (layer, tiles) in self.by_layer.iter().enumerate() {
            if tiles.len() != config.num_kv_heads {
                let expected = format!("{} KV heads in layer {layer}", config.num_kv_heads);
                return refused(expected, format!("{}", tiles.len()));
            }
            if let Some(number) = tiles.iter().find(|number| !number.is_finite() || **number < 0.0) {
                return refused(format!("numbers of tiles in layer {layer}"), format!("{number}"));
            }
        }
        Ok(())
    }

    /// The KV heads of a layer, one rank after the other and in order within a rank, so that the rank with the most tiles
    /// has few. In the model's order where no other is better.
    pub(crate) fn placed(&self, layer: usize, ranks: usize) -> Vec<usize> {
        let tiles = &self.by_layer[layer];
        let in_order: Vec<usize> = (0..tiles.len()).collect();
        let mut heads = by_size(tiles, ranks);
        improve(tiles, &mut heads);
        heads.iter_mut().for_each(|heads| heads.sort_unstable());
        let placed = heads.concat();
        if most(tiles, &placed, ranks) < most(tiles, &in_order, ranks) { placed } else { in_order }
    }

    /// The tiles of the busiest rank over the mean of the ranks, for KV heads in the order `placed(layer, num_kv_heads)`.
    /// Summed over layers, because the ranks wait for one another in each.
    pub(crate) fn busiest(&self, ranks: usize, placed: impl Fn(usize, usize) -> Vec<usize>) -> f64 {
        let layers = self.by_layer.iter().enumerate();
        let busiest: f64 = layers.map(|(layer, tiles)| most(tiles, &placed(layer, tiles.len()), ranks)).sum();
        let all: f64 = self.by_layer.iter().flatten().sum();
        if all > 0.0 { busiest * ranks as f64 / all } else { 1.0 }
    }
}

/// Ranges of consecutive numbers, each times `width`.
pub(crate) fn ranges(numbers: &[usize], width: usize) -> Vec<Range<usize>> {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    runs.map(|run| run[0] * width..(run[0] + run.len()) * width).collect()
}

/// The tiles of the busiest rank.
fn most(tiles: &[f64], placed: &[usize], ranks: usize) -> f64 {
    placed.chunks(tiles.len() / ranks).map(|heads| sum(tiles, heads)).fold(0.0, f64::max)
}

fn sum(tiles: &[f64], heads: &[usize]) -> f64 {
    heads.iter().map(|&head| tiles[head]).sum()
}

/// Equally many heads for each rank: the largest first, each to the rank that has the fewest tiles so far.
fn by_size(tiles: &[f64], ranks: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tiles.len()).collect();
    order.sort_by(|&a, &b| tiles[b].total_cmp(&tiles[a]));
    let mut heads = vec![Vec::new(); ranks];
    for head in order {
        let open = heads.iter_mut().filter(|heads| heads.len() < tiles.len() / ranks);
        let least = open.min_by(|a, b| sum(tiles, a).total_cmp(&sum(tiles, b)));
        least.expect("the number of ranks divides the number of heads").push(head);
    }
    heads
}

/// Exchanges heads between the busiest rank and another while that lowers the larger sum of both.
fn improve(tiles: &[f64], heads: &mut [Vec<usize>]) {
    // Every exchange lowers the busiest rank or leaves fewer ranks as busy; the limit is for rounding.
    for _ in 0..tiles.len() * tiles.len() {
        let sums: Vec<f64> = heads.iter().map(|heads| sum(tiles, heads)).collect();
        let Some(busiest) = (0..heads.len()).max_by(|&a, &b| sums[a].total_cmp(&sums[b])) else { return };
        let mut best = (sums[busiest], None);
        for other in (0..heads.len()).filter(|&other| other != busiest) {
            for (i, &from) in heads[busiest].iter().enumerate() {
                for (j, &to) in heads[other].iter().enumerate() {
                    let moved = tiles[from] - tiles[to];
                    let larger = (sums[busiest] - moved).max(sums[other] + moved);
                    if larger < best.0 {
                        best = (larger, Some((other, i, j)));
                    }
                }
            }
        }
        let Some((other, i, j)) = best.1 else { return };
        let (from, to) = (heads[busiest][i], heads[other][j]);
        (heads[busiest][i], heads[other][j]) = (to, from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(by_layer: &[&[f64]]) -> HeadTiles {
        HeadTiles { by_layer: by_layer.iter().map(|tiles| tiles.to_vec()).collect() }
    }

    /// The fewest tiles of the busiest rank, over all ways to share the heads.
    fn fewest(tiles: &[f64], ranks: usize) -> f64 {
        fn of(tiles: &[f64], left: &[usize], ranks: usize) -> f64 {
            let size = tiles.len() / ranks;
            let Some((&first, others)) = left.split_first() else { return 0.0 };
            // The rank of the first head that is left: all choices of its other heads.
            let choices = (0u32..1 << others.len()).filter(|set| set.count_ones() as usize + 1 == size);
            let of_choice = |set: u32| {
                let (own, rest): (Vec<_>, Vec<_>) = others.iter().enumerate().partition(|(i, _)| set >> i & 1 == 1);
                let own: f64 = own.iter().map(|&(_, &head)| tiles[head]).sum::<f64>() + tiles[first];
                own.max(of(tiles, &rest.iter().map(|&(_, &head)| head).collect::<Vec<_>>(), ranks))
            };
            choices.map(of_choice).fold(f64::INFINITY, f64::min)
        }
        of(tiles, &(0..tiles.len()).collect::<Vec<_>>(), ranks)
    }

    #[test]
    fn heads_are_shared_almost_evenly() {
        let mut state = 7u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Most heads are light, as in trained models.
            (((state >> 33) as f64 / f64::from(1u32 << 31)).powi(3) * 1000.0).round()
        };
        for (heads, ranks) in [(8, 2), (8, 4), (8, 8), (4, 2), (12, 3), (2, 1)] {
            for _ in 0..50 {
                let layer: Vec<f64> = (0..heads).map(|_| number()).collect();
                let placed = tiles(&[&layer]).placed(0, ranks);
                let mut all = placed.clone();
                all.sort_unstable();
                assert_eq!(all, (0..heads).collect::<Vec<_>>(), "every head once");
                assert!(placed.chunks(heads / ranks).all(|heads| heads.is_sorted()), "{placed:?}");
                let (got, best) = (most(&layer, &placed, ranks), fewest(&layer, ranks));
                assert!(got >= best && got <= 1.05 * best, "{layer:?} on {ranks}: {got} of {best}");
            }
        }
    }

    #[test]
    fn pairs_of_unequal_heads_are_joined() {
        assert_eq!(tiles(&[&[9.0, 8.0, 1.0, 2.0]]).placed(0, 2), [0, 2, 1, 3]);
    }

    #[test]
    fn equal_heads_stay_in_order() {
        assert_eq!(tiles(&[&[5.0; 8]]).placed(0, 4), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(tiles(&[&[0.0; 4]]).placed(0, 2), [0, 1, 2, 3]);
        assert_eq!(tiles(&[&[4.0, 1.0, 2.0, 3.0]]).placed(0, 2), [0, 1, 2, 3], "5 and 5");
    }

    #[test]
    fn the_busiest_rank_is_that_of_each_layer() {
        let tiles = tiles(&[&[3.0, 1.0], &[1.0, 3.0]]);
        assert_eq!(tiles.busiest(2, |_, _| vec![0, 1]), 1.5);
        assert_eq!(tiles.busiest(1, |_, _| vec![0, 1]), 1.0);
        assert_eq!(self::tiles(&[&[0.0, 0.0]]).busiest(2, |_, _| vec![0, 1]), 1.0);
    }

    #[test]
    fn consecutive_heads_are_one_range() {
        assert_eq!(ranges(&[0, 1, 3, 4, 5, 7], 10), [0..20, 30..60, 70..80]);
        assert_eq!(ranges(&[2, 5], 4), [8..12, 20..24]);
    }
}
