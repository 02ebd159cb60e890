//! RULER's generated data: `{dir}/{task}/validation.jsonl`.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::{Place, lines, read};
use crate::error::{EvalError, Result};
use crate::score::Scorer;
use crate::tasks::Item;

/// Longest length in tokens: far more than any model reads.
const MAX_LENGTH: usize = 1 << 30;

const EXPECTED: &str = "a RULER record with index, input, outputs and length";

/// Task, maximum number of generated tokens, scorer. Needle tasks begin with `niah`.
const TASKS: &[(&str, usize, Scorer)] = &[
    ("niah", 128, Scorer::StringMatchAll),
    ("vt", 30, Scorer::StringMatchAll),
    ("cwe", 120, Scorer::StringMatchAll),
    ("fwe", 50, Scorer::StringMatchAll),
    ("qa", 32, Scorer::StringMatchPart),
];

#[derive(Deserialize)]
struct Record {
    index: u64,
    input: String,
    outputs: Vec<String>,
    length: usize,
    // Data of older versions has the prefix in `input`.
    #[serde(default)]
    answer_prefix: String,
}

/// The items of one task. Nothing is cut, because the data was made for its length.
///
/// # Errors
/// [`EvalError::Unknown`] for a name that is not `niah*`, `vt`, `cwe`, `fwe` or `qa*`; [`EvalError::Io`];
/// [`EvalError::MalformedLine`] for a line that is not such a record, has no or empty outputs, or an impossible length.
pub fn ruler(dir: &Path, task: &str) -> Result<Vec<Item>> {
    let family = task.split('_').next().unwrap_or_default();
    let known = TASKS.iter().find(|(name, ..)| *name == family);
    let &(_, max_new_tokens, scorer) =
        known.ok_or_else(|| EvalError::unknown("task", TASKS.iter().map(|(name, ..)| *name), task))?;
    let path = dir.join(task).join("validation.jsonl");
    let item = |(place, record): (Place, Record)| {
        let Record { index, input, outputs, length, answer_prefix } = record;
        if outputs.is_empty() {
            return Err(place.malformed("at least one output", "none"));
        }
        // No answer is right for it.
        if outputs.iter().any(|output| output.trim().is_empty()) {
            return Err(place.malformed("outputs with text", format!("{outputs:?}")));
        }
        if !(1..=MAX_LENGTH).contains(&length) {
            return Err(place.malformed(format!("a length from 1 to {MAX_LENGTH} tokens"), length.to_string()));
        }
        Ok(Item {
            id: format!("ruler-{task}-{length}-i{index}"),
            task: task.to_owned(),
            index,
            prompt: input,
            answer_prefix,
            references: outputs,
            ..Item::read(max_new_tokens, scorer, length)
        })
    };
    lines(&path, &read(&path)?, EXPECTED)?.into_iter().map(item).collect()
}

