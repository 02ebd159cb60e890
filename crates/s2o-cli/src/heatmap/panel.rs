//! [`Panel`]: the order in which queries and keys are shown, and the tiles that a method computes.

use std::ops::Range;

use candle_s2o::ProbeStats;

use super::head::Head;

/// One picture of the head. A place is the position at which a query or key is shown.
#[derive(Debug)]
pub struct Panel {
    pub title: &'static str,
    pub key_label: String,
    pub query_label: &'static str,
    pub query_places: Vec<usize>,
    /// The places of the keys, in the order of the queries that see them.
    pub key_orders: Vec<KeyOrder>,
    /// The computed tiles, in the order of their queries; empty if everything is computed.
    pub bands: Vec<Band>,
    /// Share of the causal tiles that is computed.
    pub density: f64,
    /// What the probes measured, if the method has any.
    pub probes: Option<ProbeStats>,
}

#[derive(Debug)]
pub struct KeyOrder {
    pub queries: Range<usize>,
    /// The place of each of the first keys. Later keys keep their position.
    pub places: Vec<usize>,
}

/// A tile of queries with all keys that are computed for it.
#[derive(Debug)]
pub struct Band {
    pub queries: Range<usize>,
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
            probes: None,
        }
    }

    pub fn key_places(&self, query: usize) -> &[usize] {
        &self.key_orders[self.key_orders.partition_point(|order| order.queries.end <= query)].places
    }

    /// The keys computed for the query at a place; `None` if all keys are.
    pub fn computed(&self, place: usize) -> Option<&[Range<usize>]> {
        let band = self.bands.partition_point(|band| band.queries.end <= place);
        self.bands.get(band).map(|band| band.keys.as_slice())
    }
}
