//! Candle's own llama on the CPU with the drop-in: compared with its attention without flash-attn, and sparse.

use candle_core::{DType, Device, Result, Tensor};
use candle_flash_attn::s2o::{self, AttnStats, Policy, S2oConfig, SegmentLen};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Config, Llama};

const PROMPT_LEN: usize = 2000;

fn config(use_flash_attn: bool) -> Config {
    Config {
        hidden_size: 128,
        intermediate_size: 256,
        vocab_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 2048,
        ..Config::config_7b_v2(use_flash_attn)
    }
}

/// Logits after each of two chunks of the prompt, and after one more token.
fn logits(weights: &VarMap, use_flash_attn: bool) -> Result<[Tensor; 3]> {
    let config = config(use_flash_attn);
    let model = Llama::load(VarBuilder::from_varmap(weights, DType::F32, &Device::Cpu), &config)?;
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    let ids: Vec<u32> = (0..=PROMPT_LEN as u32).map(|i| (i * i + 7 * i) % 61).collect();
    let mut run = |from: usize, to: usize| {
        model.forward(&Tensor::new(&ids[from..to], &Device::Cpu)?.unsqueeze(0)?, from, &mut cache)
    };
    Ok([run(0, 1500)?, run(1500, PROMPT_LEN)?, run(PROMPT_LEN, PROMPT_LEN + 1)?])
}

/// The largest of the differences in the L2 norm, relative to `expected`. The weights differ from run to run, so a bound
/// on single logits would fail by chance.
fn apart(got: &[Tensor; 3], expected: &[Tensor; 3]) -> Result<f32> {
    let norm = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    let relative = got.iter().zip(expected).map(|(got, expected)| Ok(norm(&(got - expected)?)? / norm(expected)?));
    Ok(relative.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f32::max))
}

#[test]
fn stock_llama_is_exact_when_dense_and_counts_when_sparse() -> Result<()> {
    let weights = VarMap::new();
    let expected = logits(&weights, false)?;
    s2o::set_policy(Policy::Dense);
    let dense = logits(&weights, true)?;
    let apart_dense = apart(&dense, &expected)?;
    assert!(apart_dense < 1e-4, "{apart_dense}");

    let eager = S2oConfig::builder().tau(0.9).segment_len(SegmentLen::Fixed(128)).dense_below(1).dense_tail(1);
    s2o::set_policy(Policy::S2o(eager.build().map_err(candle_core::Error::wrap)?));
    s2o::collect_stats(true);
    let sparse = logits(&weights, true)?;
    let calls = s2o::take_stats().unwrap();
    // Two layers, two chunks. The token after the prompt needs no mask and is dense.
    let lengths: Vec<_> = calls.iter().map(|call| (call.q_len, call.k_len)).collect();
    assert_eq!(lengths, [(1500, 1500), (1500, 1500), (500, 2000), (500, 2000)]);
    let density = AttnStats::joint_density(calls.iter().map(|call| &call.stats));
    assert!(density < 0.9, "{density}");
    let apart_sparse = apart(&sparse, &expected)?;
    assert!(apart_sparse > apart_dense && apart_sparse < 1.0, "{apart_sparse}");
    Ok(())
}
