//! The one typeface of all pictures. It is part of the program, so that no machine needs fonts of its own.

use std::sync::OnceLock;

use ab_glyph::{Font, FontRef, GlyphId, OutlinedGlyph, PxScale, ScaleFont, point};
use epaint_default_fonts::UBUNTU_LIGHT;

use super::error::PlotError;

/// The family as an SVG names it: whoever lacks the first takes the next.
pub const FAMILY: &str = "Ubuntu, Helvetica, Arial, sans-serif";
/// Height of a capital over the base line, in em.
pub const CAP_HEIGHT: f64 = 0.69;
/// From one line of text to the next, in em.
pub const LINE: f64 = 1.3;

/// How much wider than ours the widest of the usual fallback typefaces runs.
const FALLBACK_WIDTH: f64 = 1.12;

/// Width to reserve for `text` at `em` pixels: no less than it takes in a fallback typeface.
pub fn width(text: &str, em: f64) -> Result<f64, PlotError> {
    let (_, end) = glyphs(face()?, text, 1.0);
    Ok(f64::from(end) * em * FALLBACK_WIDTH)
}

/// The outlines of a line of text at `em` pixels that begins at (0, 0) of its base line, and where it ends.
pub fn outlines(text: &str, em: f64) -> Result<(Vec<OutlinedGlyph>, f64), PlotError> {
    let face = face()?;
    let (glyphs, end) = glyphs(face, text, em as f32);
    let scale = scale(face, em as f32);
    // Spaces have no outline.
    let outline = |(id, x): (GlyphId, f32)| face.outline_glyph(id.with_scale_and_position(scale, point(x, 0.0)));
    Ok((glyphs.into_iter().filter_map(outline).collect(), f64::from(end)))
}

/// `text`, its end cut off where it is wider than `available`.
pub fn fitted(text: &str, em: f64, available: f64) -> Result<String, PlotError> {
    if width(text, em)? <= available {
        return Ok(text.to_owned());
    }
    let mut kept: Vec<char> = text.chars().collect();
    while kept.pop().is_some() {
        let shorter: String = kept.iter().collect::<String>().trim_end().to_owned() + "…";
        if width(&shorter, em)? <= available {
            return Ok(shorter);
        }
    }
    Ok(String::new())
}

fn face() -> Result<&'static FontRef<'static>, PlotError> {
    static FACE: OnceLock<Option<FontRef<'static>>> = OnceLock::new();
    let face = FACE.get_or_init(|| FontRef::try_from_slice(UBUNTU_LIGHT).ok());
    face.as_ref().ok_or_else(|| PlotError::Draw { reason: "the built-in font cannot be read".to_owned() })
}

/// ab_glyph measures a typeface by its height from ascent to descent.
fn scale(face: &FontRef<'_>, em: f32) -> PxScale {
    PxScale::from(em * face.height_unscaled() / face.units_per_em().unwrap_or(1000.0))
}

/// Each glyph with the place where it begins, and where the last one ends.
fn glyphs(face: &FontRef<'_>, text: &str, em: f32) -> (Vec<(GlyphId, f32)>, f32) {
    let scaled = face.as_scaled(scale(face, em));
    let (mut glyphs, mut x) = (Vec::new(), 0.0);
    let mut last = None;
    for id in text.chars().map(|c| face.glyph_id(c)) {
        if let Some(last) = last.replace(id) {
            x += scaled.kern(last, id);
        }
        glyphs.push((id, x));
        x += scaled.h_advance(id);
    }
    (glyphs, x)
}
