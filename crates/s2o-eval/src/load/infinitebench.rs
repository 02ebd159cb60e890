//! InfiniteBench: `{dir}/{task}.jsonl`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::{Place, cut_prompt, lines, read};
use crate::error::{EvalError, Result};
use crate::score::Scorer;
use crate::tasks::Item;

const EXPECTED: &str = "an InfiniteBench record with id, context, input, answer and options";

struct Form {
    name: &'static str,
    max_new_tokens: usize,
    scorer: Scorer,
    /// Text before the context.
    instruction: &'static str,
    /// Beginning of the answer.
    answer_prefix: &'static str,
}

/// The tasks that [`infinitebench`] loads. `math_calc` is left out because it generates 30000 tokens per item.
const FORMS: [Form; 11] = [
    Form {
        name: "passkey",
        max_new_tokens: 6,
        scorer: Scorer::FirstInteger,
        instruction: "A pass key is hidden in the following text. Find it and memorize it.",
        answer_prefix: "\nThe pass key is",
    },
    Form {
        name: "number_string",
        max_new_tokens: 12,
        scorer: Scorer::FirstInteger,
        instruction: "A sequence of digits is hidden in the following text. Find it and memorize it.",
        answer_prefix: "\nThe sequence of digits is",
    },
    Form {
        name: "kv_retrieval",
        max_new_tokens: 50,
        scorer: Scorer::KeyValue,
        instruction: "Find the value of one key in the JSON object below.",
        answer_prefix: "\nThe value of this key is:",
    },
    Form {
        name: "longbook_sum_eng",
        max_new_tokens: 1200,
        scorer: Scorer::RougeLsum,
        instruction: "Summarize the book below.",
        answer_prefix: "\nSummary:",
    },
    Form {
        name: "longbook_choice_eng",
        max_new_tokens: 40,
        scorer: Scorer::BookChoice,
        instruction: "Read the book below. A question with four options follows. Answer with the letter of one option.",
        answer_prefix: "\nThe letter of the right option is",
    },
    Form {
        name: "longbook_qa_eng",
        max_new_tokens: 40,
        scorer: Scorer::TokenF1,
        instruction: "Read the book below and answer the question after it in as few words as possible.",
        answer_prefix: "\nAnswer:",
    },
    Form {
        name: "longbook_qa_chn",
        max_new_tokens: 40,
        scorer: Scorer::CharacterF1,
        instruction: "请阅读下面的书，然后尽量简短地回答书后的问题。",
        answer_prefix: "\n答案：",
    },
    Form {
        name: "longdialogue_qa_eng",
        max_new_tokens: 40,
        scorer: Scorer::Dialogue,
        instruction: "In the dialogue below one name is replaced by $$MASK$$. Answer with that name.",
        answer_prefix: "\nThe replaced name is:",
    },
    Form {
        name: "math_find",
        max_new_tokens: 3,
        scorer: Scorer::MathFind,
        instruction: "Find the number that is asked for in the list below.",
        answer_prefix: "\nThe number is",
    },
    Form {
        name: "code_run",
        max_new_tokens: 5,
        scorer: Scorer::CodeRun,
        instruction: "The functions below are Python. Give the value that the call after them returns.",
        answer_prefix: "\nThe value is",
    },
    Form {
        name: "code_debug",
        max_new_tokens: 5,
        scorer: Scorer::CodeDebug,
        instruction: "One function in the code below has an obvious error. Answer with the letter of one option.",
        answer_prefix: "\nThe letter of the right option is",
    },
];

#[derive(Deserialize)]
struct Record {
    id: Value,
    context: String,
    #[serde(default)]
    input: String,
    answer: Value,
    #[serde(default)]
    options: Vec<String>,
}

