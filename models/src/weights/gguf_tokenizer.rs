//! The tokenizer inside a GGUF file.
//!
//! Candle reads vocabulary and merges. But it supports few pre-tokenizers by their GGUF names (`llama-bpe` and `smollm`
//! fall back to GPT-2's with a space before the text), treats user-defined tokens as special, and adds no `bos` where
//! llama.cpp does by default. This module sets those parts.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::gguf_spm::{self, Piece, USER_DEFINED};
use crate::error::{ModelError, Result};

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const NORMAL: u32 = 1;

/// End-of-turn and end-of-text tokens at which llama.cpp stops in addition to that in the metadata.
const END_TOKENS: [&str; 6] = ["<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|end|>"];

/// Properties of a byte-level BPE tokenizer besides its vocabulary.
struct Flavour {
    pre_tokenizer: PreTokenizerWrapper,
    normalizer: Option<NormalizerWrapper>,
    ignore_merges: bool,
    add_bos: bool,
}

impl Flavour {
    fn named(pre: &str) -> Result<Self> {
        let gpt2 = || ByteLevel::new(false, true, true);
        let split = |regex: &str| -> Result<PreTokenizerWrapper> {
            let pattern = SplitPattern::Regex(regex.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(ModelError::tokenizer)?;
            Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into())
        };
        let flavour = |pre_tokenizer| Self { pre_tokenizer, normalizer: None, ignore_merges: false, add_bos: false };
        Ok(match pre {
            "llama-bpe" | "llama3" | "llama-v3" => {
                Self { ignore_merges: true, add_bos: true, ..flavour(split(LLAMA3)?) }
            }
            "qwen2" => Self { normalizer: Some(NFC.into()), ..flavour(split(QWEN2)?) },
            "smollm" => flavour(Sequence::new(vec![Digits::new(true).into(), gpt2().into()]).into()),
            "gpt-2" | "gpt2" | "default" => flavour(gpt2().into()),
            other => {
                let expected = "llama-bpe, qwen2, smollm or gpt-2; for others give the model's tokenizer.json";
                return Err(ModelError::unsupported("tokenizer.ggml.pre", expected, other));
            }
        })
    }
}

pub(super) fn build(content: Content) -> Result<Tokenizer> {
    let model = text(&content, "tokenizer.ggml.model").unwrap_or_default();
    match model.as_str() {
        "llama" => {
            let flag = content.metadata.get("tokenizer.ggml.add_space_prefix");
            let space_prefix = flag.is_none_or(|flag| flag.to_bool().unwrap_or(true));
            with_special_tokens_around(gguf_spm::build(&pieces(&content)?, space_prefix)?, &content, true)
        }
        "gpt2" => byte_level(content),
        other => {
            let expected = "gpt2 (byte-level BPE) or llama (SentencePiece); for others give the model's tokenizer.json";
            let got = if other.is_empty() { "nothing" } else { other };
            Err(ModelError::unsupported("tokenizer.ggml.model", expected, got))
        }
    }
}

fn byte_level(mut content: Content) -> Result<Tokenizer> {
    let pre = text(&content, "tokenizer.ggml.pre").unwrap_or_else(|| "default".to_owned());
    let flavour = Flavour::named(&pre)?;
    let user_defined = take_user_defined(&mut content);
    content.metadata.insert("tokenizer.ggml.ignore_merges".to_owned(), Value::Bool(flavour.ignore_merges));
    let mut tokenizer = Tokenizer::from_gguf(&content).map_err(ModelError::tokenizer)?;
    tokenizer.with_normalizer(flavour.normalizer).map_err(ModelError::tokenizer)?;
    tokenizer.with_pre_tokenizer(Some(flavour.pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevelDecoder::new(false, true, true)));
    let mut tokenizer = with_special_tokens_around(tokenizer, &content, flavour.add_bos)?;
    let user_defined = user_defined.into_iter().map(|token| AddedToken::from(token, false).normalized(false));
    tokenizer.add_tokens(user_defined.collect::<Vec<_>>()).map_err(ModelError::tokenizer)?;
    Ok(tokenizer)
}

/// The vocabulary of a SentencePiece tokenizer.
fn pieces(content: &Content) -> Result<Vec<Piece>> {
    let list = |key: &str| content.metadata.get(key).and_then(|value| value.to_vec().ok());
    let scores: Vec<f32> =
        list("tokenizer.ggml.scores").into_iter().flatten().filter_map(|score| score.to_f32().ok()).collect();
    let kinds: Vec<i64> = list(TOKEN_TYPE).into_iter().flatten().filter_map(kind_of).collect();
    let texts: Vec<&str> = tokens(content).collect();
    for (name, got) in [("scores", scores.len()), ("token_type", kinds.len())] {
        if got != texts.len() {
            return Err(ModelError::tokenizer(format!(
                "tokenizer.ggml.{name}: expected {} entries, one per token, got {got}",
                texts.len()
            )));
        }
    }
    let entries = texts.into_iter().zip(scores).zip(kinds);
    Ok(entries.map(|((text, score), kind)| Piece { text: text.to_owned(), score, kind }).collect())
}

