//! [`Section`]: the content of an entry.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use s2o_eval::Provenance;
use s2o_plot::{Figure, Plot};

use crate::rows::{Sourced, distinct};
use crate::text::{inline, link};

/// A picture next to the rows.
pub struct Picture {
    /// Its file name without extension.
    pub name: String,
    /// Alternative text.
    pub description: String,
    pub figure: Figure,
    pub plot: Box<dyn Plot>,
}

/// Distinct files and provenances of the rows of a section.
#[derive(Debug, Default)]
pub struct Sources {
    files: Vec<PathBuf>,
    origins: Vec<Provenance>,
}

/// The content of an entry.
pub struct Section {
    /// Directory of the pictures.
    pub directory: PathBuf,
    /// The pictures, at the top of the entry.
    pub pictures: Vec<Picture>,
    /// Tables and their explanation.
    pub text: String,
    /// Listed at the end of the entry.
    pub sources: Sources,
}

impl Sources {
    pub fn of<'r, R: 'r>(rows: impl IntoIterator<Item = &'r Sourced<R>>) -> Self {
        let (files, origins): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|row| (row.path.clone(), row.provenance.clone())).unzip();
        Self { files: distinct(files), origins: distinct(origins) }
    }

    /// The source of a file whose rows have no provenance.
    pub fn of_file(path: PathBuf) -> Self {
        Self { files: vec![path], origins: Vec::new() }
    }

    /// Adds the sources of more rows.
    pub fn and(mut self, other: Self) -> Self {
        self.files = distinct(self.files.into_iter().chain(other.files));
        self.origins = distinct(self.origins.into_iter().chain(other.origins));
        self
    }

    fn markdown(&self, page: &Path, pictures: &[PathBuf]) -> Result<String> {
        let named = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok(format!("[{}]({})", inline(&name), link(page, &absolute(path)?)))
        };
        let files = self.files.iter().map(named).collect::<Result<Vec<_>>>()?;
        let mut parts = vec![format!("Rows: {}", files.join(", "))];
        let column = |of: fn(&Provenance) -> &String| {
            let values = distinct(self.origins.iter().map(of).filter(|value| !value.is_empty()));
            values.into_iter().map(|value| inline(value)).collect::<Vec<_>>().join(" and ")
        };
        for (name, values) in [
            ("commit ", column(|origin| &origin.commit)),
            ("", column(|origin| &origin.date)),
            ("", column(|origin| &origin.device)),
            ("driver ", column(|origin| &origin.driver)),
            ("", column(|origin| &origin.source)),
        ] {
            if !values.is_empty() {
                parts.push(format!("{name}{values}"));
            }
        }
        if !pictures.is_empty() {
            let vectors = pictures.iter().map(named).collect::<Result<Vec<_>>>()?;
            parts.push(format!("as vectors: {}", vectors.join(", ")));
        }
        let commands = distinct(self.origins.iter().map(|origin| command(&origin.command)).filter(|c| !c.is_empty()));
        Ok(match commands.is_empty() {
            true => format!("{}.\n", parts.join("; ")),
            false => format!("{}; made by\n\n```sh\n{}\n```\n", parts.join("; "), commands.join("\n")),
        })
    }
}

impl Picture {
    /// A picture of `size` pixels.
    pub fn new(name: String, description: String, size: (u32, u32), plot: impl Plot + 'static) -> Result<Self> {
        Ok(Self { name, description, figure: Figure::new(size.0, size.1)?, plot: Box::new(plot) })
    }
}

impl Section {
    pub fn files(&self, picture: &Picture) -> [PathBuf; 2] {
        ["png", "svg"].map(|extension| self.directory.join(format!("{}.{extension}", picture.name)))
    }

    /// The lines between the markers of a page in the directory `page`.
    pub fn markdown(&self, page: &Path) -> Result<String> {
        let page = absolute(page)?;
        let (mut text, mut vectors) = (String::from("\n"), Vec::new());
        for picture in &self.pictures {
            let [png, svg] = self.files(picture);
            text.push_str(&format!("![{}]({})\n", inline(&picture.description), link(&page, &absolute(&png)?)));
            vectors.push(svg);
        }
        if !self.pictures.is_empty() {
            text.push('\n');
        }
        text.push_str(self.text.trim());
        text.push_str("\n\n");
        text.push_str(&self.sources.markdown(&page, &vectors)?);
        text.push('\n');
        Ok(text)
    }
}

/// The command as it is called in the repository; rows name only the program.
fn command(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.strip_prefix("evaluate ") {
        Some(arguments) => format!("cargo run --release evaluate {arguments}"),
        None => line,
    }
}

/// An absolute path without links and dots. Its directory must exist.
fn absolute(path: &Path) -> Result<PathBuf> {
    let resolve = |path: &Path| fs::canonicalize(path).with_context(|| format!("cannot read {}", path.display()));
    if path.is_dir() {
        return resolve(path);
    }
    // A picture may not be written yet.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(resolve(directory)?.join(path.file_name().unwrap_or_default()))
}
