//! Candle's own model with the drop-in, compared with our decoder: the same weights, prompt and attention must give the
//! same logits.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_attn::s2o::Policy;
use candle_s2o::{Attention, Dense, S2o};
use s2o_models::{LoadOptions, ModelSource, PrefillOptions};

use crate::logits::{EXACT_WITHIN, apart};

/// Prints the difference of `[exact, by_policy]` from our decoder's logits, and fails if it is more than rounding.
pub fn compare(
    dir: &Path,
    device: &Device,
    dtype: DType,
    ids: &[u32],
    policy: &Policy,
    [exact, by_policy]: [&Tensor; 2],
) -> Result<()> {
    let options = LoadOptions { device: device.clone(), dtype: Some(dtype), ..LoadOptions::default() };
    let model = ModelSource::Directory(dir.to_owned()).load(&options, None)?;
    let sparse: Box<dyn Attention> = match policy {
        Policy::S2o(config) => Box::new(S2o::new(config.clone())),
        Policy::Layers { base, settings } => Box::new(S2o::with_layers(base.clone(), settings)?),
        Policy::Dense => Box::new(Dense),
    };
    let tokens = model.prompt(ids)?;
    let mut worst = 0f64;
    for (name, attention, stock) in [("dense", &Dense as &dyn Attention, exact), ("policy", sparse.as_ref(), by_policy)]
    {
        let mut cache = model.decoder.new_cache(1, ids.len())?;
        // In one chunk, like the stock model.
        let whole = PrefillOptions::new().chunk(ids.len());
        let ours = model.decoder.prefill(&tokens, &mut cache, attention, whole)?.last_logits()?;
        let (error, same) = apart(stock, &ours)?;
        println!(
            "our decoder    {name}: logits differ by {error:.2e}, {} token",
            if same { "the same" } else { "another" }
        );
        ensure!(error.is_finite(), "{name}: the logits are no numbers");
        worst = worst.max(error);
    }
    ensure!(worst <= EXACT_WITHIN, "logits: expected a difference of at most {EXACT_WITHIN}, got {worst:.2e}");
    Ok(())
}
