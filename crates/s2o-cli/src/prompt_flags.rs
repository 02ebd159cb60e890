//! The prompt: given text, a file, a passkey task of any length, or random tokens.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use s2o_eval::tasks::{ChatTemplate, passkey};
use s2o_models::LoadedModel;
use s2o_models::weights::synthetic;

use crate::model_flags::ModelFlags;

const DEFAULT_TOKENS: usize = 8192;

/// Flags for the prompt.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptFlags {
    /// The prompt; after a file, the question about it
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file that holds the prompt, or a document for `--prompt`; `-` reads stdin
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Hide a seven-digit key in real text and ask for it; the default if no other prompt is given
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file"])]
    passkey: bool,
    /// A prompt of this many random tokens, for timing; the default for synthetic models (8192 tokens)
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt", "prompt_file", "passkey", "context", "depth"])]
    tokens: Option<usize>,
    /// Tokens of the prompt: the length of a passkey prompt [default: 8192], or the maximum for a text, whose middle is
    /// cut out
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Depth of the passkey, 0 at the start and 1 at the end [default: 0.5]
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file"])]
    depth: Option<f64>,
    /// Chat template around a text: `none`, `llama3`, `chat-ml`, `qwen3`, `auto` for the one that the token at the end
    /// of the model's turns tells, or a file with {prompt} in the place of the text
    #[arg(
        long,
        value_name = "NAME|FILE",
        default_value = "auto",
        value_parser = Template::parse,
        conflicts_with_all = ["passkey", "tokens"]
    )]
    template: Template,
    /// Seed of the passkey prompt, of random tokens and of sampling
    #[arg(long, default_value_t = 299_792_458)]
    pub seed: u64,
}

/// A prompt ready to prefill.
#[derive(Debug, Clone, Default)]
pub struct Prompt {
    /// Its tokens, special tokens included.
    pub tokens: Vec<u32>,
    /// The passkey to find, if the prompt is a passkey task.
    pub expected: Option<String>,
    pub description: String,
}

impl PromptFlags {
    /// Whether the prompt is the user's own text, not a task or random tokens.
    pub fn is_own(&self) -> bool {
        self.prompt.is_some() || self.prompt_file.is_some()
    }

    /// Reads the text and checks the flags as far as possible before the weights of `model` are read.
    pub fn read(&self, model: &ModelFlags) -> Result<Unencoded<'_>> {
        for (flag, len) in [("--tokens", self.tokens), ("--context", self.context)] {
            ensure!(len != Some(0), "{flag}: expected at least 1 token, got 0");
        }
        if let Some(got) = self.depth.filter(|depth| !(0.0..=1.0).contains(depth)) {
            bail!("--depth: expected a number from 0 to 1, got {got}");
        }
        let text = if self.is_own() { Some(self.text()?) } else { None };
        if let Some((name, longest)) = model.positions()? {
            self.check_length(&name, longest)?;
        }
        Ok(Unencoded { flags: self, text })
    }

    fn check_length(&self, model: &str, longest: usize) -> Result<()> {
        for (flag, len) in [("--tokens", self.tokens), ("--context", self.context.filter(|_| !self.is_own()))] {
            if let Some(got) = len.filter(|len| *len > longest) {
                bail!("{flag}: expected at most {longest}, the positions of {model}, got {got}");
            }
        }
        Ok(())
    }

    /// Random tokens or a passkey task.
    fn made_prompt(&self, model: &LoadedModel) -> Result<Prompt> {
        match self.tokens {
            Some(len) => random_tokens(model, len, self.seed),
            None if model.is_synthetic => {
                if self.passkey || self.depth.is_some() {
                    bail!("a passkey task: expected a model that reads text, got {}; use --tokens", model.name);
                }
                random_tokens(model, self.context.unwrap_or(DEFAULT_TOKENS), self.seed)
            }
            None => {
                let (context, depth) = (self.context.unwrap_or(DEFAULT_TOKENS), self.depth.unwrap_or(0.5));
                let built = passkey::build(&model.tokenizer, context, depth, self.seed).context("--context")?;
                Ok(Prompt {
                    description: format!("passkey at depth {depth} of {} tokens", built.tokens.len()),
                    tokens: built.tokens,
                    expected: Some(built.answer),
                })
            }
        }
    }

    fn text(&self) -> Result<Text> {
        let prompt = self.prompt.clone().unwrap_or_default();
        let Some(path) = &self.prompt_file else { return Text::new("prompt".to_owned(), prompt) };
        let name = if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() };
        let document = read(path).with_context(|| format!("cannot read {name}"))?;
        let mut text = Text::new(name, document)?;
        if !prompt.is_empty() {
            text.content = format!("{}\n\n{prompt}", text.content.trim_end());
        }
        Ok(text)
    }
}

