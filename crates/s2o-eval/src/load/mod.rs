//! Items from the files of published benchmarks, which the user supplies.
//!
//! Each loader reads the benchmark's own format and gives its token budgets and scorers to the items. A line that is
//! not of the format is an error that names file, line, what was expected and what was found: nothing is skipped,
//! because a mean over the rest would look like a result.

mod infinitebench;
mod json;
mod longbench_v2;
mod needle_7m;
mod ruler;
mod truncation;

pub use infinitebench::{INFINITEBENCH_TASKS, infinitebench, infinitebench_directory};
pub use longbench_v2::longbench_v2;
pub use needle_7m::{NEEDLE_7M, needle_7m};
pub use ruler::{ruler, ruler_directory};
pub use truncation::truncate_middle;

/// The context budget of LongBench v2 and InfiniteBench for models of 128K positions, in tokens.
pub const DEFAULT_MAX_TOKENS: usize = 120_000;
