//! Runs of needle-11m on short prompts: computed trials, repeated trials and errors.

use std::fs;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Result as CandleResult, Tensor};
use candle_s2o::{Attention, Dense, PrefillCall};
use s2o_models::{Chunk, LoadOptions, LoadedModel, ModelSource};
use tempfile::TempDir;

use super::plan::tests::count;
use super::*;
use crate::error::EvalError;
use crate::load;
use crate::method::Method;
use crate::report::{Row, rows};
use crate::tasks::{ChatTemplate, Item};

static MODEL: LazyLock<LoadedModel> =
    LazyLock::new(|| ModelSource::Embedded.load(&LoadOptions::default(), None).unwrap());

fn samples(items: u64) -> Vec<Sample> {
    Grid { lengths: vec![300], items, ..Grid::default() }.samples(["passkey"]).unwrap()
}

fn runner() -> Runner<'static> {
    Runner::new(&MODEL, ChatTemplate::None).unwrap()
}

fn timeless(journal: &Journal) -> Vec<Row> {
    rows(journal.outcomes()).into_iter().map(|row| Row { prefill_seconds: 0.0, ..row }).collect()
}

/// Runs the samples and returns the finished trials as `sample method`.
fn run(runner: &Runner, samples: &[Sample], journal: &mut Journal) -> (crate::Result<()>, Vec<String>) {
    let mut started = Vec::new();
    let trials = runner.pending(samples, journal);
    let result = trials.and_then(|trials| {
        runner.run(&trials, journal, &mut |event| {
            if let Event::Started(trial) = event {
                started.push(format!("{} {}", trial.key.sample, trial.key.method));
            }
        })
    });
    (result, started)
}

/// Exact attention that fails after a number of prompts.
#[derive(Debug)]
struct Fails {
    calls_left: AtomicUsize,
}

impl Fails {
    fn after(prompts: usize) -> Box<Self> {
        Box::new(Self { calls_left: AtomicUsize::new(prompts * MODEL.config().num_layers) })
    }
}

impl Attention for Fails {
    fn name(&self) -> &str {
        "fails"
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> CandleResult<Tensor> {
        if self.calls_left.load(Ordering::SeqCst) == 0 {
            candle_core::bail!("the power is gone");
        }
        self.calls_left.fetch_sub(1, Ordering::SeqCst);
        Dense.prefill(call, q, k, v)
    }
}

impl Method for Fails {}

#[test]
fn an_interrupted_run_goes_on_where_it_stopped() {
    let dir = TempDir::new().unwrap();
    let (path, samples) = (dir.path().join("outcomes.jsonl"), samples(3));
    let with = |prompts| runner().method("dense", Box::new(Dense)).method("other", Fails::after(prompts));

    let mut journal = Journal::open(&path).unwrap();
    let (result, started) = run(&with(2), &samples, &mut journal);
    assert!(result.unwrap_err().to_string().contains("the power is gone"));
    assert_eq!(started.len(), 6);
    assert_eq!(journal.outcomes().len(), 5);
    drop(journal);

    // The run was killed while it wrote the fifth line.
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() - 40]).unwrap();
    assert_eq!(read_outcomes(&path).unwrap().len(), 4);
    let mut journal = Journal::open(&path).unwrap();
    let (result, started) = run(&with(9), &samples, &mut journal);
    result.unwrap();
    assert_eq!(started, ["passkey-300-i2-s0 dense", "passkey-300-i2-s0 other"]);
    assert_eq!(run(&with(9), &samples, &mut journal).1, [""; 0]);

    let mut whole = Journal::open(dir.path().join("whole.jsonl")).unwrap();
    run(&with(9), &samples, &mut whole).0.unwrap();
    assert_eq!(timeless(&journal), timeless(&whole));
    assert_eq!(read_outcomes(&path).unwrap(), journal.outcomes());
    drop(journal);
    assert!(Journal::fresh(&path).unwrap().outcomes().is_empty());
}

