//! The same tensors on the host and the GPU: the host has the numbers after rounding to 16 bits.

use candle_core::{DType, Device, Tensor};
use s2o_core::cpu::{Inputs, Strided};
use s2o_core::{AttnShape, ScoreScale};
pub use s2o_testkit::noise;

/// Layout of q, k and v in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Contiguous,
    /// Heads before length, as after a transposition.
    HeadsFirst,
    /// Views into longer and wider tensors, at offsets that are multiples of 16 bytes.
    Narrowed,
    /// The first tokens of longer tensors whose other tokens are NaN, as in a cache that is not full.
    InCache,
    /// A head_dim that is not innermost: must be copied.
    DimFirst,
    /// At an offset of 8 bytes: must be copied.
    Unaligned,
}

/// One attention problem.
pub struct Problem {
    pub shape: AttnShape,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub dtype: DType,
    /// On the host, contiguous f32.
    pub host: [Vec<f32>; 3],
    /// The same on the host as Candle tensors.
    pub on_cpu: [Tensor; 3],
    /// The same on the GPU in 16 bits.
    pub on_gpu: [Tensor; 3],
}

/// Sizes of a problem.
pub struct Sizes {
    pub batch: usize,
    pub heads: [usize; 2],
    pub q_len: usize,
    pub k_len: usize,
    pub head_dim: usize,
}

impl Problem {
    /// Seeded tensors. `sharpness` scales the queries: a larger value makes attention more peaked.
    pub fn new(device: &Device, sizes: Sizes, dtype: DType, memory: Memory, sharpness: f32) -> Self {
        let Sizes { batch, heads: [num_heads, num_kv_heads], q_len, k_len, head_dim } = sizes;
        let q_dims = [batch, q_len, num_heads, head_dim];
        let k_dims = [batch, k_len, num_kv_heads, head_dim];
        let shape = AttnShape::new(q_dims, [k_len, num_kv_heads]).unwrap();
        let seed = (q_len * 31 + k_len) as u64;
        let q = noise(q_dims.iter().product(), seed).into_iter().map(|x| x * sharpness).collect();
        let mut k = noise(k_dims.iter().product(), seed + 1);
        // Some keys are larger: a ranking places them early, and attention is peaked.
        for (row, key) in k.chunks_exact_mut(head_dim).enumerate() {
            let lift = if (row / num_kv_heads) % 17 == 0 { 4.0 } else { 2.0 };
            key.iter_mut().for_each(|x| *x *= lift);
        }
        let v = noise(k_dims.iter().product(), seed + 2);
        let on_cpu = [(q, q_dims), (k, k_dims), (v, k_dims)].map(|(data, dims): (Vec<f32>, _)| {
            let exact = Tensor::from_vec(data, &dims[..], &Device::Cpu).unwrap();
            exact.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap()
        });
        let host = on_cpu.each_ref().map(|tensor| tensor.flatten_all().unwrap().to_vec1().unwrap());
        let on_gpu = on_cpu
            .each_ref()
            .map(|tensor| laid_out(&tensor.to_dtype(dtype).unwrap().to_device(device).unwrap(), memory));
        Self { shape, scale: shape.default_softmax_scale(), softcap: None, dtype, host, on_cpu, on_gpu }
    }

    /// Replaces every number of q, k or v (`which` 0, 1 or 2), contiguous from now on. `change` takes the index and the
    /// old number.
    pub fn replace(&mut self, which: usize, change: impl Fn(usize, f32) -> f32) {
        let data: Vec<f32> = self.host[which].iter().enumerate().map(|(i, &x)| change(i, x)).collect();
        let exact = Tensor::from_vec(data, self.on_cpu[which].dims(), &Device::Cpu).unwrap();
        let rounded = exact.to_dtype(self.dtype).unwrap();
        self.on_gpu[which] = rounded.to_device(self.on_gpu[which].device()).unwrap();
        self.on_cpu[which] = rounded.to_dtype(DType::F32).unwrap();
        self.host[which] = self.on_cpu[which].flatten_all().unwrap().to_vec1().unwrap();
    }

    /// The operands for the plain Rust path.
    pub fn inputs(&self) -> Inputs<'_, f32> {
        let shape = &self.shape;
        let q_dims = [shape.batch(), shape.q_len(), shape.num_heads(), shape.head_dim()];
        let k_dims = [shape.batch(), shape.k_len(), shape.num_kv_heads(), shape.head_dim()];
        let [q, k, v] = &self.host;
        let strided = |name, data, dims| Strided::contiguous(name, data, dims).unwrap();
        Inputs::new(strided("q", q, q_dims), strided("k", k, k_dims), strided("v", v, k_dims), self.score_scale())
            .unwrap()
    }

    /// From products to scores.
    pub fn score_scale(&self) -> ScoreScale {
        ScoreScale { softmax_scale: self.scale, softcap: self.softcap }
    }

    /// Fills memory of the output's size with NaN and releases it, so that the output reuses it and unwritten rows stay
    /// NaN.
    pub fn poison(&self) {
        let elements = self.host[0].len();
        Tensor::full(f32::NAN, elements, self.on_gpu[0].device()).unwrap().to_dtype(self.dtype).unwrap();
    }
}

/// The same tensor in another layout.
fn laid_out(tensor: &Tensor, memory: Memory) -> Tensor {
    let dims = tensor.dims().to_vec();
    let padded = |dim: usize, before: usize, after: usize| tensor.pad_with_zeros(dim, before, after).unwrap();
    match memory {
        Memory::Contiguous => tensor.clone(),
        Memory::HeadsFirst => tensor.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap(),
        Memory::DimFirst => tensor.transpose(1, 3).unwrap().contiguous().unwrap().transpose(1, 3).unwrap(),
        Memory::Narrowed => {
            let wide = padded(3, 8, 16).pad_with_zeros(1, 9, 3).unwrap();
            wide.narrow(1, 9, dims[1]).unwrap().narrow(3, 8, dims[3]).unwrap()
        }
        Memory::InCache => {
            let rest = [dims[0], 7, dims[2], dims[3]];
            let rest = Tensor::full(f32::NAN, &rest[..], tensor.device()).unwrap().to_dtype(tensor.dtype()).unwrap();
            Tensor::cat(&[tensor, &rest], 1).unwrap().narrow(1, 0, dims[1]).unwrap()
        }
        Memory::Unaligned => padded(3, 4, 4).narrow(3, 4, dims[3]).unwrap(),
    }
}
