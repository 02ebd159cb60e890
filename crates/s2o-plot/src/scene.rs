//! A picture, drawn as SVG and as pixels at the same time. All lengths are in pixels.

use tiny_skia::{
    FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect as Pixels, Stroke, StrokeDash, Transform,
};

use super::error::PlotError;
use super::palette::{Colour, INK, PAPER};
use super::typeface;

/// The typeface is light. Strokes around its outlines, in em, give it the weight of ordinary and of bold text.
const WEIGHT: f64 = 0.02;
const BOLD_WEIGHT: f64 = 0.04;

/// A point, x to the right and y downwards.
pub type Point = (f64, f64);

/// An axis-aligned rectangle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect {
    pub left: f64,
    pub top: f64,
    pub right: f64,
    pub bottom: f64,
}

impl Rect {
    pub fn width(&self) -> f64 {
        self.right - self.left
    }

    pub fn height(&self) -> f64 {
        self.bottom - self.top
    }

    /// Checks that labels and margins left at least these pixels for the data.
    pub fn check(self, min_width: f64, min_height: f64) -> Result<Self, PlotError> {
        for (side, min, got) in [("width", min_width, self.width()), ("height", min_height, self.height())] {
            if got < min {
                let expected = format!("at least {min:.0} pixels of {side} for the data");
                return Err(PlotError::wrong("picture", expected, format!("{got:.0}")));
            }
        }
        Ok(self)
    }
}

/// The part of a text that lies at its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Plain,
    Bold,
    /// Reads from the bottom up.
    Upwards,
}

/// A picture to which shapes are added.
#[derive(Debug)]
pub struct Scene {
    pub width: f64,
    pub height: f64,
    /// Pixels per em of ordinary text. Other lengths are multiples of it.
    pub em: f64,
    /// The document without its end.
    pub svg: String,
    pub pixels: Pixmap,
}

