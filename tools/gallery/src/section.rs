//! [`Section`]: the content of an entry.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result};
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

/// The content of an entry.
pub struct Section {
    /// Directory of the pictures.
    pub directory: PathBuf,
    /// The pictures, at the top of the entry.
    pub pictures: Vec<Picture>,
    /// Tables and their explanation.
    pub text: String,
    /// The distinct files of the rows and their provenances, at the end of the entry.
    pub files: Vec<PathBuf>,
    origins: Vec<Provenance>,
}

impl Section {
    /// An empty entry about rows of a directory.
    pub fn new(directory: &Path) -> Self {
        let directory = directory.to_owned();
        Self { directory, pictures: Vec::new(), text: String::new(), files: Vec::new(), origins: Vec::new() }
    }

    /// Names the sources of rows.
    pub fn cite<'r, R: 'r>(&mut self, rows: impl IntoIterator<Item = &'r Sourced<R>>) {
        for Sourced { path, provenance, .. } in rows {
            if !self.files.contains(path) {
                self.files.push(path.clone());
            }
            if !self.origins.contains(provenance) {
                self.origins.push(provenance.clone());
            }
        }
    }

    /// Adds a picture of `size` pixels.
    pub fn draw(
        &mut self,
        name: String,
        description: String,
        size: (u32, u32),
        plot: impl Plot + 'static,
    ) -> Result<()> {
        let figure = Figure::new(size.0, size.1)?;
        self.pictures.push(Picture { name, description, figure, plot: Box::new(plot) });
        Ok(())
    }

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
        if !vectors.is_empty() {
            text.push('\n');
        }
        Ok(format!("{text}{}\n\n{}\n", self.text.trim(), self.sources(&page, &vectors)?))
    }

    fn sources(&self, page: &Path, vectors: &[PathBuf]) -> Result<String> {
        let linked = |paths: &[PathBuf]| {
            let link = |path: &PathBuf| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                Ok(format!("[{}]({})", inline(&name), link(page, &absolute(path)?)))
            };
            Ok::<_, Error>(paths.iter().map(link).collect::<Result<Vec<_>>>()?.join(", "))
        };
        let mut parts = vec![format!("Rows: {}", linked(&self.files)?)];
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
        if !vectors.is_empty() {
            parts.push(format!("as vectors: {}", linked(vectors)?));
        }
        let commands = distinct(self.origins.iter().map(|origin| command(&origin.command)).filter(|c| !c.is_empty()));
        Ok(match commands.is_empty() {
            true => format!("{}.\n", parts.join("; ")),
            false => format!("{}; made by\n\n```sh\n{}\n```\n", parts.join("; "), commands.join("\n")),
        })
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