/// The items of one task. Each prompt is cut in its middle to `max_tokens` tokens, answer prefix included.
///
/// References are the answers as text, and for multiple choice also the letter of the right option.
///
/// # Errors
/// [`EvalError::Unknown`] for a name that is not a file of InfiniteBench, or `math_calc`; [`EvalError::Io`];
/// [`EvalError::MalformedLine`]; [`EvalError::ContextTooShort`]; [`EvalError::Tokenizer`].
pub fn infinitebench(dir: &Path, task: &str, tokenizer: &Tokenizer, max_tokens: usize) -> Result<Vec<Item>> {
    let form = FORMS.iter().find(|form| form.name == task);
    let form = form.ok_or_else(|| EvalError::unknown("task", names(), task))?;
    let path = dir.join(format!("{task}.jsonl"));
    let item = |(index, (place, record)): (u64, (Place, Record))| {
        let references = references(form, &record, place)?;
        let prompt = cut_prompt(tokenizer, task, &prompt(form, &record), form.answer_prefix, max_tokens)?;
        Ok(Item {
            id: format!("infinitebench-{task}-{max_tokens}-{}", text_of(&record.id, place)?),
            task: task.to_owned(),
            index,
            prompt,
            answer_prefix: form.answer_prefix.to_owned(),
            references,
            ..Item::read(form.max_new_tokens, form.scorer, max_tokens)
        })
    };
    (0..).zip(lines(&path, &read(&path)?, EXPECTED)?).map(item).collect()
}

/// The items of every task whose file is in `dir`. The task names begin with `infinitebench/`.
///
/// # Errors
/// As [`infinitebench`]; [`EvalError::WrongInput`] if `dir` has no such files.
pub fn infinitebench_directory(dir: &Path, tokenizer: &Tokenizer, max_tokens: usize) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for task in names() {
        if dir.join(format!("{task}.jsonl")).exists() {
            items.extend(infinitebench(dir, task, tokenizer, max_tokens)?);
        }
    }
    if items.is_empty() {
        let expected = format!("TASK.jsonl in it, TASK one of {}", names().collect::<Vec<_>>().join(", "));
        return Err(EvalError::wrong("directory of InfiniteBench", expected, format!("none in {}", dir.display())));
    }
    items.iter_mut().for_each(|item| item.task.insert_str(0, "infinitebench/"));
    Ok(items)
}

fn names() -> impl Iterator<Item = &'static str> {
    FORMS.iter().map(|form| form.name)
}

fn prompt(form: &Form, record: &Record) -> String {
    let mut prompt = format!("{}\n\n{}", form.instruction, record.context);
    if !record.input.is_empty() {
        prompt = format!("{prompt}\n\n{}", record.input);
    }
    for (letter, option) in ('A'..).zip(&record.options) {
        prompt.push_str(&format!("\n{letter}. {option}"));
    }
    prompt
}

/// The answers as text, followed by the letter of the option that equals an answer.
fn references(form: &Form, record: &Record, place: Place) -> Result<Vec<String>> {
    let mut references = match &record.answer {
        Value::Array(answers) => answers.iter().map(|answer| text_of(answer, place)).collect::<Result<Vec<_>>>()?,
        answer => vec![text_of(answer, place)?],
    };
    if references.is_empty() {
        return Err(place.malformed("at least one answer", "none"));
    }
    // No answer is right for it.
    if references.iter().any(|reference| reference.trim().is_empty()) {
        return Err(place.malformed("answers with text", format!("{references:?}")));
    }
    if matches!(form.scorer, Scorer::BookChoice | Scorer::CodeDebug) {
        let right = ('A'..).zip(&record.options).find(|(_, option)| references.contains(option));
        let (letter, _) = right.ok_or_else(|| {
            place.malformed(format!("an answer among the options {:?}", record.options), format!("{references:?}"))
        })?;
        if !references.iter().any(|reference| reference.chars().eq([letter])) {
            references.push(letter.to_string());
        }
    }
    Ok(references)
}

