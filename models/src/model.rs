//! [`LoadedModel`]: decoder, tokenizer and stop tokens together.

use candle_core::Tensor;
use tokenizers::Tokenizer;

use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::error::{ModelError, Result};

/// Embeddings have a few rows more than tokens, which make them a multiple of the tile size or wait for new tokens.
const MOST_ROWS_PER_TOKEN: f64 = 1.25;

/// A model ready to run. Made by [`crate::ModelSource::load`].
#[derive(Debug)]
pub struct LoadedModel {
    /// Short name, for tables.
    pub name: String,
    /// The weights and the forward pass.
    pub decoder: Decoder,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end a generation, sorted and unique.
    pub eos_ids: Vec<u32>,
    /// Whether the weights are synthetic ([`crate::weights::synthetic`]): the model can be timed, but its output has
    /// no meaning.
    pub is_synthetic: bool,
}

impl LoadedModel {
    /// Puts the parts together. The tokenizer's truncation and padding, which some files set for training, are switched
    /// off: a prompt is neither cut nor filled up.
    ///
    /// # Errors
    /// [`ModelError::InvalidConfig`] if the tokenizer can produce ids that the embedding lacks, or has far fewer tokens
    /// than the embedding has rows.
    pub fn new(name: String, decoder: Decoder, mut tokenizer: Tokenizer, mut eos_ids: Vec<u32>) -> Result<Self> {
        tokenizer.with_truncation(None).map_err(ModelError::tokenizer)?.with_padding(None);
        eos_ids.sort_unstable();
        eos_ids.dedup();
        let vocab_size = decoder.config().vocab_size;
        let largest = tokenizer.get_vocab(false).into_values().max().unwrap_or(0);
        if largest as usize >= vocab_size {
            let reason = format!("the tokenizer has token id {largest}, but the embedding has only {vocab_size} rows");
            return Err(ModelError::config(name, reason));
        }
        let tokens = 1 + tokenizer.get_vocab(true).into_values().max().unwrap_or(0) as usize;
        if vocab_size as f64 > MOST_ROWS_PER_TOKEN * tokens as f64 {
            let reason = format!(
                "the embedding has {vocab_size} rows, but the tokenizer only {tokens} tokens: expected the tokenizer \
                 of this model, with at most {MOST_ROWS_PER_TOKEN} rows for a token"
            );
            return Err(ModelError::config(name, reason));
        }
        Ok(Self { name, decoder, tokenizer, eos_ids, is_synthetic: false })
    }

    /// Shape and constants of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        self.decoder.config()
    }

    /// Number of parameters; a tied head counts once.
    pub fn num_parameters(&self) -> usize {
        self.config().num_parameters()
    }

    /// Tokens of `text`, with the special tokens that the tokenizer puts around a prompt (`<|bos|>` for `needle-11m`).
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokens(text, true)
    }

    /// Tokens of `text` alone, for a text that has its special tokens in it, such as one in a chat template.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        self.tokens(text, false)
    }

    fn tokens(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, add_special).map_err(ModelError::tokenizer)?.get_ids().to_vec())
    }

    /// Text of `tokens`, without special tokens.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(ModelError::tokenizer)
    }

    /// Tokens as a prompt tensor `(1, len)` u32 on the decoder's device.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`].
    pub fn prompt(&self, tokens: &[u32]) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err(ModelError::EmptyPrompt);
        }
        Ok(Tensor::from_slice(tokens, (1, tokens.len()), self.decoder.device())?)
    }
}
