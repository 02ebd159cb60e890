//! Tables of hand-made outcomes.

use tempfile::TempDir;

use super::*;
use crate::run::{Key, Outcome, SampleResult, Setting};
use crate::tasks::ChatTemplate;

/// The setting of a model that does not exist.
pub(crate) fn setting(chunk: &str) -> Setting {
    Setting {
        model: "m".into(),
        dtype: "f32".into(),
        device: "cpu".into(),
        template: ChatTemplate::None,
        chunk: chunk.into(),
    }
}

/// The outcome of item `index` of `task`: right if `prediction` is `yes`.
fn answer(task: &str, length: usize, index: u64, method: &str, chunk: &str, prediction: &str) -> Outcome {
    Outcome {
        key: Key { sample: format!("{task}-{length}-{index}"), method: method.into(), setting: setting(chunk) },
        digest: None,
        task: task.into(),
        groups: Vec::new(),
        context_tokens: length,
        depth: None,
        index,
        seed: Some(7),
        prompt_tokens: length - 1,
        density: if method == "dense" { 1.0 } else { 0.25 + index as f64 / 4.0 },
        layer_density: Vec::new(),
        prefill_seconds: 1.0 + index as f64,
        result: SampleResult::Answer {
            prediction: prediction.into(),
            references: vec!["yes".into()],
            score: if prediction == "yes" { 1.0 } else { 0.0 },
        },
    }
}

fn passage(method: &str, loss: f64, likeliest: &[u32]) -> Outcome {
    let result = SampleResult::Perplexity { loss, likeliest: likeliest.to_vec() };
    Outcome { result, ..answer("text", 100, 0, method, "whole", "") }
}

#[test]
fn rows_add_up_by_task_length_and_method() {
    let mut outcomes = Vec::new();
    for (index, sparse) in ["yes", "no", "yes"].into_iter().enumerate() {
        outcomes.push(answer("b", 200, index as u64, "dense", "whole", "yes"));
        outcomes.push(answer("b", 200, index as u64, "s2o", "whole", sparse));
    }
    outcomes.push(answer("b", 100, 0, "dense", "whole", "no"));
    outcomes.push(answer("a", 100, 0, "dense", "whole", "yes"));
    let rows = rows(&outcomes);
    let places: Vec<(&str, usize, &str, usize)> =
        rows.iter().map(|row| (row.task.as_str(), row.context_tokens, row.method.as_str(), row.items)).collect();
    assert_eq!(places, [("b", 100, "dense", 1), ("b", 200, "dense", 3), ("b", 200, "s2o", 3), ("a", 100, "dense", 1)]);
    let sparse = &rows[2];
    assert!((sparse.score.unwrap() - 2.0 / 3.0).abs() < 1e-12 && (sparse.density - 0.5).abs() < 1e-12);
    assert_eq!((sparse.prefill_seconds, sparse.changed_by_chunks), (2.0, None));
    // Wilson interval of 2 out of 3.
    assert!((sparse.score_low.unwrap() - 0.2077).abs() < 1e-4 && (sparse.score_high.unwrap() - 0.9385).abs() < 1e-4);
    assert_eq!((sparse.perplexity, sparse.top1_agreement), (None, None));
}

