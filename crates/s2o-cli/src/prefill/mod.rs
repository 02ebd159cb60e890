//! Long-context prefill with dense attention and with S2O: time, density and difference.

use std::path::PathBuf;

use anyhow::Result;
use candle_s2o::{Attention, Dense, S2o};
use clap::{Args, ValueEnum};
use s2o_models::{GenerationOptions, HeadTiles, KvStorage};
use tracing_chrome::ChromeLayerBuilder;
use tracing_subscriber::prelude::*;

mod report;
mod run;

use self::report::Report;
use self::run::Session;
use crate::layout::Look;
use crate::model_flags::ModelFlags;
use crate::prompt_flags::PromptFlags;
use crate::ranks::{RankFlags, Ranks};
use crate::s2o_flags::S2oFlags;
use crate::{exit, wrong_usage};

/// Prefill a long prompt with dense or S2O attention, or both side by side, and generate from it
///
/// Without arguments: the built-in model on a passkey prompt of 8192 tokens, both methods. With your own prompt, only
/// S2O unless --compare is given.
#[derive(Debug, Args)]
pub struct Flags {
    /// Run only this attention, unless --compare is given [default: s2o for your own prompt, otherwise both]
    #[arg(long, value_name = "METHOD")]
    attention: Option<Method>,
    /// The same as `--attention dense`, as in Candle's examples
    #[arg(long, conflicts_with = "attention")]
    use_flash_attn: bool,
    /// Run dense and S2O side by side; the default unless you give your own prompt
    #[arg(long)]
    compare: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Write the time spent in each layer as a Chrome trace (trace-TIMESTAMP.json)
    #[arg(long)]
    tracing: bool,
    /// Write the synthetic model to this new directory, as safetensors that any engine loads [default precision: bf16],
    /// and exit
    #[arg(long, value_name = "DIR", requires = "synthetic")]
    save: Option<PathBuf>,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    prompt: PromptFlags,
    #[command(flatten)]
    s2o: S2oFlags,
    #[command(flatten)]
    ranks: RankFlags,
    #[command(flatten)]
    generation: GenerationFlags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    S2o,
    Dense,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Generation")]
struct GenerationFlags {
    /// Maximum number of tokens to generate [default: 256 for your own prompt, otherwise 24]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    sample_len: Option<usize>,
    /// Temperature of sampling; 0 takes the likeliest token [default: 0]
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample among the likeliest tokens that together reach this probability [default: all tokens]
    #[arg(long, requires = "temperature")]
    top_p: Option<f64>,
    /// Sample among this many likeliest tokens [default: all tokens]
    #[arg(long, requires = "temperature")]
    top_k: Option<usize>,
    /// Penalty on tokens that occurred recently; 1 is no penalty
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// Number of previous tokens that the penalty considers
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    repeat_last_n: usize,
}

impl Flags {
    /// The methods to run, dense first.
    fn methods(&self) -> &'static [Method] {
        match self.attention {
            _ if self.compare => &[Method::Dense, Method::S2o],
            _ if self.use_flash_attn => &[Method::Dense],
            Some(Method::Dense) => &[Method::Dense],
            Some(Method::S2o) => &[Method::S2o],
            None if self.prompt.is_own() => &[Method::S2o],
            None => &[Method::Dense, Method::S2o],
        }
    }

    fn generation(&self) -> GenerationOptions {
        let flags = &self.generation;
        GenerationOptions {
            max_new_tokens: flags.sample_len.unwrap_or(if self.prompt.is_own() { 256 } else { 24 }),
            temperature: flags.temperature,
            top_k: flags.top_k,
            top_p: flags.top_p,
            seed: self.prompt.seed,
            repeat_penalty: flags.repeat_penalty,
            repeat_last_n: flags.repeat_last_n,
        }
    }

