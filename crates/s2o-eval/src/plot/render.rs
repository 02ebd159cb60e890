//! A [`Scene`] as SVG and as pixels. Both go through [`paint`]; what differs is in [`Medium`].

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontDesc, FontFamily, FontStyle, FontTransform, RGBColor, ShapeStyle};

use super::error::PlotError;
use super::palette::PAPER;
use super::scene::{Anchor, Point, Rect, Scene, Shape, Text};
use super::typeface;

/// What a backend makes of the numbers that it is given.
#[derive(Debug)]
struct Medium {
    /// Its units in a pixel of the picture; backends know whole units only.
    scale: f64,
    /// Whether it keeps text and wide paths as such, rather than as pixels.
    is_vector: bool,
}

const SVG: Medium = Medium { scale: 4.0, is_vector: true };

/// Drawn larger and averaged, for smooth edges.
const RASTER: Medium = Medium { scale: 3.0, is_vector: false };

/// The size of a font by which plotters' SVG backend means an em of 1.
const SVG_SIZE: f64 = 1.24;
/// From the top anchor of a text to its base line in that backend, in em.
const SVG_ASCENT: f64 = 0.76;

/// The scene as an SVG document.
pub fn svg(scene: &Scene) -> Result<String, PlotError> {
    let size = SVG.size(scene);
    let mut document = String::new();
    paint(&mut SVGBackend::with_string(&mut document, size), scene, &SVG)?;
    // The view box keeps the finer units; the picture is as large as it was asked for.
    let [fine, asked] = [size, (scene.width as u32, scene.height as u32)]
        .map(|(width, height)| format!("<svg width=\"{width}\" height=\"{height}\""));
    Ok(document.replacen(&fine, &asked, 1))
}

/// The scene as rows of red, green and blue.
pub fn pixels(scene: &Scene) -> Result<Vec<u8>, PlotError> {
    let size = RASTER.size(scene);
    let mut fine = vec![0; 3 * size.0 as usize * size.1 as usize];
    paint(&mut BitMapBackend::with_buffer(&mut fine, size), scene, &RASTER)?;

    let (factor, width, height) = (RASTER.scale as usize, scene.width as usize, scene.height as usize);
    let mut sums = vec![0u16; 3 * width * height];
    for (y, row) in fine.chunks_exact(3 * width * factor).enumerate() {
        let sums = &mut sums[3 * width * (y / factor)..][..3 * width];
        for (sum, group) in sums.chunks_exact_mut(3).zip(row.chunks_exact(3 * factor)) {
            for pixel in group.chunks_exact(3) {
                sum.iter_mut().zip(pixel).for_each(|(sum, &part)| *sum += u16::from(part));
            }
        }
    }
    let count = (factor * factor) as u16;
    Ok(sums.into_iter().map(|sum| ((sum + count / 2) / count) as u8).collect())
}

impl Medium {
    fn size(&self, scene: &Scene) -> (u32, u32) {
        ((scene.width * self.scale) as u32, (scene.height * self.scale) as u32)
    }

    fn point(&self, (x, y): Point) -> (i32, i32) {
        ((x * self.scale).round() as i32, (y * self.scale).round() as i32)
    }

    fn stroke(&self, colour: RGBColor, width: f64) -> ShapeStyle {
        ShapeStyle::from(colour).stroke_width((width * self.scale).round().max(1.0) as u32)
    }
}

fn paint<B: DrawingBackend>(backend: &mut B, scene: &Scene, medium: &Medium) -> Result<(), PlotError> {
    let paper = Rect { left: 0.0, top: 0.0, right: scene.width, bottom: scene.height };
    area(backend, medium, paper, PAPER)?;
    for shape in &scene.shapes {
        match shape {
            Shape::Area { rect, colour } => area(backend, medium, *rect, *colour)?,
            Shape::Polygon { corners, colour } => {
                let corners = corners.iter().map(|corner| medium.point(*corner));
                backend.fill_polygon(corners, &colour.filled()).map_err(refused)?;
            }
            Shape::Path { points, colour, width } => path(backend, medium, points, *colour, *width)?,
            Shape::Circle { centre, radius, colour } => disc(backend, medium, *centre, *radius, *colour)?,
            Shape::Text(line) => text(backend, medium, line)?,
        }
    }
    backend.present().map_err(refused)
}

