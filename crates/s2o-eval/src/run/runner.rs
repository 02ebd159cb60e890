//! [`Runner`]: runs samples with several methods on one model.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use candle_core::{Device, Tensor};
use candle_s2o::HeadWork;
use s2o_models::{Chunk, DeviceMemory, KvCache, LoadedModel, ModelError};

use super::answers;
use super::journal::Journal;
use super::outcome::{Outcome, SampleResult, Setting};
use super::passage::{Passage, perplexity};
use super::sample::Sample;
use super::trial::Trial;
use crate::error::{EvalError, Result};
use crate::method::{self, Method, MethodSpec};
use crate::tasks::{ChatTemplate, Item};

/// Upper bound of the tokens that template and answer add to a generated prompt.
const ROOM_FOR_ANSWER: usize = 256;

/// A length in tokens above the shortest prompt of every task.
pub(super) const SHORT: usize = 4096;

/// Bytes for the caches of sequences that are decoded together on a CPU.
const CACHES_ON_CPU: u64 = 1 << 30;

/// A model, and the methods and chunk sizes that every sample is run with.
#[derive(Debug)]
pub struct Runner<'m> {
    pub(super) model: &'m LoadedModel,
    template: ChatTemplate,
    pub(super) methods: Vec<(String, Box<dyn Method>)>,
    pub(super) chunks: Vec<Chunk>,
}

/// An event of a run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A trial starts.
    Started(&'a Trial<'a>),
    /// Its outcome is in the journal.
    Finished(&'a Outcome),
}

/// What a prefill yields: the result of a passage, or the logits `(1, vocab_size)` from which an answer is decoded.
enum Prefilled {
    Result(SampleResult),
    Logits(Tensor),
}

/// The work of a prefill.
struct Work {
    density: f64,
    layer_density: Vec<f64>,
    time: Duration,
}

