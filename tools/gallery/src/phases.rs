//! Bars of the time for selection and for attention.

use anyhow::Result;
use s2o_plot::{Bar, Bars};

use crate::section::Picture;
use crate::text::tokens;

/// A bar for each method at a length, from its name and its milliseconds for selection and attention. The file is named
/// after `kind` and the length.
pub fn picture<'m>(
    kind: &str,
    length: usize,
    methods: impl IntoIterator<Item = (&'m str, [f64; 2])>,
) -> Result<Picture> {
    let bars: Vec<Bar> =
        methods.into_iter().map(|(label, parts)| Bar { label: label.to_owned(), parts: parts.to_vec() }).collect();
    let longest = bars.iter().map(|bar| bar.parts.iter().sum()).fold(0.0, f64::max);
    let height = 180 + 46 * u32::try_from(bars.len()).unwrap_or(u32::MAX).min(60);
    let plot = Bars {
        title: format!("{} tokens", tokens(length)),
        quantity: "milliseconds".to_owned(),
        parts: vec!["selection".to_owned(), "attention".to_owned()],
        bars,
        decimals: if longest < 10.0 { 2 } else { 1 },
    };
    let description = format!("Time for selection and attention of each method at {length} tokens");
    Picture::new(format!("{kind}-{length}"), description, (1000, height), plot)
}
