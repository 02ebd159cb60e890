//! The shapes of a picture, independent of the file format: in pixels, painted in order.

use super::error::PlotError;
use super::palette::{Colour, INK};
use super::typeface;

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

    /// Checks that at least `min` pixels are left in both directions.
    pub fn check(self, min: f64) -> Result<Self, PlotError> {
        for (direction, got) in [("width", self.width()), ("height", self.height())] {
            if got < min {
                return Err(PlotError::NoRoom { direction, expected: min, got });
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

/// One line of text.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    pub content: String,
    /// A point on the base line.
    pub at: Point,
    pub anchor: Anchor,
    /// Pixels per em.
    pub em: f64,
    pub colour: Colour,
    pub bold: bool,
    /// Whether the text reads from the bottom up.
    pub upwards: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    Area {
        rect: Rect,
        colour: Colour,
    },
    Polygon {
        corners: Vec<Point>,
        colour: Colour,
    },
    Circle {
        centre: Point,
        radius: f64,
        colour: Colour,
    },
    Path {
        points: Vec<Point>,
        colour: Colour,
        width: f64,
        /// Pixels of a dash and of the gap after it; `None` for a solid line.
        dash: Option<(f64, f64)>,
    },
    Text(Text),
}

/// A picture to which shapes are added.
#[derive(Debug)]
pub struct Scene {
    pub width: f64,
    pub height: f64,
    /// Pixels per em of ordinary text. Other lengths are multiples of it.
    pub em: f64,
    pub shapes: Vec<Shape>,
}

impl Scene {
    /// An empty picture whose text stays legible at half its size.
    pub fn new(width: u32, height: u32) -> Self {
        let (width, height) = (f64::from(width), f64::from(height));
        Self { width, height, em: ((width + height) / 84.0).clamp(14.0, 40.0), shapes: Vec::new() }
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
        self.shapes.push(Shape::Area { rect, colour });
    }

    pub fn line(&mut self, from: Point, to: Point, colour: Colour, width: f64) {
        self.shapes.push(Shape::Path { points: vec![from, to], colour, width, dash: None });
    }

    pub fn outline(&mut self, Rect { left, top, right, bottom }: Rect) {
        let points = vec![(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        self.shapes.push(Shape::Path { points, colour: INK, width: self.hair(), dash: None });
    }

    /// Draws a line of text whose capitals are centred on the height `y`.
    pub fn label(&mut self, content: impl Into<String>, x: f64, y: f64, anchor: Anchor) {
        self.label_in(content, (x, y), anchor, self.em, INK);
    }

    /// [`Scene::label`] with another size and colour.
    pub fn label_in(&mut self, content: impl Into<String>, (x, y): Point, anchor: Anchor, em: f64, colour: Colour) {
        let at = (x, y + 0.5 * typeface::CAP_HEIGHT * em);
        let content = content.into();
        self.shapes.push(Shape::Text(Text { content, at, anchor, em, colour, bold: false, upwards: false }));
    }

    /// Draws a line of text that reads upwards: its capitals are centred on `x`, its middle is at `y`.
    pub fn label_upwards(&mut self, content: impl Into<String>, x: f64, y: f64) {
        let at = (x + 0.5 * typeface::CAP_HEIGHT * self.em, y);
        let (em, anchor, content) = (self.em, Anchor::Middle, content.into());
        self.shapes.push(Shape::Text(Text { content, at, anchor, em, colour: INK, bold: false, upwards: true }));
    }

    /// Draws a heading at the top of `area` and cuts it off `area`. Draws nothing if it is empty.
    pub fn heading(&mut self, content: &str, area: &mut Rect, em: f64) {
        if content.is_empty() {
            return;
        }
        // A long heading is shrunk before it is cut.
        let em = (em * area.width() / typeface::width(content, em)).clamp(0.8 * em, em);
        let content = typeface::fitted(content, em, area.width());
        let at = (area.left, area.top + typeface::CAP_HEIGHT * em);
        let anchor = Anchor::Start;
        self.shapes.push(Shape::Text(Text { content, at, anchor, em, colour: INK, bold: true, upwards: false }));
        area.top += 1.5 * em;
    }
}