    pub fn run(&self) -> Result<()> {
        if let Some(directory) = &self.save {
            return exit::print(&self.model.save(directory)?);
        }
        let given = self.s2o.given().or_else(|| self.ranks.given_tiles());
        if let Some(given) = given.filter(|_| self.methods() == [Method::Dense]) {
            let dense = if self.use_flash_attn { "--use-flash-attn" } else { "--attention dense" };
            wrong_usage("prefill", &format!("{given}: no effect on exact attention; leave out '{dense}'"));
        }
        // The trace is written when this is dropped.
        let _trace = self.tracing.then(|| {
            let (layer, guard) = ChromeLayerBuilder::new().include_args(true).build();
            tracing_subscriber::registry().with(layer).init();
            guard
        });
        // Checked first, so that a wrong option does not cost the loading of 16 GB.
        let s2o = self.s2o.attention()?;
        self.generation().check().map_err(|error| anyhow::anyhow!("--{error}"))?;
        match self.ranks.join(&self.model)? {
            None => self.run_with(&s2o, None),
            Some(ranks) => ranks.run(|| self.run_with(&s2o, Some(&ranks))),
        }
    }

    fn run_with(&self, s2o: &S2o, ranks: Option<&Ranks>) -> Result<()> {
        let methods = self.methods();
        let prints = ranks.is_none_or(Ranks::is_first);
        let prompt = if prints { Some(self.prompt.read(&self.model)?) } else { None };
        let model = self.model.load_shared(ranks)?;
        // Dense attention is then the reference for the precision too.
        let as_read = if methods.len() > 1 { self.model.load_as_read(ranks)? } else { None };
        let is_narrow = as_read.is_some() || model.decoder.kv_storage() == KvStorage::Int8;
        let reference = (methods.len() > 1 && is_narrow).then(|| as_read.as_ref().unwrap_or(&model));
        self.s2o.check_layers(model.config().num_layers)?;
        let mut prompt = prompt.map(|prompt| prompt.encode(&model)).transpose()?.unwrap_or_default();
        if let Some(ranks) = ranks {
            let options = (methods, &self.s2o, self.generation(), self.model.chunk, self.json);
            ranks.agree(&format!("{options:?}"))?;
            prompt.tokens = ranks.tokens_of_first(&prompt.tokens)?;
        }

        let streams = prints && !self.json && methods.len() == 1;
        let session = |model, kv| Session::new(model, kv, &prompt.tokens, self.model.chunk, self.generation());
        let mut on_text = |text: &str| if streams { exit::print(text) } else { Ok(()) };
        let mut report = Report {
            model: &model,
            prompt: &prompt,
            s2o,
            by_layer: self.s2o.by_layer(),
            reference: reference.map(|model| model.decoder.precision_with(KvStorage::AsComputed)),
            dense: None,
            sparse: None,
        };
        let mut left = methods;
        if let Some(reference) = reference {
            let mut session = session(reference, KvStorage::AsComputed)?;
            session.compares(&[&Dense])?;
            report.dense = Some(session.run("dense", &Dense, &mut on_text)?);
            left = &[Method::S2o];
        }
        let mut session = session(&model, model.decoder.kv_storage())?;
        let attention = |method: &Method| match method {
            Method::Dense => &Dense as &dyn Attention,
            Method::S2o => s2o,
        };
        let attentions: Vec<&dyn Attention> = left.iter().map(attention).collect();
        if methods.len() > 1 {
            session.compares(&attentions)?;
        } else if model.is_synthetic {
            // Such a model is only there to be timed.
            session.warm_up(&attentions)?;
            s2o.take_stats()?;
        }
        for method in left {
            match method {
                Method::Dense => report.dense = Some(session.run("dense", &Dense, &mut on_text)?),
                Method::S2o => {
                    let run = session.run("S2O", s2o, &mut on_text)?;
                    let mut stats = s2o.take_stats()?;
                    if let Some(parallel) = model.decoder.parallel() {
                        stats = parallel.all_heads(&stats, model.config())?;
                    }
                    if let Some(ranks) = ranks.filter(|ranks| ranks.is_first()) {
                        ranks.keep_tiles(&HeadTiles::of(&stats, model.config()))?;
                    }
                    report.sparse = Some((run, stats));
                }
            }
        }
        drop(session);
        if !prints {
            Ok(())
        } else if self.json {
            exit::print(&format!("{}\n", serde_json::to_string(&report.json()?)?))
        } else {
            let look = Look::of_stdout();
            // Separates the output from the generated text.
            let gap = if streams { "\n\n" } else { look.gap() };
            exit::print(&format!("{gap}{}", report.text(look)?))
        }
    }
}
