//! The selectors on post-RoPE tensors of a trained model, and on the project's other vectors.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_s2o::{Attention, PrefillCall, dense_attn};
use s2o_baselines::{BlockSelector, BlockSparse, MeanPooling, Pbs, PbsScore, XAttention};

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

/// Prints what the published settings leave out, and what it costs. `S2O_VECTORS` names another directory.
#[test]
#[ignore = "prints, and asserts nothing"]
fn density_and_error() {
    let dir = std::env::var_os("S2O_VECTORS").map_or_else(data, PathBuf::from);
    let files = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    files.sort();
    for file in files {
        let (call, tensors) = load(&file);
        println!("{}: {:?}", file.file_stem().unwrap().to_string_lossy(), shape_of(&tensors));
        print(MeanPooling::default(), &call, &tensors);
        print(XAttention::default(), &call, &tensors);
        for score in [PbsScore::MeanPooled, PbsScore::Antidiagonal] {
            print(Pbs::default().score(score), &call, &tensors);
        }
    }
}

fn print(method: impl BlockSelector, call: &PrefillCall, [q, k, v]: &[Tensor; 3]) {
    let method = BlockSparse::new(method);
    let out = method.prefill(call, q, k, v).unwrap();
    let dense = dense_attn(q, k, v, call.softmax_scale, true).unwrap();
    let mse = (out - dense).unwrap().sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
    let heads = &method.take_work()[&0];
    let density = heads.iter().map(|head| head.density()).sum::<f64>() / heads.len() as f64;
    println!("  {:17} density {density:.3}  MSE {mse:.2e}", method.name());
}
