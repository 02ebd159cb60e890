//! [`Panel`]: in which order queries and keys are shown, and which of them a method computes together.

use std::ops::Range;

use s2o_plot::{AttentionMap, PlotError, Tile};

use super::head::Head;
use super::pooled::Pooled;

/// One picture of the head. A place is where a query or key is shown.
#[derive(Debug)]
pub struct Panel {
    pub title: &'static str,
    /// Label of the key axis.
    pub key_label: String,
    /// Label of the query axis.
    pub query_label: &'static str,
    /// The place of each query.
    pub query_places: Vec<usize>,
    /// The places of the keys, in the order of the queries that see them.
    pub key_orders: Vec<KeyOrder>,
    /// The computed tiles, in the order of their queries; empty if everything is computed.
    pub bands: Vec<Band>,
    /// Share of the causal tiles that is computed.
    pub density: f64,
}

/// The order in which keys are shown to some queries.
#[derive(Debug)]
pub struct KeyOrder {
    /// The queries.
    pub queries: Range<usize>,
    /// The place of each of the first keys; those after them stay where they are.
    pub places: Vec<usize>,
}

/// A tile of queries with all that is computed for it.
#[derive(Debug)]
pub struct Band {
    /// Places of the queries.
    pub queries: Range<usize>,
    /// Places of the keys.
    pub keys: Vec<Range<usize>>,
}

impl Panel {
    /// Everything in the order of the prompt.
    pub fn original(head: &Head) -> Self {
        Self {
            title: "(a) original",
            key_label: "key".to_owned(),
            query_label: "query",
            query_places: (0..head.q_len()).collect(),
            key_orders: vec![KeyOrder { queries: 0..head.q_len(), places: Vec::new() }],
            bands: Vec::new(),
            density: 1.0,
        }
    }

    /// The place of each key as a query sees it.
    pub fn key_places(&self, query: usize) -> &[usize] {
        &self.key_orders[self.key_orders.partition_point(|order| order.queries.end <= query)].places
    }

    /// The keys computed for the query at a place; `None` if all are.
    pub fn computed(&self, place: usize) -> Option<&[Range<usize>]> {
        let band = self.bands.partition_point(|band| band.queries.end <= place);
        self.bands.get(band).map(|band| band.keys.as_slice())
    }

    /// The picture of it.
    pub fn map(&self, head: &Head, pooled: &Pooled) -> Result<AttentionMap, PlotError> {
        let tile = |band: &Band, keys: &Range<usize>| Tile { queries: band.queries.clone(), keys: keys.clone() };
        Ok(AttentionMap {
            title: self.title.to_owned(),
            probabilities: pooled.matrix()?,
            queries: 0..head.q_len(),
            keys: 0..head.k_len(),
            query_label: self.query_label.to_owned(),
            key_label: self.key_label.clone(),
            tiles: self.bands.iter().flat_map(|band| band.keys.iter().map(move |keys| tile(band, keys))).collect(),
        })
    }
}
