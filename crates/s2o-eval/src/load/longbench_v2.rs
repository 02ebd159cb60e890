//! LongBench v2: 503 multiple-choice questions in one `data.json`.

use std::path::Path;

use serde::Deserialize;
use tokenizers::Tokenizer;

use super::{Place, cut_prompt, read, whole};
use crate::error::Result;
use crate::score::Scorer;
use crate::tasks::Item;

const EXPECTED: &str = "a list of LongBench v2 records with _id, domain, sub_domain, difficulty, length, question, \
                        choice_A to choice_D, answer and context";

const TASK: &str = "longbench_v2";
const MAX_NEW_TOKENS: usize = 128;

#[derive(Deserialize)]
struct Record {
    #[serde(rename = "_id")]
    id: String,
    domain: String,
    sub_domain: String,
    difficulty: Difficulty,
    length: Length,
    question: String,
    #[serde(rename = "choice_A")]
    a: String,
    #[serde(rename = "choice_B")]
    b: String,
    #[serde(rename = "choice_C")]
    c: String,
    #[serde(rename = "choice_D")]
    d: String,
    answer: Letter,
    context: String,
}

// Enums instead of later checks, so that the parser names the line of a wrong word.
#[derive(Debug, Clone, Copy, Deserialize)]
enum Letter {
    A,
    B,
    C,
    D,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Difficulty {
    Easy,
    Hard,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Length {
    Short,
    Medium,
    Long,
}

/// The items of `data.json`. Each prompt is cut in its middle to `max_tokens` tokens (the benchmark uses
/// [`super::DEFAULT_MAX_TOKENS`]). [`Item::groups`] holds difficulty, length, domain and sub-domain.
///
/// The prompt asks for `The correct answer is (X)`, because the scorer searches for this sentence.
///
/// # Errors
/// [`crate::EvalError::Io`]; [`crate::EvalError::MalformedLine`] with the line of the first invalid record;
/// [`crate::EvalError::ContextTooShort`]; [`crate::EvalError::Tokenizer`].
pub fn longbench_v2(path: &Path, tokenizer: &Tokenizer, max_tokens: usize) -> Result<Vec<Item>> {
    let records: Vec<Record> = whole(path, &read(path)?, EXPECTED)?;
    if records.is_empty() {
        return Err(Place { path, line: 1 }.malformed("at least one record", "an empty list"));
    }
    let item = |(index, record): (u64, Record)| {
        let prompt = cut_prompt(tokenizer, TASK, &prompt(&record), "", max_tokens)?;
        // The names of the variants are the benchmark's words.
        let (difficulty, length) = (format!("{:?}", record.difficulty), format!("{:?}", record.length));
        Ok(Item {
            id: format!("longbench_v2-{max_tokens}-{}", record.id),
            task: TASK.to_owned(),
            index,
            prompt,
            references: vec![format!("{:?}", record.answer)],
            groups: vec![difficulty.to_lowercase(), length.to_lowercase(), record.domain, record.sub_domain],
            ..Item::read(MAX_NEW_TOKENS, Scorer::LongbenchChoice, max_tokens)
        })
    };
    (0..).zip(records).map(item).collect()
}

fn prompt(record: &Record) -> String {
    let Record { context, question, a, b, c, d, .. } = record;
    format!(
        "Read the text below. A question about it with four choices follows.\n\n<text>\n{context}\n</text>\n\n\
         Question: {question}\n(A) {a}\n(B) {b}\n(C) {c}\n(D) {d}\n\n\
         Choose one of them. Reply with the sentence \"The correct answer is (X)\", where X is A, B, C or D."
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;
    use crate::error::EvalError;
    use crate::tasks::tokenizer_for_tests;

    fn record(id: &str) -> Value {
        json!({
            "_id": id, "domain": "Code", "sub_domain": "Repositories", "difficulty": "hard", "length": "short",
            "question": "Which colour?", "choice_A": "red", "choice_B": "blue", "choice_C": "green", "choice_D": "grey",
            "answer": "B", "context": "The sky is blue. ".repeat(300),
        })
    }

    fn load(content: &str, max_tokens: usize) -> Result<Vec<Item>> {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("data.json");
        fs::write(&path, content).unwrap();
        longbench_v2(&path, tokenizer_for_tests(), max_tokens)
    }

    #[test]
    fn records_become_items() {
        let items = load(&json!([record("x"), record("y")]).to_string(), 100_000).unwrap();
        let item = &items[1];
        assert_eq!((items.len(), item.id.as_str()), (2, "longbench_v2-100000-y"));
        assert_eq!(item.groups, ["hard", "short", "Code", "Repositories"]);
        assert_eq!((item.score("The correct answer is (B)."), item.score("The correct answer is (A).")), (1.0, 0.0));
        for part in ["\n(A) red\n(B) blue\n(C) green\n(D) grey\n", "The correct answer is (X)"] {
            assert!(item.prompt.contains(part), "{part}");
        }
        assert_eq!(item.max_new_tokens, 128);
    }

    #[test]
    fn the_middle_of_the_context_is_cut() {
        let items = load(&json!([record("x")]).to_string(), 200).unwrap();
        let prompt = &items[0].prompt;
        assert!(tokenizer_for_tests().encode(prompt.as_str(), true).unwrap().len() <= 200);
        assert!(prompt.starts_with("Read the text below.") && prompt.ends_with("where X is A, B, C or D."));
    }

    #[test]
    fn bad_records_name_their_line() {
        let edited = |key: &str, value: Value| {
            let mut bad = record("x");
            bad[key] = value;
            format!("[\n{},\n{bad}\n]", record("y"))
        };
        for (content, line, got) in [
            (edited("answer", json!("E")), 3, "unknown variant `E`"),
            (edited("difficulty", json!("medium")), 3, "unknown variant `medium`"),
            (edited("context", json!(5)), 3, "invalid type: integer `5`"),
            ("[\n\n{}]".to_owned(), 3, "missing field"),
            (String::new(), 1, "EOF"),
            ("[]".to_owned(), 1, "an empty list"),
        ] {
            let error = load(&content, 1000).unwrap_err();
            let EvalError::MalformedLine { line: at, got: found, .. } = &error else { panic!("{error}") };
            assert!(*at == line && found.contains(got), "{error}");
        }
        let short = load(&json!([record("x")]).to_string(), 1).unwrap_err();
        assert!(matches!(short, EvalError::ContextTooShort { got: 1, .. }), "{short}");
        let missing = longbench_v2(Path::new("nowhere/data.json"), tokenizer_for_tests(), 10);
        assert!(matches!(missing, Err(EvalError::Io { .. })));
    }
}