fn text_of(value: &Value, place: Place) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        other => Err(place.malformed("a text or a number", other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::tasks::tokenizer_for_tests;

    fn load(task: &str, content: &str) -> Result<Vec<Item>> {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join(format!("{task}.jsonl")), content).unwrap();
        infinitebench(dir.path(), task, tokenizer_for_tests(), 300)
    }

    fn one(task: &str, answer: &str, options: &str) -> Result<Item> {
        let context = "A line of the context. ".repeat(100);
        let line = format!(
            r#"{{"id": 7, "context": "{context}", "input": "What is it?", "answer": {answer}, "options": {options}}}"#
        );
        Ok(load(task, &line)?.remove(0))
    }

    #[test]
    fn every_task_loads_with_its_budget() {
        let budgets = [6, 12, 50, 1200, 40, 40, 40, 40, 3, 5, 5];
        for (task, budget) in names().zip(budgets) {
            let item = one(task, r#""41""#, r#"["x", "41"]"#).unwrap();
            assert_eq!((item.task.as_str(), item.max_new_tokens), (task, budget));
            assert_eq!(item.id, format!("infinitebench-{task}-300-7"));
            let text = item.prompt.clone() + &item.answer_prefix;
            assert!(tokenizer_for_tests().encode(text, true).unwrap().len() <= 300, "{task}");
            assert!(item.prompt.ends_with("What is it?\nA. x\nB. 41"), "{task}");
        }
    }

    #[test]
    fn answers_of_every_type_score() {
        assert_eq!(one("passkey", r#""71432""#, "[]").unwrap().score(" 71432."), 1.0);
        assert_eq!(one("math_find", "12.5", "[]").unwrap().score("12.5"), 1.0);
        assert_eq!(one("code_run", "-3", "[]").unwrap().score("-3"), 1.0);
        assert_eq!(one("longbook_qa_eng", r#"["red", "blue"]"#, "[]").unwrap().score("Blue"), 1.0);
        assert_eq!(one("longdialogue_qa_eng", r#"["JOHN"]"#, "[]").unwrap().score("John"), 1.0);
    }

    #[test]
    fn choices_have_letter_and_text() {
        let options = r#"["Rome", "Paris", "Oslo", "Bonn"]"#;
        for answer in [r#"["Paris"]"#, r#""Paris""#, r#"["Paris", "B"]"#] {
            let item = one("longbook_choice_eng", answer, options).unwrap();
            assert_eq!(item.references, ["Paris", "B"]);
            assert_eq!((item.score("B. Paris"), item.score("The answer is: Paris"), item.score("C")), (1.0, 1.0, 0.0));
        }
    }

    #[test]
    fn bad_lines_are_named() {
        let good = r#"{"id": 1, "context": "c", "input": "q", "answer": "a", "options": []}"#;
        for (bad, got) in [
            ("not json", "expected"),
            (r#"{"id": 1, "input": "q", "answer": "a"}"#, "missing field `context`"),
            (r#"{"id": 1, "context": "c", "answer": {"x": 1}}"#, "{\"x\":1}"),
            (r#"{"id": 1, "context": "c", "answer": []}"#, "none"),
            (r#"{"id": 1, "context": "c", "answer": ["a", ""]}"#, r#"["a", ""]"#),
        ] {
            let error = load("passkey", &format!("{good}\n\n{bad}")).unwrap_err();
            let EvalError::MalformedLine { line: 3, got: found, .. } = &error else { panic!("{error}") };
            assert!(found.contains(got), "{error}");
        }
        let error = one("code_debug", r#"["f"]"#, r#"["g", "h"]"#).unwrap_err();
        let part = r#"line 1: expected an answer among the options ["g", "h"], got ["f"]"#;
        assert!(error.to_string().contains(part), "{error}");
    }

    #[test]
    fn a_directory_has_the_tasks_of_its_files() {
        let dir = TempDir::new().unwrap();
        let load = || infinitebench_directory(dir.path(), tokenizer_for_tests(), 300);
        let error = load().unwrap_err().to_string();
        assert!(error.contains("TASK one of passkey, number_string") && error.contains("got none in"), "{error}");
        for task in ["math_find", "passkey"] {
            let line = r#"{"id": 1, "context": "c", "input": "q", "answer": "5", "options": []}"#;
            fs::write(dir.path().join(format!("{task}.jsonl")), line).unwrap();
        }
        let tasks: Vec<String> = load().unwrap().into_iter().map(|item| item.task).collect();
        assert_eq!(tasks, ["infinitebench/passkey", "infinitebench/math_find"]);
    }

    #[test]
    fn unknown_tasks_and_missing_files_are_errors() {
        let dir = TempDir::new().unwrap();
        let load = |task| infinitebench(dir.path(), task, tokenizer_for_tests(), 300).unwrap_err();
        assert!(matches!(load("math_calc"), EvalError::Unknown { .. }));
        assert!(matches!(load("passkey"), EvalError::Io { .. }));
        let line = r#"{"id": 1, "context": "c", "input": "q", "answer": "5", "options": []}"#;
        fs::write(dir.path().join("passkey.jsonl"), line).unwrap();
        let of_length = |max_tokens| infinitebench(dir.path(), "passkey", tokenizer_for_tests(), max_tokens);
        let EvalError::ContextTooShort { expected, got: 1, .. } = of_length(1).unwrap_err() else { panic!() };
        assert!(matches!(of_length(expected - 1), Err(EvalError::ContextTooShort { .. })));
        assert!(!of_length(expected).unwrap()[0].prompt.is_empty());
    }
}
