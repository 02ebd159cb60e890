//! Reference vectors made by an independent float64 program (tests/data/README.md). The f64 reference equals it.

use std::path::PathBuf;

use s2o_core::reference::{self, Head};
use s2o_core::{AttnShape, KeyScore, Plan, S2oConfig, SegmentLen, SegmentOrder, TriggeringTile};
use s2o_testkit::relative_l2;
use safetensors::SafeTensors;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub struct Header {
    segment: usize,
    tile_q: usize,
    tile_k: usize,
    /// The vectors use the paper's name.
    #[serde(rename = "kv_offset")]
    q_offset: usize,
    runs: Vec<Run>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Run {
    pub index: usize,
    pub tau: f32,
    rule: String,
    keep: u8,
    q_perm: u8,
    second_cumulant: f32,
    front_sink: usize,
    dense_tail: usize,
    /// Density over the heads in the file.
    pub density: f64,
}

/// One file.
pub struct Vectors {
    pub name: String,
    bytes: Vec<u8>,
    header: Header,
    pub shape: AttnShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// All files of tests/data, or of the directory that S2O_VECTORS names.
pub fn load_all() -> Vec<Vectors> {
    let dir = std::env::var_os("S2O_VECTORS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data"), PathBuf::from);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    paths.sort();
    assert!(paths.len() >= 5, "expected five vector files in {}", dir.display());
    paths.iter().map(|path| Vectors::load(path)).collect()
}

impl Vectors {
    fn load(path: &std::path::Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let header: Header = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["config"]).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let sizes = |name: &str| tensors.tensor(name).unwrap().shape().to_vec();
        let floats = |name: &str| numbers(&tensors, name, f32::from_le_bytes).unwrap();
        let (q, k) = (sizes("q"), sizes("k"));
        assert_eq!(header.q_offset, k[0] - q[0]);
        let shape = AttnShape::new([1, q[0], q[1], q[2]], [k[0], k[1]]).unwrap();
        Self {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            shape,
            q: floats("q"),
            k: floats("k"),
            v: floats("v"),
            header,
            bytes,
        }
    }

    pub fn qkv(&self) -> [&[f32]; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// Every file ends with its prompt.
    pub fn prompt_len(&self) -> usize {
        self.shape.k_len()
    }

    pub fn runs(&self) -> &[Run] {
        &self.header.runs
    }

    pub fn config(&self, run: &Run) -> S2oConfig {
        S2oConfig::builder()
            .segment_len(SegmentLen::Fixed(self.header.segment))
            .tile_q(self.header.tile_q)
            .tile_k(self.header.tile_k)
            .tau(run.tau)
            .set("stop-rule", &run.rule)
            .unwrap()
            .triggering_tile(if run.keep == 1 { TriggeringTile::Keep } else { TriggeringTile::Discard })
            .key_score(if run.second_cumulant == 0.0 {
                KeyScore::MeanQuery
            } else {
                KeyScore::SecondCumulant { c: run.second_cumulant }
            })
            .front_sink(run.front_sink)
            .recent(0)
            .dense_tail(run.dense_tail)
            .q_perm(run.q_perm == 1)
            .dense_below(0)
            .build()
            .unwrap()
    }

    pub fn floats(&self, name: &str) -> Option<Vec<f32>> {
        numbers(&SafeTensors::deserialize(&self.bytes).unwrap(), name, f32::from_le_bytes)
    }

    pub fn ints(&self, name: &str) -> Option<Vec<u32>> {
        numbers(&SafeTensors::deserialize(&self.bytes).unwrap(), name, u32::from_le_bytes)
    }
}

fn numbers<T>(tensors: &SafeTensors<'_>, name: &str, from: fn([u8; 4]) -> T) -> Option<Vec<T>> {
    Some(tensors.tensor(name).ok()?.data().as_chunks().0.iter().map(|&bytes| from(bytes)).collect())
}

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
