//! [`Bars`]: stacked bars, such as the time of a method split into selection and attention.

use super::axis::{self, Range, Scale, number};
use super::error::PlotError;
use super::figure::Plot;
use super::palette::{self, INK};
use super::scene::{Anchor, Rect, Scene};
use super::typeface;

/// One bar.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bar {
    /// Its name.
    pub label: String,
    /// One number for each part, at least 0.
    pub parts: Vec<f64>,
}

/// Stacked horizontal bars, each followed by its total, with the names of the parts above.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bars {
    /// Heading; may be empty.
    pub title: String,
    /// The measured quantity and its unit.
    pub quantity: String,
    /// Names of the parts, from the left.
    pub parts: Vec<String>,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
    /// Decimals of the printed numbers.
    pub decimals: usize,
}

/// Size of the numbers in bars, relative to the text.
const NUMBER_SIZE: f64 = 0.9;
/// A bar's share of its row.
const THICKNESS: f64 = 0.66;
/// Largest thickness of a bar, in em.
const THICKEST: f64 = 3.0;

impl Plot for Bars {
    fn draw(&self, scene: &mut Scene) -> Result<(), PlotError> {
        let largest = self.largest_total()?;
        // Bars of length 0 still have an axis.
        let range = Range::new("bar", Scale::Linear, 0.0, if largest > 0.0 { largest } else { 1.0 })?;
        let em = scene.em;
        let area = scene.heading(&self.title, scene.area(), 1.15 * em);
        let area = self.legend(scene, area);

        let names: Vec<String> = self.bars.iter().map(|bar| bar.label.clone()).collect();
        let names = axis::centred(&names, em, axis::NAME_SHARE * area.width());
        let totals: Vec<String> = self.bars.iter().map(|bar| number(bar.total(), self.decimals)).collect();
        let sides = [0.4, typeface::widest(&totals, em) + 0.6 * em];
        let lowest = (typeface::LINE * self.bars.len() as f64).max(3.0);
        let data = axis::room(scene, area, ["", &self.quantity], &names, sides).check(3.0 * em, lowest * em)?;

        let ticks = axis::ticks_along(scene, &range, data.width());
        axis::draw_grid(scene, data, &ticks, true);
        let half = 0.5 * (THICKNESS * data.height() / self.bars.len() as f64).min(THICKEST * em);
        for ((bar, name), total) in self.bars.iter().zip(names).zip(totals) {
            let y = data.top + name.place * data.height();
            scene.label(&name.label, data.left - axis::TICK_AND_GAP * em, y, Anchor::End);
            let (mut sum, mut left) = (0.0, data.left);
            for (part, value) in bar.parts.iter().enumerate() {
                sum += value;
                let right = data.left + range.place(sum) * data.width();
                let colour = palette::series(part);
                scene.fill(Rect { left, top: y - half, right, bottom: y + half }, colour);
                let (text, small) = (number(*value, self.decimals), NUMBER_SIZE * em);
                // The total after the bar already gives the number of a bar with one part.
                if text != total && typeface::width(&text, small) + 0.4 * em < right - left {
                    scene.label_in(&text, (0.5 * (left + right), y), Anchor::Middle, small, palette::text_on(colour));
                }
                left = right;
            }
            scene.label(&total, left + 0.4 * em, y, Anchor::Start);
        }
        scene.line((data.left, data.top), (data.left, data.bottom), INK, scene.hair());
        scene.line((data.left, data.bottom), (data.right, data.bottom), INK, scene.hair());
        axis::draw_below(scene, data, &self.quantity, &ticks);
        Ok(())
    }
}

impl Bars {
    fn largest_total(&self) -> Result<f64, PlotError> {
        if self.bars.is_empty() || self.parts.is_empty() {
            return Err(PlotError::wrong("bars", "a bar and a part", "none"));
        }
        let mut largest = 0f64;
        for bar in &self.bars {
            if bar.parts.len() != self.parts.len() {
                return Err(PlotError::wrong("parts of a bar", self.parts.len(), bar.parts.len()));
            }
            if let Some(&got) = bar.parts.iter().find(|value| !(**value >= 0.0 && value.is_finite())) {
                return Err(PlotError::wrong("bar", "a finite number that is not below 0", got));
            }
            largest = largest.max(bar.total());
        }
        Ok(largest)
    }

    /// Draws the names of the parts at the top of `area`, in as many lines as needed, and returns the rest of `area`.
    fn legend(&self, scene: &mut Scene, area: Rect) -> Rect {
        const SAMPLE: f64 = 0.8;
        let em = scene.em;
        let (mut x, mut y) = (area.left, area.top + 0.5 * em);
        for (part, name) in self.parts.iter().enumerate() {
            let name = typeface::fitted(name, em, area.width() - (SAMPLE + 0.4) * em);
            let width = (SAMPLE + 0.4) * em + typeface::width(&name, em);
            if x > area.left && x + width > area.right {
                (x, y) = (area.left, y + typeface::LINE * em);
            }
            let half = 0.5 * SAMPLE * em;
            let sample = Rect { left: x, top: y - half, right: x + 2.0 * half, bottom: y + half };
            scene.fill(sample, palette::series(part));
            scene.label(&name, x + (SAMPLE + 0.4) * em, y, Anchor::Start);
            x += width + 1.2 * em;
        }
        Rect { top: y + 0.6 * em, ..area }
    }
}

impl Bar {
    fn total(&self) -> f64 {
        self.parts.iter().sum()
    }
}