#[test]
fn outcomes_say_what_came_out() {
    let dir = TempDir::new().unwrap();
    let mut journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
    let specs = ["dense", "s2o:dense-below=0:dense-tail=0", "dense"].map(|spec| spec.parse().unwrap());
    let runner = runner().specs(&specs).unwrap().chunks([Chunk::Whole, Chunk::Tokens(128)]);
    let samples = Grid { lengths: vec![1024], ..Grid::default() }.samples(["passkey"]).unwrap();
    run(&runner, &samples, &mut journal).0.unwrap();
    let outcomes = journal.outcomes();
    assert_eq!(outcomes.len(), 4);
    for outcome in outcomes {
        let SampleResult::Answer { prediction, references, score } = &outcome.result else { panic!("{outcome:?}") };
        let answer = format!("{}.", references[0]);
        assert!(prediction.trim().starts_with(&answer), "{prediction:?} for {answer:?}");
        assert_eq!(*score, 1.0);
        assert!((960..=1024).contains(&outcome.prompt_tokens) && outcome.prefill_seconds > 0.0);
        assert_eq!(outcome.layer_density.len(), MODEL.config().num_layers);
        assert_eq!((outcome.seed, outcome.depth.is_some(), outcome.digest.is_none()), (Some(0), true, true));
    }
    let order: Vec<(&str, &str)> =
        outcomes.iter().map(|outcome| (outcome.key.method.as_str(), outcome.key.setting.chunk.as_str())).collect();
    let sparse = "s2o:dense-below=0:dense-tail=0";
    assert_eq!(order, [("dense", "whole"), ("dense", "128"), (sparse, "whole"), (sparse, "128")]);
    assert!(outcomes[0].density == 1.0 && outcomes[2].density < 1.0 && outcomes[2].layer_density[4] < 1.0);
}

/// Attends to nothing.
#[derive(Debug)]
struct Blind;

impl Attention for Blind {
    fn name(&self) -> &str {
        "blind"
    }

    fn prefill(&self, _: &PrefillCall, q: &Tensor, _: &Tensor, _: &Tensor) -> CandleResult<Tensor> {
        q.zeros_like()
    }
}

impl Method for Blind {}

#[test]
fn answers_decoded_together_are_those_decoded_alone() {
    let samples = Grid { lengths: vec![1024], ..Grid::default() }.samples(["niah_single_3"]).unwrap();
    let answers = |names: &[&str]| -> Vec<String> {
        let dir = TempDir::new().unwrap();
        let mut journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
        let method =
            |name: &str| -> Box<dyn Method> { if name == "blind" { Box::new(Blind) } else { Box::new(Dense) } };
        let runner = names.iter().fold(runner(), |runner, name| runner.method(*name, method(name)));
        run(&runner, &samples, &mut journal).0.unwrap();
        let prediction = |outcome: &Outcome| match &outcome.result {
            SampleResult::Answer { prediction, .. } => prediction.clone(),
            other => panic!("{other:?}"),
        };
        journal.outcomes().iter().map(prediction).collect()
    };
    let together = answers(&["blind", "dense"]);
    assert_ne!(together[0], together[1]);
    assert_eq!(together, ["blind", "dense"].map(|name| answers(&[name]).remove(0)));
}

