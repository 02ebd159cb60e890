//! [`Parallel`]: one decoder on the devices of several ranks.
//!
//! S2O ranks and stops over all keys of a head, so ranks share the work of attention by whole heads: every rank has all
//! keys of its heads, and order and stop are those of one device.
//!
//! - [`Mode::Sequence`] (DeepSpeed-Ulysses, arXiv 2309.14509): every rank has all weights. The tokens of a chunk are
//!   sharded in embedding, norms, linear layers and MLP. Before attention each rank gets the queries, keys and values
//!   of its heads for all tokens of the chunk, and after it the outputs of all heads for its tokens: two all-to-alls a
//!   layer.
//! - [`Mode::Tensor`] (Megatron-LM, arXiv 1909.08053): every rank has the weights of its heads and its part of the MLP,
//!   and all tokens: two all-reduces of the residual stream's width a layer.
//!
//! Decoding has one token and nothing to shard but weights and heads, so it is tensor parallel in both modes; for it a
//! rank in sequence mode has its part of the output projections and the MLPs a second time. In both modes a rank's KV
//! cache has only its own heads. Embedding and output head are on every rank.
//!
//! Heads skip different parts of the keys, and in each layer the ranks wait for the one whose heads skip least. Without
//! [`Parallel::balanced`] a rank has consecutive heads; with it, heads that had equal work in an earlier prompt.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_s2o::AttnStats;
use s2o_comm::Communicator;
use thiserror::Error;

use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Result};
use crate::fused::{self, LinearPrecision};
use crate::head_tiles::HeadTiles;
use crate::layers::Weights;

/// What the ranks share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// The tokens of a prompt. Every rank holds all weights.
    Sequence,
    /// The weights.
    Tensor,
    /// [`Self::Sequence`] if the weights take at most three fifths of the free memory of every rank, which leaves room
    /// for cache and activations; otherwise [`Self::Tensor`].
    #[default]
    Auto,
}

/// The error for a string that is not a [`Mode`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected sequence, tensor or auto, got {0:?}")]
pub struct UnknownMode(String);

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequence => "sequence",
            Self::Tensor => "tensor",
            Self::Auto => "auto",
        })
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> std::result::Result<Self, UnknownMode> {
        match text {
            "sequence" => Ok(Self::Sequence),
            "tensor" => Ok(Self::Tensor),
            "auto" => Ok(Self::Auto),
            other => Err(UnknownMode(other.to_owned())),
        }
    }
}

/// This rank's place among the ranks that run one decoder together. All ranks call the same functions of the decoder
/// with the same arguments, and get the same results.
#[derive(Debug, Clone)]
pub struct Parallel {
    mode: Mode,
    comm: Arc<dyn Communicator>,
    tiles: Option<Arc<HeadTiles>>,
}

/// Fewest tokens of a rank for which sharding a chunk pays. A shorter chunk is computed as decoding is.
const FEWEST_TOKENS: usize = 16;

impl Parallel {
    /// Shares the work among the ranks of `comm`, whose tensors must be on the decoder's device.
    pub fn new(mode: Mode, comm: Arc<dyn Communicator>) -> Self {
        Self { mode, comm, tiles: None }
    }

    /// Shares the KV heads so that the ranks have equal work for a prompt like the one of `tiles`, which must be the same
    /// on all ranks. The outputs of attention do not change by a bit; in [`Mode::Tensor`], and in decoding, the sums over
    /// the ranks are rounded in another order.
    pub fn balanced(self, tiles: HeadTiles) -> Self {
        Self { tiles: Some(Arc::new(tiles)), ..self }
    }