#[test]
fn methods_are_compared_on_the_same_samples() {
    let mut outcomes: Vec<Outcome> = (0..6)
        .flat_map(|index| ["dense", "s2o"].map(|method| answer("a", 100, index, method, "auto", "yes")))
        .collect();
    assert_eq!(unpaired(&outcomes), None);
    // A seventh sample of one method, another task of another method, and a setting of its own.
    outcomes.push(answer("a", 100, 6, "dense", "auto", "no"));
    outcomes.push(answer("b", 100, 0, "s2o", "auto", "no"));
    let mut other = answer("a", 100, 7, "dense", "auto", "no");
    other.key.setting.dtype = "bf16".into();
    outcomes.push(other);
    let found: Vec<(String, String, String, usize, f64)> = rows(&outcomes)
        .into_iter()
        .map(|row| (row.task, row.method, row.dtype, row.items, row.score.unwrap()))
        .collect();
    let row = |task: &str, method: &str, dtype: &str, items, score| {
        (task.to_owned(), method.to_owned(), dtype.to_owned(), items, score)
    };
    let expected = [
        row("a", "dense", "f32", 6, 1.0),
        row("a", "s2o", "f32", 6, 1.0),
        row("b", "s2o", "f32", 1, 0.0),
        row("a", "dense", "bf16", 1, 0.0),
    ];
    assert_eq!(found, expected);
    let said = unpaired(&outcomes).unwrap();
    assert!(said.starts_with("1 of 15 outcomes are left out"), "{said}");
    assert!(markdown(&outcomes).contains(&format!("## Left out\n\n{said}\n")));
    // Nothing is shared.
    let apart = [answer("a", 100, 0, "dense", "auto", "yes"), answer("a", 100, 1, "s2o", "auto", "yes")];
    assert_eq!((rows(&apart).len(), unpaired(&apart).unwrap().starts_with("2 of 2 ")), (0, true));
}

#[test]
fn settings_that_differ_are_columns() {
    let names = |outcomes: &[Outcome]| {
        let rows = rows(outcomes);
        naming_columns(&rows.iter().collect::<Vec<_>>()).iter().map(|column| column.name).collect::<Vec<_>>()
    };
    let one = answer("a", 100, 0, "dense", "auto", "yes");
    assert_eq!(names(std::slice::from_ref(&one)), ["task", "context", "method"]);
    let mut other = one.clone();
    other.key.setting.dtype = "bf16".into();
    other.key.setting.device = "cuda".into();
    assert_eq!(names(&[one, other]), ["task", "context", "dtype", "device", "method"]);
}

#[test]
fn chunks_are_compared_with_the_first() {
    let mut outcomes = Vec::new();
    for (index, [first, second]) in [["yes", " yes"], ["yes", "no"], ["no", "other"]].into_iter().enumerate() {
        outcomes.push(answer("a", 100, index as u64, "s2o", "whole", first));
        outcomes.push(answer("a", 100, index as u64, "s2o", "64", second));
    }
    let changed: Vec<_> = rows(&outcomes).into_iter().map(|row| (row.chunk, row.changed_by_chunks)).collect();
    assert_eq!(changed, [("whole".to_owned(), Some(0)), ("64".to_owned(), Some(2))]);
    let text = markdown(&outcomes);
    assert!(text.contains("| task | context | items | s2o, chunk whole | s2o, chunk 64 |"), "{text}");
    assert!(text.contains("first chunk size\n\n") && text.contains("| a | 100 | 3 | 0 | 2 |"), "{text}");
}

#[test]
fn groups_follow_their_task() {
    let grouped = |index, groups: &[&str], prediction: &str| Outcome {
        groups: groups.iter().map(|&group| group.to_owned()).collect(),
        ..answer("longbench_v2", 100, index, "dense", "auto", prediction)
    };
    let outcomes = [
        grouped(0, &["easy", "short"], "yes"),
        grouped(1, &["hard", "short"], "no"),
        grouped(2, &["hard", "long"], "yes"),
    ];
    let found: Vec<(String, usize, f64)> =
        rows(&outcomes).into_iter().map(|row| (row.group, row.items, row.score.unwrap())).collect();
    let group = |name: &str, items, score| (name.to_owned(), items, score);
    let expected = [
        group("", 3, 2.0 / 3.0),
        group("easy", 1, 1.0),
        group("short", 2, 0.5),
        group("hard", 2, 0.5),
        group("long", 1, 1.0),
    ];
    assert_eq!(found, expected);
    assert!(markdown(&outcomes).contains("| longbench_v2 | hard | 100 | 2 | 50.0 |"));
}

