//! The published methods choose the same blocks on the GPU as on the CPU, and attend to the chosen blocks.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_s2o::{Attention, BLOCK_Q, BlockSelection, PrefillCall};
use s2o_baselines::{
    BlockSelector, BlockSparse, FlashPrefill, FlexPrefill, HeadPattern, Keys, MInference, MInferenceConfig,
    MeanPooling, Pbs, PbsScore, Selection, SlidingWindow, Sparge, XAttention,
};

use crate::Runner;
use crate::problem::{Memory, Problem, Sizes};

/// Share of the blocks that may be chosen on only one device: the order of sums differs, and scores may be equal.
const TIES: f64 = 0.01;
/// The same share if the GPU multiplies in 16 bits and the CPU in 32 bits.
const ROUNDED: f64 = 0.1;

fn same_blocks(name: &str, [on_cpu, on_gpu]: [&BlockSelection; 2], allowed: f64) {
    let [cpu, gpu] = [&on_cpu.blocks, &on_gpu.blocks];
    assert_eq!(cpu.len(), gpu.len(), "{name}");
    let (mut chosen, mut alone) = (0, 0);
    for list in 0..cpu.len() {
        let [cpu, gpu] = [cpu.list(list), gpu.list(list)];
        chosen += cpu.len();
        alone += cpu.iter().filter(|block| !gpu.contains(block)).count();
        alone += gpu.iter().filter(|block| !cpu.contains(block)).count();
    }
    let columns = [on_cpu, on_gpu].map(|lists| lists.columns.clone().unwrap_or_default());
    assert_eq!(columns[0].len(), columns[1].len(), "{name}");
    for (cpu, gpu) in columns[0].iter().zip(&columns[1]) {
        chosen += cpu.len();
        alone += cpu.iter().filter(|key| !gpu.contains(key)).count();
        alone += gpu.iter().filter(|key| !cpu.contains(key)).count();
    }
    assert!(chosen > 0, "{name} chose nothing");
    assert!(alone as f64 <= allowed * chosen as f64, "{name}: {alone} of {chosen} blocks and keys on one side alone");
}

/// Runs `selector` on both devices and compares the GPU's output with the CPU's output for the GPU's choice. `allowed`
/// is the share by which the choices may differ; `None` does not compare them.
fn agree<S: BlockSelector>(selector: S, problem: &Problem, allowed: Option<f64>) {
    let shape = &problem.shape;
    let call = PrefillCall { layer: 0, softmax_scale: problem.scale, prompt_len: shape.k_len() };
    let [[cq, ck, cv], [q, k, v]] = [&problem.on_cpu, &problem.on_gpu];
    let name = selector.name().to_owned();
    let chosen = selector.select(&call, q, k, v).unwrap();
    assert!(matches!(chosen.keys, Keys::Mask(_)), "{name}: the choice left the GPU");
    let lists = chosen.keys.lists().unwrap();
    if let Some(allowed) = allowed {
        let on_cpu = selector.select(&call, cq, ck, cv).unwrap().keys.lists().unwrap();
        same_blocks(&name, [&on_cpu, &lists], allowed);
    }
    let reordered = chosen.reordered.as_ref().map(|reordered| {
        let on_cpu = |x: &Tensor| x.to_device(cq.device()).unwrap().to_dtype(DType::F32).unwrap();
        s2o_baselines::Reordered { k: on_cpu(&reordered.k), v: on_cpu(&reordered.v) }
    });
    let held = Selection { keys: Keys::Lists(lists), reordered };
    let (exact, work) = BlockSparse::<S>::attend(&call, [cq, ck, cv], held).unwrap();
    problem.poison();
    let method = BlockSparse::new(selector);
    let out = method.prefill(&call, q, k, v).unwrap();
    assert_eq!(method.take_work()[&0], work, "{name}");
    assert_close(&name, &out.to_device(cq.device()).unwrap().to_dtype(DType::F32).unwrap(), &exact);
}

fn assert_close(name: &str, out: &Tensor, exact: &Tensor) {
    let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    let error = norm(&(out - exact).unwrap()) / norm(exact);
    assert!(error < 1e-2, "{name}: the output is {error} away");
}

/// One head for each pattern.
fn minference() -> MInference {
    let heads = vec![
        HeadPattern::AShape { sink: 128, window: 512 },
        HeadPattern::VerticalSlash { verticals: 300, slashes: 200 },
        HeadPattern::VerticalSlash { verticals: 40, slashes: 400 },
        HeadPattern::BlockSparse { blocks: 3 },
    ];
    MInference::from_config(MInferenceConfig { layers: BTreeMap::from([(0, heads)]) }).unwrap()
}

pub fn cases(runner: &mut Runner) {
    for (q_len, k_len) in [(3000, 3000), (1100, 2948)] {
        runner.case(&format!("selectors {q_len} of {k_len}"), |runner| {
            let sizes = Sizes { batch: 2, heads: [4, 2], q_len, k_len, head_dim: 128 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 16.0);
            agree(MeanPooling::default(), &problem, Some(TIES));
            agree(XAttention::default(), &problem, Some(ROUNDED));
            agree(FlexPrefill::default(), &problem, Some(TIES));
            agree(FlashPrefill::default(), &problem, Some(ROUNDED));
            agree(SlidingWindow::new(700, 128).unwrap(), &problem, Some(TIES));
            agree(minference(), &problem, Some(TIES));
            // The order of keys with equal weights is undefined, so blocks may have other keys.
            agree(Pbs::default(), &problem, None);
            agree(Pbs::default().score(PbsScore::Antidiagonal), &problem, None);
            // On the CPU its blocks have 64 keys.
            agree(Sparge::default(), &problem, None);
        });
    }
    for (q_len, k_len, stride) in [(3000, 3000, 64), (1100, 2948, 64), (700, 2000, 100)] {
        runner.case(&format!("delta attention {q_len} of {k_len}, every {stride}th query"), |runner| {
            let sizes = Sizes { batch: 2, heads: [4, 2], q_len, k_len, head_dim: 128 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 16.0);
            problem.poison();
            let call = PrefillCall { layer: 0, softmax_scale: problem.scale, prompt_len: k_len };
            let [on_cpu, on_gpu] = [&problem.on_cpu, &problem.on_gpu].map(|[q, k, v]| {
                let method = BlockSparse::new(SlidingWindow::new(300, 64).unwrap()).with_delta(stride).unwrap();
                let out = method.prefill(&call, q, k, v).unwrap();
                (out.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap(), method.take_work())
            });
            assert_eq!(on_cpu.1, on_gpu.1);
            assert_close("delta", &on_gpu.0, &on_cpu.0);
        });
    }
    runner.case("selectors take every block of a short prompt", |runner| {
        let sizes = Sizes { batch: 1, heads: [2, 1], q_len: BLOCK_Q, k_len: BLOCK_Q, head_dim: 64 };
        let problem = Problem::new(&runner.device, sizes, DType::F16, Memory::Contiguous, 1.0);
        agree(MeanPooling::default(), &problem, Some(TIES));
        agree(XAttention::default(), &problem, Some(ROUNDED));
        agree(Pbs::default(), &problem, Some(TIES));
    });
}
