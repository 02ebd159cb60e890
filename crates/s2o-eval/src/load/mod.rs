//! Items from files of published benchmarks, which the user supplies.
//!
//! Each loader reads the benchmark's own format and sets the benchmark's token budgets and scorers. An invalid line is
//! an error that names file, line, expected and actual content. No line is skipped, because a mean over the rest would
//! look like a result.

mod infinitebench;
mod json;
mod longbench_v2;
mod needle_7m;
mod ruler;
mod truncation;

pub use infinitebench::{infinitebench, infinitebench_directory};
pub use longbench_v2::longbench_v2;
pub use needle_7m::{NEEDLE_7M, needle_7m};
pub use ruler::{ruler, ruler_directory};
pub use truncation::truncate_middle;

/// The context budget of LongBench v2 and InfiniteBench for models of 128K positions, in tokens.
pub const DEFAULT_MAX_TOKENS: usize = 120_000;
