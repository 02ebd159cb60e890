//! Progress bars on stderr, which are only there when that and stdout are a terminal: whoever redirects the output
//! wants quiet.

use std::io::{IsTerminal, stdout};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of `len` steps for the phase `what`. It stays when it is finished.
pub fn bar(what: impl Into<String>, len: usize, unit: &str) -> ProgressBar {
    let template = format!("{{prefix:<16}} {{bar:32}} {{pos:>7}} / {{len}} {unit}, {{elapsed}}");
    let style = ProgressStyle::with_template(&template).expect("the template is fixed").progress_chars("━━╌");
    let target = if stdout().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(len as u64), target).with_style(style).with_prefix(what.into());
    bar.tick();
    bar
}

/// A bar for steps that take long, with the time that is left. What goes on now is its prefix, how much is done its
/// message.
pub fn bar_with_eta(len: u64) -> ProgressBar {
    let bar = bar("", 0, "");
    let template = "{bar:24} {percent:>3} %, {msg}, {elapsed} gone, {eta} left  {prefix}";
    bar.set_style(ProgressStyle::with_template(template).expect("the template is fixed").progress_chars("━━╌"));
    bar.set_length(len);
    bar
}

/// Leaves the bar as it stands, and the cursor on a line of its own.
pub fn finish(bar: &ProgressBar) {
    bar.abandon();
    if !bar.is_hidden() {
        eprintln!();
    }
}