    /// What the ranks share. Of a loaded decoder it is not [`Mode::Auto`].
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The connection to the other ranks.
    pub fn comm(&self) -> &dyn Communicator {
        self.comm.as_ref()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Decides [`Mode::Auto`], and refuses models whose heads or MLPs the ranks cannot share evenly, and ranks with
    /// another model or mode.
    pub(crate) fn checked(self, config: &DecoderConfig, weights: &Weights) -> Result<Self> {
        if weights.are_quantised() {
            let expected = "weights in f32, bf16 or f16 (--dtype)";
            return Err(ModelError::unsupported("several ranks", expected, weights.precision()));
        }
        let ranks = self.world_size();
        let inner = config.intermediate_size;
        for (what, got) in [("KV heads", config.num_kv_heads), ("columns of an MLP", inner)] {
            if !got.is_multiple_of(ranks) {
                return Err(ModelError::input(
                    "number of ranks",
                    format!("a divisor of the model's {got} {what}"),
                    ranks,
                ));
            }
        }
        self.comm.group().agree("the model's configuration", &format!("{config:?}, {}", weights.precision()))?;
        self.comm.group().agree("what the ranks share", &self.mode.to_string())?;
        self.comm.group().agree("the tiles of the heads", &self.digest_of_tiles())?;
        if let Some(tiles) = &self.tiles {
            tiles.check(config)?;
        }
        let mode = match (self.mode, DeviceMemory::of(weights.device())?) {
            (Mode::Auto, None) => Mode::Sequence,
            (Mode::Auto, Some(memory)) => {
                let needed = weights.bytes(config) + shared_bytes(config, weights) / ranks as u64;
                if needed <= self.least(memory.free)? / 5 * 3 { Mode::Sequence } else { Mode::Tensor }
            }
            (mode, _) => mode,
        };
        Ok(Self { mode, ..self })
    }

    /// Refuses ranks with other weights of one configuration, by the values of one tensor that all ranks have.
    pub(crate) fn check_weights(&self, norm: &Tensor) -> Result<()> {
        let values = norm.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        Ok(self.comm.group().agree("the model's weights", &format!("a final norm of {values:?}"))?)
    }

    /// A rank's part of `len` columns.
    pub(crate) fn part_of(&self, rank: usize, len: usize) -> Range<usize> {
        part(len, rank, self.world_size())
    }

    /// This rank's part of `len` columns.
    pub(crate) fn own(&self, len: usize) -> Range<usize> {
        self.part_of(self.comm.rank(), len)
    }

    /// The KV heads of a layer, one rank after the other.
    fn kv_heads(&self, layer: usize, num_kv_heads: usize) -> Vec<usize> {
        match &self.tiles {
            Some(tiles) => tiles.placed(layer, self.world_size()),
            None => (0..num_kv_heads).collect(),
        }
    }

    /// The KV heads of a rank in a layer, in order.
    pub(crate) fn kv_heads_of(&self, rank: usize, layer: usize, num_kv_heads: usize) -> Vec<usize> {
        self.kv_heads(layer, num_kv_heads)[self.part_of(rank, num_kv_heads)].to_vec()
    }

    /// The place of each KV head of a layer among those of all ranks, counted rank after rank.
    pub(crate) fn slots(&self, layer: usize, num_kv_heads: usize) -> Vec<usize> {
        let mut slots = vec![0; num_kv_heads];
        for (slot, head) in self.kv_heads(layer, num_kv_heads).into_iter().enumerate() {
            slots[head] = slot;
        }
        slots
    }

    /// The tiles of the busiest rank over the mean of the ranks, if a prompt has these tiles: the ranks wait for it in
    /// each layer.
    pub fn busiest(&self, tiles: &HeadTiles) -> f64 {
        tiles.busiest(self.world_size(), |layer, num_kv_heads| self.kv_heads(layer, num_kv_heads))
    }

    /// The statistics of all heads in the model's order, on every rank, from those of its own heads, both by layer.
    ///
    /// # Errors
    /// [`ModelError::Ranks`] if a rank is lost or has other layers.
    pub fn all_heads(
        &self,
        own: &BTreeMap<usize, AttnStats>,
        config: &DecoderConfig,
    ) -> Result<BTreeMap<usize, AttnStats>> {
        let unreadable = |error: serde_json::Error| ModelError::config("statistics of a rank", error);
        let layer = |(&layer, own): (&usize, &AttnStats)| {
            let parts = self.comm.group().exchange(&serde_json::to_vec(own).map_err(unreadable)?)?;
            let parts = parts.iter().map(|part| serde_json::from_slice(part).map_err(unreadable));
            let placed = AttnStats::of_all_heads(&parts.collect::<Result<Vec<AttnStats>>>()?);
            Ok((layer, placed.in_order(&self.slots(layer, config.num_kv_heads))))
        };
        own.iter().map(layer).collect()
    }

    fn digest_of_tiles(&self) -> String {
        let Some(tiles) = &self.tiles else { return "none".to_owned() };
        let mut hasher = DefaultHasher::new();
        format!("{tiles:?}").hash(&mut hasher);
        format!("those of digest {:016x}", hasher.finish())
    }

    /// The smallest number of any rank.
    pub(crate) fn least(&self, number: u64) -> Result<u64> {
        let all = self.comm.group().exchange(&number.to_le_bytes())?;
        let read = |bytes: Vec<u8>| bytes.try_into().map(u64::from_le_bytes).ok();
        Ok(all.into_iter().filter_map(read).min().unwrap_or(number))
    }

    /// The shards of a chunk of `len` tokens; `None` if every rank computes all of them.
    pub(crate) fn shards(&self, batch: usize, len: usize) -> Option<Shards<'_>> {
        let ranks = self.world_size();
        (self.mode == Mode::Sequence && ranks > 1 && len >= ranks * FEWEST_TOKENS).then(|| Shards {
            comm: self.comm(),
            batch,
            len,
        })
    }

    /// The sum of all ranks' parts `x`.
    pub(crate) fn sum(&self, x: Tensor) -> Result<Tensor> {
        match self.world_size() {
            1 => Ok(x),
            _ => Ok(self.comm.all_reduce(&x)?),
        }
    }
}

