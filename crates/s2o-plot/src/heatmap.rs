//! [`Heatmap`]: a labelled matrix in colours, such as passkey scores by depth and length or density by layer and head.

use std::ops;

use super::axis::{self, Range, Scale, Tick, number};
use super::error::PlotError;
use super::figure::Plot;
use super::palette::{self, BLANK, Colour, INK};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// Numbers in rows and columns. NaN is a cell without a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// A matrix of `values`, row by row.
    ///
    /// # Errors
    /// [`PlotError::WrongInput`] if there are not `rows * columns` values.
    pub fn new(rows: usize, columns: usize, values: Vec<f64>) -> Result<Self, PlotError> {
        let expected = rows.saturating_mul(columns);
        if values.len() != expected {
            return Err(PlotError::wrong("values of the matrix", expected, values.len()));
        }
        Ok(Self { rows, columns, values })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values, row by row.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// Draws the cells. `colour` gets the index (row by row) and the value of a cell; cells without a colour are not
    /// painted.
    pub(super) fn draw(&self, scene: &mut Scene, area: Rect, colour: impl Fn(usize, f64) -> Option<Colour>) {
        let x = |column: usize| area.left + area.width() * column as f64 / self.columns as f64;
        let y = |row: usize| area.top + area.height() * row as f64 / self.rows as f64;
        // Edges within a pixel blend with the paper: cells that only touch would show light seams.
        let overlap = 1.0;
        let colours: Vec<_> = self.values.iter().enumerate().map(|(cell, value)| colour(cell, *value)).collect();
        for (row, colours) in colours.chunks(self.columns.max(1)).enumerate() {
            // One rectangle for neighbours of the same colour.
            for (columns, colour) in runs(colours) {
                let right = (x(columns.end) + overlap).min(area.right);
                let bottom = (y(row + 1) + overlap).min(area.bottom);
                if let Some(colour) = *colour {
                    scene.fill(Rect { left: x(columns.start), top: y(row), right, bottom }, colour);
                }
            }
        }
    }
}

/// Runs of equal items, each with its range.
pub fn runs<T: PartialEq>(items: &[T]) -> impl Iterator<Item = (ops::Range<usize>, &T)> {
    items.chunk_by(|a, b| a == b).scan(0, |end, run| {
        let from = *end;
        *end += run.len();
        Some((from..*end, &run[0]))
    })
}

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

/// Size of the numbers in cells, relative to the text.
const NUMBER_SIZE: f64 = 0.9;

impl Plot for Heatmap {
    fn draw(&self, scene: &mut Scene) -> Result<(), PlotError> {
        let range = self.colour_range()?;
        let em = scene.em;
        let area = scene.heading(&self.title, scene.area(), 1.15 * em);

        let rows = axis::centred(&self.row_labels, em, axis::NAME_SHARE * area.width());
        let bar = ColourBar { range, label: &self.unit };
        let height = area.height() - axis::height_below(scene, &self.columns);
        let sides = [0.4, bar.width(scene, height)];
        let data = axis::room(scene, area, [&self.rows, &self.columns], &rows, sides).check(4.0 * em, 4.0 * em)?;

        let colour = |value: f64| if self.scale.shows(value) { palette::gradient(range.place(value)) } else { BLANK };
        self.values.draw(scene, data, |_, value| Some(colour(value)));
        self.print_numbers(scene, data, &colour);
        scene.outline(data);
        axis::draw_below(scene, data, &self.columns, &axis::centred(&self.column_labels, em, f64::INFINITY));
        axis::draw_left(scene, data, area.left, &self.rows, &rows, true);
        bar.draw(scene, data, area.right)
    }
}

impl Heatmap {
    fn colour_range(&self) -> Result<Range, PlotError> {
        let Matrix { rows, columns, ref values } = self.values;
        for (what, labels, expected) in
            [("row labels", &self.row_labels, rows), ("column labels", &self.column_labels, columns)]
        {
            if labels.len() != expected {
                return Err(PlotError::wrong(what, expected, labels.len()));
            }
        }
        let own = Range::around(self.scale, values.iter().copied()).ok_or_else(|| {
            let expected = "a value that the colour scale can show";
            PlotError::wrong("matrix", expected, format!("none among {}", values.len()))
        })?;
        self.range.map_or(Ok(own), |(low, high)| Range::new("colour range", self.scale, low, high))
    }

    fn print_numbers(&self, scene: &mut Scene, data: Rect, colour: &dyn Fn(f64) -> Colour) {
        let em = NUMBER_SIZE * scene.em;
        let Matrix { rows, columns, ref values } = self.values;
        let (width, height) = (data.width() / columns as f64, data.height() / rows as f64);
        let shown = |value: f64| if self.scale.shows(value) { number(value, self.decimals) } else { String::new() };
        let texts: Vec<String> = values.iter().map(|value| shown(*value)).collect();
        if height < typeface::LINE * em || width < 1.2 * em || typeface::widest(&texts, em) > 0.9 * width {
            return;
        }
        for (i, (text, value)) in texts.iter().zip(values).enumerate().filter(|(_, (text, _))| !text.is_empty()) {
            let x = data.left + ((i % columns) as f64 + 0.5) * width;
            let y = data.top + ((i / columns) as f64 + 0.5) * height;
            scene.label_in(text, (x, y), Anchor::Middle, em, palette::text_on(colour(*value)));
        }
    }
}

/// The colours of a range, right of the data.
pub struct ColourBar<'l> {
    pub range: Range,
    pub label: &'l str,
}

impl ColourBar<'_> {
    /// Width of the colours, in em.
    const BAR: f64 = 1.0;
    /// Gap left of the colours, in em.
    const APART: f64 = 0.9;
    /// Gap between the colours and their labels, in em.
    const GAP: f64 = 0.5;

    /// Width, including the gap left of the bar.
    pub fn width(&self, scene: &Scene, height: f64) -> f64 {
        let line = if self.label.is_empty() { 0.0 } else { typeface::LINE };
        axis::widest(&self.ticks(scene, height), scene.em) + (Self::APART + Self::BAR + Self::GAP + line) * scene.em
    }

    /// Draws the bar right of `data`, with the same height. The labels end at `right`.
    pub fn draw(&self, scene: &mut Scene, data: Rect, right: f64) -> Result<(), PlotError> {
        const STRIPES: usize = 49;
        let em = scene.em;
        let bar =
            Rect { left: data.right + Self::APART * em, right: data.right + (Self::APART + Self::BAR) * em, ..data };
        let values = (0..STRIPES).rev().map(|i| i as f64 / (STRIPES - 1) as f64).collect();
        Matrix::new(STRIPES, 1, values)?.draw(scene, bar, |_, share| Some(palette::gradient(share)));
        scene.outline(bar);
        for tick in self.ticks(scene, data.height()) {
            let y = bar.bottom - tick.place * bar.height();
            scene.line((bar.right, y), (bar.right + 0.25 * em, y), INK, scene.hair());
            scene.label(&tick.label, bar.right + Self::GAP * em, y, Anchor::Start);
        }
        if !self.label.is_empty() {
            let label = typeface::fitted(self.label, em, data.height());
            scene.label_upwards(&label, right - 0.5 * em, 0.5 * (data.top + data.bottom));
        }
        Ok(())
    }

    fn ticks(&self, scene: &Scene, height: f64) -> Vec<Tick> {
        self.range.ticks(axis::count_for(height, 1.2 * scene.em))
    }
}
