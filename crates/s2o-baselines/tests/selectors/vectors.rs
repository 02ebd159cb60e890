//! The project's vectors (tests/data/README.md), among them post-RoPE tensors of a trained model.

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_s2o::PrefillCall;
use s2o_baselines::{BlockSelector, PbsScore};

use crate::inputs::Inputs;
use crate::{mean_pooling, pbs, xattention};

/// q, k, v of a file, with a batch dimension.
fn load(name: &str) -> Inputs {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/data/{name}.safetensors"));
    let file =
        candle_core::safetensors::load(&path, &Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Inputs::new(["q", "k", "v"].map(|name| file[name].unsqueeze(0).unwrap()))
}

/// One head of SmolLM2, `(1, 1536, 1, 64)`: the whole prompt, and chunks that begin at a block, inside a block, and
/// with the last query.
pub fn smollm2() -> Vec<Inputs> {
    let whole = load("smollm2_layer12");
    let part = |(start, end): (usize, usize)| {
        let [q, k, v] = &whole.tensors;
        let of = |x: &Tensor, start: usize| x.narrow(1, start, end - start).unwrap();
        let part = Inputs::new([of(q, start), of(k, 0), of(v, 0)]);
        Inputs { call: PrefillCall { prompt_len: 1536, ..part.call }, ..part }
    };
    [(0, 1536), (1024, 1536), (700, 1401), (1535, 1536)].map(part).to_vec()
}

/// [`Inputs::measure`] on the whole prompt of [`smollm2`].
pub fn measure(selector: impl BlockSelector) -> [f64; 3] {
    smollm2()[0].measure(selector)
}

#[test]
fn choices_on_all_vectors() {
    for name in ["smollm2_layer12", "small", "ragged", "chunk", "mha_d80"] {
        let inputs = load(name);
        for share in [0.5, 0.9] {
            mean_pooling::compare(&inputs, share).assert_decided(5, 200);
            xattention::compare(&inputs, 16, share).assert_decided(5, 200);
            for score in [PbsScore::MeanPooled, PbsScore::Antidiagonal] {
                let options = pbs::Options { share, ..pbs::Options::published(score) };
                pbs::compare(&inputs, options).assert_decided(5, 200);
            }
        }
    }
}
