//! [`Figure`]: pictures of one size, each as PNG and as SVG.

use std::fs;
use std::fs::File;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use plotters::backend::{BitMapBackend, DrawingBackend};

use super::error::PlotError;
use super::render;
use super::scene::{Rect, Scene};

/// Pixels of a side. The largest picture takes a quarter of a GiB while it is drawn.
const SIDE: RangeInclusive<u32> = 160..=3000;

/// How a plot puts itself on a picture.
pub trait Draw {
    /// Draws within `area`.
    fn draw(&self, scene: &mut Scene, area: Rect) -> Result<(), PlotError>;
}

/// What a [`Figure`] can write: [`Lines`](super::Lines), [`Heatmap`](super::Heatmap), [`Bars`](super::Bars),
/// [`AttentionMap`](super::AttentionMap) and [`AttentionMaps`](super::AttentionMaps).
pub trait Plot: Draw {}

impl<P: Draw> Plot for P {}

/// A picture's size. Text grows with it, so that it is legible at half the size too.
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
    /// [`PlotError::Size`] if a side is shorter than 160 or longer than 3000 pixels.
    pub fn new(width: u32, height: u32) -> Result<Self, PlotError> {
        if !SIDE.contains(&width) || !SIDE.contains(&height) {
            return Err(PlotError::Size { expected: SIDE, got: (width, height) });
        }
        Ok(Self { width, height })
    }

    /// Draws `plot` and writes it to `name.png` and `name.svg` in `directory`, which is made if need be. Nothing is
    /// written if the plot cannot be drawn.
    ///
    /// # Errors
    /// If the plot's data cannot be drawn, or a file cannot be written.
    pub fn write(&self, plot: &dyn Plot, directory: &Path, name: &str) -> Result<Files, PlotError> {
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(PlotError::Name { got: name.to_owned() });
        }
        let scene = self.scene(plot)?;
        let (document, pixels) = (render::svg(&scene)?, render::pixels(&scene)?);

        let cannot = |path: &Path| {
            let path = path.to_owned();
            |source| PlotError::Write { path, source }
        };
        fs::create_dir_all(directory).map_err(cannot(directory))?;
        let [png, svg] = ["png", "svg"].map(|extension| directory.join(format!("{name}.{extension}")));
        fs::write(&svg, document).map_err(cannot(&svg))?;
        // plotters says in words only why it cannot open a file.
        drop(File::create(&png).map_err(cannot(&png))?);
        let mut file = BitMapBackend::new(&png, (self.width, self.height));
        file.blit_bitmap((0, 0), (self.width, self.height), &pixels)
            .and_then(|()| file.present())
            .map_err(|error| PlotError::Draw { reason: error.to_string() })?;
        drop(file);
        Ok(Files { png, svg })
    }

    /// What [`Self::write`] writes to `name.svg`.
    ///
    /// # Errors
    /// If the plot's data cannot be drawn.
    pub fn svg(&self, plot: &dyn Plot) -> Result<String, PlotError> {
        render::svg(&self.scene(plot)?)
    }

    fn scene(&self, plot: &dyn Plot) -> Result<Scene, PlotError> {
        let mut scene = Scene::new(self.width, self.height);
        let area = scene.area();
        plot.draw(&mut scene, area)?;
        Ok(scene)
    }
}
