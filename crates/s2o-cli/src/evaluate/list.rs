//! `list`: tasks and methods by name.

use std::fmt::Write;

use anyhow::Result;
use s2o_eval::load::NEEDLE_7M;
use s2o_eval::run::GROUPS;
use s2o_eval::{method, tasks};

use super::samples::PERPLEXITY;
use crate::exit;

pub fn run() -> Result<()> {
    let mut text = String::from("Tasks, for --tasks; for those with * --depths sets the place of the answer\n");
    for task in tasks::ALL {
        let mark = if task.takes_depth { '*' } else { ' ' };
        writeln!(text, "  {:<17}{mark} {}", task.name, task.summary)?;
    }
    writeln!(text, "  {NEEDLE_7M:<17}  the 30 recorded prompts of the model needle-7m, of 4096 and 32768 tokens")?;
    writeln!(text, "  {PERPLEXITY:<17}  perplexity of English text that comes with needle-7m")?;
    text.push_str("\nSeveral tasks under one name\n");
    for group in GROUPS {
        writeln!(text, "  {:<17}  {}", group.name, group.summary)?;
    }
    text.push_str("\nMethods, for --methods, with their options as in s2o:tau=0.05:segment=1024\n");
    for row in method::ALL {
        writeln!(text, "  {:<17}  {}", row.name, row.summary)?;
        let options = row.options();
        if !options.is_empty() {
            writeln!(text, "  {:<17}  options: {}", "", options.join(", "))?;
        }
    }
    exit::print(&text)
}
