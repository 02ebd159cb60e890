//! [`Session`]: one loaded model, prompt and cache, so that all methods run under the same conditions.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{D, Tensor};
use candle_s2o::{Attention, PrefillCall};
use s2o_models::{
    Chunk, GenerationOptions, KvCache, KvStorage, LoadedModel, ModelError, PrefillOptions, PrefillOutput, TextStream,
    TokenStream,
};

use crate::progress::{self, Progress};

/// Number of positions at the prompt's end whose likeliest next token is compared.
const COMPARED_POSITIONS: usize = 64;
/// Tokens of the untimed run on a CPU.
const WARM_UP_TOKENS: usize = 128;

#[derive(Debug)]
pub struct Run {
    /// Wall time of the prefill.
    pub prefill: Duration,
    /// Part of it in the attention of each layer.
    pub attention: Vec<Duration>,
    /// Hidden state and logits.
    pub output: PrefillOutput,
    pub text: String,
    pub num_generated: usize,
    /// Wall time of generating.
    pub decode: Duration,
}

impl Run {
    pub fn attention_total(&self) -> Duration {
        self.attention.iter().sum()
    }

    /// Share of the compared positions at which the likeliest next token is that of `other`.
    pub fn top1_agreement(&self, other: &Self) -> Result<f64> {
        let [mine, theirs] =
            [self, other].map(|run| run.output.logits.argmax(D::Minus1)?.flatten_all()?.to_vec1::<u32>());
        let (mine, theirs) = (mine?, theirs?);
        let agree = mine.iter().zip(&theirs).filter(|(a, b)| a == b).count();
        Ok(agree as f64 / mine.len() as f64)
    }
}

/// The model, prompt and cache that all runs share.
pub struct Session<'m> {
    model: &'m LoadedModel,
    prompt: &'m [u32],
    tokens: Tensor,
    cache: KvCache,
    chunk: Option<usize>,
    num_logits: usize,
    options: GenerationOptions,
}

impl<'m> Session<'m> {
    /// Allocates the cache for the prompt and the tokens to generate. Fewer tokens are generated if the model's context
    /// ends earlier.
    pub fn new(
        model: &'m LoadedModel,
        kv: KvStorage,
        prompt: &'m [u32],
        chunk: Chunk,
        mut options: GenerationOptions,
    ) -> Result<Self> {
        let (expected, got) = (model.config().max_positions, prompt.len());
        if got > expected {
            return Err(ModelError::ContextTooLong { expected, got }.into());
        }
        let tokens = model.prompt(prompt)?;
        // The last new token is not fed back.
        let room = expected - got + 1;
        if options.max_new_tokens > room {
            eprintln!("generating at most {room} tokens: the model's context ends at {expected}");
            options.max_new_tokens = room;
        }
        let cache = model.decoder.new_cache_in(kv, 1, got + options.max_new_tokens.saturating_sub(1))?;
        // Chosen once, after the cache is allocated, so that all methods use the same chunks.
        let chunk = model.decoder.chunk_tokens(chunk, 1)?;
        Ok(Self { model, prompt, tokens, cache, chunk, num_logits: 1, options })
    }

    /// Prepares a fair comparison of several methods: all are warm, and return logits to compare.
    pub fn compares(&mut self, methods: &[&dyn Attention]) -> Result<()> {
        self.num_logits = COMPARED_POSITIONS.min(self.prompt.len());
        self.warm_up(methods)
    }

    /// Runs the methods before they are timed, for thread pools and code. A GPU loads a kernel at its first call and
    /// uses other kernels for short inputs, so on a GPU each method runs over a whole chunk.
    pub fn warm_up(&mut self, methods: &[&dyn Attention]) -> Result<()> {
        let on_cpu = self.model.decoder.device().is_cpu();
        let chunk = self.chunk.unwrap_or(self.prompt.len()).max(1);
        let (tokens, methods) = if on_cpu { (WARM_UP_TOKENS, &methods[..1]) } else { (chunk, methods) };
        let few = self.tokens.narrow(1, 0, tokens.min(self.prompt.len()))?;
        for method in methods {
            self.model.decoder.prefill(&few, &mut self.cache, *method, PrefillOptions::new())?;
            self.cache.reset();
        }
        Ok(())
    }

    /// Prefills with `method`, then generates from the cache of that prefill. `on_text` gets the text piece by piece.
    pub fn run(
        &mut self,
        name: &str,
        method: &dyn Attention,
        on_text: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Run> {
        self.cache.reset();
        let decoder = &self.model.decoder;
        let phase = progress::start(format!("prefill, {name}"), self.prompt.len(), "tokens");
        let layers = Mutex::new(vec![Duration::ZERO; decoder.config().num_layers]);
        let timed = Timed { inner: method, progress: &phase, layers };
        let options = PrefillOptions::new().chunk(self.chunk).num_logits(self.num_logits);
        let start = Instant::now();
        let output = decoder.prefill(&self.tokens, &mut self.cache, &timed, options)?;
        decoder.device().synchronize()?;
        let prefill = start.elapsed();
        let attention = timed.layers.into_inner().unwrap_or_else(PoisonError::into_inner);
        phase.finish();

        let start = Instant::now();
        let (text, num_generated) = self.generate(&output, on_text)?;
        Ok(Run { prefill, attention, output, text, num_generated, decode: start.elapsed() })
    }

    fn generate(
        &mut self,
        output: &PrefillOutput,
        on_text: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<(String, usize)> {
        let (model, logits) = (self.model, output.last_logits()?);
        let stream =
            TokenStream::new(&model.decoder, &mut self.cache, &logits, self.prompt, &model.eos_ids, &self.options)?;
        let mut pieces = TextStream::new(&model.tokenizer);
        let (mut text, mut count) = (String::new(), 0);
        let mut show = |piece: String| -> Result<()> {
            text.push_str(&piece);
            if piece.is_empty() { Ok(()) } else { on_text(&piece) }
        };
        for token in stream {
            show(pieces.push(token?)?)?;
            count += 1;
        }
        show(pieces.finish()?)?;
        Ok((text, count))
    }
}

/// An attention method with a timer. It also reports progress in tokens after each layer, because a chunk of a large
/// model takes too long for one report per chunk.
#[derive(Debug)]
struct Timed<'a> {
    inner: &'a dyn Attention,
    progress: &'a Progress,
    /// Time spent in each layer, over all chunks.
    layers: Mutex<Vec<Duration>>,
}

impl Attention for Timed<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        // Devices work asynchronously: without waiting, the projections would be timed too.
        q.device().synchronize()?;
        let start = Instant::now();
        let out = self.inner.prefill(call, q, k, v)?;
        out.device().synchronize()?;
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        layers[call.layer] += start.elapsed();
        let (chunk, end) = (q.dim(1)?, k.dim(1)?);
        self.progress.set(end - chunk + chunk * (call.layer + 1) / layers.len());
        Ok(out)
    }
}
