//! A model that takes its attention as an argument: the built-in model gives the same answer with dense attention, with
//! S2O, and with your own method.
//!
//! ```text
//! cargo run --release --example plug_into_model
//! ```

use anyhow::Result;
use candle_core::Tensor;
use candle_s2o::{Attention, AttnStats, Dense, PrefillCall, S2o, S2oConfig};
use s2o_models::{GenerationOptions, LoadOptions, ModelSource, PrefillOptions, passkey};

/// Your own method implements one function. This method is dense in the first layer and S2O in the others.
#[derive(Debug)]
struct DenseFirst(S2o);

impl Attention for DenseFirst {
    fn name(&self) -> &str {
        "dense first"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        if call.layer == 0 { Dense.prefill(call, q, k, v) } else { self.0.prefill(call, q, k, v) }
    }
}

fn main() -> Result<()> {
    let model = "needle-11m".parse::<ModelSource>()?.load(&LoadOptions::default(), None)?;
    // English text of 4096 tokens with a seven-digit key in it, and a question about the key.
    let prompt = passkey::records()?.swap_remove(0);
    let tokens = model.encode(&prompt.input)?;
    println!("expected: {}", prompt.answer);

    let s2o = || S2o::new(S2oConfig::default()).with_stats();
    let (sparse, own) = (s2o(), DenseFirst(s2o()));
    let mut cache = model.decoder.new_cache(1, tokens.len() + 16)?;
    for method in [&Dense as &dyn Attention, &sparse, &own] {
        cache.reset();
        let options = GenerationOptions { max_new_tokens: 12, ..Default::default() };
        let prefill = PrefillOptions::new();
        let out = model.generate(&tokens, &mut cache, method, prefill, &options, &mut |_| ())?;
        println!("{}: {}", method.name(), passkey::answer(&out.text));
    }
    println!("density of s2o: {:.3}", AttnStats::joint_density(sparse.take_stats()?.values()));
    Ok(())
}
