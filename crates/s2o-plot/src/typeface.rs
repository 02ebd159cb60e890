//! The typeface of all pictures. It is part of the program, so that no fonts need to be installed.

use std::sync::LazyLock;

use ab_glyph::{Font, FontRef, GlyphId, OutlineCurve, Point};
use epaint_default_fonts::UBUNTU_LIGHT;
use tiny_skia::{Path, PathBuilder};

/// The families that an SVG names. A viewer without the first family takes the next.
pub const FAMILY: &str = "Ubuntu, Helvetica, Arial, sans-serif";
/// Height of a capital above the base line, in em.
pub const CAP_HEIGHT: f64 = 0.69;
/// Distance between lines of text, in em.
pub const LINE: f64 = 1.3;

/// Width of the widest usual fallback typeface, relative to ours.
const FALLBACK_WIDTH: f64 = 1.12;

static FACE: LazyLock<FontRef<'static>> =
    LazyLock::new(|| FontRef::try_from_slice(UBUNTU_LIGHT).expect("the embedded font is valid"));

/// Width to reserve for `text` at `em` pixels: at least its width in a fallback typeface.
pub fn width(text: &str, em: f64) -> f64 {
    glyphs(text).1 * em * FALLBACK_WIDTH
}

/// [`width`] of the widest of some texts.
pub fn widest<'a>(texts: impl IntoIterator<Item = &'a String>, em: f64) -> f64 {
    texts.into_iter().map(|text| width(text, em)).fold(0.0, f64::max)
}

/// The outline of a line of text at `em` pixels that begins at (0, 0) on its base line, and its width.
pub fn outline(text: &str, em: f64) -> (Option<Path>, f64) {
    let (glyphs, end) = glyphs(text);
    let mut path = PathBuilder::new();
    for (id, start) in glyphs {
        // Spaces have no outline.
        let curves = FACE.outline(id).map(|outline| outline.curves).unwrap_or_default();
        let scale = em as f32 / units_per_em();
        let place = |point: Point| ((start * em) as f32 + point.x * scale, -point.y * scale);
        let mut last = None;
        for curve in curves {
            let (OutlineCurve::Line(from, to) | OutlineCurve::Quad(from, _, to) | OutlineCurve::Cubic(from, .., to)) =
                curve;
            if last.replace(to) != Some(from) {
                path.close();
                let (x, y) = place(from);
                path.move_to(x, y);
            }
            let (x, y) = place(to);
            match curve {
                OutlineCurve::Line(..) => path.line_to(x, y),
                OutlineCurve::Quad(_, control, _) => {
                    let (x1, y1) = place(control);
                    path.quad_to(x1, y1, x, y);
                }
                OutlineCurve::Cubic(_, first, second, _) => {
                    let ((x1, y1), (x2, y2)) = (place(first), place(second));
                    path.cubic_to(x1, y1, x2, y2, x, y);
                }
            }
        }
        path.close();
    }
    (path.finish(), end * em)
}

/// `text`, cut at its end if it is wider than `available`.
pub fn fitted(text: &str, em: f64, available: f64) -> String {
    let mut fitted = text.to_owned();
    let mut kept = text;
    while width(&fitted, em) > available {
        let Some((end, _)) = kept.char_indices().next_back() else { return String::new() };
        kept = &kept[..end];
        fitted = kept.trim_end().to_owned() + "…";
    }
    fitted
}

fn units_per_em() -> f32 {
    FACE.units_per_em().unwrap_or(1000.0)
}

/// Each glyph with its start, and the end of the last glyph, in em.
fn glyphs(text: &str) -> (Vec<(GlyphId, f64)>, f64) {
    let (mut glyphs, mut end) = (Vec::new(), 0.0);
    let mut last = None;
    for id in text.chars().map(|c| FACE.glyph_id(c)) {
        if let Some(last) = last.replace(id) {
            end += FACE.kern_unscaled(last, id);
        }
        glyphs.push((id, f64::from(end / units_per_em())));
        end += FACE.h_advance_unscaled(id);
    }
    (glyphs, f64::from(end / units_per_em()))
}
