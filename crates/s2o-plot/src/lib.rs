//! Pictures for reports, written as PNG and as SVG by the same drawing code.
//!
//! Colours are distinguishable for every kind of colour vision, labels are next to the data, and text is legible when a
//! picture is shown at half its size. No fonts need to be installed.
//!
//! ```
//! use s2o_plot::{Axis, Figure, Lines, Series};
//!
//! let series = |label: &str, points: &[(f64, f64)]| Series {
//!     label: label.to_owned(),
//!     points: points.to_vec(),
//!     marks: true,
//! };
//! let plot = Lines {
//!     title: "Error at equal density".to_owned(),
//!     x: Axis::linear("density"),
//!     y: Axis::log10("mean squared error"),
//!     series: vec![series("S2O", &[(0.1, 3e-4), (0.4, 5e-5)]), series("PBS", &[(0.1, 5e-3), (0.4, 1e-3)])],
//!     levels: Vec::new(),
//! };
//! let directory = std::env::temp_dir().join("s2o-plots");
//! let files = Figure::new(1200, 800)?.write(&plot, &directory, "error")?;
//! assert!(files.png.exists() && files.svg.exists());
//! # Ok::<(), s2o_plot::PlotError>(())
//! ```

mod attention;
mod axis;
mod bars;
mod error;
mod figure;
mod heatmap;
mod lines;
mod palette;
mod scene;
mod typeface;

#[cfg(test)]
mod tests;

pub use attention::{AttentionMap, AttentionMaps, Tile};
pub use axis::{Axis, Scale};
pub use bars::{Bar, Bars};
pub use error::PlotError;
pub use figure::{Figure, Files, Plot};
pub use heatmap::{Heatmap, Matrix};
pub use lines::{Level, Lines, Series};
