//! A cache that another tool filled, in the layout of Python's `huggingface_hub`: blobs, references, and snapshots of
//! links to the blobs. No network.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use s2o_models::{LoadedModel, ModelError};
use tempfile::TempDir;

use crate::fixtures::*;
use crate::hub::{Server, closed, load, options};

const FIRST: &str = "1111111111111111111111111111111111111111";
const SECOND: &str = "2222222222222222222222222222222222222222";
const SHARD: &str = "model-00002-of-00002.safetensors";

/// A cache with the repository `org/tiny`.
struct Mirror {
    cache: TempDir,
}

impl Mirror {
    fn new() -> Self {
        let mirror = Self { cache: tempfile::tempdir().unwrap() };
        for directory in ["blobs", "refs", "snapshots"] {
            fs::create_dir_all(mirror.repository().join(directory)).unwrap();
        }
        mirror
    }

    fn repository(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny")
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository().join("snapshots").join(commit)
    }

    /// Stores weights as a commit, in one file or in two shards with an index.
    fn commit(&self, commit: &str, weights: &HashMap<String, Tensor>, sharded: bool) {
        let files = tempfile::tempdir().unwrap();
        if sharded {
            write_sharded(files.path(), &llama_json(), weights);
        } else {
            write_directory(files.path(), &llama_json(), weights);
        }
        fs::create_dir_all(self.snapshot(commit)).unwrap();
        for (number, file) in fs::read_dir(files.path()).unwrap().enumerate() {
            let name = file.unwrap().file_name().into_string().unwrap();
            // On the hub, the name of a blob is its hash.
            let blob = format!("{commit}-{number}");
            fs::copy(files.path().join(&name), self.repository().join("blobs").join(&blob)).unwrap();
            symlink(Path::new("../../blobs").join(&blob), self.snapshot(commit).join(&name)).unwrap();
        }
    }

    fn refer(&self, name: &str, commit: &str) {
        let path = self.repository().join("refs").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, commit).unwrap();
    }
}

fn logits(model: &LoadedModel) -> Tensor {
    last_logits(&model.decoder, &tokens(1, 20, 288))
}

#[test]
fn a_full_cache_makes_no_request() {
    for sharded in [false, true] {
        let mirror = Mirror::new();
        mirror.commit(FIRST, &weights(&llama_json(), 51), sharded);
        mirror.refer("main", FIRST);
        let expected = {
            let files = tempfile::tempdir().unwrap();
            write_directory(files.path(), &llama_json(), &weights(&llama_json(), 51));
            logits(&load(files.path().to_str().unwrap(), &options(&closed(), mirror.cache.path())).unwrap())
        };
        let server = Server::start(mirror.cache.path());
        let mut options = options(&server.address, mirror.cache.path());
        for offline in [false, true] {
            options.hub.offline = offline;
            let model = load("org/tiny", &options).unwrap();
            assert_eq!(model.name, "tiny");
            assert_eq!(values(&logits(&model)), values(&expected));
        }
        assert_eq!(server.requests(), [""; 0], "sharded: {sharded}");
    }
}

#[test]
fn branches_tags_and_commits_are_told_apart() {
    let mirror = Mirror::new();
    mirror.commit(FIRST, &weights(&llama_json(), 52), true);
    mirror.commit(SECOND, &weights(&llama_json(), 53), false);
    mirror.refer("main", FIRST);
    mirror.refer("v2", SECOND);
    mirror.refer("refs/pr/7", SECOND);
    let mut options = options(&closed(), mirror.cache.path());
    options.hub.offline = true;
    let logits = |revision: &str| values(&logits(&load(&format!("org/tiny@{revision}"), &options).unwrap()));
    let (first, second) = (logits("main"), logits("v2"));
    assert_ne!(first, second);
    assert_eq!(logits(FIRST), first);
    assert_eq!(logits(SECOND), second);
    assert_eq!(logits("refs/pr/7"), second);
    let error = load("org/tiny@v3", &options).unwrap_err();
    assert!(matches!(&error, ModelError::Offline { at, .. } if at.revision == "v3"), "{error}");
}

#[test]
fn a_missing_shard_is_named() {
    let mirror = Mirror::new();
    mirror.commit(FIRST, &weights(&llama_json(), 54), true);
    mirror.refer("main", FIRST);
    fs::remove_file(mirror.snapshot(FIRST).join(SHARD)).unwrap();
    let empty = tempfile::tempdir().unwrap();
    let server = Server::start(empty.path());
    let mut options = options(&server.address, mirror.cache.path());
    let error = load("org/tiny", &options).unwrap_err();
    assert!(matches!(&error, ModelError::HubFileNotFound { at } if at.file == SHARD), "{error}");
    assert!(error.to_string().contains(SHARD), "{error}");
    options.hub.offline = true;
    let error = load("org/tiny", &options).unwrap_err();
    assert!(matches!(&error, ModelError::Offline { at, .. } if at.file == SHARD), "{error}");

    // The same files as a user's directory.
    let error = load(mirror.snapshot(FIRST).to_str().unwrap(), &options).unwrap_err();
    assert!(matches!(&error, ModelError::MissingFile { path, .. } if path.ends_with(SHARD)), "{error}");
    assert!(error.to_string().contains("names it as a shard"), "{error}");
}

#[test]
fn a_link_to_a_lost_blob_counts_as_missing() {
    let mirror = Mirror::new();
    mirror.commit(FIRST, &weights(&llama_json(), 55), true);
    mirror.refer("main", FIRST);
    fs::remove_file(fs::canonicalize(mirror.snapshot(FIRST).join(SHARD)).unwrap()).unwrap();
    let mut options = options(&closed(), mirror.cache.path());
    options.hub.offline = true;
    let error = load("org/tiny", &options).unwrap_err();
    assert!(matches!(&error, ModelError::Offline { at, .. } if at.file == SHARD), "{error}");
}
