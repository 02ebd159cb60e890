//! Progress of long phases on stderr: bars on a terminal, otherwise a line when a phase begins and regular lines after
//! it.

use std::io::{IsTerminal, stderr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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

/// Prints a line on stderr unless progress is quiet.
pub fn say(line: &str) {
    if LOOK.get().is_some_and(|look| *look != Look::Quiet) {
        eprintln!("{line}");
    }
}

#[derive(Debug)]
pub struct Progress {
    /// Hidden unless bars are shown. It always counts steps and time.
    bar: ProgressBar,
    unit: &'static str,
    /// Second of the phase at which the next line is due; `None` if no lines are shown.
    next_line: Option<AtomicU64>,
}

/// Begins a phase of `len` steps; 0 if the number is not known yet.
pub fn start(phase: impl Into<String>, len: usize, unit: &'static str) -> Progress {
    let template = format!("{{prefix:<16}} {{bar:32}} {{pos:>7}} / {{len}} {unit}, {{elapsed}}");
    Progress::new(phase.into(), len as u64, unit, &template)
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

/// Begins a long phase of `len` steps. Its bar shows the remaining time and the name of the step.
pub fn start_with_eta(phase: impl Into<String>, len: u64, unit: &'static str) -> Progress {
    Progress::new(phase.into(), len, unit, "{bar:24} {percent:>3} %, {elapsed} gone, {eta} left  {prefix}: {msg}")
}

impl Progress {
    fn new(phase: String, len: u64, unit: &'static str, template: &str) -> Self {
        let look = LOOK.get().copied().unwrap_or(Look::Quiet);
        let style = ProgressStyle::with_template(template).expect("the template is fixed").progress_chars("━━╌");
        let target = if look == Look::Bars { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(len), target).with_style(style).with_prefix(phase);
        bar.tick();
        if look == Look::Lines {
            let length = if len > 0 { format!(": {len} {unit}") } else { String::new() };
            eprintln!("{}{length}", bar.prefix());
        }
        Self { bar, unit, next_line: (look == Look::Lines).then(|| AtomicU64::new(LINE_SECONDS)) }
    }

    pub fn set(&self, done: usize) {
        self.bar.set_position(done as u64);
        self.line();
    }

    pub fn add(&self, steps: usize) {
        self.bar.inc(steps as u64);
        self.line();
    }

    pub fn name_step(&self, step: String) {
        self.bar.set_message(step);
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
            let (done, len, unit) = (self.bar.position(), self.bar.length().unwrap_or(0), self.unit);
            eprintln!("{}: {done} of {len} {unit}, {seconds} s", self.bar.prefix());
        }
    }
}