impl Scene {
    /// An empty picture whose text stays legible at half its size.
    pub fn new(width: u32, height: u32) -> Self {
        let mut pixels = Pixmap::new(width, height).expect("the sides of a figure are limited");
        pixels.fill(PAPER.into());
        let family = typeface::FAMILY;
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"{family}\" stroke-linecap=\"square\" \
             stroke-linejoin=\"round\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"{PAPER}\"/>\n"
        );
        let (width, height) = (f64::from(width), f64::from(height));
        Self { width, height, em: ((width + height) / 84.0).clamp(14.0, 40.0), svg, pixels }
    }

    /// The area inside the margin.
    pub fn area(&self) -> Rect {
        let margin = 0.6 * self.em;
        Rect { left: margin, top: margin, right: self.width - margin, bottom: self.height - margin }
    }

    /// Width of a thin line.
    pub fn hair(&self) -> f64 {
        self.em / 18.0
    }

    pub fn fill(&mut self, rect: Rect, colour: Colour) {
        let [x, y, width, height] = [rect.left, rect.top, rect.width(), rect.height()].map(number);
        self.svg += &format!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>\n");
        let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom].map(|side| side as f32);
        if let Some(rect) = Pixels::from_ltrb(left, top, right, bottom) {
            self.pixels.fill_rect(rect, &paint(colour), Transform::identity(), None);
        }
    }

    pub fn polygon(&mut self, corners: &[Point], colour: Colour) {
        self.svg += &format!("<polygon points=\"{}\" fill=\"{colour}\"/>\n", listed(corners));
        self.fill_path(joined(corners, true), colour);
    }

    pub fn circle(&mut self, (x, y): Point, radius: f64, colour: Colour) {
        let [cx, cy, r] = [x, y, radius].map(number);
        self.svg += &format!("<circle cx=\"{cx}\" cy=\"{cy}\" r=\"{r}\" fill=\"{colour}\"/>\n");
        self.fill_path(PathBuilder::from_circle(x as f32, y as f32, radius as f32), colour);
    }

    /// Draws lines between points. `dash` is the length of a dash and of the gap after it; `None` for a solid line.
    pub fn path(&mut self, points: &[Point], colour: Colour, width: f64, dash: Option<(f64, f64)>) {
        let dashes = dash
            .map(|(on, off)| format!(" stroke-dasharray=\"{} {}\" stroke-linecap=\"butt\"", number(on), number(off)));
        let (path, wide, dashes) = (listed(points), number(width), dashes.unwrap_or_default());
        self.svg += &format!(
            "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{wide}\"{dashes}/>\n"
        );
        let dash = dash.and_then(|(on, off)| StrokeDash::new(vec![on as f32, off as f32], 0.0));
        let line_cap = if dash.is_some() { LineCap::Butt } else { LineCap::Square };
        if let Some(path) = joined(points, false) {
            let stroke = Stroke { dash, line_cap, ..stroke(width) };
            self.pixels.stroke_path(&path, &paint(colour), &stroke, Transform::identity(), None);
        }
    }

    pub fn line(&mut self, from: Point, to: Point, colour: Colour, width: f64) {
        self.path(&[from, to], colour, width, None);
    }

    pub fn outline(&mut self, Rect { left, top, right, bottom }: Rect) {
        let points = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        self.path(&points, INK, self.hair(), None);
    }

    /// Draws a line of text whose capitals are centred on the height `y`.
    pub fn label(&mut self, content: &str, x: f64, y: f64, anchor: Anchor) {
        self.label_in(content, (x, y), anchor, self.em, INK);
    }

    /// [`Scene::label`] with another size and colour.
    pub fn label_in(&mut self, content: &str, (x, y): Point, anchor: Anchor, em: f64, colour: Colour) {
        self.text(content, (x, y + 0.5 * typeface::CAP_HEIGHT * em), anchor, em, colour, Style::Plain);
    }

    /// Draws a line of text that reads upwards: its capitals are centred on `x`, its middle is at `y`.
    pub fn label_upwards(&mut self, content: &str, x: f64, y: f64) {
        let at = (x + 0.5 * typeface::CAP_HEIGHT * self.em, y);
        self.text(content, at, Anchor::Middle, self.em, INK, Style::Upwards);
    }

    /// Draws a heading at the top of `area` and returns the rest of `area`. Draws nothing if it is empty.
    pub fn heading(&mut self, content: &str, area: Rect, em: f64) -> Rect {
        if content.is_empty() {
            return area;
        }
        // A long heading is shrunk before it is cut.
        let em = (em * area.width() / typeface::width(content, em)).clamp(0.8 * em, em);
        let content = typeface::fitted(content, em, area.width());
        let at = (area.left, area.top + typeface::CAP_HEIGHT * em);
        self.text(&content, at, Anchor::Start, em, INK, Style::Bold);
        Rect { top: area.top + 1.5 * em, ..area }
    }

    /// Draws a line of text; `at` is on its base line.
    fn text(&mut self, content: &str, at: Point, anchor: Anchor, em: f64, colour: Colour, style: Style) {
        let (path, width) = typeface::outline(content, em);
        let (anchored, start) = match anchor {
            Anchor::Start => ("", 0.0),
            Anchor::Middle => (" text-anchor=\"middle\"", -0.5 * width),
            Anchor::End => (" text-anchor=\"end\"", -width),
        };
        let [x, y, size] = [at.0, at.1, em].map(number);
        let styled = match style {
            Style::Plain => String::new(),
            Style::Bold => " font-weight=\"bold\"".to_owned(),
            Style::Upwards => format!(" transform=\"rotate(-90 {x} {y})\""),
        };
        let escaped = content.replace('&', "&amp;").replace('<', "&lt;");
        self.svg += &format!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{colour}\"{anchored}{styled}>{escaped}</text>\n"
        );

        // A line of spaces has no outline.
        let Some(path) = path else { return };
        let (x, y, start) = (at.0 as f32, at.1 as f32, start as f32);
        let place = match style {
            Style::Upwards => Transform::from_row(0.0, -1.0, 1.0, 0.0, x, y - start),
            _ => Transform::from_translate(x + start, y),
        };
        let weight = if style == Style::Bold { BOLD_WEIGHT } else { WEIGHT };
        self.pixels.fill_path(&path, &paint(colour), FillRule::Winding, place, None);
        self.pixels.stroke_path(&path, &paint(colour), &stroke(weight * em), place, None);
    }

    fn fill_path(&mut self, path: Option<Path>, colour: Colour) {
        if let Some(path) = path {
            self.pixels.fill_path(&path, &paint(colour), FillRule::Winding, Transform::identity(), None);
        }
    }
}

fn paint(colour: Colour) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color(colour.into());
    paint
}

fn stroke(width: f64) -> Stroke {
    Stroke { width: width as f32, line_join: LineJoin::Round, ..Stroke::default() }
}

fn joined(points: &[Point], is_closed: bool) -> Option<Path> {
    let mut path = PathBuilder::new();
    for (i, &(x, y)) in points.iter().enumerate() {
        if i == 0 { path.move_to(x as f32, y as f32) } else { path.line_to(x as f32, y as f32) }
    }
    if is_closed {
        path.close();
    }
    path.finish()
}

fn listed(points: &[Point]) -> String {
    points.iter().map(|&(x, y)| format!("{},{}", number(x), number(y))).collect::<Vec<_>>().join(" ")
}

/// A length to a hundredth of a pixel.
fn number(pixels: f64) -> String {
    let text = format!("{pixels:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}
