//! The CUDA backend against exact attention and the CPU path. It needs a GPU and fails without one.
//!
//! ```text
//! cargo test --release --features cuda --test cuda                # everything
//! cargo test --release --features cuda --test cuda -- sparse 128K # cases whose names contain a word
//! S2O_CUDA_ARCH=sm80 cargo test --release --features cuda --test cuda
//! ```
//!
//! The test has its own main function: the cases share one GPU and run sequentially, and the binary can be copied to a
//! machine with a GPU and without Rust.

mod blocks;
mod decode;
mod decoder;
mod dense;
mod error_control;
mod exact;
mod fused;
mod gated_linear;
#[cfg(feature = "ladder")]
mod gather;
mod greedy;
mod host;
mod host_cache;
mod int8;
mod int8_linear;
mod probes;
mod problem;
mod ranking;
mod same_bits;
mod selection_queries;
mod selection_rows;
mod selectors;
mod sparse;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use candle_core::Device;
use cudarc::driver::CudaContext;

/// Runs the cases and counts the results.
pub struct Runner {
    /// The GPU.
    pub device: Device,
    /// Whether the default rule decides one tile late, as in the kernels for sm_90a.
    pub stops_late: bool,
    words: Vec<String>,
    passed: usize,
    failed: Cell<usize>,
}

impl Runner {
    /// Runs one case, which passes unless it panics.
    pub fn case(&mut self, name: &str, case: impl FnOnce(&Self)) {
        if !self.words.is_empty() && !self.words.iter().any(|word| name.contains(word.as_str())) {
            return;
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(self)));
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => self.passed += 1,
            Err(_) => {
                self.failed.set(self.failed.get() + 1);
                println!("FAILED {name} ({seconds:.1} s)");
            }
        }
        if seconds > 2.0 {
            println!("slow: {name} took {seconds:.1} s");
        }
    }
}

fn main() -> ExitCode {
    let words = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("expected a CUDA GPU, got {error}");
            println!("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let context = CudaContext::new(0).expect("the device has a context");
    let capability = context.compute_capability().expect("every GPU has a compute capability");
    let arch = std::env::var("S2O_CUDA_ARCH").ok();
    let stops_late = capability == (9, 0) && arch.as_deref().is_none_or(|arch| arch == "sm90a");
    println!("{} {capability:?}, {}", context.name().unwrap_or_default(), arch.as_deref().unwrap_or("its own build"));
    let start = Instant::now();
    let mut runner = Runner { device, stops_late, words, passed: 0, failed: Cell::new(0) };
    dense::cases(&mut runner);
    decode::cases(&mut runner);
    blocks::cases(&mut runner);
    selection_rows::cases(&mut runner);
    selection_queries::cases(&mut runner);
    selectors::cases(&mut runner);
    #[cfg(feature = "ladder")]
    gather::cases(&mut runner);
    ranking::cases(&mut runner);
    sparse::cases(&mut runner);
    same_bits::cases(&mut runner);
    probes::cases(&mut runner);
    error_control::cases(&mut runner);
    host::cases(&mut runner);
    host_cache::cases(&mut runner);
    int8::cases(&mut runner);
    fused::cases(&mut runner);
    greedy::cases(&mut runner);
    gated_linear::cases(&mut runner);
    int8_linear::cases(&mut runner);
    decoder::cases(&mut runner);
    let (passed, failed) = (runner.passed, runner.failed.get());
    println!("{passed} passed, {failed} failed in {:.1} s", start.elapsed().as_secs_f64());
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