fn area<B: DrawingBackend>(backend: &mut B, medium: &Medium, rect: Rect, colour: RGBColor) -> Result<(), PlotError> {
    let (from, to) = (medium.point((rect.left, rect.top)), medium.point((rect.right, rect.bottom)));
    backend.draw_rect(from, to, &colour.filled(), true).map_err(refused)
}

fn disc<B: DrawingBackend>(
    backend: &mut B,
    medium: &Medium,
    centre: Point,
    radius: f64,
    colour: RGBColor,
) -> Result<(), PlotError> {
    let radius = (radius * medium.scale).round() as u32;
    backend.draw_circle(medium.point(centre), radius, &colour.filled(), true).map_err(refused)
}

fn path<B: DrawingBackend>(
    backend: &mut B,
    medium: &Medium,
    points: &[Point],
    colour: RGBColor,
    width: f64,
) -> Result<(), PlotError> {
    if medium.is_vector {
        let points = points.iter().map(|point| medium.point(*point));
        return backend.draw_path(points, &medium.stroke(colour, width)).map_err(refused);
    }
    // plotters' own wide paths have spikes at sharp turns.
    let half = 0.5 * width.max(1.0 / medium.scale);
    for pair in points.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        let len = (x1 - x0).hypot(y1 - y0);
        if x0 == x1 || y0 == y1 {
            let rect = Rect {
                left: x0.min(x1) - half,
                top: y0.min(y1) - half,
                right: x0.max(x1) + half,
                bottom: y0.max(y1) + half,
            };
            area(backend, medium, rect, colour)?;
            continue;
        }
        let (dx, dy) = (half * (y1 - y0) / len, half * (x0 - x1) / len);
        let corners = [(x0 + dx, y0 + dy), (x1 + dx, y1 + dy), (x1 - dx, y1 - dy), (x0 - dx, y0 - dy)];
        backend.fill_polygon(corners.map(|corner| medium.point(corner)), &colour.filled()).map_err(refused)?;
    }
    for joint in points.iter().skip(1).take(points.len().saturating_sub(2)) {
        disc(backend, medium, *joint, half, colour)?;
    }
    Ok(())
}

fn text<B: DrawingBackend>(backend: &mut B, medium: &Medium, line: &Text) -> Result<(), PlotError> {
    let em = line.em * medium.scale;
    if !medium.is_vector {
        return glyphs(backend, line, medium.point(line.at), em);
    }
    let style = if line.bold { FontStyle::Bold } else { FontStyle::Normal };
    let transform = if line.upwards { FontTransform::Rotate270 } else { FontTransform::None };
    let anchor = match line.anchor {
        Anchor::Start => HPos::Left,
        Anchor::Middle => HPos::Center,
        Anchor::End => HPos::Right,
    };
    let font = FontDesc::new(FontFamily::Name(typeface::FAMILY), SVG_SIZE * em, style).transform(transform);
    let style = font.color(&line.colour).pos(Pos::new(anchor, VPos::Top));
    let ((x, y), ascent) = (line.at, SVG_ASCENT * line.em);
    let at = if line.upwards { (x - ascent, y) } else { (x, y - ascent) };
    backend.draw_text(&line.content, &style, medium.point(at)).map_err(refused)
}

/// Text as pixels. plotters' own leaves out the space before each glyph, and letters then stand unevenly.
fn glyphs<B: DrawingBackend>(backend: &mut B, line: &Text, (x, y): (i32, i32), em: f64) -> Result<(), PlotError> {
    let (outlines, width) = typeface::outlines(&line.content, em)?;
    let start = match line.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -0.5 * width,
        Anchor::End => -width,
    };
    // The typeface is a light one: set again beside itself, its strokes have the weight of ordinary text.
    let shifts = if line.bold { -1..3 } else { 0..2 };
    for shift in shifts {
        for outline in &outlines {
            let bounds = outline.px_bounds();
            let (left, top) = (start.round() as i32 + bounds.min.x as i32 + shift, bounds.min.y as i32);
            let mut covered = Vec::new();
            outline.draw(|dx, dy, share| covered.push((left + dx as i32, top + dy as i32, share)));
            for (dx, dy, share) in covered {
                let point = if line.upwards { (x + dy, y - dx) } else { (x + dx, y + dy) };
                let colour = line.colour.mix(f64::from(share.clamp(0.0, 1.0)));
                backend.draw_pixel(point, colour.to_backend_color()).map_err(refused)?;
            }
        }
    }
    Ok(())
}

fn refused(error: impl std::error::Error) -> PlotError {
    PlotError::Draw { reason: error.to_string() }
}