/// The ids that end a generation.
pub(super) fn eos_ids(content: &Content) -> Vec<u32> {
    let named = ["eos_token_id", "eot_token_id", "eom_token_id"]
        .iter()
        .filter_map(|key| content.metadata.get(&format!("tokenizer.ggml.{key}")))
        .filter_map(|value| value.to_u64().ok().and_then(|id| u32::try_from(id).ok()));
    let listed = tokens(content).enumerate().filter(|(_, token)| END_TOKENS.contains(token)).map(|(id, _)| id as u32);
    named.chain(listed).collect()
}

/// Marks user-defined tokens (such as Qwen3's `<think>`) as normal and returns them: they are text that is matched
/// whole.
fn take_user_defined(content: &mut Content) -> Vec<String> {
    let all: Vec<String> = tokens(content).map(str::to_owned).collect();
    let Some(Value::Array(types)) = content.metadata.get_mut(TOKEN_TYPE) else {
        return Vec::new();
    };
    let mut taken = Vec::new();
    for (kind, token) in types.iter_mut().zip(all) {
        if kind_of(kind) == Some(USER_DEFINED) {
            *kind = Value::U32(NORMAL);
            taken.push(token);
        }
    }
    taken
}

/// A `tokenizer.ggml.token_type`, of whichever integer type the writer chose.
fn kind_of(value: &Value) -> Option<i64> {
    match value {
        Value::I64(kind) => Some(*kind),
        Value::I32(kind) => Some(i64::from(*kind)),
        other => other.to_u64().ok().and_then(|kind| i64::try_from(kind).ok()),
    }
}

/// Adds `bos` before and `eos` after a text, if the metadata says so.
fn with_special_tokens_around(mut tokenizer: Tokenizer, content: &Content, default_bos: bool) -> Result<Tokenizer> {
    let token = |flag: &str, default: bool, key: &str| -> Result<Option<(String, u32)>> {
        let flag = content.metadata.get(flag).and_then(|value| value.to_bool().ok());
        if !flag.unwrap_or(default) {
            return Ok(None);
        }
        let id = content.metadata.get(key).and_then(|value| value.to_u64().ok()).map(|id| id as u32);
        match id.and_then(|id| Some((tokenizer.id_to_token(id)?, id))) {
            None => Err(ModelError::tokenizer(format!("{key} is missing or names no token"))),
            found => Ok(found),
        }
    };
    let bos = token("tokenizer.ggml.add_bos_token", default_bos, "tokenizer.ggml.bos_token_id")?;
    let eos = token("tokenizer.ggml.add_eos_token", false, "tokenizer.ggml.eos_token_id")?;
    let text = |token: &(String, u32)| token.0.clone();
    let pieces: Vec<String> = bos.iter().map(text).chain(["$A".to_owned()]).chain(eos.iter().map(text)).collect();
    let template = TemplateProcessing::builder()
        .try_single(pieces)
        .map_err(ModelError::tokenizer)?
        .special_tokens(bos.into_iter().chain(eos).collect::<Vec<_>>())
        .build()
        .map_err(ModelError::tokenizer)?;
    tokenizer.with_post_processor(Some(template));
    Ok(tokenizer)
}

fn text(content: &Content, key: &str) -> Option<String> {
    content.metadata.get(key).and_then(|value| value.to_string().ok()).cloned()
}

fn tokens(content: &Content) -> impl Iterator<Item = &str> {
    let list = content.metadata.get("tokenizer.ggml.tokens").and_then(|value| value.to_vec().ok());
    list.into_iter().flatten().map(|value| value.to_string().map_or("", String::as_str))
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    fn split(pre: &str, text: &str) -> Vec<String> {
        let mut split = PreTokenizedString::from(text);
        Flavour::named(pre).unwrap().pre_tokenizer.pre_tokenize(&mut split).unwrap();
        let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, _, _)| piece.replace('Ġ', " ").replace('Ċ', "\n")).collect()
    }

    #[test]
    fn digits_split_as_each_model_was_trained() {
        assert_eq!(split("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(split("qwen2", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(split("smollm", "a 123b"), ["a", " ", "1", "2", "3", "b"]);
        assert_eq!(split("gpt-2", "a 123"), ["a", " 123"]);
    }

    #[test]
    fn no_space_is_put_in_front() {
        for pre in ["llama-bpe", "qwen2", "smollm", "gpt-2"] {
            assert_eq!(split(pre, "Hello it's\n\n x"), ["Hello", " it", "'s", "\n\n", " x"], "{pre}");
        }
    }

    #[test]
    fn unknown_pre_tokenizer_is_refused() {
        assert!(matches!(
            Flavour::named("tekken"),
            Err(ModelError::UnsupportedFeature { feature: "tokenizer.ggml.pre", .. })
        ));
    }
}
