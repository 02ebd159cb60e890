//! Makes each tensor on the device when it is requested.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::thread;

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::Profile;
use super::anatomy::{Anatomy, RESERVED, Rows};
use crate::config::DecoderConfig;
use crate::random::SplitMix64;

/// Numbers of one tensor that share a generator on a CPU.
const BLOCK: usize = 1 << 16;

/// Weights that are made on request. A tensor depends on seed, name and device, not on earlier requests.
#[derive(Debug)]
pub(super) struct Generator {
    seed: u64,
    shapes: HashMap<String, Vec<usize>>,
    /// `None` for plain random weights.
    anatomy: Option<Anatomy>,
}

impl Generator {
    pub(super) fn new(config: &DecoderConfig, profile: Profile, seed: u64) -> Self {
        let anatomy = match profile {
            Profile::Calibrated { focus } => Some(Anatomy::new(config, focus, seed)),
            Profile::Random => None,
        };
        Self { seed, shapes: config.tensor_shapes().into_iter().collect(), anatomy }
    }

    fn make(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let &[rows, columns] = shape else { return self.vector(name, shape, dtype, device) };
        let normal = |rows, columns, deviation: f64| self.normal(name, rows, columns, deviation, device);
        let fan_in = 1.0 / (columns as f64).sqrt();
        let Some(anatomy) = &self.anatomy else {
            let deviation = if name.ends_with("embed_tokens.weight") { 1.0 } else { fan_in };
            return normal(rows, columns, deviation)?.to_dtype(dtype);
        };
        if name.ends_with("embed_tokens.weight") {
            let reserved = Tensor::from_vec(anatomy.embedding(rows), (rows, RESERVED), device)?.to_dtype(dtype)?;
            return Tensor::cat(&[reserved, normal(rows, columns - RESERVED, 1.0)?.to_dtype(dtype)?], 1);
        }
        let writes = |deviation: f64| {
            let kept = Tensor::zeros((RESERVED, columns), dtype, device)?;
            Tensor::cat(&[kept, normal(rows - RESERVED, columns, fan_in * deviation)?.to_dtype(dtype)?], 0)
        };
        let plan = match name {
            _ if name.ends_with("q_proj.weight") => anatomy.q_proj(layer_of(name)),
            _ if name.ends_with("k_proj.weight") => anatomy.k_proj(layer_of(name)),
            _ if name.ends_with("o_proj.weight") => return writes(anatomy.o_proj()),
            _ if name.ends_with("down_proj.weight") => return writes(anatomy.down_proj()),
            _ => return normal(rows, columns, fan_in)?.to_dtype(dtype),
        };
        let Rows { columns: reserved, deviations } = plan;
        let content = normal(rows, columns - RESERVED, 1.0)?;
        let content = content.broadcast_mul(&Tensor::from_vec(deviations, (rows, 1), device)?)?.to_dtype(dtype)?;
        let reserved = Tensor::from_vec(reserved, (rows, RESERVED), device)?.to_dtype(dtype)?;
        Tensor::cat(&[reserved, content], 1)
    }

    /// Norms and biases.
    fn vector(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let value = match &self.anatomy {
            Some(anatomy) if name.ends_with("q_norm.weight") => anatomy.q_norm(layer_of(name)),
            Some(anatomy) if name.ends_with("k_norm.weight") => anatomy.k_norm(),
            _ if name.ends_with("norm.weight") => 1.0,
            _ => 0.0,
        };
        Tensor::full(value, shape, device)?.to_dtype(dtype)
    }

    /// Normal numbers in f32.
    fn normal(&self, name: &str, rows: usize, columns: usize, deviation: f64, device: &Device) -> Result<Tensor> {
        let seed = tensor_seed(self.seed, name);
        if !device.is_cpu() {
            device.set_seed(seed)?;
            return Tensor::randn(0_f32, deviation as f32, (rows, columns), device);
        }
        // Candle's generator on a CPU takes no seed.
        let mut values = vec![0_f32; rows * columns];
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let blocks = values.len().div_ceil(BLOCK);
        let share = blocks.div_ceil(threads).max(1);
        thread::scope(|scope| {
            for (number, part) in values.chunks_mut(share * BLOCK).enumerate() {
                scope.spawn(move || {
                    for (block, values) in part.chunks_mut(BLOCK).enumerate() {
                        // The stream depends on the block, not on where a thread's part begins.
                        let mut random = SplitMix64::new(block_seed(seed, number * share + block));
                        values.fill_with(|| random.normal() * deviation as f32);
                    }
                });
            }
        });
        Tensor::from_vec(values, (rows, columns), device)
    }
}

impl SimpleBackend for Generator {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let got = self.shapes.get(name).ok_or_else(|| Error::CannotFindTensor { path: name.to_owned() }.bt())?;
        if got.as_slice() != shape.dims() {
            let (expected, got) = (shape, Shape::from_dims(got));
            return Err(Error::UnexpectedShape { msg: format!("shape mismatch for {name}"), expected, got }.bt());
        }
        self.make(name, got, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = self.shapes.get(name).ok_or_else(|| Error::CannotFindTensor { path: name.to_owned() }.bt())?;
        self.make(name, shape, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.shapes.contains_key(name)
    }
}

/// The number after `layers.`.
fn layer_of(name: &str) -> usize {
    let number = name.split('.').find_map(|part| part.parse().ok());
    number.expect("every projection's name comes from tensor_shapes and holds its layer")
}

fn tensor_seed(seed: u64, name: &str) -> u64 {
    // FNV-1a.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    SplitMix64::new(seed ^ hash).next_u64()
}

fn block_seed(seed: u64, block: usize) -> u64 {
    SplitMix64::new(seed.wrapping_add(block as u64)).next_u64()
}
