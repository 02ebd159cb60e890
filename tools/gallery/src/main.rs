//! Makes the pictures and tables of the pages of results from rows that are in the repository.
//!
//! A page is Markdown with pairs of comments, `<!-- gallery: NAME -->` and `<!-- /gallery -->`, each alone on its line.
//! The lines between them are generated; all others are hand-written and stay. A NAME is a kind and the directory of
//! its rows, such as `error-by-density needle-11m-8k`. docs/experiments.md lists the kinds and shows the commands.
//! Pictures are PNG and SVG files next to the rows. Every entry ends with the commit, device, source and command of its
//! rows.

mod density_by_head;
mod error_by_density;
mod experiments;
mod layers;
mod methods_by_time;
mod niah;
mod page;
mod record;
mod rows;
mod section;
mod speed_up_by_length;
#[cfg(test)]
mod tests;
mod text;
mod time_by_error;

use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use experiments::{COMPONENTS, MATCHED_SPEED, TAU_AND_SEGMENT, TIME_SPLIT};
use page::Block;
use rows::line_error;
use section::Section;

/// The pages with generated parts.
const PAGES: [&str; 3] = ["docs/results-equal-density.md", "docs/results-gpu.md", "docs/results-answers.md"];

/// Makes the pictures and tables of the pages of results from the rows in the repository
///
/// Rewrites the lines between `<!-- gallery: NAME -->` and `<!-- /gallery -->` and keeps all others.
/// docs/experiments.md lists the names.
#[derive(Debug, Parser)]
#[command(name = "gallery")]
struct Arguments {
    /// Pages to update
    #[arg(long, value_name = "FILES", value_delimiter = ',', default_values = PAGES)]
    pages: Vec<PathBuf>,
    /// Directory that holds the directories of experiments and runs
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    rows: PathBuf,
    /// Directory of the benchmark records
    #[arg(long, value_name = "DIR", default_value = "benches/record")]
    record: PathBuf,
    /// Write nothing, and fail if the page or a picture is out of date
    #[arg(long)]
    check: bool,
}

/// A page and the places of its rows.
#[derive(Debug)]
struct Gallery {
    page: PathBuf,
    rows: PathBuf,
    record: PathBuf,
}

struct Kind {
    name: &'static str,
    /// Whether its rows are in the benchmarks' record.
    is_of_record: bool,
    render: fn(&Path) -> Result<Section>,
}

const KINDS: [Kind; 10] = [
    Kind { name: "error-by-density", is_of_record: false, render: error_by_density::section },
    Kind { name: "density-by-head", is_of_record: false, render: density_by_head::section },
    Kind { name: "time-split", is_of_record: false, render: |directory| TIME_SPLIT.section(directory) },
    Kind { name: "matched-speed", is_of_record: false, render: |directory| MATCHED_SPEED.section(directory) },
    Kind { name: "tau-and-segment", is_of_record: false, render: |directory| TAU_AND_SEGMENT.section(directory) },
    Kind { name: "components", is_of_record: false, render: |directory| COMPONENTS.section(directory) },
    Kind { name: "niah", is_of_record: false, render: niah::section },
    Kind { name: "speed-up-by-length", is_of_record: true, render: speed_up_by_length::section },
    Kind { name: "methods-by-time", is_of_record: true, render: methods_by_time::section },
    Kind { name: "time-by-error", is_of_record: true, render: time_by_error::section },
];

/// An entry of the page and its new content.
struct Entry {
    block: Block,
    section: Section,
    body: String,
}

fn main() -> Result<()> {
    let Arguments { pages, rows, record, check } = Arguments::parse();
    for page in pages {
        let gallery = Gallery { page, rows: rows.clone(), record: record.clone() };
        let entries = if check { gallery.check()? } else { gallery.update()? };
        for Entry { block, section, .. } in entries {
            println!("{}, line {}: {}", gallery.page.display(), block.line, block.name);
            for file in section.pictures.iter().flat_map(|picture| section.files(picture)) {
                println!("  {}", file.display());
            }
        }
    }
    Ok(())
}

impl Gallery {
    /// Writes all pictures, and the page if it changes. Nothing is written if an entry cannot be made.
    fn update(&self) -> Result<Vec<Entry>> {
        let (text, entries) = self.render()?;
        for Entry { section, .. } in &entries {
            for picture in &section.pictures {
                picture.figure.write(picture.plot.as_ref(), &section.directory, &picture.name)?;
            }
        }
        let page = page::replaced(&text, entries.iter().map(|entry| (&entry.block, entry.body.as_str())));
        if page != text {
            fs::write(&self.page, page).with_context(|| format!("cannot write {}", self.page.display()))?;
        }
        Ok(entries)
    }

    /// Writes nothing. Fails if [`Self::update`] would change the page or an SVG, or if a PNG is missing.
    fn check(&self) -> Result<Vec<Entry>> {
        let (text, entries) = self.render()?;
        let mut stale = Vec::new();
        for Entry { block, section, body } in &entries {
            if text[block.body.clone()] != *body {
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
        ensure!(stale.is_empty(), "expected the output of `gallery`, got something else in {}", stale.join("; "));
        Ok(entries)
    }

    /// The current page, and its entries as they should be.
    fn render(&self) -> Result<(String, Vec<Entry>)> {
        let text = fs::read_to_string(&self.page).with_context(|| format!("cannot read {}", self.page.display()))?;
        let directory = self.page.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let entry = |block: Block| {
            let (kind, rows) = self.kind(&block)?;
            let rendered = (kind.render)(&rows).and_then(|section| Ok((section.markdown(directory)?, section)));
            let (body, section) =
                rendered.with_context(|| format!("{}, line {}: {}", self.page.display(), block.line, block.name))?;
            Ok(Entry { block, section, body })
        };
        let entries = page::blocks(&self.page, &text)?.into_iter().map(entry).collect::<Result<_>>()?;
        Ok((text, entries))
    }

    /// The kind that a marker names, and the directory of its rows.
    fn kind(&self, block: &Block) -> Result<(&'static Kind, PathBuf)> {
        let (name, argument) = block.name.split_once(char::is_whitespace).unwrap_or((&block.name, ""));
        let wrong = |expected: &str, got: &str| line_error(&self.page, block.line, expected, &format!("`{got}`"));
        let Some(kind) = KINDS.iter().find(|kind| kind.name == name) else {
            return Err(wrong(&format!("one of {}", KINDS.map(|kind| kind.name).join(", ")), name));
        };
        let (parent, argument) = (if kind.is_of_record { &self.record } else { &self.rows }, argument.trim());
        // Pictures are written to this directory, so it must not be outside.
        let is_below = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        if argument.is_empty() || !is_below(Path::new(argument)) {
            return Err(wrong(&format!("`{name}` and a directory of {}", parent.display()), &block.name));
        }
        Ok((kind, parent.join(argument)))
    }
}