#[test]
fn a_passage_has_a_perplexity_and_an_agreement() {
    let dir = TempDir::new().unwrap();
    let mut journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
    let runner = runner().specs(&["dense", "s2o:dense-below=0"].map(|spec| spec.parse().unwrap())).unwrap();
    let passage = Passage::embedded(600, 200).unwrap();
    run(&runner, &[Sample::Passage(passage.clone())], &mut journal).0.unwrap();
    let rows = rows(journal.outcomes());
    assert_eq!((rows.len(), rows[0].score, rows[0].top1_agreement), (2, None, Some(1.0)));
    let perplexity = rows[0].perplexity.unwrap();
    assert!((5.0..200.0).contains(&perplexity), "{perplexity}");
    assert!((rows[1].perplexity.unwrap() / perplexity - 1.0).abs() < 0.1 && rows[1].top1_agreement > Some(0.8));

    for (passage, part) in [
        (Passage { last: 600, ..passage.clone() }, "expected 1 to 599, got 600"),
        (
            Passage { text: "Too short.".into(), name: "note.txt".into(), ..passage },
            "at least 600 tokens in note.txt, got",
        ),
    ] {
        let error = run(&runner, &[Sample::Passage(passage)], &mut journal).0.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// The line of a right answer in a journal.
fn journal_line() -> String {
    let setting = Setting {
        model: "m".into(),
        dtype: "f32".into(),
        device: "cpu".into(),
        template: ChatTemplate::None,
        chunk: "whole".into(),
    };
    let outcome = Outcome {
        key: Key { sample: "a-7".into(), method: "dense".into(), setting },
        digest: None,
        task: "a".into(),
        groups: Vec::new(),
        context_tokens: 7,
        depth: None,
        index: 0,
        seed: None,
        prompt_tokens: 7,
        density: 1.0,
        layer_density: vec![1.0],
        prefill_seconds: 1.0,
        result: SampleResult::Answer { prediction: "yes".into(), references: vec!["yes".into()], score: 1.0 },
    };
    serde_json::to_string(&outcome).unwrap()
}

#[test]
fn other_journals_are_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("outcomes.jsonl");
    let refused = |text: &str| {
        fs::write(&path, text).unwrap();
        let error = Journal::open(&path).unwrap_err().to_string();
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "nothing is overwritten");
        error
    };
    let header = format!("{{\"format\":\"s2o-eval outcomes\",\"version\":{FORMAT_VERSION}}}");
    let newer = refused(&format!("{}\n", header.replace(&FORMAT_VERSION.to_string(), "99")));
    assert!(newer.ends_with("expected s2o-eval outcomes of version 1, got version 99"), "{newer}");
    assert!(refused("my shopping list").ends_with("got a file that is not a journal"));
    assert!(refused("{\"a\": 1}\n").ends_with("got a file that is not a journal"));
    let broken = refused(&format!("{header}\n{{\"sample\":1}}\n"));
    assert!(broken.contains("line 2: expected an outcome, got"), "{broken}");

    // Numbers that cannot be, and a second outcome of the same sample.
    let good = journal_line();
    let with = |field: &str, value: &str| good.replacen(field, value, 1);
    for (line, expected) in [
        (with("\"score\":1.0", "\"score\":55.0"), "line 2: expected a score from 0 to 1, got 55"),
        (with("\"density\":1.0", "\"density\":-3.0"), "line 2: expected a density >= 0, got -3"),
        (with("\"prefill_seconds\":1.0", "\"prefill_seconds\":-1.0"), "line 2: expected seconds >= 0, got -1"),
        (
            format!("{good}\n{}", with("\"score\":1.0", "\"score\":0.0")),
            "line 3: expected one outcome for each sample, method and setting, got a second one of a-7 with dense, \
             after line 2",
        ),
    ] {
        let error = refused(&format!("{header}\n{line}\n"));
        assert!(error.ends_with(expected), "{error}");
    }

    // The run was killed inside a character of its last line, as with answers in other alphabets.
    fs::write(&path, [format!("{header}\n{{\"prediction\":\"").as_bytes(), &"ü".as_bytes()[..1]].concat()).unwrap();
    assert!(read_outcomes(&path).unwrap().is_empty());
    drop(Journal::open(&path).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{header}\n"));

    // The run was killed at its start.
    fs::write(&path, &header[..7]).unwrap();
    let journal = Journal::open(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), format!("{header}\n"));
    let second = Journal::open(&path).unwrap_err().to_string();
    assert!(second.ends_with("expected a file that no other process writes to, got one in use"), "{second}");
    drop(journal);
}

#[test]
fn another_file_under_the_same_name_is_noticed() {
    let dir = TempDir::new().unwrap();
    let mut journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
    let runner = runner().method("dense", Box::new(Dense));
    let mut item = load::needle_7m().unwrap().remove(0);
    item.prompt.truncate(item.prompt.floor_char_boundary(800));
    item.context_tokens = 512;
    run(&runner, &[Sample::Given(item.clone())], &mut journal).0.unwrap();
    item.prompt.push('!');
    let error = runner.pending(&[Sample::Given(item)], &journal).unwrap_err();
    let EvalError::OtherRun { expected, .. } = error else { panic!("{error}") };
    assert!(expected.contains("needle-7m-0 with digest"), "{expected}");
}