/// The items of every task in `dir`, sorted by name. A directory holds data of one length, so all items get its largest
/// length, rounded up to 1024 tokens, as [`Item::context_tokens`]. The task names begin with `ruler/`.
///
/// # Errors
/// As [`ruler`]; [`EvalError::WrongInput`] if `dir` has no tasks.
pub fn ruler_directory(dir: &Path) -> Result<Vec<Item>> {
    let failed = |source| EvalError::Io { path: dir.to_owned(), source };
    let mut tasks = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.path().join("validation.jsonl").exists() {
            tasks.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    tasks.sort();
    if tasks.is_empty() {
        let (expected, got) = ("TASK/validation.jsonl in it", format!("none in {}", dir.display()));
        return Err(EvalError::wrong("directory of RULER", expected, got));
    }
    let mut items = Vec::new();
    for task in &tasks {
        items.extend(ruler(dir, task)?);
    }
    let longest = items.iter().map(|item| item.context_tokens).max().unwrap_or_default().next_multiple_of(1024);
    for item in &mut items {
        item.task.insert_str(0, "ruler/");
        item.context_tokens = longest;
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn load(task: &str, content: &str) -> Result<Vec<Item>> {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join(task)).unwrap();
        fs::write(dir.path().join(task).join("validation.jsonl"), content).unwrap();
        ruler(dir.path(), task)
    }

    const GOOD: &str = concat!(
        r#"{"index": 0, "input": "Text. What?", "outputs": ["12", "34"], "length": 4096, "#,
        r#""length_w_model_temp": 4200, "answer_prefix": " They are", "token_position_answer": 5}"#
    );

    #[test]
    fn fields_become_an_item() {
        let items =
            load("niah_multivalue", &format!("{GOOD}\n\n{}\n", GOOD.replace("\"index\": 0", "\"index\": 1"))).unwrap();
        assert_eq!(items.len(), 2);
        let item = &items[0];
        assert_eq!((item.prompt.as_str(), item.answer_prefix.as_str()), ("Text. What?", " They are"));
        assert_eq!((item.max_new_tokens, item.scorer, item.context_tokens), (128, Scorer::StringMatchAll, 4096));
        assert_eq!(item.score("12"), 0.5);
        assert_ne!(item.id, items[1].id);
    }

    #[test]
    fn budgets_follow_the_task() {
        for (task, max_new_tokens) in
            [("vt", 30), ("cwe", 120), ("fwe", 50), ("qa_1", 32), ("qa_2", 32), ("niah_single_1", 128)]
        {
            assert_eq!(load(task, GOOD).unwrap()[0].max_new_tokens, max_new_tokens, "{task}");
        }
        assert_eq!(load("qa_2", GOOD).unwrap()[0].scorer, Scorer::StringMatchPart);
    }

    #[test]
    fn bad_lines_are_named() {
        let no_outputs = GOOD.replace(r#"["12", "34"]"#, "[]");
        let empty_output = GOOD.replace(r#"["12", "34"]"#, r#"["12", " "]"#);
        let [no_length, endless] = ["0", "18446744073709551615"]
            .map(|length| GOOD.replace("\"length\": 4096", &format!("\"length\": {length}")));
        for (bad, got) in [
            ("{\"index\": 0,", "EOF"),
            ("[1]", "invalid"),
            (r#"{"index": 0, "input": "x", "length": 1}"#, "missing field `outputs`"),
            (no_outputs.as_str(), "none"),
            (empty_output.as_str(), r#"["12", " "]"#),
            (no_length.as_str(), "0"),
            (endless.as_str(), "18446744073709551615"),
        ] {
            let error = load("vt", &format!("{GOOD}\n{bad}\n")).unwrap_err();
            let EvalError::MalformedLine { line: 2, got: found, .. } = &error else { panic!("{error}") };
            assert!(found.contains(got), "{error}");
        }
    }

    #[test]
    fn a_directory_is_of_one_length() {
        let dir = TempDir::new().unwrap();
        for (task, length) in [("vt", "4096"), ("qa_1", "4100"), ("cwe", "3900")] {
            fs::create_dir(dir.path().join(task)).unwrap();
            let line = GOOD.replace("\"length\": 4096", &format!("\"length\": {length}"));
            fs::write(dir.path().join(task).join("validation.jsonl"), line).unwrap();
        }
        fs::write(dir.path().join("README"), "").unwrap();
        let items = ruler_directory(dir.path()).unwrap();
        let tasks: Vec<&str> = items.iter().map(|item| item.task.as_str()).collect();
        assert_eq!(tasks, ["ruler/cwe", "ruler/qa_1", "ruler/vt"]);
        assert!(items.iter().all(|item| item.context_tokens == 5120));
        let error = ruler_directory(&dir.path().join("vt")).unwrap_err().to_string();
        assert!(error.starts_with("directory of RULER: expected TASK/validation.jsonl in it, got none in "), "{error}");
        assert!(matches!(ruler_directory(&dir.path().join("nowhere")), Err(EvalError::Io { .. })));
    }

    #[test]
    fn empty_missing_and_unknown_files_are_errors() {
        assert!(matches!(load("vt", "\n").unwrap_err(), EvalError::MalformedLine { line: 1, .. }));
        let dir = TempDir::new().unwrap();
        assert!(matches!(ruler(dir.path(), "vt").unwrap_err(), EvalError::Io { .. }));
        let error = ruler(dir.path(), "chess").unwrap_err();
        assert_eq!(error.to_string(), "`chess` is not a task: expected one of niah, vt, cwe, fwe, qa");
    }
}
