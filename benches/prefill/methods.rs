//! The methods: our decoder with each attention, and Candle's own model.

use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_s2o::{Attention, AttnStats, Dense, S2o, S2oConfig};
use clap::ValueEnum;
use s2o_models::{Chunk, Decoder, DecoderConfig, DecoderOptions, KvStorage, LinearPrecision, Parallel, PrefillOptions};

use crate::decode::{self, Decoded};
use crate::logits::first_token;
use crate::measure::gpu::Gpu;
use crate::ranks::meet;
use crate::split::{Ranked, Split, Watched};
#[cfg(feature = "flash-attn")]
use crate::stock::Stock;

/// A model with an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Our decoder, S2O with its default options.
    S2o,
    /// As `s2o`, with every chunk taken for the end of the prompt: what an engine gets that does not tell its end.
    S2oChunks,
    /// Our decoder, S2O with the paper's settings.
    Paper,
    /// Our decoder, exact attention.
    Dense,
    /// Our decoder with linear layers in int8, S2O with its default options.
    S2oInt8,
    /// Our decoder with linear layers in int8, exact attention.
    DenseInt8,
    /// Our decoder with a KV cache in 8 bits, S2O with its default options.
    S2oKv8,
    /// Our decoder with a KV cache in memory of the host, S2O with its default options.
    S2oKvHost,
    /// Our decoder with a KV cache in 8 bits, exact attention.
    DenseKv8,
    /// Our decoder with linear layers in int8 and a KV cache in 8 bits, S2O with its default options.
    S2oInt8Kv8,
    /// Candle's own model with candle-flash-attn (feature flash-attn).
    Stock,
}

impl Method {
    /// The name in rows and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::S2o => "s2o",
            Self::S2oChunks => "s2o, end of the prompt not known",
            Self::Paper => "s2o, paper's preset",
            Self::Dense => "dense",
            Self::S2oInt8 => "s2o, linear layers in int8",
            Self::DenseInt8 => "dense, linear layers in int8",
            Self::S2oKv8 => "s2o, KV cache in 8 bits",
            Self::S2oKvHost => "s2o, KV cache in host memory",
            Self::DenseKv8 => "dense, KV cache in 8 bits",
            Self::S2oInt8Kv8 => "s2o, linear layers in int8, KV cache in 8 bits",
            Self::Stock => "stock, candle-flash-attn 0.11.1",
        }
    }

    /// The options of S2O; `None` for other methods.
    pub fn config(self) -> Option<S2oConfig> {
        match self {
            Self::S2o | Self::S2oChunks | Self::S2oInt8 | Self::S2oKv8 | Self::S2oKvHost | Self::S2oInt8Kv8 => {
                Some(S2oConfig::default())
            }
            Self::Paper => Some(S2oConfig::paper()),
            Self::Dense | Self::DenseInt8 | Self::DenseKv8 | Self::Stock => None,
        }
    }

    /// Precision of the linear layers.
    pub fn linear(self) -> LinearPrecision {
        match self {
            Self::S2oInt8 | Self::DenseInt8 | Self::S2oInt8Kv8 => LinearPrecision::Int8,
            _ => LinearPrecision::AsRead,
        }
    }

    /// Precision and place of the KV cache.
    pub fn kv(self) -> KvStorage {
        match self {
            Self::S2oKv8 | Self::DenseKv8 | Self::S2oInt8Kv8 => KvStorage::Int8,
            Self::S2oKvHost => KvStorage::Host,
            _ => KvStorage::AsComputed,
        }
    }

    /// Whether tokens are decoded after its prefill, for the time of a token.
    pub fn decodes(self) -> bool {
        matches!(self, Self::S2o | Self::S2oInt8 | Self::S2oKv8 | Self::S2oKvHost | Self::S2oInt8Kv8)
    }

    fn s2o(self) -> Option<S2o> {
        let s2o = S2o::new(self.config()?);
        Some(if self == Self::S2oChunks { s2o.without_prompt_end() } else { s2o })
    }

    fn attention(self) -> Box<dyn Attention> {
        match self.s2o() {
            Some(s2o) => Box::new(s2o),
            None => Box::new(Dense),
        }
    }
}

/// The models, on the same weights.
pub struct Models<'a> {
    gpu: &'a Gpu,
    decoder: Decoder,
    /// The same with linear layers in int8, if a method has them.
    int8: Option<Decoder>,
    chunk: Chunk,
    #[cfg(feature = "flash-attn")]
    stock: Option<Stock>,
}

impl<'a> Models<'a> {
    /// Loads our decoder, and Candle's model if one of `methods` is that and it is supported.
    pub fn load(
        gpu: &'a Gpu,
        config: &DecoderConfig,
        vb: VarBuilder,
        parallel: Option<Parallel>,
        chunk: Chunk,
        methods: &[Method],
    ) -> Result<Self> {
        let with_stock = methods.contains(&Method::Stock);
        let load = |linear| {
            let options = DecoderOptions { linear, parallel: parallel.clone(), ..DecoderOptions::default() };
            Decoder::load_with(config, &vb, options, None)
        };
        let decoder = load(LinearPrecision::AsRead)?;
        let with_int8 = methods.iter().any(|method| method.linear() == LinearPrecision::Int8);
        let int8 = with_int8.then(|| load(LinearPrecision::Int8)).transpose()?;
        #[cfg(feature = "flash-attn")]
        let stock = if with_stock { loaded(config, vb) } else { None };
        #[cfg(not(feature = "flash-attn"))]
        anyhow::ensure!(
            !with_stock,
            "--methods stock: expected a build with candle-flash-attn, got one without; \
             build with --features cuda,flash-attn"
        );
        Ok(Self {
            gpu,
            decoder,
            int8,
            chunk,
            #[cfg(feature = "flash-attn")]
            stock,
        })
    }

