//! The methods that can be compared, in one table.

use candle_s2o::{Attention, AttnStats, ConfigError, Dense, HeadStats, S2o};

use crate::cli::s2o_flags::S2oFlags;

/// One row a method: its name, and how the flags make it.
const METHODS: &[(&str, Make)] =
    &[("dense", |_| Ok(Box::new(Dense))), ("s2o", |flags| Ok(Box::new(flags.attention()?)))];

type Make = fn(&S2oFlags) -> Result<Box<dyn Method>, ConfigError>;

/// An attention method that knows how much of attention it computed.
pub trait Method: Attention {
    /// Density of the last call, by query head and in total.
    fn take_density(&self, num_heads: usize) -> Density;
}

/// Share of the causal key tiles that were computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Density {
    /// Over all heads.
    pub total: f64,
    /// Of each query head, over all sequences.
    pub heads: Vec<f64>,
}

/// Names that `--methods` takes.
pub fn names() -> impl Iterator<Item = &'static str> {
    METHODS.iter().map(|(name, _)| *name)
}

/// The methods of these names.
pub fn build(names: &[String], flags: &S2oFlags) -> Result<Vec<Box<dyn Method>>, ConfigError> {
    let rows = names.iter().filter_map(|name| METHODS.iter().find(|(row, _)| row == name));
    rows.map(|(_, make)| make(flags)).collect()
}

impl Method for Dense {
    fn take_density(&self, num_heads: usize) -> Density {
        Density { total: 1.0, heads: vec![1.0; num_heads] }
    }
}

impl Method for S2o {
    fn take_density(&self, num_heads: usize) -> Density {
        let mut total = AttnStats::default();
        self.take_stats().into_values().for_each(|stats| total.append(stats));
        let mut heads = vec![HeadStats::default(); num_heads];
        for (i, head) in total.heads.iter().enumerate() {
            heads[i % num_heads].tiles.extend(&head.tiles);
        }
        Density { total: total.density(), heads: heads.iter().map(HeadStats::density).collect() }
    }
}