/// A text and the name of its origin.
#[derive(Debug)]
struct Text {
    name: String,
    content: String,
}

impl Text {
    fn new(name: String, content: String) -> Result<Self> {
        let got = if content.is_empty() { "none" } else { "only white space" };
        ensure!(!content.trim().is_empty(), "{name}: expected a text, got {got}");
        Ok(Self { name, content })
    }
}

/// A checked prompt that waits for the model's tokenizer.
#[derive(Debug)]
pub struct Unencoded<'f> {
    flags: &'f PromptFlags,
    /// The user's own text.
    text: Option<Text>,
}

impl Unencoded<'_> {
    pub fn encode(&self, model: &LoadedModel) -> Result<Prompt> {
        let flags = self.flags;
        let longest = model.config().max_positions;
        // Again, because a model on the hub has no positions before it is loaded.
        flags.check_length(&model.name, longest)?;
        let Some(Text { name, content }) = &self.text else { return flags.made_prompt(model) };
        let (pattern, template) = flags.template.pattern(model)?;
        let text = pattern.replacen(PLACE, content, 1);
        let tokens = encode(model, &text, pattern != PLACE, name, flags.context)?;
        if tokens.len() > longest {
            let (len, fits) = (tokens.len(), longest - longest.min(1024) / 2);
            bail!(
                "{name} has {len} tokens, the model {longest} positions: --context {fits} keeps its beginning and end"
            );
        }
        Ok(Prompt { description: format!("{name}, {} tokens{template}", tokens.len()), tokens, expected: None })
    }
}

/// Place of the text in a template.
const PLACE: &str = "{prompt}";

/// The chat template around a text.
#[derive(Debug, Clone)]
enum Template {
    /// That of the model.
    Auto,
    Named(ChatTemplate),
    File(PathBuf),
}

impl Template {
    fn parse(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(named)) => Ok(Self::Named(named)),
            _ if Path::new(text).is_file() => Ok(Self::File(text.into())),
            _ => Err(format!("expected auto, {} or a file, got {text}", ChatTemplate::names())),
        }
    }

    /// The whole template with [`PLACE`] in it, and what the description says of it. The template of a base model is
    /// [`PLACE`] alone.
    fn pattern(&self, model: &LoadedModel) -> Result<(String, String)> {
        let (named, note) = match self {
            Self::Auto => (ChatTemplate::of_model(&model.tokenizer, &model.eos_ids), " (auto)"),
            Self::Named(template) => (*template, ""),
            Self::File(path) => {
                let name = path.display();
                let pattern = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
                let places = pattern.matches(PLACE).count();
                ensure!(places == 1, "--template {name}: expected {PLACE} once, got it {places} times");
                return Ok((pattern, format!(", template {name}")));
            }
        };
        named.check(&model.tokenizer)?;
        let note = if named == ChatTemplate::None { String::new() } else { format!(", template {named}{note}") };
        Ok((named.pattern().replace("{answer_prefix}", ""), note))
    }
}

/// The text of a file, or of stdin for `-`.
fn read(path: &Path) -> std::io::Result<String> {
    if path != Path::new("-") {
        return fs::read_to_string(path);
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    Ok(text)
}

/// A text as tokens of the model, at most `context` of them: the middle of a longer text is cut out. A text in a
/// template has its special tokens in it.
pub fn encode(
    model: &LoadedModel,
    text: &str,
    is_templated: bool,
    name: &str,
    context: Option<usize>,
) -> Result<Vec<u32>> {
    let tokens = if is_templated { model.encode_bare(text) } else { model.encode(text) };
    let mut tokens = tokens.with_context(|| match model.is_synthetic {
        true => format!("{name}: a synthetic model reads the numbers of its tokens, such as `17 4711`"),
        false => name.to_owned(),
    })?;
    let all = tokens.len();
    if let Some(context) = context.filter(|context| *context < all) {
        // Instructions are at the start of a text and questions at its end, so the middle is cut out.
        let head = context.div_ceil(2);
        tokens.drain(head..all - (context - head));
        eprintln!(
            "{name}: {all} tokens, of which the first {head} and the last {} are kept (--context {context})",
            context - head
        );
    }
    Ok(tokens)
}

/// A prompt of `len` random token ids, after the special tokens that begin every text.
pub fn random_tokens(model: &LoadedModel, len: usize, seed: u64) -> Result<Prompt> {
    let mut tokens = synthetic::prompt(model.config().vocab_size, len, seed);
    for (token, first) in tokens.iter_mut().zip(model.encode("")?) {
        *token = first;
    }
    Ok(Prompt { description: format!("{len} random tokens"), tokens, expected: None })
}
