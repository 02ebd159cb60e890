//! The f64 reference equals the independent program.

use s2o_core::reference::{self, Head};
use s2o_core::{Plan, S2oConfig, SegmentOrder};
use s2o_testkit::relative_l2;

use crate::vectors::load_all;

/// The vectors are stored as f32, whose rounding alone is up to 6e-8.
const ROUNDING: f64 = 1e-7;

#[test]
fn orders_are_the_same() {
    for vectors in load_all() {
        let config = vectors.config(&vectors.runs()[0]);
        let plan = Plan::new(&config, &vectors.shape, vectors.prompt_len(), S2oConfig::CPU_BREAK_EVEN).unwrap();
        let head = Head::new(&vectors.shape, vectors.qkv(), vectors.shape.default_softmax_scale(), 0, 0);
        for (s, order) in reference::rank_all(&head, &plan, &config).iter().enumerate() {
            let SegmentOrder { q_perm, kv_perm, .. } = order;
            let name = |what: &str| format!("{what}.h0.s{s}");
            let (q_want, kv_want) = (vectors.ints(&name("q_perm")), vectors.ints(&name("kv_perm")));
            assert_eq!(kv_perm.as_slice(), kv_want.unwrap(), "{} {}", vectors.name, name("kv_perm"));
            assert_eq!(q_perm.as_slice(), q_want.unwrap(), "{} {}", vectors.name, name("q_perm"));
        }
    }
}

#[test]
fn outputs_and_visits_are_the_same() {
    let mut runs = 0;
    for vectors in load_all() {
        let scale = vectors.shape.default_softmax_scale();
        for run in vectors.runs() {
            let at = format!("{} run {}", vectors.name, run.index);
            let config = vectors.config(run);
            let (out, stats) =
                reference::attention(&vectors.shape, vectors.qkv(), scale, &config, vectors.prompt_len(), None)
                    .unwrap();
            let visited: Vec<u32> =
                stats.heads.iter().flat_map(|head| head.tiles.iter().map(|tile| tile.visited as u32)).collect();
            let want = vectors.ints(&format!("visited.{}", run.index)).unwrap();
            assert_eq!(visited, want, "{at}: visited prefix tiles");
            let error = relative_l2(&out, &vectors.floats(&format!("out.{}", run.index)).unwrap());
            assert!(error < ROUNDING, "{at}: output differs by {error:e}");
            let (got, want) = (stats.density(), run.density);
            assert!((got - want).abs() < 1e-12, "{at}: density {got}, expected {want}");
            if run.tau == 0.0 {
                let dense = vectors.floats("dense").unwrap();
                assert!(relative_l2(&out, &dense) < ROUNDING, "{at}: never stopping is dense");
                assert_eq!(stats.density(), 1.0, "{at}");
            }
            runs += 1;
        }
    }
    assert!(runs >= 13, "only {runs} runs were compared");
}
