//! The pictures and tables of a page, made from rows that are in the repository.
//!
//! A page is Markdown with pairs of comments, `<!-- gallery: NAME -->` and `<!-- /gallery -->`, each alone on its line.
//! What stands between them is made from rows; all else is hand-written and stays. A NAME is a kind and the directory of
//! its rows, such as `error-by-density needle-7m-8k`:
//!
//! | kind | rows | makes |
//! |---|---|---|
//! | `error-by-density DIR` | `matched-density.csv` or `sweep.csv` of an experiment | error of all methods at equal density |
//! | `density-by-head DIR` | `heads.csv` of an experiment | density by layer and head |
//! | `time-split DIR` | `time-split.csv` of an experiment | time for selection and attention, with density and error |
//! | `matched-speed DIR` | `matched-speed.csv` of an experiment | time by density against random blocks |
//! | `tau-and-segment DIR` | `tau-and-segment.csv` of an experiment | density, error and speed-up by threshold and segment |
//! | `components DIR` | `components.csv` of an experiment | density, error and speed-up of S2O's parts |
//! | `niah DIR` | `outcomes.jsonl` of a run, or its `table.csv` | score by depth and length; score and density by task |
//! | `speed-up-by-length DEVICE` | the record of the benchmarks `attention` and `prefill` | speed-up by prompt length |
//! | `methods-by-time DEVICE` | the record of the benchmark `methods` | time for selection and attention |
//!
//! Pictures are PNG and SVG files beside the rows. Every entry ends with its rows' commit, device, source and command.
//!
//! ```
//! use s2o_eval::gallery::Gallery;
//!
//! let gallery = Gallery { page: "page.md".into(), rows: "results".into(), record: "record".into() };
//! let error = gallery.check().expect_err("there is no such page").to_string();
//! assert!(error.starts_with("cannot read page.md: "));
//! ```

mod components;
mod density_by_head;
mod error;
mod error_by_density;
mod layers;
mod matched_speed;
mod methods_by_time;
mod niah;
mod page;
mod phases;
mod record;
mod rows;
mod section;
mod speed_up_by_length;
mod tau_and_segment;
#[cfg(test)]
mod tests;
mod text;
mod time_split;

use std::fs;
use std::path::{Component, Path, PathBuf};

pub use error::{GalleryError, Result};
use page::Block;
use section::Section;

use crate::error::EvalError;

/// A page and the rows that it is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gallery {
    /// The Markdown file.
    pub page: PathBuf,
    /// Directory of the directories of experiments and runs.
    pub rows: PathBuf,
    /// Directory of the benchmarks' directories, one for each device.
    pub record: PathBuf,
}

/// An entry of the page that was made or checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// What its marker names.
    pub name: String,
    /// Line of its marker, counted from 1.
    pub line: u64,
    /// Its pictures, a PNG and an SVG of each.
    pub pictures: Vec<PathBuf>,
}

/// Where the rows of a kind of entry lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Rows,
    Record,
}

/// A kind of entry.
struct Kind {
    name: &'static str,
    place: Place,
    make: fn(&Path) -> Result<Section>,
}

const KINDS: [Kind; 9] = [
    Kind { name: "error-by-density", place: Place::Rows, make: error_by_density::section },
    Kind { name: "density-by-head", place: Place::Rows, make: density_by_head::section },
    Kind { name: "time-split", place: Place::Rows, make: time_split::section },
    Kind { name: "matched-speed", place: Place::Rows, make: matched_speed::section },
    Kind { name: "tau-and-segment", place: Place::Rows, make: tau_and_segment::section },
    Kind { name: "components", place: Place::Rows, make: components::section },
    Kind { name: "niah", place: Place::Rows, make: niah::section },
    Kind { name: "speed-up-by-length", place: Place::Record, make: speed_up_by_length::section },
    Kind { name: "methods-by-time", place: Place::Record, make: methods_by_time::section },
];