/// Bytes of the output projections and MLPs, of which a rank in sequence mode has its part a second time.
fn shared_bytes(config: &DecoderConfig, weights: &Weights) -> u64 {
    let of_layer = config.hidden_size * (config.num_heads * config.head_dim + 3 * config.intermediate_size);
    let bytes = match weights.linear_precision() {
        LinearPrecision::AsRead => weights.dtype().size_in_bytes(),
        LinearPrecision::Int8 => 1,
    };
    (config.num_layers * of_layer * bytes) as u64
}

/// Part `index` of `count` nearly equal parts of `0..len`.
fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    len * index / count..len * (index + 1) / count
}

/// The tokens of one chunk, sharded among the ranks in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shards<'a> {
    comm: &'a dyn Communicator,
    batch: usize,
    len: usize,
}

impl Shards<'_> {
    /// Tokens of a rank.
    fn of(&self, rank: usize) -> Range<usize> {
        part(self.len, rank, self.comm.world_size())
    }

    fn all(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.comm.world_size()).map(|rank| self.of(rank))
    }

    /// This rank's tokens.
    pub(crate) fn own(&self) -> Range<usize> {
        self.of(self.comm.rank())
    }

    /// From the outputs for the heads of each rank, `(batch, own tokens, width)`, to those for the own heads of all
    /// tokens: `(batch, len, width)`.
    pub(crate) fn to_heads(self, outputs: &[Tensor]) -> Result<Tensor> {
        let sends = outputs.iter().map(|x| Ok(x.flatten_to(1)?)).collect::<Result<Vec<_>>>()?;
        let rows = self.all().map(|tokens| self.batch * tokens.len()).collect::<Vec<_>>();
        let received = self.comm.all_to_all(&sends, &rows)?;
        self.joined(received, &rows)
    }

    /// From the output of the own heads for all tokens, `(batch, len, width)`, to that of all heads for the own tokens:
    /// `(batch, own tokens, ranks * width)`. `slots` are [`Parallel::slots`].
    pub(crate) fn to_tokens(self, out: &Tensor, slots: &Tensor) -> Result<Tensor> {
        let of_rank = |tokens: Range<usize>| Ok(out.narrow(1, tokens.start, tokens.len())?.flatten_to(1)?);
        let sends = self.all().map(of_rank).collect::<Result<Vec<_>>>()?;
        let (ranks, own) = (self.comm.world_size(), self.own().len());
        let rows = self.batch * own;
        let received = self.comm.all_to_all(&sends, &vec![rows; ranks])?;
        Ok(fused::join_heads(&received, ranks, slots)?.reshape((self.batch, own, ()))?)
    }

    /// From the output of the own heads for some tokens, `(batch, tokens, width)`, on every rank that of all heads: `(batch,
    /// tokens, ranks * width)`. `slots` are [`Parallel::slots`].
    pub(crate) fn of_all_heads(&self, out: &Tensor, slots: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = out.dims3()?;
        let (ranks, rows) = (self.comm.world_size(), batch * tokens);
        let received = self.comm.all_gather(&out.flatten_to(1)?.contiguous()?, &vec![rows; ranks])?;
        Ok(fused::join_heads(&received, ranks, slots)?.reshape((batch, tokens, ()))?)
    }

    /// The rows of positions `from..` of the chunk on every rank: `(batch, len - from, width)`. `rows_of` gives a range of
    /// the own tokens, in the dtype and width of `x` `(batch, own tokens, width)`.
    pub(crate) fn gather(
        &self,
        from: usize,
        x: &Tensor,
        rows_of: impl FnOnce(Range<usize>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let wanted = |tokens: Range<usize>| tokens.start.max(from)..tokens.end.max(from);
        let own = self.own();
        let mine = wanted(own.clone());
        let x = match own.len() - mine.len()..own.len() {
            // Kernels are not launched on nothing.
            range if range.is_empty() => x.narrow(1, 0, 0)?,
            range => rows_of(range)?,
        };
        let rows = self.all().map(|tokens| self.batch * wanted(tokens).len()).collect::<Vec<_>>();
        let received = self.comm.all_gather(&x.flatten_to(1)?, &rows)?;
        self.joined(received, &rows)
    }

    /// `(batch, tokens, width)` from the rows of all ranks, one rank after the other.
    fn joined(&self, received: Tensor, rows: &[usize]) -> Result<Tensor> {
        let width = received.dim(1)?;
        if self.batch == 1 {
            return Ok(received.unsqueeze(0)?);
        }
        let mut start = 0;
        let of_rank = |&rows: &usize| {
            start += rows;
            received.narrow(0, start - rows, rows)?.reshape((self.batch, rows / self.batch, width))
        };
        Ok(Tensor::cat(&rows.iter().map(of_rank).collect::<Result<Vec<_>, _>>()?, 1)?)
    }
}
