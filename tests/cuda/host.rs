//! Guarantees of the host code: typed errors, streams, threads, CUDA graphs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_s2o::cuda::CudaError;
use candle_s2o::{
    Attention, AttnError, Mask, PrefillCall, S2o, S2oConfig, S2oError, S2oOp, SegmentLen, break_even_of, dense_attn,
    s2o_attn, s2o_attn_with_stats,
};
use cudarc::driver::sys;
use s2o_core::cpu;

use crate::Runner;
use crate::exact::bits;
use crate::problem::{Memory, Problem, Sizes};
use crate::sparse::op;

fn config() -> S2oConfig {
    S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_below(0).tau(0.1).build().unwrap()
}

fn problem(device: &Device, len: usize) -> Problem {
    let sizes = Sizes { batch: 1, heads: [4, 2], q_len: len, k_len: len, head_dim: 128 };
    Problem::new(device, sizes, DType::BF16, Memory::Contiguous, 8.0)
}

pub fn cases(runner: &mut Runner) {
    runner.case("host errors are typed", |runner| errors(&runner.device));
    runner.case("host the break-even depends on the heads", |runner| break_even(&runner.device));
    runner.case("host threads do not disturb each other", |runner| threads(&runner.device));
    runner.case("host a device with its own stream", |runner| {
        let own = Device::new_cuda_with_stream(0).unwrap();
        let (there, here) = (problem(&own, 2000), problem(&runner.device, 2000));
        let ranking = cpu::rank(&here.inputs(), &config(), 2000).unwrap();
        let outputs = [&there, &here].map(|problem| {
            let [q, k, v] = &problem.on_gpu;
            (0..5).map(|_| bits(&op(problem, &config(), 2000, &ranking).apply(q, k, v).unwrap())).collect::<Vec<_>>()
        });
        assert!(outputs.iter().flatten().all(|bits| *bits == outputs[0][0]));
    });
    runner.case("host a call in a CUDA graph", |runner| graph(&runner.device));
    runner.case("host a CUDA graph next to another thread", |runner| graph_next_to_a_thread(&runner.device));
    runner.case("host statistics read on another thread", |runner| statistics_elsewhere(&runner.device));
    runner.case("host statistics only on demand", |runner| {
        let problem = problem(&runner.device, 1000);
        let [q, k, v] = &problem.on_gpu;
        let call = PrefillCall { layer: 0, softmax_scale: problem.scale, prompt_len: 1000 };
        let silent = S2o::new(S2oConfig::default());
        silent.prefill(&call, q, k, v).unwrap();
        assert!(silent.take_stats().unwrap().is_empty());
        let loud = S2o::new(S2oConfig::default()).with_stats();
        loud.prefill(&call, q, k, v).unwrap();
        assert_eq!(loud.take_stats().unwrap()[&0].heads.len(), 4);
    });
}