#[test]
fn different_items_need_different_ids() {
    let dir = TempDir::new().unwrap();
    let journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
    let runner = runner().method("dense", Box::new(Dense));
    let item = load::needle_7m().unwrap().remove(0);
    let twice = [Sample::Given(item.clone()), Sample::Given(item.clone())];
    assert_eq!(runner.pending(&twice, &journal).unwrap().len(), 1, "the same item is run once");
    let other = Item { references: vec!["other".to_owned()], ..item.clone() };
    let error = runner.pending(&[Sample::Given(item), Sample::Given(other)], &journal).unwrap_err().to_string();
    assert!(error.ends_with("got two items with the id needle-7m-0"), "{error}");
}

#[test]
fn lengths_that_cannot_be_are_found_before_the_first_sample() {
    let max = MODEL.config().max_positions;
    let check = |lengths: Vec<usize>| {
        runner().check_lengths(&Grid { lengths, ..Grid::default() }.samples(["passkey"]).unwrap())
    };
    check(vec![300, max - 100]).unwrap();
    let short = check(vec![300, 20]).unwrap_err();
    assert!(matches!(short, EvalError::ContextTooShort { got: 20, .. }), "{short}");
    // The prompt has room, its answer has not.
    for tokens in [max, max + 1] {
        let long = check(vec![300, tokens]).unwrap_err();
        let EvalError::ContextTooLong { tokens: asked, expected, got, .. } = long else { panic!("{long}") };
        assert_eq!((asked, expected), (tokens, max));
        assert!(got > max, "{got}");
    }
}

#[test]
fn models_that_cannot_answer_are_refused() {
    let error = Runner::new(&MODEL, ChatTemplate::Llama3).unwrap_err().to_string();
    assert!(error.contains("expected one with <|begin_of_text|>, for llama3"), "{error}");
    let error = runner().specs(&["s2o:tau=x".parse().unwrap()]).unwrap_err().to_string();
    assert!(error.contains("tau: expected `auto` or a number in [0, 1), got \"x\""), "{error}");
}

#[test]
fn a_plan_counts_what_is_left() {
    let dir = TempDir::new().unwrap();
    let mut journal = Journal::open(dir.path().join("outcomes.jsonl")).unwrap();
    let grid = Grid { lengths: vec![300, 500], items: 2, ..Grid::default() };
    let mut samples = grid.samples(["passkey"]).unwrap();
    samples.push(Sample::Passage(Passage::embedded(600, 100).unwrap()));
    let runner = runner().specs(&["dense".parse().unwrap(), "s2o".parse().unwrap()]).unwrap();
    run(&runner, &samples[..1], &mut journal).0.unwrap();
    let runner = runner.chunks([Chunk::Whole, Chunk::Tokens(256)]);
    let trials = runner.pending(&samples, &journal).unwrap();
    let plan = runner.plan(&trials).unwrap();
    // Whole prompts of the first sample are in the journal.
    assert_eq!((plan.samples, plan.prefills(), plan.tokens()), (5, 18, 2 * 300 + 4 * (300 + 2 * 500 + 600)));
    let item = samples[0].item(&MODEL.tokenizer).unwrap().unwrap().into_owned();
    let most = item.max_new_tokens;
    let of_dense: Vec<Count> = plan.counts.iter().filter(|count| count.method == "dense").cloned().collect();
    let expected = [
        count("passkey", 300, "dense", 3, most),
        count("passkey", 500, "dense", 4, most),
        count("perplexity", 600, "dense", 2, 0),
    ];
    assert_eq!(of_dense, expected);
    assert!(most > 0 && plan.prompt_seconds > 0.0);
    let bytes = |elements: usize| 4 * elements as u64;
    let config = MODEL.config();
    let cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim;
    let memory = (plan.memory.weights, plan.memory.kv_cache, plan.memory.context_tokens);
    assert_eq!(memory, (bytes(MODEL.num_parameters()), bytes(600 * cache), 600));
    assert_eq!(runner.missing(&samples, &[], journal.path()).unwrap().len(), 20);

    let speed = runner.speed(600).unwrap();
    assert_eq!(speed.tokens, 512);
    assert!(speed.linear_seconds > 0.0 && speed.attention_seconds > 0.0 && speed.step_seconds > 0.0, "{speed:?}");
    // Four answers are decoded together.
    assert_eq!((speed.weights, speed.kv), (bytes(MODEL.num_parameters()) / 4, bytes(cache) as f64));
    assert_eq!(runner.speed(100).unwrap().tokens, 100);
}
