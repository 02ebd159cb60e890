//! Reference vectors made by an independent float64 program (tests/data/README.md).

use std::path::PathBuf;

use s2o_core::{AttnShape, KeyScore, S2oConfig, SegmentLen, TriggeringTile};
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
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data"), PathBuf::from);
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
