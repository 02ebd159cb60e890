//! Rotary position embedding: inverse frequencies with their scalings.
//!
//! Half-split (NeoX) rotation as in Hugging Face models: entries `i` and `i + head_dim / 2` of a head rotate together.

use std::f64::consts::PI;

use serde_json::Value;

use crate::error::{ModelError, Result};

/// Base frequency and scaling of the rotation.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Change of that series for long contexts.
    pub scaling: RopeScaling,
}

/// Changes to the inverse frequencies, under the names of Hugging Face's `rope_type`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `default`: none.
    None,
    /// `linear`: every frequency divided by `factor`.
    Linear {
        /// Factor by which the context becomes longer.
        factor: f64,
    },
    /// `llama3`: low frequencies divided by `factor`, high ones kept, with a ramp between (Llama 3.1 and 3.2).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_max_positions: usize,
    },
    /// `yarn` (arXiv 2309.00071): a ramp over dimensions, and cos and sin scaled by `attention_factor`.
    Yarn {
        /// Factor by which the context becomes longer.
        factor: f64,
        /// Factor on cos and sin, hence its square on the attention scores.
        attention_factor: f64,
        /// Rotations within the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is divided by `factor`.
        beta_slow: f64,
        /// Whether the ramp starts and ends on whole dimensions.
        truncate: bool,
        /// Context length of the original training.
        original_max_positions: usize,
    },
    /// A divisor for each frequency, as in `rope_freqs.weight` of GGUF files.
    Divisors(Vec<f32>),
}

impl RopeScaling {
    /// Reads `rope_scaling` / `rope_parameters` of a `config.json` whose context is `max_positions`.
    pub(crate) fn from_json(value: &Value, max_positions: usize, origin: &str) -> Result<Self> {
        let wrong = |what: &str, expected: &str, got: &Value| {
            ModelError::config(origin, format!("{what}: expected {expected}, got {got}"))
        };
        let Some(entries) = value.as_object() else {
            return Err(wrong("rope_scaling", "an object with rope_type", value));
        };
        if entries.values().any(Value::is_object) {
            return Err(wrong("rope_scaling", "one setting for all layers", value));
        }
        let kind = match ["rope_type", "type"].iter().find_map(|key| entries.get(*key)) {
            None if entries.contains_key("factor") => return Err(wrong("rope_scaling", "a rope_type", value)),
            None => None,
            Some(Value::String(kind)) => Some(kind.as_str()),
            Some(other) => return Err(wrong("rope_scaling.rope_type", "a name", other)),
        };
        let number = |key: &str| match entries.get(key) {
            None => Ok(None),
            // The other numbers have defaults, which files write as null.
            Some(Value::Null) if key != "factor" => Ok(None),
            Some(number) => match number.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(wrong(&format!("rope_scaling.{key}"), "a number", number)),
            },
        };
        let need = |key: &str| {
            number(key)?.ok_or_else(|| ModelError::config(origin, format!("rope_scaling lacks the number {key}")))
        };
        let original = || match value.get("original_max_position_embeddings") {
            None | Some(Value::Null) => Ok(max_positions),
            Some(length) => length.as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| {
                ModelError::config(origin, "rope_scaling.original_max_position_embeddings is not a positive integer")
            }),
        };
        match kind {
            None | Some("default") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: need("factor")? }),
            Some("llama3") => Ok(Self::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_positions: original()?,
            }),
            Some("yarn") => {
                let original_max_positions = original()?;
                let factor = number("factor")?.unwrap_or(max_positions as f64 / original_max_positions as f64);
                let recommended = match (number("mscale")?, number("mscale_all_dim")?) {
                    (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                        yarn_scale(factor, scale) / yarn_scale(factor, all)
                    }
                    _ => yarn_scale(factor, 1.0),
                };
                Ok(Self::Yarn {
                    factor,
                    attention_factor: number("attention_factor")?.unwrap_or(recommended),
                    beta_fast: number("beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("beta_slow")?.unwrap_or(1.0),
                    truncate: value.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                    original_max_positions,
                })
            }
            Some(other) => {
                Err(ModelError::unsupported("rope_scaling.rope_type", "default, linear, llama3 or yarn", other))
            }
        }
    }

    /// The context that YaRN reaches. Qwen3's configurations also have the short `max_position_embeddings`.
    pub(crate) fn extended_positions(&self) -> usize {
        match self {
            Self::Yarn { factor, original_max_positions, .. } => (*original_max_positions as f64 * factor) as usize,
            _ => 0,
        }
    }
}

/// YaRN's recommended factor on cos and sin for a context `factor` times longer.
pub(crate) fn yarn_scale(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

impl RopeConfig {
    pub(crate) fn check(&self, head_dim: usize, origin: &str) -> Result<()> {
        /// More than any model has: positions would no longer differ.
        const MOST: f64 = 1e12;
        if !(1.0..=MOST).contains(&self.theta) {
            let reason = format!("rope_theta is {}, expected a number from 1 to {MOST}", self.theta);
            return Err(ModelError::config(origin, reason));
        }
        let mut positive = Vec::new();
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive.push(("rope_scaling.factor", *factor)),
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, .. } => positive.extend([
                ("rope_scaling.factor", *factor),
                ("rope_scaling.low_freq_factor", *low),
                ("rope_scaling.high_freq_factor - low_freq_factor", high - low),
            ]),
            RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, .. } => positive.extend([
                ("rope_scaling.factor", *factor),
                ("rope_scaling.attention_factor", *attention_factor),
                ("rope_scaling.beta_fast", *beta_fast),
                ("rope_scaling.beta_slow", *beta_slow),
            ]),
            RopeScaling::Divisors(divisors) if divisors.len() != head_dim / 2 => {
                let reason = format!("{} rope frequency divisors, expected {}", divisors.len(), head_dim / 2);
                return Err(ModelError::config(origin, reason));
            }
            RopeScaling::Divisors(divisors) => {
                positive.extend(divisors.iter().map(|d| ("a rope frequency divisor", f64::from(*d))));
            }
        }
        match positive.into_iter().find(|(_, value)| !(*value > 0.0 && *value <= MOST)) {
            Some((name, value)) => {
                Err(ModelError::config(origin, format!("{name} is {value}, expected a positive number up to {MOST}")))
            }
            None => Ok(()),
        }
    }

    /// The `head_dim / 2` inverse frequencies, scaled.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let scaled = |i: usize| {
            let freq = self.theta.powf(-((2 * i) as f64) / head_dim as f64);
            match &self.scaling {
                RopeScaling::None => freq,
                RopeScaling::Linear { factor } => freq / factor,
                RopeScaling::Divisors(divisors) => freq / divisors.get(i).map_or(1.0, |d| f64::from(*d)),
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                    let rotations = *original_max_positions as f64 * freq / (2.0 * PI);
                    let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    (1.0 - kept) * freq / factor + kept * freq
                }
                RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_positions, .. } => {
                    // The dimension whose frequency rotates `rotations` times within the original context.
                    let dimension = |rotations: f64| {
                        let positions = *original_max_positions as f64;
                        head_dim as f64 * (positions / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                    };
                    let (low, high) = (dimension(*beta_fast), dimension(*beta_slow));
                    let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                    let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                    let width = if high == low { 0.001 } else { high - low };
                    let divided = ((i as f64 - low) / width).clamp(0.0, 1.0);
                    divided * freq / factor + (1.0 - divided) * freq
                }
            }
        };
        (0..head_dim / 2).map(|i| scaled(i) as f32).collect()
    }

    /// The factor on cos and sin: 1 except for YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}
