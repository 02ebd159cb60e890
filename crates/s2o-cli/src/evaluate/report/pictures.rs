//! The pictures of a report: scores, densities and speed-up by length.

use std::path::Path;

use anyhow::Result;
use s2o_eval::report::{ALL_TASKS, Comparison, grouped};
use s2o_plot::{Axis, Bar, Bars, Figure, Lines, Plot, Series};

/// Size of the pictures in pixels; their text is legible at half of it.
const SIZE: (u32, u32) = (1200, 680);

/// The method, with its chunk size if the rows have several, as pictures and tables name it.
pub fn label<'r>(method: &str, chunk: &str, rows: impl IntoIterator<Item = &'r Comparison>) -> String {
    match rows.into_iter().any(|row| row.chunk != chunk) {
        true => format!("{method}, chunk {chunk}"),
        false => method.to_owned(),
    }
}

/// What a picture shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    Score,
    Density,
    SpeedUp,
}

/// A written picture.
pub struct Picture {
    pub subject: Subject,
    /// The name of its PNG.
    pub file: String,
    /// Alternative text.
    pub description: String,
}

impl Subject {
    const ALL: [Self; 3] = [Self::Score, Self::Density, Self::SpeedUp];

    /// The name of the files without extension.
    fn name(self) -> &'static str {
        match self {
            Self::Score => "score-by-length",
            Self::Density => "density-by-length",
            Self::SpeedUp => "speed-up-by-length",
        }
    }

    fn quantity(self) -> &'static str {
        match self {
            Self::Score => "mean score in percent",
            Self::Density => "density",
            Self::SpeedUp => "prefill, times as fast as exact",
        }
    }

    fn value(self, row: &Comparison) -> Option<f64> {
        match self {
            Self::Score => Some(100.0 * row.score),
            Self::Density => Some(row.density),
            Self::SpeedUp => row.speed_up,
        }
    }

    fn decimals(self) -> usize {
        match self {
            Self::Score => 1,
            Self::Density => 3,
            Self::SpeedUp => 2,
        }
    }
}

/// The names of all files that [`draw`] may write.
pub fn files() -> impl Iterator<Item = String> {
    Subject::ALL
        .into_iter()
        .flat_map(|subject| ["png", "svg"].map(|extension| format!("{}.{extension}", subject.name())))
}

/// Writes the pictures whose values are known: curves by length, or bars if there is one length.
pub fn draw(directory: &Path, comparisons: &[Comparison]) -> Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    for subject in Subject::ALL {
        let is_shown = |row: &&Comparison| row.task == ALL_TASKS && subject.value(row).is_some();
        let rows: Vec<&Comparison> = comparisons.iter().filter(is_shown).collect();
        let Some(first) = rows.first() else { continue };
        let methods = grouped(rows.iter().copied(), |row| (&row.method, &row.chunk));
        let is_one_length = rows.iter().all(|row| row.context_tokens == first.context_tokens);
        let (plot, height): (Box<dyn Plot>, u32) = match is_one_length {
            true => (Box::new(bars(subject, &methods, first.context_tokens)), 200 + 60 * methods.len() as u32),
            false => (Box::new(lines(subject, &methods)), SIZE.1),
        };
        Figure::new(SIZE.0, height.min(3000))?.write(plot.as_ref(), directory, subject.name())?;
        pictures.push(Picture {
            subject,
            file: format!("{}.png", subject.name()),
            description: format!("{} by prompt length", capitalised(subject.quantity())),
        });
    }
    Ok(pictures)
}

fn lines(subject: Subject, methods: &[Vec<&Comparison>]) -> Lines {
    let point = |row: &&Comparison| (row.context_tokens as f64, subject.value(row).unwrap_or(f64::NAN));
    let series = methods.iter().map(|rows| Series {
        label: label(&rows[0].method, &rows[0].chunk, methods.iter().map(|rows| rows[0])),
        points: rows.iter().map(point).collect(),
        marks: true,
    });
    Lines {
        title: String::new(),
        x: Axis::log2("prompt length in tokens"),
        y: match subject {
            Subject::SpeedUp => Axis::log2(subject.quantity()),
            _ => Axis::linear(subject.quantity()),
        },
        series: series.collect(),
        levels: Vec::new(),
    }
}

fn bars(subject: Subject, methods: &[Vec<&Comparison>], tokens: usize) -> Bars {
    let bar = |rows: &Vec<&Comparison>| Bar {
        label: label(&rows[0].method, &rows[0].chunk, methods.iter().map(|rows| rows[0])),
        parts: vec![subject.value(rows[0]).unwrap_or_default()],
    };
    Bars {
        title: String::new(),
        quantity: subject.quantity().to_owned(),
        parts: vec![format!("prompts of {tokens} tokens")],
        bars: methods.iter().map(bar).collect(),
        decimals: subject.decimals(),
    }
}

fn capitalised(text: &str) -> String {
    text[..1].to_uppercase() + &text[1..]
}
