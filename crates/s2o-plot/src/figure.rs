//! [`Figure`]: pictures of one size, written as PNG and as SVG.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::error::PlotError;
use super::scene::Scene;

/// A picture that a [`Figure`] can write: [`Lines`](super::Lines), [`Heatmap`](super::Heatmap),
/// [`Bars`](super::Bars) and [`AttentionMaps`](super::AttentionMaps).
pub trait Plot {
    /// Draws everything inside the margin.
    #[doc(hidden)]
    fn draw(&self, scene: &mut Scene) -> Result<(), PlotError>;
}

/// A picture's size. Text scales with it, so that it is legible at half the size too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figure {
    width: u32,
    height: u32,
}

/// The two files of a picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The PNG.
    pub png: PathBuf,
    /// The SVG.
    pub svg: PathBuf,
}

impl Figure {
    /// Pictures of `width` by `height` pixels.
    ///
    /// # Errors
    /// [`PlotError::WrongInput`] if a side is shorter than 160 or longer than 3000 pixels.
    pub fn new(width: u32, height: u32) -> Result<Self, PlotError> {
        const SIDE: RangeInclusive<u32> = 160..=3000;
        if !SIDE.contains(&width) || !SIDE.contains(&height) {
            let got = format!("{width} x {height}");
            return Err(PlotError::wrong("picture", format!("{SIDE:?} pixels a side"), got));
        }
        Ok(Self { width, height })
    }

    /// Draws `plot` and writes it to `name.png` and `name.svg` in `directory`, which is created if it is missing.
    /// Nothing is written if the plot cannot be drawn.
    ///
    /// # Errors
    /// If the plot's data cannot be drawn, or a file cannot be written.
    pub fn write(&self, plot: &dyn Plot, directory: &Path, name: &str) -> Result<Files, PlotError> {
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(PlotError::wrong("picture name", "a file name without its extension", format!("{name:?}")));
        }
        let scene = self.scene(plot)?;
        let cannot = |path: &Path| {
            let path = path.to_owned();
            |source| PlotError::Write { path, source }
        };
        let [png, svg] = ["png", "svg"].map(|extension| directory.join(format!("{name}.{extension}")));
        let pixels = scene.pixels.encode_png().map_err(io::Error::other).map_err(cannot(&png))?;
        fs::create_dir_all(directory).map_err(cannot(directory))?;
        fs::write(&svg, scene.svg).map_err(cannot(&svg))?;
        fs::write(&png, pixels).map_err(cannot(&png))?;
        Ok(Files { png, svg })
    }

    /// The document that [`Self::write`] writes to `name.svg`.
    ///
    /// # Errors
    /// If the plot's data cannot be drawn.
    pub fn svg(&self, plot: &dyn Plot) -> Result<String, PlotError> {
        Ok(self.scene(plot)?.svg)
    }

    pub(crate) fn scene(&self, plot: &dyn Plot) -> Result<Scene, PlotError> {
        let mut scene = Scene::new(self.width, self.height);
        plot.draw(&mut scene)?;
        scene.svg += "</svg>\n";
        Ok(scene)
    }
}