enum Content<'s> {
    Item(Cow<'s, Item>),
    Passage(&'s Passage),
}

impl<'m> Runner<'m> {
    /// A runner without methods that takes prompts whole.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] for synthetic weights, whose answers mean nothing, and for a tokenizer that lacks the
    /// template's tokens.
    pub fn new(model: &'m LoadedModel, template: ChatTemplate) -> Result<Self> {
        if model.is_synthetic {
            let got = format!("{}, whose answers mean nothing", model.name);
            return Err(EvalError::wrong("model to evaluate", "trained weights", got));
        }
        template.check(&model.tokenizer)?;
        Ok(Self { model, template, methods: Vec::new(), chunks: vec![Chunk::Whole] })
    }

    /// Adds methods of the table. A method that was already added is skipped.
    ///
    /// # Errors
    /// As [`MethodSpec::build`].
    pub fn specs(mut self, specs: &[MethodSpec]) -> Result<Self> {
        for spec in specs {
            self = self.method(spec.to_string(), spec.build()?);
        }
        Ok(self)
    }

    /// Adds a method under a name. An earlier method of the same name is kept.
    #[must_use]
    pub fn method(mut self, name: impl Into<String>, method: Box<dyn Method>) -> Self {
        let name = name.into();
        if !self.methods.iter().any(|(there, _)| *there == name) {
            self.methods.push((name, method));
        }
        self
    }

    /// Runs every method with each of these chunk sizes.
    #[must_use]
    pub fn chunks(mut self, chunks: impl IntoIterator<Item = Chunk>) -> Self {
        self.chunks = chunks.into_iter().collect();
        self
    }

    /// Mean density of a method's prefills of `samples`, with the first chunk size.
    pub(super) fn density(&self, spec: &MethodSpec, samples: &[&Sample]) -> Result<f64> {
        let method = spec.build()?;
        let mut sum = 0.0;
        for sample in samples {
            let (_, tokens) = self.encode(sample)?;
            let mut cache = self.model.decoder.new_cache(1, tokens.len())?;
            let chunk = self.model.decoder.chunk_tokens(self.first_chunk(), 1)?;
            answers::prefill(self.model, &tokens, &mut cache, method.as_ref(), chunk)?;
            sum += densities(&method.take_work()?, self.model.config().num_layers).0;
        }
        Ok(sum / samples.len() as f64)
    }

    /// Runs trials of [`Runner::pending`] and adds their outcomes to the journal. The answers to one prompt are decoded
    /// together, as many as have their caches in a quarter of a GPU's free memory or in 1 GiB on a CPU.
    ///
    /// # Errors
    /// Errors of items, the model, methods and the journal. Earlier outcomes stay in the journal.
    pub fn run(&self, trials: &[Trial], journal: &mut Journal, on_event: &mut dyn FnMut(Event)) -> Result<()> {
        for trials in trials.chunk_by(|a, b| a.key.sample == b.key.sample) {
            let Some(first) = trials.first() else { continue };
            let (content, tokens) = self.encode(first.sample)?;
            let room = content.room(tokens.len());
            // Passages have no answers to decode together.
            let together = content.item().map_or(Ok(1), |_| self.together(room))?;
            for trials in trials.chunks(together) {
                let cache = self.model.decoder.new_cache(trials.len(), room)?;
                let (outcomes, error) = self.outcomes(trials, &content, &tokens, &cache, on_event)?;
                for outcome in outcomes {
                    journal.append(outcome)?;
                    if let Some(outcome) = journal.outcomes().last() {
                        on_event(Event::Finished(outcome));
                    }
                }
                error.map_or(Ok(()), Err)?;
            }
        }
        Ok(())
    }

    /// Number of sequences of `room` positions to decode together.
    pub(super) fn together(&self, room: usize) -> Result<usize> {
        let memory = DeviceMemory::of(self.model.decoder.device())?.map_or(CACHES_ON_CPU, |memory| memory.free / 4);
        Ok(usize::try_from(memory / self.cache_bytes(room).max(1)).unwrap_or(usize::MAX).max(1))
    }

    /// Bytes of the KV cache of one sequence of `room` positions.
    pub(super) fn cache_bytes(&self, room: usize) -> u64 {
        self.model.decoder.cache_bytes(1, room)
    }

    /// Number of trials of each sample.
    pub(super) fn variants(&self) -> usize {
        self.methods.len() * self.chunks.len()
    }

    pub(super) fn first_chunk(&self) -> Chunk {
        self.chunks.first().copied().unwrap_or_default()
    }

    /// Checks the lengths of `samples` before any of them is run: encodes one prompt of each task and length that may
    /// be too short for the task or too long for the model.
    ///
    /// # Errors
    /// [`EvalError::ContextTooShort`], [`EvalError::ContextTooLong`], [`EvalError::Tokenizer`].
    pub fn check_lengths(&self, samples: &[Sample]) -> Result<()> {
        let mut seen = HashSet::new();
        for sample in samples {
            let answer = match sample {
                Sample::Given(item) => item.max_new_tokens.max(ROOM_FOR_ANSWER),
                Sample::Generated { .. } => ROOM_FOR_ANSWER,
                Sample::Passage(_) => 0,
            };
            let length = sample.context_tokens();
            let is_long = length.saturating_add(answer) > self.model.config().max_positions;
            if (length < SHORT || is_long) && seen.insert((sample.task(), length)) {
                self.encode(sample)?;
            }
        }
        Ok(())
    }

    fn encode<'s>(&self, sample: &'s Sample) -> Result<(Content<'s>, Vec<u32>)> {
        let fits = |got: usize| match self.model.config().max_positions {
            expected if got > expected => {
                let (task, tokens) = (sample.task().to_owned(), sample.context_tokens());
                Err(EvalError::ContextTooLong { task, tokens, expected, got })
            }
            _ => Ok(()),
        };
        // Avoids making a text that the model cannot read.
        fits(sample.context_tokens())?;
        let (content, tokens) = match sample {
            Sample::Passage(passage) => (Content::Passage(passage), passage.encode(self.model)?),
            Sample::Generated { .. } | Sample::Given(_) => match sample.item(&self.model.tokenizer)? {
                Some(item) => {
                    let tokens = self.template.encode(&self.model.tokenizer, &item)?;
                    (Content::Item(item), tokens)
                }
                None => return Err(ModelError::EmptyPrompt.into()),
            },
        };
        fits(content.room(tokens.len()))?;
        Ok((content, tokens))
    }

    /// The outcomes of trials on one sample, and the error that ended them early.
    fn outcomes(
        &self,
        trials: &[Trial],
        content: &Content,
        tokens: &[u32],
        cache: &KvCache,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<(Vec<Outcome>, Option<EvalError>)> {
        let (mut prefills, mut error) = (Vec::new(), None);
        for (i, trial) in trials.iter().enumerate() {
            on_event(Event::Started(trial));
            match self.prefill(trial, content, tokens, cache.sequences(i..i + 1)?) {
                Ok(prefill) => prefills.push(prefill),
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        let (work, results): (Vec<Work>, Vec<Prefilled>) = prefills.into_iter().unzip();
        let results = self.results(content, tokens, cache, results)?;
        let outcome = |((trial, work), result)| outcome(trial, content, tokens, work, result);
        Ok((trials.iter().zip(work).zip(results).map(outcome).collect(), error))
    }

    fn prefill(
        &self,
        trial: &Trial,
        content: &Content,
        tokens: &[u32],
        mut cache: KvCache,
    ) -> Result<(Work, Prefilled)> {
        let method = self.methods[trial.method].1.as_ref();
        // The chunk size is chosen after the cache is allocated, so that all methods use the same chunks.
        let chunk = self.model.decoder.chunk_tokens(trial.chunk, 1)?;
        let (prefilled, time) = match content {
            Content::Item(_) => {
                let (logits, time) = answers::prefill(self.model, tokens, &mut cache, method, chunk)?;
                (Prefilled::Logits(logits), time)
            }
            Content::Passage(passage) => {
                let (result, time) = perplexity(self.model, tokens, passage.last, &mut cache, method, chunk)?;
                (Prefilled::Result(result), time)
            }
        };
        let (density, layer_density) = densities(&method.take_work()?, self.model.config().num_layers);
        Ok((Work { density, layer_density, time }, prefilled))
    }

    /// Decodes the answers of the first sequences of `cache`, if the sample is an item.
    fn results(
        &self,
        content: &Content,
        tokens: &[u32],
        cache: &KvCache,
        prefilled: Vec<Prefilled>,
    ) -> Result<Vec<SampleResult>> {
        let (mut results, mut logits) = (Vec::new(), Vec::new());
        for prefilled in prefilled {
            match prefilled {
                Prefilled::Result(result) => results.push(result),
                Prefilled::Logits(last) => logits.push(last),
            }
        }
        if let Some(item) = content.item()
            && !logits.is_empty()
        {
            let mut cache = cache.sequences(0..logits.len())?;
            cache.set_len(tokens.len())?;
            for prediction in answers::decode(self.model, item, &mut cache, &logits)? {
                let score = item.score(&prediction);
                results.push(SampleResult::Answer { prediction, references: item.references.clone(), score });
            }
        }
        Ok(results)
    }

    pub(super) fn setting(&self, chunk: Chunk) -> Setting {
        let decoder = &self.model.decoder;
        let device = match decoder.device() {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
            Device::Metal(_) => "metal",
        };
        Setting {
            model: self.model.name.clone(),
            dtype: decoder.precision(),
            device: device.to_owned(),
            template: self.template,
            chunk: chunk.to_string(),
        }
    }
}

impl Content<'_> {
    fn item(&self) -> Option<&Item> {
        match self {
            Self::Item(item) => Some(item),
            Self::Passage(_) => None,
        }
    }

    /// Positions for prompt and answer. The last new token is not fed back.
    fn room(&self, prompt: usize) -> usize {
        prompt + self.item().map_or(0, |item| item.max_new_tokens.saturating_sub(1))
    }
}

fn outcome(trial: &Trial, content: &Content, tokens: &[u32], work: Work, result: SampleResult) -> Outcome {
    let item = content.item();
    Outcome {
        key: trial.key.clone(),
        digest: trial.sample.digest(),
        task: trial.sample.task().to_owned(),
        groups: item.map(|item| item.groups.clone()).unwrap_or_default(),
        context_tokens: trial.sample.context_tokens(),
        depth: item.and_then(|item| item.depth),
        index: item.map(|item| item.index).unwrap_or_default(),
        seed: item.and_then(|item| item.seed),
        prompt_tokens: tokens.len(),
        density: work.density,
        layer_density: work.layer_density,
        prefill_seconds: work.time.as_secs_f64(),
        result,
    }
}

/// Joint density of all layers, and density of each. A layer without work was dense; all layers have the same tiles.
fn densities(work: &BTreeMap<usize, Vec<HeadWork>>, num_layers: usize) -> (f64, Vec<f64>) {
    let of_layer = |layer| work.get(&layer).map_or(1.0, method::density);
    let layers: Vec<f64> = (0..num_layers).map(of_layer).collect();
    let known = work.len().min(num_layers) as f64;
    let joint = method::density(work.values().flatten());
    ((joint * known + num_layers as f64 - known) / num_layers as f64, layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_without_work_are_dense() {
        let half = |causal| vec![HeadWork::of_tiles(causal as f64 / 2.0, causal); 2];
        let work = BTreeMap::from([(1, half(10)), (3, half(10))]);
        assert_eq!(densities(&work, 4), (0.75, vec![1.0, 0.5, 1.0, 0.5]));
        assert_eq!(densities(&BTreeMap::new(), 2), (1.0, vec![1.0, 1.0]));
    }
}