fn break_even(device: &Device) {
    // Sparse calls skip nearly everything.
    let config = S2oConfig::builder().tau(0.5).build().unwrap();
    let density = |len, head_dim| {
        let sizes = Sizes { batch: 1, heads: [1, 1], q_len: len, k_len: len, head_dim };
        let problem = Problem::new(device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        let [q, k, v] = &problem.on_gpu;
        let (_, stats) = s2o_attn_with_stats(q, k, v, problem.scale, &config).unwrap();
        (break_even_of(q).unwrap(), stats.density())
    };
    for head_dim in [128, 256] {
        let (from, dense) = density(4096, head_dim);
        assert_eq!(dense, 1.0);
        assert_eq!(density(from - 1, head_dim).1, 1.0, "{head_dim} columns");
        assert!(density(from, head_dim).1 < 1.0, "{head_dim} columns");
    }
}

fn errors(device: &Device) {
    let zeros = |dims: (usize, usize, usize, usize), dtype| Tensor::zeros(dims, dtype, device).unwrap();
    let refused = |tensor: &Tensor, config: &S2oConfig| s2o_attn(tensor, tensor, tensor, 0.125, config).unwrap_err();
    let wide = zeros((1, 300, 2, 64), DType::F32);
    for error in [refused(&wide, &config()), dense_attn(&wide, &wide, &wide, 0.125, Mask::Causal).unwrap_err()] {
        assert!(matches!(error, AttnError::Cuda(CudaError::DType { name: "q", got: DType::F32 })), "{error}");
        assert!(error.to_string().contains("the CPU path takes F32"), "{error}");
    }
    for head_dim in [8, 96, 192] {
        let error = refused(&zeros((1, 300, 2, head_dim), DType::BF16), &config());
        assert!(matches!(error, AttnError::Cuda(CudaError::HeadDim { got, .. }) if got == head_dim), "{error}");
        assert!(error.to_string().contains("expected 64 or 128 or 256 on CUDA"), "{error}");
    }
    let good = zeros((1, 600, 2, 64), DType::BF16);
    let tiles = config().to_builder().tile_k(64).build().unwrap();
    assert!(matches!(refused(&good, &tiles), AttnError::Cuda(CudaError::Tile { name: "tile-k", got: 64 })));
    let tight = config().to_builder().workspace_cap(1000).build().unwrap();
    match refused(&good, &tight) {
        // The last segment with rows before the dense tail begins at 256.
        AttnError::S2o(S2oError::WorkspaceTooSmall { expected, got: 1000, prefix_len: 256 }) => {
            assert_eq!(expected, 256 * 2 * 6 + 256 / 64 * 2 * 8);
        }
        other => panic!("expected a workspace error, got {other}"),
    }
    let scale = s2o_attn(&good, &good, &good, f32::NAN, &config()).unwrap_err();
    assert!(matches!(scale, AttnError::S2o(S2oError::SoftmaxScale { .. })), "{scale}");
    for got in [0.0, -0.125] {
        let error = dense_attn(&good, &good, &good, got, Mask::Causal).unwrap_err();
        assert!(
            matches!(error, AttnError::Cuda(CudaError::SoftmaxScale { got: refused }) if refused == got),
            "{error}"
        );
    }
    let on_cpu = good.to_device(&Device::Cpu).unwrap();
    let mixed = dense_attn(&good, &good, &on_cpu, 0.125, Mask::Causal).unwrap_err();
    assert!(matches!(mixed, AttnError::DeviceMismatch { name: "v", .. }), "{mixed}");
    let narrow = dense_attn(&good, &good.to_dtype(DType::F16).unwrap(), &good, 0.125, Mask::Causal).unwrap_err();
    assert!(matches!(narrow, AttnError::DTypeMismatch { name: "k", .. }), "{narrow}");
    let short = S2oOp::new(0.125, config()).with_prompt_len(10).apply(&good, &good, &good).unwrap_err();
    assert!(matches!(short, AttnError::S2o(S2oError::PromptShorterThanKeys { .. })), "{short}");
    let few = S2oOp::new(0.125, config()).with_ranking(Vec::new()).apply(&good, &good, &good).unwrap_err();
    assert!(matches!(few, AttnError::S2o(S2oError::Ranking(_))), "{few}");
    let gradient = candle_core::Var::from_tensor(&good).unwrap();
    let out = dense_attn(&gradient, &good, &good, 0.125, Mask::Causal).unwrap();
    assert!(out.to_dtype(DType::F32).unwrap().sum_all().unwrap().backward().is_err());
    // The environment is read at every call; no other thread runs now.
    for (arch, wrong) in [("sm_90", true), ("sm80", false)] {
        let before = std::env::var_os("S2O_CUDA_ARCH");
        // SAFETY: the cases run one after the other on the main thread, and idle workers read no environment.
        unsafe { std::env::set_var("S2O_CUDA_ARCH", arch) };
        let outcome = dense_attn(&good, &good, &good, 0.125, Mask::Causal);
        match before {
            // SAFETY: as above.
            Some(before) => unsafe { std::env::set_var("S2O_CUDA_ARCH", before) },
            // SAFETY: as above.
            None => unsafe { std::env::remove_var("S2O_CUDA_ARCH") },
        }
        match outcome {
            Err(AttnError::Cuda(CudaError::UnknownArch(_))) if wrong => {}
            Ok(_) if !wrong => {}
            other => panic!("S2O_CUDA_ARCH={arch}: {other:?}"),
        }
    }
}

fn threads(device: &Device) {
    let problems: Vec<Problem> = [1500, 2000, 2500, 3000].map(|len| problem(device, len)).into();
    let rankings: Vec<_> = problems
        .iter()
        .map(|problem| cpu::rank(&problem.inputs(), &config(), problem.shape.k_len()).unwrap())
        .collect();
    let run = |i: usize| {
        let problem = &problems[i];
        let [q, k, v] = &problem.on_gpu;
        let out = op(problem, &config(), problem.shape.k_len(), &rankings[i]).apply(q, k, v).unwrap();
        bits(&out)
    };
    let want: Vec<_> = (0..problems.len()).map(run).collect();
    device.synchronize().unwrap();
    std::thread::scope(|scope| {
        for (i, want) in want.iter().enumerate() {
            let run = &run;
            scope.spawn(move || (0..20).for_each(|_| assert!(run(i) == *want, "thread {i} got other bits")));
        }
    });
}

fn graph(device: &Device) {
    let problem = problem(device, 3000);
    let ranking = cpu::rank(&problem.inputs(), &config(), 3000).unwrap();
    let [q, k, v] = &problem.on_gpu;
    let dense = || dense_attn(q, k, v, problem.scale, Mask::Causal).unwrap();
    // Ranking, sparse attention and the dense tail.
    let sparse = || s2o_attn(q, k, v, problem.scale, &config()).unwrap();
    let want = [dense(), sparse()].map(|out| bits(&out));
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    device.synchronize().unwrap();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let out = [dense(), sparse()];
    let stats = s2o_attn_with_stats(q, k, v, problem.scale, &config()).unwrap_err();
    let lists = op(&problem, &config(), 3000, &ranking).apply(q, k, v).unwrap_err();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("something was captured");
    for error in [stats, lists] {
        assert!(matches!(error, AttnError::Cuda(CudaError::Capturing { .. })), "{error}");
    }
    for _ in 0..2 {
        graph.launch().unwrap();
        device.synchronize().unwrap();
        assert!(out.each_ref().map(bits) == want, "a graph computes something else");
    }
}

/// The other streams belong to all threads: a capture must not take them along.
fn graph_next_to_a_thread(device: &Device) {
    let problem = problem(device, 3000);
    let [q, k, v] = &problem.on_gpu;
    let sparse = || s2o_attn(q, k, v, problem.scale, &config()).unwrap();
    let want = bits(&sparse());
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let is_done = AtomicBool::new(false);
    let (calls, captures) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut calls = 0;
            while !is_done.load(Ordering::Relaxed) {
                assert!(bits(&sparse()) == want, "a call next to a capture got other bits");
                calls += 1;
            }
            calls
        });
        let capture = || {
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let out = sparse();
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().expect("something was captured");
            graph.launch().unwrap();
            bits(&out) == want
        };
        let captures = (0..20).map(|_| catch_unwind(AssertUnwindSafe(capture)).unwrap_or(false)).collect::<Vec<_>>();
        is_done.store(true, Ordering::Relaxed);
        (other.join().unwrap(), captures)
    });
    assert!(calls > 0 && captures.iter().all(|is_right| *is_right), "{calls} calls, {captures:?}");
}

/// The stream of Candle's default device is another one on each thread.
fn statistics_elsewhere(device: &Device) {
    let problem = problem(device, 3000);
    let sizes = Sizes { batch: 1, heads: [16, 2], q_len: 16_384, k_len: 16_384, head_dim: 128 };
    let long = Problem::new(device, sizes, DType::BF16, Memory::Contiguous, 1.0);
    let [q, k, v] = &problem.on_gpu;
    let pending = |tau| {
        let config = config().to_builder().tau(tau).build().unwrap();
        S2oOp::new(problem.scale, config).apply_with_pending_stats(q, k, v).unwrap().1
    };
    let want = pending(0.1).read().unwrap();
    for _ in 0..5 {
        // It leaves other counts in the memory that the next call gets.
        assert!(pending(0.0).read().unwrap() != want);
        for _ in 0..10 {
            let [q, k, v] = &long.on_gpu;
            dense_attn(q, k, v, long.scale, Mask::Causal).unwrap();
        }
        let late = pending(0.1);
        let got = std::thread::spawn(move || late.read()).join().unwrap().unwrap();
        assert!(got == want, "read before the call has ended");
    }
}
