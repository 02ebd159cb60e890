//! A [`Scene`] as a PNG file.

use tiny_skia::{
    FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect as Pixels, Stroke, StrokeDash, Transform,
};

use super::error::PlotError;
use super::palette::{Colour, PAPER};
use super::scene::{Anchor, Point, Scene, Shape, Text};
use super::typeface;

/// The typeface is light. Strokes around its outlines, in em, give it the weight of ordinary and of bold text.
const WEIGHT: f64 = 0.02;
const BOLD_WEIGHT: f64 = 0.04;

/// The bytes of the file.
pub fn encode(scene: &Scene) -> Result<Vec<u8>, PlotError> {
    let (width, height) = (scene.width as u32, scene.height as u32);
    let cannot = |reason: &dyn ToString| PlotError::Encode { reason: reason.to_string() };
    let mut pixmap = Pixmap::new(width, height).ok_or_else(|| cannot(&"the picture does not fit into memory"))?;
    pixmap.fill(PAPER.into());
    for shape in &scene.shapes {
        match shape {
            Shape::Area { rect, colour } => {
                let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom].map(|side| side as f32);
                if let Some(rect) = Pixels::from_ltrb(left, top, right, bottom) {
                    pixmap.fill_rect(rect, &paint(*colour), Transform::identity(), None);
                }
            }
            Shape::Polygon { corners, colour } => fill(&mut pixmap, lines(corners, true), *colour),
            Shape::Circle { centre: (x, y), radius, colour } => {
                fill(&mut pixmap, PathBuilder::from_circle(*x as f32, *y as f32, *radius as f32), *colour);
            }
            Shape::Path { points, colour, width, dash } => {
                let dash = dash.and_then(|(on, off)| StrokeDash::new(vec![on as f32, off as f32], 0.0));
                let line_cap = if dash.is_some() { LineCap::Butt } else { LineCap::Square };
                let stroke = Stroke { dash, line_cap, ..stroke(*width) };
                if let Some(path) = lines(points, false) {
                    pixmap.stroke_path(&path, &paint(*colour), &stroke, Transform::identity(), None);
                }
            }
            Shape::Text(line) => text(&mut pixmap, line),
        }
    }
    pixmap.encode_png().map_err(|error| cannot(&error))
}

fn paint(colour: Colour) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color(colour.into());
    paint
}

fn stroke(width: f64) -> Stroke {
    Stroke { width: width as f32, line_join: LineJoin::Round, ..Stroke::default() }
}

fn lines(points: &[Point], is_closed: bool) -> Option<Path> {
    let mut path = PathBuilder::new();
    for (i, &(x, y)) in points.iter().enumerate() {
        if i == 0 { path.move_to(x as f32, y as f32) } else { path.line_to(x as f32, y as f32) }
    }
    if is_closed {
        path.close();
    }
    path.finish()
}

fn fill(pixmap: &mut Pixmap, path: Option<Path>, colour: Colour) {
    if let Some(path) = path {
        pixmap.fill_path(&path, &paint(colour), FillRule::Winding, Transform::identity(), None);
    }
}

fn text(pixmap: &mut Pixmap, line: &Text) {
    let (path, width) = typeface::outline(&line.content, line.em);
    // A line of spaces has no outline.
    let Some(path) = path else { return };
    let start = match line.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -0.5 * width,
        Anchor::End => -width,
    } as f32;
    let (x, y) = (line.at.0 as f32, line.at.1 as f32);
    let place = match line.upwards {
        true => Transform::from_row(0.0, -1.0, 1.0, 0.0, x, y - start),
        false => Transform::from_translate(x + start, y),
    };
    let (paint, weight) = (paint(line.colour), if line.bold { BOLD_WEIGHT } else { WEIGHT });
    pixmap.fill_path(&path, &paint, FillRule::Winding, place, None);
    pixmap.stroke_path(&path, &paint, &stroke(weight * line.em), place, None);
}
