//! Progress of long phases on stderr: bars on a terminal, otherwise a line when a phase begins and regular lines after
//! it.

use std::io::{IsTerminal, stderr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::layout::duration;

/// Time between the lines of a phase, in seconds.
const LINE_SECONDS: u64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Bars,
    Lines,
    Quiet,
}

static LOOK: OnceLock<Look> = OnceLock::new();

/// Sets the form of the progress output; `quiet` shows none. Only the first call has an effect.
pub fn init(quiet: bool) {
    LOOK.get_or_init(|| match quiet {
        true => Look::Quiet,
        false if stderr().is_terminal() => Look::Bars,
        false => Look::Lines,
    });
}

/// Whether no progress is shown.
pub fn is_quiet() -> bool {
    LOOK.get().is_none_or(|look| *look == Look::Quiet)
}

/// Prints a line on stderr unless progress is quiet.
pub fn say(line: &str) {
    if !is_quiet() {
        eprintln!("{line}");
    }
}

#[derive(Debug)]
pub struct Progress {
    /// Hidden unless bars are shown. It always counts steps and time.
    bar: ProgressBar,
    /// What the steps are; `None` if they are shares of an estimated time.
    unit: Option<&'static str>,
    /// Second of the phase at which the next line is due; `None` if no lines are shown.
    next_line: Option<AtomicU64>,
}

/// Begins a phase of `len` steps; 0 if the number is not known yet.
pub fn start(phase: impl Into<String>, len: usize, unit: &'static str) -> Progress {
    let template = format!("{{prefix:<16}} {{bar:32}} {{pos:>7}} / {{len}} {unit}, {{elapsed}}");
    Progress::new(phase.into(), len as u64, Some(unit), &template)
}

/// Runs a phase of `len` steps, which reports the numbers of steps done and of all steps.
pub fn during<T, E>(
    phase: &str,
    len: usize,
    unit: &'static str,
    run: impl FnOnce(&mut dyn FnMut(usize, usize)) -> Result<T, E>,
) -> Result<T, E> {
    let progress = start(phase, len, unit);
    let result = run(&mut |done, all| {
        progress.bar.set_length(all as u64);
        progress.set(done);
    })?;
    progress.finish();
    Ok(result)
}

/// Begins a long phase whose steps have estimated times, `len` milliseconds together. It shows the remaining time, which
/// follows from the time of the finished steps, and the name of the step.
pub fn start_estimated(phase: impl Into<String>, len: u64) -> Progress {
    Progress::new(phase.into(), len, None, "{bar:24} {percent:>3} %, {elapsed} gone, {eta} left  {prefix}: {msg}")
}

impl Progress {
    fn new(phase: String, len: u64, unit: Option<&'static str>, template: &str) -> Self {
        let look = LOOK.get().copied().unwrap_or(Look::Quiet);
        let style = ProgressStyle::with_template(template).expect("the template is fixed").progress_chars("━━╌");
        let target = if look == Look::Bars { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(len), target).with_style(style).with_prefix(phase);
        bar.tick();
        if look == Look::Lines {
            match unit {
                Some(unit) if len > 0 => eprintln!("{}: {len} {unit}", bar.prefix()),
                _ => eprintln!("{}", bar.prefix()),
            }
        }
        Self { bar, unit, next_line: (look == Look::Lines).then(|| AtomicU64::new(LINE_SECONDS)) }
    }

    pub fn set(&self, done: usize) {
        self.bar.set_position(done as u64);
        self.line();
    }

    pub fn add(&self, steps: usize) {
        self.bar.inc(steps as u64);
        // Estimated steps finish several at once. A line after the first of them would count too little.
        if self.unit.is_some() {
            self.line();
        }
    }

    /// Names the step that begins, of a phase with estimated steps.
    pub fn name_step(&self, step: String) {
        self.bar.set_message(step);
        self.line();
    }

    /// Leaves a bar as it is and moves the cursor to a new line.
    pub fn finish(self) {
        self.bar.abandon();
        if !self.bar.is_hidden() {
            eprintln!();
        }
    }

    fn line(&self) {
        let Some(next) = &self.next_line else { return };
        let seconds = self.bar.elapsed().as_secs();
        if seconds >= next.load(Ordering::Relaxed) {
            next.store(seconds + LINE_SECONDS, Ordering::Relaxed);
            let (done, len, phase) = (self.bar.position(), self.bar.length().unwrap_or(0), self.bar.prefix());
            match self.unit {
                Some(unit) => eprintln!("{phase}: {done} of {len} {unit}, {seconds} s"),
                None => eprintln!("{phase}: {}", remaining(self.bar.elapsed().as_secs_f64(), done, len)),
            }
        }
    }
}

/// The share that is done, the time gone, and the time left if the rest is as fast, relative to its estimate, as what is
/// done.
fn remaining(seconds: f64, done: u64, len: u64) -> String {
    let share = if len == 0 { 1.0 } else { (done as f64 / len as f64).min(1.0) };
    let left = match share > 0.0 {
        true => format!("about {} left", duration(seconds * (1.0 - share) / share)),
        false => "time left unknown".to_owned(),
    };
    format!("{:.0} %, {} gone, {left}", 100.0 * share, duration(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_time_gone() {
        assert_eq!(remaining(20.0, 1, 4), "25 %, 20 s gone, about 60 s left");
        assert_eq!(remaining(7200.0, 3, 4), "75 %, 2.0 h gone, about 40 min left");
        assert_eq!(remaining(20.0, 0, 4), "0 %, 20 s gone, time left unknown");
        assert_eq!(remaining(20.0, 5, 4), "100 %, 20 s gone, about 0 s left");
    }
}
