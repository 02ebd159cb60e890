//! Tests of the selectors on post-RoPE tensors of a trained model, and on the project's other vectors.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_s2o::PrefillCall;
use s2o_baselines::PbsScore;

use crate::plain_cdf::shape_of;
use crate::{mean_pooling, pbs, xattention};

/// q, k, v of a file, with a batch dimension.
fn load(path: &Path) -> (PrefillCall, [Tensor; 3]) {
    let mut tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let tensors = ["q", "k", "v"].map(|name| tensors.remove(name).unwrap().unsqueeze(0).unwrap());
    let shape = shape_of(&tensors);
    let softmax_scale = shape.default_softmax_scale();
    (PrefillCall { layer: 0, softmax_scale, prompt_len: shape.k_len() }, tensors)
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
}

#[test]
fn choices_on_all_vectors() {
    for name in ["smollm2_layer12", "small", "ragged", "chunk", "mha_d80"] {
        let (call, tensors) = load(&data().join(name).with_extension("safetensors"));
        for share in [0.5, 0.9] {
            mean_pooling::compare(&call, &tensors, share).assert_decided();
            xattention::compare(&call, &tensors, 16, share).assert_decided();
            for score in [PbsScore::MeanPooled, PbsScore::Antidiagonal] {
                pbs::compare(&call, &tensors, pbs::Options { share, ..pbs::Options::published(score) })
                    .assert_decided();
            }
        }
    }
}
