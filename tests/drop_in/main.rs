//! Tests of the drop-in on a GPU: every function of s2o-flash-attn against its own CPU path, which the crate's tests
//! compare with f64, and against the original's kernels if the build has them (feature flash-attn). They fail without a
//! GPU.
//!
//! ```text
//! cargo test --release --features cuda,flash-attn --test drop_in
//! cargo test --release --features cuda,flash-attn --test drop_in -- varlen bf16  # names that contain one of the words
//! ```
//!
//! `--original bf16-64,bf16-128` compares with the original for these kernels only, for a build of it with fewer
//! kernels. A kernel is named by dtype and head dim (32, 64, 96, 128 and so on; 64, 128, 256 or 512 and `-paged` for
//! pages). The main function is our own, as in tests/cuda, so the binary runs on a machine without Rust.

mod call;
mod fixed;
mod long_sequences;
mod varlen;
mod wrong_lengths;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use call::{Call, by_original, ours};
use candle_core::{DType, Device, Tensor};
use s2o_flash_attn::s2o::{Policy, set_policy};

/// Runs cases and counts.
pub struct Runner {
    /// The GPU.
    pub device: Device,
    words: Vec<String>,
    /// Kernels of the original that this build has; `None` for all.
    kernels: Option<Vec<String>>,
    against_original: usize,
    passed: usize,
    failed: usize,
}

impl Runner {
    /// One case: passes unless it panics.
    pub fn case(&mut self, name: &str, case: impl FnOnce(&mut Self)) {
        if !self.words.is_empty() && !self.words.iter().any(|word| name.contains(word.as_str())) {
            return;
        }
        match catch_unwind(AssertUnwindSafe(|| case(self))) {
            Ok(()) => self.passed += 1,
            Err(_) => {
                self.failed += 1;
                println!("FAILED {name}");
            }
        }
    }

    /// A call on the GPU gives the numbers of the CPU path.
    pub fn check(&mut self, name: &str, call: &Call) {
        let name = format!("{:?} {name} {}", call.function, label(call));
        self.case(&name, |runner| {
            let exact = ours(&on_cpu(call)).expect("the CPU path takes it");
            near("ours on the CPU", &ours(call).expect("the GPU takes it"), &exact);
            runner.check_original(call, &exact);
        });
    }

    fn check_original(&mut self, call: &Call, exact: &Tensor) {
        if self.kernels.as_ref().is_some_and(|kernels| !kernels.contains(&kernel(call))) {
            return;
        }
        if let Some(out) = by_original(call) {
            near("the original", &out.expect("the original takes it"), exact);
            self.against_original += 1;
        }
    }
}

/// The original's kernel for a call.
fn kernel(call: &Call) -> String {
    let head_dim = call.q.dims().last().copied().unwrap_or_default();
    let dtype = call.q.dtype().as_str();
    let first = |dims: &[usize]| dims.iter().copied().find(|&dim| head_dim <= dim).unwrap_or(512);
    match call.pages {
        Some(_) => format!("{dtype}-{}-paged", first(&[64, 128, 256])),
        None => format!("{dtype}-{}", first(&[32, 64, 96, 128, 160, 192, 224, 256])),
    }
}

fn label(call: &Call) -> String {
    format!("{} D{}", call.q.dtype().as_str(), call.q.dims().last().copied().unwrap_or_default())
}

/// The same numbers on the CPU, in f32.
pub fn on_cpu(call: &Call) -> Call {
    let there = |t: &Tensor| t.to_device(&Device::Cpu).expect("copied");
    let wide = |t: &Tensor| there(t).to_dtype(DType::F32).expect("converted");
    let mut call = call.clone();
    (call.q, call.k, call.v) = (wide(&call.q), wide(&call.k), wide(&call.v));
    call.slopes = call.slopes.as_ref().map(there);
    if let Some(lengths) = &mut call.lengths {
        (lengths.q, lengths.k) = (there(&lengths.q), there(&lengths.k));
    }
    if let Some(pages) = &mut call.pages {
        pages.table = there(&pages.table);
        pages.prefix_ranges = pages.prefix_ranges.as_ref().map(there);
    }
    call
}

/// [`s2o_testkit::tensor`] on `device`.
pub fn tensor(seed: u64, dims: &[usize], dtype: DType, device: &Device) -> Tensor {
    s2o_testkit::tensor(dims, seed, dtype).to_device(device).expect("copied")
}

/// ALiBi's slopes for this many heads.
pub fn slopes(num_heads: usize, device: &Device) -> Tensor {
    let slopes: Vec<f32> = (1..=num_heads).map(|head| (-8.0 * head as f32 / num_heads as f32).exp2()).collect();
    Tensor::new(slopes, device).expect("copied")
}

/// The elements of a tensor.
pub fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).and_then(|wide| wide.flatten_all()?.to_vec1()).expect("numbers")
}

/// Checks that two results differ at most by the rounding of 16-bit weights and outputs.
pub fn near(what: &str, got: &Tensor, exact: &Tensor) {
    let tolerance = if got.dtype() == DType::F16 { 3e-3 } else { 1.5e-2 };
    assert_eq!(got.dims(), exact.dims(), "{what}: shape");
    let (got, exact) = (floats(got), floats(exact));
    assert!(got.iter().all(|x| x.is_finite()), "{what}: the output has values that are no numbers");
    let size = exact.iter().fold(0f32, |size, x| size.max(x.abs()));
    let worst = got.iter().zip(&exact).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= tolerance * size.max(1e-3), "{what}: {worst:e} apart, the largest output is {size:e}");
}

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let kernels = words.iter().position(|word| word == "--original").map(|at| {
        let list = words.drain(at..(at + 2).min(words.len())).nth(1).unwrap_or_default();
        list.split(',').map(str::to_owned).collect()
    });
    words.retain(|word| !word.starts_with('-'));
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("expected a CUDA GPU, got {error}");
            println!("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    set_policy(Policy::Dense);
    let mut runner = Runner { device, words, kernels, against_original: 0, passed: 0, failed: 0 };
    fixed::cases(&mut runner);
    varlen::cases(&mut runner);
    long_sequences::cases(&mut runner);
    wrong_lengths::cases(&mut runner);
    fixed::errors(&mut runner);
    fixed::policy(&mut runner);
    println!("{} calls compared with candle-flash-attn's own kernels", runner.against_original);
    println!("{} passed, {} failed", runner.passed, runner.failed);
    if runner.failed == 0 && runner.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
