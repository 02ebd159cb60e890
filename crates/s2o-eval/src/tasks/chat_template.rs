//! [`ChatTemplate`]: the text that an instruction-tuned model needs around a prompt.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::Item;
use crate::error::{EvalError, Result};

/// Text around an item's prompt. The answer prefix follows it as the beginning of the model's own turn.
///
/// Most differences between published scores come from a wrong template: print [`ChatTemplate::pattern`] with results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ChatTemplate {
    /// Prompt and answer prefix without a template, for base models.
    #[default]
    None,
    /// Llama 3, 3.1 and 3.2 Instruct, without a system turn.
    Llama3,
    /// ChatML: Qwen2.5 and others, without a system turn.
    ChatMl,
    /// Qwen3 without thinking: ChatML and an empty thought, which leaves the token budget to the answer.
    Qwen3,
}

impl ChatTemplate {
    /// Every template.
    pub const ALL: [Self; 4] = [Self::None, Self::Llama3, Self::ChatMl, Self::Qwen3];

    /// The names of all templates, separated by commas.
    pub fn names() -> String {
        Self::ALL.map(|template| template.to_string()).join(", ")
    }

    /// The template of a model, identified by the token that ends its turns. Base models have the same tokens, but do
    /// not end with them. `eos_ids` are the tokens that end a generation.
    pub fn of_model(tokenizer: &Tokenizer, eos_ids: &[u32]) -> Self {
        let ends_with = |token| tokenizer.token_to_id(token).is_some_and(|id| eos_ids.contains(&id));
        match () {
            () if ends_with("<|eot_id|>") => Self::Llama3,
            () if ends_with("<|im_end|>") && tokenizer.token_to_id("<think>").is_some() => Self::Qwen3,
            () if ends_with("<|im_end|>") => Self::ChatMl,
            () => Self::None,
        }
    }

    /// Refuses a tokenizer that would split the template's special tokens.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] with the token that the tokenizer lacks.
    pub fn check(self, tokenizer: &Tokenizer) -> Result<()> {
        let needed: &[&str] = match self {
            Self::None => &[],
            Self::Llama3 => &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            Self::ChatMl => &["<|im_start|>", "<|im_end|>"],
            Self::Qwen3 => &["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        };
        match needed.iter().find(|token| tokenizer.token_to_id(token).is_none()) {
            None => Ok(()),
            Some(token) => {
                let expected = format!("one with {token}, for {self}");
                Err(EvalError::wrong("tokenizer of the chat template", expected, "one without"))
            }
        }
    }

    /// The whole template for display, with `{prompt}` and `{answer_prefix}` in their places.
    pub fn pattern(self) -> String {
        self.wrap("{prompt}", "{answer_prefix}")
    }

    /// The text that the model reads.
    pub fn apply(self, item: &Item) -> String {
        self.wrap(&item.prompt, &item.answer_prefix)
    }

    /// The tokens that the model reads. The tokenizer adds its own special tokens in front only if the template has
    /// none, so that no text begins twice.
    ///
    /// # Errors
    /// [`EvalError::Tokenizer`].
    pub fn encode(self, tokenizer: &Tokenizer, item: &Item) -> Result<Vec<u32>> {
        let text = self.apply(item);
        Ok(tokenizer.encode(text, self == Self::None).map_err(EvalError::tokenizer)?.get_ids().to_vec())
    }

    fn wrap(self, prompt: &str, answer_prefix: &str) -> String {
        let (before, after) = match self {
            Self::None => ("", ""),
            Self::Llama3 => (
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
                "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
            Self::ChatMl => ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            Self::Qwen3 => ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        };
        [before, prompt, after, answer_prefix].concat()
    }
}

/// The name in files and on command lines.
impl fmt::Display for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for ChatTemplate {
    type Err = EvalError;

    fn from_str(name: &str) -> Result<Self> {
        let named = Self::ALL.into_iter().find(|template| template.to_string() == name);
        named.ok_or_else(|| EvalError::wrong("chat template", Self::names(), name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{generated, tokenizer_for_tests};

    #[test]
    fn llama3_is_rulers() {
        let pattern = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>\
                       <|start_header_id|>assistant<|end_header_id|>\n\n{answer_prefix}";
        assert_eq!(ChatTemplate::Llama3.pattern(), pattern);
    }

    #[test]
    fn prefix_begins_the_models_turn() {
        let item = generated("passkey", 512, 0);
        for template in ChatTemplate::ALL {
            let text = template.apply(&item);
            assert!(text.contains(&item.prompt) && text.ends_with(&item.answer_prefix), "{template}");
        }
        assert_eq!(ChatTemplate::None.apply(&item), item.prompt.clone() + &item.answer_prefix);
    }

    #[test]
    fn only_a_bare_prompt_gets_the_tokenizers_own_start() {
        let tokenizer = tokenizer_for_tests();
        let start = tokenizer.token_to_id("<|bos|>").unwrap();
        let item = generated("passkey", 512, 0);
        assert_eq!(ChatTemplate::None.encode(tokenizer, &item).unwrap()[0], start);
        assert_ne!(ChatTemplate::Llama3.encode(tokenizer, &item).unwrap()[0], start);
    }

    #[test]
    fn the_models_end_token_tells_its_template() {
        let plain = tokenizer_for_tests();
        assert_eq!(ChatTemplate::of_model(plain, &[1]), ChatTemplate::None);
        let mut chat = plain.clone();
        let id = |tokenizer: &Tokenizer, token| tokenizer.token_to_id(token).unwrap();
        let add = |tokenizer: &mut Tokenizer, tokens: &[&str]| {
            let tokens: Vec<_> = tokens.iter().map(|&token| tokenizers::AddedToken::from(token, true)).collect();
            tokenizer.add_special_tokens(tokens).unwrap();
        };
        add(&mut chat, &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]);
        assert_eq!(ChatTemplate::of_model(&chat, &[1]), ChatTemplate::None, "a base model ends otherwise");
        assert_eq!(ChatTemplate::of_model(&chat, &[1, id(&chat, "<|eot_id|>")]), ChatTemplate::Llama3);
        add(&mut chat, &["<|im_start|>", "<|im_end|>"]);
        assert_eq!(ChatTemplate::of_model(&chat, &[id(&chat, "<|im_end|>")]), ChatTemplate::ChatMl);
        assert!(ChatTemplate::Qwen3.check(&chat).is_err());
        add(&mut chat, &["<think>", "</think>"]);
        assert_eq!(ChatTemplate::of_model(&chat, &[id(&chat, "<|im_end|>")]), ChatTemplate::Qwen3);
        assert!(ChatTemplate::ALL.into_iter().all(|template| template.check(&chat).is_ok()));
        let error = "tokenizer of the chat template: expected one with <|begin_of_text|>, for llama3, got one without";
        assert_eq!(ChatTemplate::Llama3.check(plain).unwrap_err().to_string(), error);
    }

    #[test]
    fn names_parse_and_others_are_refused() {
        for template in ChatTemplate::ALL {
            assert_eq!(template.to_string().parse::<ChatTemplate>().unwrap(), template);
            assert_eq!(serde_json::to_value(template).unwrap(), template.to_string());
        }
        let error = "alpaca".parse::<ChatTemplate>().unwrap_err().to_string();
        assert_eq!(error, "chat template: expected none, llama3, chat-ml, qwen3, got alpaca");
    }
}
