//! Properties of every task in the table.

use std::collections::HashSet;

use super::*;

/// Above the shortest prompt of every task with needle-11m's tokenizer.
const LENGTHS: [usize; 2] = [2300, 4096];

fn count_tokens(item: &Item) -> usize {
    ChatTemplate::None.encode(tokenizer_for_tests(), item).unwrap().len()
}

#[test]
fn every_task_fits_its_length() {
    for task in ALL {
        for num_tokens in LENGTHS {
            let item = generated(task.name, num_tokens, 1);
            let tokens = count_tokens(&item);
            assert!(tokens <= num_tokens && tokens + SLACK >= num_tokens, "{}: {tokens} of {num_tokens}", task.name);
            assert_eq!((item.context_tokens, item.task.as_str()), (num_tokens, task.name));
            assert_eq!(item.id, task.item_id(&ItemSpec::new(num_tokens, 1)));
        }
    }
}

#[test]
fn every_task_is_deterministic_and_its_items_differ() {
    for task in ALL {
        let specs = [ItemSpec::new(2300, 1), ItemSpec::new(2300, 2), ItemSpec::new(2300, 1).index(1)];
        let items = specs.map(|spec| task.generate(tokenizer_for_tests(), &spec).unwrap());
        assert_eq!(items[0], task.generate(tokenizer_for_tests(), &specs[0]).unwrap(), "{}", task.name);
        let prompts: HashSet<&str> = items.iter().map(|item| item.prompt.as_str()).collect();
        let ids: HashSet<&str> = items.iter().map(|item| item.id.as_str()).collect();
        let answers: HashSet<&[String]> = items.iter().map(|item| item.references.as_slice()).collect();
        assert_eq!((prompts.len(), ids.len(), answers.len()), (3, 3, 3), "{}", task.name);
    }
}

#[test]
fn every_task_accepts_its_references_and_nothing_else() {
    for task in ALL {
        let item = generated(task.name, 2300, 5);
        assert!(!item.references.is_empty() && item.references.iter().all(|answer| item.prompt.contains(answer)));
        assert_eq!(item.score(&format!(" {}.\n", item.references.join(" "))), 1.0, "{}", task.name);
        for wrong in ["", "I do not know.", " 1234567890. zzzzzz", "The answer is in the text."] {
            assert_eq!(item.score(wrong), 0.0, "{}: {wrong}", task.name);
        }
    }
}

#[test]
fn needles_are_where_they_should_be() {
    for task in ALL.iter().filter(|task| task.takes_depth) {
        for depth in [0.0, 0.3, 0.5, 1.0] {
            let item = task.generate(tokenizer_for_tests(), &ItemSpec::new(4096, 9).depth(depth)).unwrap();
            assert_eq!(item.depth, Some(depth), "{}", task.name);
            let at = item.prompt.find(&item.references[0]).unwrap() as f64 / item.prompt.len() as f64;
            // Instruction, question and the needle's own length shift the depth.
            assert!((at - depth).abs() < 0.08, "{} at {at} instead of {depth}", task.name);
        }
    }
}

#[test]
fn a_chosen_depth_changes_the_place_but_not_the_answer() {
    for task in ALL.iter().filter(|task| task.takes_depth) {
        let at = |depth| task.generate(tokenizer_for_tests(), &ItemSpec::new(2300, 9).depth(depth)).unwrap();
        let (early, late) = (at(0.1), at(0.9));
        assert_eq!(early.references, late.references, "{}", task.name);
        assert_ne!(early.prompt, late.prompt, "{}", task.name);
        assert_eq!(early.id, format!("{}-2300-d0.1-i0-s9", task.name));
    }
}

#[test]
fn rulers_token_budgets_and_scorers() {
    use crate::score::Scorer::{StringMatchAll, StringMatchPart};
    for (name, max_new_tokens, scorer) in [
        ("niah_single_1", 128, StringMatchAll),
        ("niah_multiquery", 128, StringMatchAll),
        ("vt", 30, StringMatchAll),
        ("cwe", 120, StringMatchAll),
        ("fwe", 50, StringMatchAll),
        ("qa_1", 32, StringMatchPart),
        ("qa_2", 32, StringMatchPart),
    ] {
        let item = generated(name, 2300, 0);
        assert_eq!((item.max_new_tokens, item.scorer), (max_new_tokens, scorer), "{name}");
    }
}

#[test]
fn names_are_unique_and_found() {
    let names: HashSet<&str> = ALL.iter().map(|task| task.name).collect();
    assert_eq!(names.len(), ALL.len());
    assert_eq!(ruler().count(), 13);
    assert!(is_ruler("vt") && is_ruler("ruler/vt") && !is_ruler("niah"));
    assert!(ALL.iter().all(|task| find(task.name).unwrap().name == task.name && !task.summary.is_empty()));
    let error = find("niah_single_4").unwrap_err();
    let start = "`niah_single_4` is not a task: expected one of niah, niah_single_1, ";
    assert!(error.to_string().starts_with(start), "{error}");
}

#[test]
fn wrong_arguments_are_refused() {
    let generate = |task: &str, spec| find(task).unwrap().generate(tokenizer_for_tests(), &spec).unwrap_err();
    for depth in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        let error = generate("niah", ItemSpec::new(1024, 0).depth(depth));
        assert!(matches!(error, EvalError::WrongInput { what: "depth", .. }), "{error}");
    }
    assert!(matches!(generate("vt", ItemSpec::new(2300, 0).depth(0.5)), EvalError::WrongInput { .. }));
    assert!(matches!(generate("fwe", ItemSpec::new(usize::MAX, 0)), EvalError::WrongInput { .. }));
    for task in ALL {
        for num_tokens in [0, 20] {
            let error = generate(task.name, ItemSpec::new(num_tokens, 0));
            assert!(matches!(error, EvalError::ContextTooShort { got, .. } if got == num_tokens), "{error}");
        }
    }
}
