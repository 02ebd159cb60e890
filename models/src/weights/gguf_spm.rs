//! SentencePiece vocabularies in GGUF files (`tokenizer.ggml.model` = `llama`, as in Llama 2): pieces with scores.
//!
//! The rule repeatedly joins the neighbours whose union has the best score. This is byte-pair encoding with the merges
//! in the order of their scores, and bytes for text that no piece covers.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::{AddedToken, Tokenizer};

use crate::error::{ModelError, Result};

/// SentencePiece's character for a space.
const SPACE: char = '▁';

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;

/// One vocabulary entry.
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    /// `tokenizer.ggml.token_type`.
    pub(super) kind: i64,
}

/// Builds the tokenizer, without special tokens around a text. If `space_prefix`, a space is put before each text.
pub(super) fn build(pieces: &[Piece], space_prefix: bool) -> Result<Tokenizer> {
    let vocab: Vocab = pieces.iter().zip(0..).map(|(piece, id)| (piece.text.clone(), id)).collect();
    let mut bpe =
        BPE::builder().vocab_and_merges(vocab.clone(), merges(pieces, &vocab)).fuse_unk(true).byte_fallback(true);
    if let Some(unknown) = pieces.iter().find(|piece| piece.kind == UNKNOWN) {
        bpe = bpe.unk_token(unknown.text.clone());
    }
    let mut tokenizer = Tokenizer::new(bpe.build().map_err(ModelError::tokenizer)?);

    let replace = |from: String, to: String| Replace::new(from, to).map_err(ModelError::tokenizer);
    let mut normalizers = vec![replace(" ".to_owned(), SPACE.to_string())?.into()];
    let mut decoders: Vec<DecoderWrapper> =
        vec![replace(SPACE.to_string(), " ".to_owned())?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if space_prefix {
        normalizers.insert(0, Prepend::new(SPACE.to_string()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers))).map_err(ModelError::tokenizer)?;
    tokenizer.with_decoder(Some(Decoders::new(decoders)));

    let added = |kind: i64, special: bool| {
        pieces
            .iter()
            .filter(move |piece| piece.kind == kind)
            .map(move |piece| AddedToken::from(piece.text.clone(), special).normalized(false))
            .collect::<Vec<_>>()
    };
    tokenizer.add_special_tokens(added(CONTROL, true)).map_err(ModelError::tokenizer)?;
    tokenizer.add_special_tokens(added(UNKNOWN, true)).map_err(ModelError::tokenizer)?;
    tokenizer.add_tokens(added(USER_DEFINED, false)).map_err(ModelError::tokenizer)?;
    Ok(tokenizer)
}

/// Every way to join two pieces into a third, best score first, equal scores in the order of the vocabulary.
fn merges(pieces: &[Piece], vocab: &Vocab) -> Merges {
    let mut by_score: Vec<&Piece> = pieces.iter().filter(|piece| piece.kind == 1).collect();
    by_score.sort_by(|a, b| b.score.total_cmp(&a.score));
    by_score
        .into_iter()
        .flat_map(|piece| {
            let mut splits: Vec<(u32, u32, String, String)> = piece
                .text
                .char_indices()
                .skip(1)
                .filter_map(|(at, _)| {
                    let (left, right) = piece.text.split_at(at);
                    Some((*vocab.get(left)?, *vocab.get(right)?, left.to_owned(), right.to_owned()))
                })
                .collect();
            splits.sort();
            splits.into_iter().map(|(_, _, left, right)| (left, right))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three special tokens, the 256 bytes, and pieces with their scores.
    fn tokenizer(space_prefix: bool) -> Tokenizer {
        let piece = |text: &str, score: f32, kind: i64| Piece { text: text.to_owned(), score, kind };
        let mut pieces = vec![piece("<unk>", 0.0, UNKNOWN), piece("<s>", 0.0, CONTROL), piece("</s>", 0.0, CONTROL)];
        pieces.extend((0..256).map(|byte| piece(&format!("<0x{byte:02X}>"), 0.0, 6)));
        for (score, text) in ["▁h", "he", "ll", "hell", "▁hell", "▁hello", "lo", "wor", "wo", "▁w"].iter().enumerate()
        {
            pieces.push(piece(text, -(score as f32), 1));
        }
        for letter in "▁helowrd".chars() {
            pieces.push(piece(&letter.to_string(), -100.0, 1));
        }
        build(&pieces, space_prefix).unwrap()
    }

    fn pieces_of(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text, false).unwrap().get_tokens().to_vec()
    }

    #[test]
    fn the_best_score_joins_first() {
        let tokenizer = tokenizer(true);
        // "▁h" (0) comes before "he" (-1), so "hell" never forms; "ll" (-2) comes before "lo" (-6).
        assert_eq!(pieces_of(&tokenizer, "hello"), ["▁h", "e", "ll", "o"]);
        // Inside a word no other piece takes the h: he, ll, hell.
        assert_eq!(pieces_of(&tokenizer, "ohello"), ["▁", "o", "hell", "o"]);
        assert_eq!(pieces_of(&tokenizer, "wor wor"), ["▁", "wor", "▁", "wor"]);
    }

    #[test]
    fn what_no_piece_covers_becomes_bytes_and_comes_back() {
        for space_prefix in [true, false] {
            let tokenizer = tokenizer(space_prefix);
            for text in ["hello world", "  two  spaces", "🦀 crab\nline", "naïve", ""] {
                let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{text:?}");
            }
        }
        assert_eq!(pieces_of(&tokenizer(true), "é")[1..], ["<0xC3>", "<0xA9>"]);
    }

    #[test]
    fn special_tokens_stand_alone() {
        let tokenizer = tokenizer(false);
        assert_eq!(pieces_of(&tokenizer, "he</s>he"), ["he", "</s>", "he"]);
        let ids = tokenizer.encode("he</s>", false).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "he");
    }
}
