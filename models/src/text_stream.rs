//! [`TextStream`]: text of a token stream, without broken characters.

use tokenizers::Tokenizer;

use crate::error::{ModelError, Result};

/// Turns tokens into text as they arrive. Text that ends inside a character is held back.
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    /// Later text does not depend on the tokens before this.
    context_start: usize,
    /// The text of the tokens before this has been returned.
    shown: usize,
}

impl<'t> TextStream<'t> {
    /// An empty stream.
    pub fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), context_start: 0, shown: 0 }
    }

    /// Adds a token and returns the text that is now complete, possibly empty.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        self.advance(false)
    }

    /// Returns the text held back; an incomplete character at the end becomes U+FFFD.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn finish(&mut self) -> Result<String> {
        self.advance(true)
    }

    /// Decodes from the last shown piece on, because the text of a piece (its leading space) depends on the piece
    /// before.
    fn advance(&mut self, all: bool) -> Result<String> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens, true).map_err(ModelError::tokenizer);
        let before = decode(&self.tokens[self.context_start..self.shown])?;
        let after = decode(&self.tokens[self.context_start..])?;
        let is_whole = all || !after.ends_with(char::REPLACEMENT_CHARACTER);
        match after.strip_prefix(before.as_str()) {
            Some(fresh) if is_whole && !fresh.is_empty() => {
                self.context_start = self.shown;
                self.shown = self.tokens.len();
                Ok(fresh.to_owned())
            }
            _ => Ok(String::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_str(s2o_needle_11m::TOKENIZER).unwrap());

    fn streamed(tokens: &[u32]) -> (Vec<String>, String) {
        let mut stream = TextStream::new(&TOKENIZER);
        let pieces = tokens.iter().map(|token| stream.push(*token).unwrap()).collect();
        (pieces, stream.finish().unwrap())
    }

    proptest! {
        #[test]
        fn streamed_text_is_the_text(text in r"(\PC|\n|\t| ){0,40}") {
            let ids = TOKENIZER.encode(text.as_str(), true).unwrap().get_ids().to_vec();
            let (pieces, rest) = streamed(&ids);
            let broken = char::REPLACEMENT_CHARACTER;
            prop_assert!(text.contains(broken) || !pieces.concat().contains(broken));
            prop_assert_eq!(pieces.concat() + &rest, text);
        }

        #[test]
        fn any_tokens_stream_as_they_decode(ids in prop::collection::vec(8u32..4096, 0..40)) {
            let (pieces, rest) = streamed(&ids);
            prop_assert_eq!(pieces.concat() + &rest, TOKENIZER.decode(&ids, true).unwrap());
        }
    }

    #[test]
    fn half_a_character_waits_for_the_other_half() {
        let ids = TOKENIZER.encode("🦀!", false).unwrap().get_ids().to_vec();
        assert!(ids.len() > 2, "the crab takes several tokens");
        let (pieces, rest) = streamed(&ids);
        assert_eq!(pieces.concat(), "🦀!");
        assert!(pieces[..ids.len() - 2].iter().all(String::is_empty), "{pieces:?}");
        assert_eq!(rest, "");
        let (pieces, rest) = streamed(&ids[..2]);
        assert_eq!((pieces.concat().as_str(), rest.as_str()), ("", "\u{fffd}"));
    }
}
