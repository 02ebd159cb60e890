//! [`Heatmap`]: a labelled matrix in colours, such as passkey scores by depth and length or density by layer and head.

use super::axis;
use super::cells;
use super::error::PlotError;
use super::figure::Plot;
use super::matrix::Matrix;
use super::palette::{self, BLANK, Colour};
use super::scale::{Range, Scale, Tick, number};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// A matrix in colours. Its first row is at the top.
#[derive(Debug, Clone, PartialEq)]
pub struct Heatmap {
    /// Heading; may be empty.
    pub title: String,
    /// The numbers. A cell that the scale cannot show (NaN, infinity, or 0 on a logarithmic scale) is grey.
    pub values: Matrix,
    /// One label per row.
    pub row_labels: Vec<String>,
    /// One label per column; labels that would overlap are left out.
    pub column_labels: Vec<String>,
    /// Label of the row axis.
    pub rows: String,
    /// Label of the column axis.
    pub columns: String,
    /// Label of the colour bar.
    pub unit: String,
    /// Scale of the colours.
    pub scale: Scale,
    /// Values at the ends of the colour scale. `None`: the smallest and the largest of the matrix.
    pub range: Option<(f64, f64)>,
    /// Decimals of the numbers in the cells, which are printed if they fit.
    pub decimals: usize,
}

/// Largest share of the width for the row labels.
const LABEL_SHARE: f64 = 0.35;
/// Size of the numbers in cells, relative to the text.
const NUMBER_SIZE: f64 = 0.9;

impl Plot for Heatmap {
    fn draw(&self, scene: &mut Scene, mut area: Rect) -> Result<(), PlotError> {
        let range = self.colour_range()?;
        let em = scene.em;
        scene.heading(&self.title, &mut area, 1.15 * em);

        let room = LABEL_SHARE * area.width();
        let row_labels: Vec<String> = self.row_labels.iter().map(|label| typeface::fitted(label, em, room)).collect();
        let bottom = area.bottom - axis::height_below(scene, &self.columns);
        let bar = cells::colour_bar_width(scene, &range, bottom - area.top, &self.unit);
        let left = axis::width_left(scene, &self.rows, &row_labels);
        let data = Rect { left: area.left + left, top: area.top + 0.4 * em, right: area.right - bar, bottom };
        let data = data.check(4.0 * em)?;

        let colour = |value: f64| self.colour(&range, value);
        cells::fill(scene, data, &self.values, |_, value| Some(colour(value)));
        self.print_numbers(scene, data, &colour);
        scene.outline(data);
        axis::draw_below(scene, data, &self.columns, &centred(&self.column_labels));
        axis::draw_left(scene, data, area.left, &self.rows, &centred(&row_labels), true);
        cells::colour_bar(scene, data, area.right, &range, &self.unit)
    }
}

impl Heatmap {
    fn colour_range(&self) -> Result<Range, PlotError> {
        for (what, labels, expected) in [
            ("row labels", &self.row_labels, self.values.rows()),
            ("column labels", &self.column_labels, self.values.columns()),
        ] {
            if labels.len() != expected {
                return Err(PlotError::wrong(what, expected, labels.len()));
            }
        }
        let values = self.values.values();
        match (Range::around("matrix", self.scale, values.iter().copied())?, self.range) {
            (None, _) => {
                let expected = "a value that the colour scale can show";
                Err(PlotError::wrong("matrix", expected, format!("none among {}", values.len())))
            }
            (Some(_), Some((low, high))) => Range::new("colour range", self.scale, low, high),
            (Some(own), None) => Ok(own),
        }
    }

    fn colour(&self, range: &Range, value: f64) -> Colour {
        if self.scale.shows(value) { palette::gradient(range.place(value)) } else { BLANK }
    }

    fn print_numbers(&self, scene: &mut Scene, data: Rect, colour: &dyn Fn(f64) -> Colour) {
        let em = NUMBER_SIZE * scene.em;
        let (rows, columns) = (self.values.rows(), self.values.columns());
        let (width, height) = (data.width() / columns as f64, data.height() / rows as f64);
        let shown = |value: f64| if self.scale.shows(value) { number(value, self.decimals) } else { String::new() };
        let texts: Vec<String> = self.values.values().iter().map(|value| shown(*value)).collect();
        if height < typeface::LINE * em || width < 1.2 * em || typeface::widest(&texts, em) > 0.9 * width {
            return;
        }
        for (i, (text, value)) in texts.into_iter().zip(self.values.values()).enumerate() {
            if !text.is_empty() {
                let x = data.left + ((i % columns) as f64 + 0.5) * width;
                let y = data.top + ((i / columns) as f64 + 0.5) * height;
                scene.label_in(text, (x, y), Anchor::Middle, em, palette::text_on(colour(*value)));
            }
        }
    }
}

/// Labels at the centres of equal parts.
fn centred(labels: &[String]) -> Vec<Tick> {
    let place = |i: usize| (i as f64 + 0.5) / labels.len() as f64;
    labels.iter().enumerate().map(|(i, label)| Tick { place: place(i), label: label.clone() }).collect()
}
