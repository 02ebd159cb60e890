//! The ops on the CPU. The plain Rust path reads `q`, `k` and `v` in Candle's storage with their strides and offsets,
//! without copies.

use candle_core::{CpuStorage, DType, Layout, WithDType};
use s2o_core::cpu::{self, Element, Inputs, Strided};
use s2o_core::{BLOCK_Q, BlockLists, BlockSelection, Ranking, S2oError};

use crate::attn_op::{AttnOp, Compute, Qkv};
use crate::error::AttnError;
use crate::ops::{BlockOp, DenseOp, KeyColumns, MaskOp, RankOp, S2oOp};
use crate::pending_stats::PendingStats;

/// An op on the CPU, for every element type of the CPU path.
trait CpuOp: AttnOp {
    /// Computes into `out`, which is empty for an op without an output.
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Self::Report, AttnError>;
}

impl<K: CpuOp> Compute<CpuStorage> for K {
    fn compute(&self, qkv: &Qkv<'_, CpuStorage>) -> Result<(Option<CpuStorage>, K::Report), AttnError> {
        match qkv.dtype {
            DType::F32 => typed::<f32, K>(self, qkv),
            DType::F16 => typed::<half::f16, K>(self, qkv),
            DType::BF16 => typed::<half::bf16, K>(self, qkv),
            got => Err(AttnError::DType { name: "q", got }),
        }
    }
}

fn typed<T: Element + WithDType, K: CpuOp>(
    op: &K,
    qkv: &Qkv<'_, CpuStorage>,
) -> Result<(Option<CpuStorage>, K::Report), AttnError> {
    let [q, k, v] = qkv.operands;
    let [q, k, v] = [strided::<T>("q", q)?, strided::<T>("k", k)?, strided::<T>("v", v)?];
    let inputs = Inputs::new(q, k, v, qkv.scale)?;
    let rows = qkv.shape.batch() * qkv.shape.q_len() * qkv.shape.num_heads();
    let elements = if K::HAS_OUTPUT { rows * qkv.shape.head_dim() } else { 0 };
    let mut out = vec![T::default(); elements];
    let report = op.run(&inputs, &mut out)?;
    Ok((K::HAS_OUTPUT.then(|| T::to_cpu_storage_owned(out)), report))
}

fn strided<'a, T: Element + WithDType>(
    name: &'static str,
    (storage, layout): (&'a CpuStorage, &Layout),
) -> Result<Strided<'a, T>, AttnError> {
    let dims = layout.shape().dims4()?.into();
    let strides = layout.stride().try_into().expect("as many strides as dimensions");
    let data = storage.as_slice::<T>()?.get(layout.start_offset()..).unwrap_or_default();
    Ok(Strided::new(name, data, dims, strides).map_err(S2oError::from)?)
}

impl CpuOp for S2oOp {
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Option<PendingStats>, AttnError> {
        let (config, prompt_len) = self.settings(inputs.shape());
        let stats = match &self.ranking {
            Some(ranking) => cpu::attention_with_ranking(inputs, &config, prompt_len, ranking, out)?,
            None => cpu::attention(inputs, &config, prompt_len, out)?,
        };
        Ok(Some(stats.into()))
    }
}

impl CpuOp for RankOp {
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, _: &mut [T]) -> Result<Ranking, AttnError> {
        let (config, prompt_len) = self.0.settings(inputs.shape());
        Ok(cpu::rank(inputs, &config, prompt_len)?)
    }
}

impl CpuOp for DenseOp {
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<(), AttnError> {
        cpu::dense(inputs, self.mask, out);
        Ok(())
    }
}

impl CpuOp for BlockOp {
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<Vec<f64>, AttnError> {
        Ok(cpu::block_sparse(inputs, self.mask, &self.selection, out)?)
    }
}

impl CpuOp for MaskOp {
    fn run<T: Element>(&self, inputs: &Inputs<'_, T>, out: &mut [T]) -> Result<(), AttnError> {
        let shape = inputs.shape();
        self.check(shape)?;
        let (_, _, rows, key_blocks) = self.blocks.dims4()?;
        let mask = self.blocks.flatten_all()?.to_vec1::<u8>()?;
        let first = if self.mask.is_causal() { shape.q_offset() / BLOCK_Q } else { key_blocks };
        let lists = mask.chunks_exact(key_blocks).enumerate().map(|(list, row)| {
            let seen = key_blocks.min(first + list % rows + 1);
            (0..seen).filter(|&block| row[block] != 0)
        });
        let columns = self.columns.as_ref().map(KeyColumns::lists).transpose()?;
        let selection = BlockSelection { columns, ..BlockLists::new(lists).into() };
        cpu::block_sparse(inputs, self.mask, &selection, out)?;
        Ok(())
    }
}