impl Gallery {
    /// Writes all pictures, and the page where it changes. Nothing is written if one of the entries cannot be made.
    ///
    /// # Errors
    /// [`GalleryError::Line`] for markers, names and rows that are not as they should be, [`GalleryError::Missing`] rows
    /// or markers, [`GalleryError::Plot`] and [`EvalError`] for pictures and files; those of an entry within
    /// [`GalleryError::Entry`].
    pub fn update(&self) -> Result<Vec<Made>> {
        let made = self.make()?;
        for section in &made.sections {
            for picture in &section.pictures {
                picture.figure.write(picture.plot.as_ref(), &section.directory, &picture.name)?;
            }
        }
        let page = page::replaced(&made.text, &made.blocks, made.bodies.iter().map(String::as_str));
        if page != made.text {
            fs::write(&self.page, page).map_err(|source| EvalError::Write { path: self.page.clone(), source })?;
        }
        Ok(made.entries())
    }

    /// Writes nothing, and fails if [`Self::update`] would change the page or an SVG, or if a PNG is missing.
    ///
    /// # Errors
    /// [`GalleryError::OutOfDate`], and those of [`Self::update`].
    pub fn check(&self) -> Result<Vec<Made>> {
        let made = self.make()?;
        let mut stale = Vec::new();
        for ((block, section), body) in made.blocks.iter().zip(&made.sections).zip(&made.bodies) {
            if made.text[block.body.clone()] != *body {
                stale.push(format!("{}, line {}: {}", self.page.display(), block.line, block.name));
            }
            for picture in &section.pictures {
                let drawn = picture.figure.svg(picture.plot.as_ref())?;
                let [png, svg] = section.files(picture);
                if fs::read_to_string(&svg).ok().is_none_or(|there| there != drawn) {
                    stale.push(svg.display().to_string());
                }
                if !png.exists() {
                    stale.push(png.display().to_string());
                }
            }
        }
        if stale.is_empty() { Ok(made.entries()) } else { Err(GalleryError::OutOfDate { stale }) }
    }

    fn make(&self) -> Result<Making> {
        let read = |source| EvalError::Io { path: self.page.clone(), source };
        let text = fs::read_to_string(&self.page).map_err(read)?;
        let blocks = page::blocks(&self.page, &text)?;
        let directory = self.page.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (mut sections, mut bodies) = (Vec::new(), Vec::new());
        for block in &blocks {
            let (kind, rows) = self.entry(block)?;
            let made = (kind.make)(&rows).and_then(|section| Ok((section.markdown(directory)?, section)));
            let (body, section) = made.map_err(|error| GalleryError::Entry {
                page: self.page.clone(),
                line: block.line,
                name: block.name.clone(),
                source: Box::new(error),
            })?;
            sections.push(section);
            bodies.push(body);
        }
        Ok(Making { text, blocks, sections, bodies })
    }

    /// The kind that a marker names, and the directory of its rows.
    fn entry(&self, block: &Block) -> Result<(&'static Kind, PathBuf)> {
        let wrong = |expected: String, got: &str| GalleryError::Line {
            path: self.page.clone(),
            line: block.line,
            expected,
            got: format!("`{got}`"),
        };
        let (name, argument) = block.name.split_once(char::is_whitespace).unwrap_or((&block.name, ""));
        let argument = argument.trim();
        let kind = KINDS
            .iter()
            .find(|kind| kind.name == name)
            .ok_or_else(|| wrong(format!("one of {}", KINDS.map(|kind| kind.name).join(", ")), name))?;
        let parent = if kind.place == Place::Rows { &self.rows } else { &self.record };
        // Pictures are written there.
        let is_below = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        if argument.is_empty() || !is_below(Path::new(argument)) {
            return Err(wrong(format!("`{name}` and a directory of {}", parent.display()), &block.name));
        }
        Ok((kind, parent.join(argument)))
    }
}

/// A page with what goes into it.
struct Making {
    text: String,
    blocks: Vec<Block>,
    sections: Vec<Section>,
    bodies: Vec<String>,
}

impl Making {
    fn entries(&self) -> Vec<Made> {
        let entries = self.blocks.iter().zip(&self.sections);
        entries
            .map(|(block, section)| Made {
                name: block.name.clone(),
                line: block.line,
                pictures: section.pictures.iter().flat_map(|picture| section.files(picture)).collect(),
            })
            .collect()
    }
}