    /// Our decoder with the linear layers of a method.
    fn decoder(&self, method: Method) -> &Decoder {
        match (&self.int8, method.linear()) {
            (Some(decoder), LinearPrecision::Int8) => decoder,
            _ => &self.decoder,
        }
    }

    /// The GPUs that share our decoder, if there are several.
    pub fn parallel(&self) -> Option<&Parallel> {
        self.decoder.parallel()
    }

    /// The name of Candle's model in rows, if it is wanted.
    pub fn stock_name(&self) -> Option<&'static str> {
        #[cfg(feature = "flash-attn")]
        return self.stock.as_ref().map(Stock::name);
        #[cfg(not(feature = "flash-attn"))]
        None
    }

    /// Logits `(vocab_size)` after the prompt, with a new cache: the memory that a first prompt takes.
    pub fn run(&mut self, method: Method, tokens: &Tensor) -> Result<Tensor> {
        match method {
            Method::Stock => Ok(self.stock_run(tokens)?.0),
            _ => self.prefill(method, method.attention().as_ref(), tokens),
        }
    }

    /// Milliseconds from the call to the id of the first token on the host. The cache is allocated before, as it is
    /// from the second prompt on; Candle's model allocates none.
    pub fn first_token_ms(&mut self, method: Method, tokens: &Tensor) -> Result<f64> {
        if method == Method::Stock {
            return Ok(self.stock_run(tokens)?.1);
        }
        let attention = method.attention();
        let decoder = self.decoder(method);
        let mut cache = decoder.new_cache_in(method.kv(), 1, tokens.dim(1)?)?;
        meet(self.parallel())?;
        first_token(&self.gpu.device, || {
            let out = decoder.prefill(tokens, &mut cache, attention.as_ref(), self.options())?;
            Ok(out.last_logits()?.flatten_all()?)
        })
        .map(|(_, ms)| ms)
    }

    /// The time of our decoder by part, and its chunk in tokens.
    pub fn split(&self, method: Method, tokens: &Tensor) -> Result<(Split, usize)> {
        let attention = method.attention();
        let watched = Watched::new(attention.as_ref(), self.gpu);
        let total = self.gpu.time(&mut || self.prefill(method, &watched, tokens).map(drop))?;
        let ranking = match method.s2o() {
            Some(s2o) => {
                let ranked = Ranked::new(s2o);
                self.prefill(method, &ranked, tokens)?;
                ranked.ranking_ms()
            }
            None => 0.0,
        };
        Ok((Split { total, attention: watched.ms()?, ranking, idle: watched.idle() }, watched.chunk()))
    }

    /// Share of the causal tiles that our decoder computes.
    pub fn density(&self, method: Method, tokens: &Tensor) -> Result<f64> {
        let Some(s2o) = method.s2o().map(S2o::with_stats) else { return Ok(1.0) };
        self.prefill(method, &s2o, tokens)?;
        let mut stats = s2o.take_stats()?;
        if let Some(parallel) = self.parallel() {
            stats = parallel.all_heads(&stats, self.decoder(method).config())?;
        }
        Ok(AttnStats::joint_density(stats.values()))
    }

    /// Decoding after a prompt, in each precision that a method has.
    pub fn decode(&self, methods: &[Method], prompt: &Tensor, count: usize) -> Result<Vec<(Method, Decoded)>> {
        let ours = methods.iter().copied().filter(|method| method.decodes());
        ours.map(|method| {
            let (decoder, linear, kv) = (self.decoder(method), method.linear(), method.kv());
            Ok((method, decode::decode(self.gpu, decoder, linear, kv, prompt, count)?))
        })
        .collect()
    }

    fn prefill(&self, method: Method, attention: &dyn Attention, tokens: &Tensor) -> Result<Tensor> {
        let decoder = self.decoder(method);
        let mut cache = decoder.new_cache_in(method.kv(), 1, tokens.dim(1)?)?;
        let out = decoder.prefill(tokens, &mut cache, attention, self.options())?;
        Ok(out.last_logits()?.flatten_all()?)
    }

    fn options(&self) -> PrefillOptions<'static> {
        PrefillOptions::new().chunk(self.chunk)
    }

    #[cfg(feature = "flash-attn")]
    fn stock_run(&mut self, tokens: &Tensor) -> Result<(Tensor, f64)> {
        let stock = self.stock.as_mut().context("Candle's model was not loaded")?;
        stock.clear()?;
        let out = first_token(&self.gpu.device, || stock.prefill(tokens));
        // Releases keys and values even after an error, because the other methods need these gigabytes.
        stock.clear()?;
        out
    }

    #[cfg(not(feature = "flash-attn"))]
    fn stock_run(&mut self, _: &Tensor) -> Result<(Tensor, f64)> {
        None.context("Candle's model was not loaded")
    }
}

/// Candle's model. If it cannot be loaded, prints the reason, because our decoder can still be timed.
#[cfg(feature = "flash-attn")]
fn loaded(config: &DecoderConfig, vb: VarBuilder) -> Option<Stock> {
    Stock::load(config, vb).inspect_err(|error| println!("{} does not run: {error}", Method::Stock.name())).ok()
}