#[test]
fn rulers_mean_weighs_tasks_not_items() {
    let outcomes = [
        answer("vt", 100, 0, "dense", "auto", "yes"),
        answer("vt", 100, 1, "dense", "auto", "yes"),
        answer("vt", 100, 2, "dense", "auto", "yes"),
        answer("cwe", 100, 0, "dense", "auto", "no"),
        answer("passkey", 100, 0, "dense", "auto", "no"),
        answer("ruler/vt", 100, 0, "dense", "auto", "no"),
    ];
    let all = rows(&outcomes);
    let average = all.last().unwrap();
    assert_eq!((average.task.as_str(), average.items, average.score), (RULER_AVERAGE, 4, Some(0.5)));
    assert_eq!(all.iter().filter(|row| row.task == RULER_AVERAGE).count(), 1);
    assert_eq!(average.score_low, None);
    assert!(markdown(&outcomes).contains("| ruler average | 100 | 4 | 50.0 |"));
}

#[test]
fn perplexity_is_of_the_mean_loss() {
    let outcomes = [passage("dense", 2.0, &[1, 2, 3, 4]), passage("s2o", 2.5, &[1, 2, 3, 5])];
    let rows = rows(&outcomes);
    assert!((rows[0].perplexity.unwrap() - 2.0_f64.exp()).abs() < 1e-12);
    assert_eq!((rows[1].top1_agreement, rows[1].score, rows[1].score_low), (Some(0.75), None, None));
    assert!(markdown(&outcomes).contains("| text | 100 | s2o | whole | 12.182 | 0.250 | 0.750 |"));
    assert_eq!(super::rows(&outcomes[1..])[0].top1_agreement, None);
}

#[test]
fn grids_have_depths_down_and_lengths_across() {
    let at = |length, depth, index, prediction: &str| Outcome {
        depth: Some(depth),
        ..answer("niah", length, index, "dense", "auto", prediction)
    };
    let mut outcomes =
        vec![at(200, 1.0, 0, "no"), at(100, 0.0, 0, "yes"), at(100, 1.0, 1, "yes"), at(100, 1.0, 2, "no")];
    let grids = depth_grids(&outcomes);
    assert_eq!((grids.len(), &grids[0].lengths[..], &grids[0].depths[..]), (1, &[100, 200][..], &[0.0, 1.0][..]));
    assert_eq!(grids[0].scores, [[Some(1.0), None], [Some(0.5), Some(0.0)]]);
    assert!(!grids[0].is_full() && !markdown(&outcomes).contains("by depth and length"));
    outcomes.push(at(200, 0.0, 3, "yes"));
    assert!(depth_grids(&outcomes)[0].is_full());
    let table = "| depth | 100 | 200 |\n| --- | --- | --- |\n| 0 % | 100 | 100 |\n| 100 % | 50 | 0 |";
    assert!(markdown(&outcomes).contains(table));
}

#[test]
fn exports_have_the_fields_of_others() {
    let outcome = Outcome { depth: Some(0.25), ..answer("niah", 100, 3, "dense", "auto", "yes") };
    let json = serde_json::to_value(niah_result(&outcome).unwrap()).unwrap();
    let expected = serde_json::json!({
        "context_length": 100, "depth_percent": 25.0, "response": "yes", "answer": "yes", "correct": true, "seed": 7,
    });
    assert_eq!(json, expected);
    assert!(niah_result(&Outcome { depth: None, ..outcome.clone() }).is_none());

    let mut item = crate::load::needle_7m().unwrap().remove(0);
    item.prompt = "What?".into();
    let json = serde_json::to_value(ruler_prediction(&outcome, &item).unwrap()).unwrap();
    let expected = serde_json::json!({
        "index": 3, "pred": "yes", "input": "What?", "outputs": ["yes"], "others": {}, "truncation": -1, "length": 99,
    });
    assert_eq!(json, expected);
    assert!(ruler_prediction(&passage("dense", 1.0, &[]), &item).is_none());
}

#[test]
fn csv_has_a_line_for_each_row() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("table.csv");
    let outcomes = [answer("a", 100, 0, "s2o:tau=0.1", "auto", "yes"), passage("dense", 1.0, &[1])];
    write_csv(&path, &rows(&outcomes)).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("task,group,context_tokens,method,chunk,items,score,score_low,"), "{text}");
    assert!(lines[1].starts_with("a,,100,s2o:tau=0.1,auto,1,1.0,0.2065"), "{text}");
    let error = write_csv::<Row>(&dir.path().join("no/table.csv"), &[]).unwrap_err().to_string();
    assert!(error.starts_with("cannot write ") && error.contains("table.csv"), "{error}");
}

