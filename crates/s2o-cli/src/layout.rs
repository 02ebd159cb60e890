//! Tables and bar charts: with box characters on a terminal, otherwise in plain ASCII.

use std::io::IsTerminal;

use candle_s2o::ProbeStats;
use comfy_table::presets::{ASCII_BORDERS_ONLY_CONDENSED, UTF8_BORDERS_ONLY};
use comfy_table::{Attribute, Cell, CellAlignment, Table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Colours and box characters.
    Terminal,
    Plain,
}

impl Look {
    /// The look for stdout: `Terminal` if it is a terminal.
    pub fn of_stdout() -> Self {
        if std::io::stdout().is_terminal() { Self::Terminal } else { Self::Plain }
    }

    /// A table with a header. All columns except the first are right-aligned.
    pub fn table<'a>(self, header: impl IntoIterator<Item = &'a str>) -> Table {
        let mut table = Table::new();
        table.load_style(match self {
            Self::Terminal => UTF8_BORDERS_ONLY,
            Self::Plain => ASCII_BORDERS_ONLY_CONDENSED,
        });
        // https://no-color.org
        if self == Self::Plain || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            table.force_no_tty();
        }
        table.set_header(header.into_iter().map(|name| Cell::new(name).add_attribute(Attribute::Bold)));
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// Separates text from the progress bars above it.
    pub fn gap(self) -> &'static str {
        if self == Self::Terminal { "\n" } else { "" }
    }

    /// A bar that is `share` (0 to 1) of `width` full.
    pub fn bar(self, share: f64, width: usize) -> String {
        let full = ((share.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
        let (on, off) = match self {
            Self::Terminal => ("█", "░"),
            Self::Plain => ("#", "."),
        };
        on.repeat(full) + &off.repeat(width - full)
    }
}

/// A time with a suitable unit, to about three digits.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.00995 => format!("{:.1} ms", s * 1e3),
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 99.95 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    }
}

/// A long time to about two digits.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 89.5 => format!("{s:.0} s"),
        s if s < 89.5 * 60.0 => format!("{:.0} min", s / 60.0),
        s if s < 48.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86400.0),
    }
}

/// A path or another word as a shell reads it.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+,".contains(c);
    if word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// An error to three digits.
pub fn scientific(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.2e}") }
}

/// A measured error and its interval.
pub fn error(probes: &ProbeStats) -> String {
    let (low, high) = probes.interval();
    format!("{:.3} ({low:.3} to {high:.3})", probes.relative_error())
}

/// A whole number with separated thousands.
pub fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_times_have_two_digits() {
        let texts = [0.4, 89.0, 90.0, 5369.0, 5400.0, 172_799.0, 172_800.0].map(duration);
        assert_eq!(texts, ["0 s", "89 s", "2 min", "89 min", "1.5 h", "48.0 h", "2.0 days"]);
    }
}