#[test]
fn methods_are_compared_with_exact_attention() {
    let mut outcomes = Vec::new();
    // Task a loses one of two items, b wins one of four.
    for (task, index, dense, sparse) in [
        ("a", 0, "yes", "no"),
        ("a", 1, "yes", "yes"),
        ("b", 0, "no", "yes"),
        ("b", 1, "yes", "yes"),
        ("b", 2, "yes", "yes"),
        ("b", 3, "yes", "yes"),
    ] {
        outcomes.push(answer(task, 200, index, "dense", "auto", dense));
        let slow = answer(task, 200, index, "s2o", "auto", sparse);
        outcomes.push(Outcome { prefill_seconds: slow.prefill_seconds / 4.0, ..slow });
    }
    outcomes.push(answer("a", 100, 0, "dense", "auto", "yes"));
    outcomes.push(answer("a", 100, 0, "s2o", "auto", "yes"));
    outcomes.push(passage("dense", 1.0, &[1]));
    let all = comparisons(&outcomes);
    let places: Vec<(usize, &str, &str, usize)> =
        all.iter().map(|row| (row.context_tokens, row.task.as_str(), row.method.as_str(), row.items)).collect();
    assert_eq!(
        places[..4],
        [(100, "a", "dense", 1), (100, "a", "s2o", 1), (100, ALL_TASKS, "dense", 1), (100, ALL_TASKS, "s2o", 1)]
    );
    assert_eq!(
        places[4..8],
        [(200, "a", "dense", 2), (200, "a", "s2o", 2), (200, "b", "dense", 4), (200, "b", "s2o", 4)]
    );
    let [dense, sparse] = &all[8..] else { panic!("{places:?}") };
    assert_eq!((dense.difference, dense.worse, dense.speed_up), (None, None, Some(1.0)));
    // Means over tasks, not over items.
    assert_eq!((dense.score, sparse.score, sparse.tasks, sparse.items), (0.875, 0.75, 2, 6));
    assert_eq!((sparse.worse, sparse.better, sparse.speed_up), (Some(1), Some(1), Some(4.0)));
    assert!((sparse.difference.unwrap() + 0.125).abs() < 1e-12);
    let interval = (sparse.difference_low.unwrap(), sparse.difference_high.unwrap());
    assert!(interval.0 < -0.125 && interval.1 > 0.0, "{interval:?}");
    assert!((sparse.density - (0.375 + 0.625) / 2.0).abs() < 1e-12);

    let items = differing_items(&outcomes);
    let found: Vec<(&str, f64, f64, &str)> = items
        .iter()
        .map(|item| (item.sample.as_str(), item.score, item.dense_score, item.prediction.as_str()))
        .collect();
    assert_eq!(found, [("a-200-0", 0.0, 1.0, "no"), ("b-200-0", 1.0, 0.0, "yes")]);

    // Without exact attention there is nothing to compare with.
    let alone: Vec<Outcome> = outcomes.into_iter().filter(|outcome| outcome.key.method == "s2o").collect();
    assert!(comparisons(&alone).iter().all(|row| (row.difference, row.speed_up, row.worse) == (None, None, None)));
    assert_eq!(differing_items(&alone), []);
}

#[test]
fn chunks_are_compared_with_exact_attention_in_the_same_chunks() {
    let outcomes = [
        answer("a", 100, 0, "dense", "whole", "yes"),
        answer("a", 100, 0, "dense", "64", "no"),
        answer("a", 100, 0, "s2o", "whole", "yes"),
        answer("a", 100, 0, "s2o", "64", "yes"),
    ];
    let differences: Vec<(String, Option<f64>)> = comparisons(&outcomes)
        .into_iter()
        .filter(|row| row.task == ALL_TASKS && row.method == "s2o")
        .map(|row| (row.chunk, row.difference))
        .collect();
    assert_eq!(differences, [("whole".to_owned(), Some(0.0)), ("64".to_owned(), Some(1.0))]);
}
