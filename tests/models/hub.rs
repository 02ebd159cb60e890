//! The hub client against a small HTTP server: no test may depend on the real hub.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use s2o_models::{HubOptions, LoadOptions, LoadedModel, ModelError, ModelSource};

use crate::fixtures::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves `org/*` as the hub does: answers a range request with size, etag and commit, and redirects large files to
/// another path, as the hub does to its storage. `org/gated` and `org/private` answer 403 and 401.
pub(crate) struct Server {
    pub(crate) address: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(files: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (files, log, own) = (files.to_owned(), requests.clone(), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, log, own) = (files.clone(), log.clone(), own.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &files, &own, &log));
            }
        });
        Self { address, requests }
    }

    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(stream: TcpStream, files: &Path, own: &str, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(request)) = lines.next() else { return };
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let header = |name: &str| {
        let prefix = format!("{name}: ");
        headers.iter().find(|h| h.to_lowercase().starts_with(&prefix)).map(|h| h[prefix.len()..].to_owned())
    };
    let path = request.split(' ').nth(1).unwrap().to_owned();
    log.lock().unwrap().push(format!("{path} {}", header("authorization").unwrap_or_default()));
    let file = path.rsplit('/').next().unwrap().to_owned();
    let refused =
        [("gated", "403 Forbidden"), ("private", "401 Unauthorized"), ("broken", "500 Internal Server Error")];
    let refused = refused.iter().find(|(name, _)| path.starts_with(&format!("/org/{name}/")));
    let (status, extra, body): (&str, String, Vec<u8>) = match refused {
        Some((_, status)) => (status, String::new(), Vec::new()),
        None => match std::fs::read(files.join(&file)) {
            Err(_) => ("404 Not Found", String::new(), Vec::new()),
            Ok(_) if file.ends_with(".safetensors") && path.starts_with("/org/") => {
                let location = format!("{own}/storage/{file}");
                ("302 Found", format!("Location: {location}\r\nX-Linked-Etag: \"{file}\"\r\n"), Vec::new())
            }
            Ok(bytes) => {
                let range = header("range").unwrap_or_else(|| "bytes=0-".to_owned());
                let (from, to) = range.trim_start_matches("bytes=").split_once('-').unwrap();
                let from: usize = from.parse().unwrap();
                let to = to.parse::<usize>().map_or(bytes.len(), |to| to + 1).min(bytes.len());
                let content_range = format!("Content-Range: bytes {from}-{}/{}\r\n", to.saturating_sub(1), bytes.len());
                ("206 Partial Content", format!("{content_range}ETag: \"{file}\"\r\n"), bytes[from..to].to_vec())
            }
        },
    };
    let mut stream = stream;
    let head = format!(
        "HTTP/1.1 {status}\r\nX-Repo-Commit: {COMMIT}\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // A client may disconnect early.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

pub(crate) fn options(endpoint: &str, cache: &Path) -> LoadOptions {
    let (endpoint, cache, token) = (endpoint.to_owned(), cache.to_owned(), Some("hf_test".to_owned()));
    LoadOptions { hub: HubOptions { endpoint, cache, token, offline: false }, ..Default::default() }
}

pub(crate) fn load(source: &str, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    source.parse::<ModelSource>().unwrap().load(options, None)
}

/// An address without a server.
pub(crate) fn closed() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn a_model_is_fetched_once_and_then_read_from_the_cache() {
    for sharded in [false, true] {
        let (files, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let weights = weights(&llama_json(), 41);
        if sharded {
            write_sharded(files.path(), &llama_json(), &weights);
        } else {
            write_directory(files.path(), &llama_json(), &weights);
            std::fs::write(files.path().join("generation_config.json"), r#"{"eos_token_id": 3}"#).unwrap();
        }
        let server = Server::start(files.path());
        let options = options(&server.address, cache.path());
        let model = load("org/tiny", &options).unwrap();
        assert_eq!(model.name, "tiny");
        assert_eq!(model.eos_ids, if sharded { vec![257, 258] } else { vec![3, 257, 258] });
        assert_eq!(model.config().vocab_size, 288);
        let requests = server.requests();
        assert!(requests.iter().any(|r| r == "/org/tiny/resolve/main/config.json Bearer hf_test"), "{requests:?}");
        assert!(requests.iter().any(|r| r.starts_with("/storage/model")), "{requests:?}");

        let mut offline = options.clone();
        offline.hub.endpoint = closed();
        assert!(load("org/tiny", &offline).is_ok(), "a full cache needs no network");
        offline.hub.offline = true;
        assert!(load("org/tiny", &offline).is_ok(), "HF_HUB_OFFLINE allows the cache");
        assert!(load(&format!("org/tiny@{COMMIT}"), &offline).is_ok(), "a commit's snapshot needs no reference");
    }
}

#[test]
fn refusals_say_what_to_do() {
    let (files, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(files.path());
    let options = options(&server.address, cache.path());
    for (id, expected) in [("org/gated", 403), ("org/private", 401)] {
        let error = load(id, &options).unwrap_err();
        assert!(matches!(&error, ModelError::Gated { status, .. } if *status == expected), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("{}/{id}", server.address)) && text.contains("HF_TOKEN"), "{text}");
        assert!(text.contains("accept the licence") && text.contains(&format!("HTTP {expected}")), "{text}");
        assert!(text.ends_with(&format!("run `hf auth login`; there is no directory {id} here")), "{text}");
        assert!(text.contains("hf auth login") && !text.contains("hf_test"), "{text}");
    }
    let error = load("org/broken", &options).unwrap_err();
    assert!(matches!(&error, ModelError::Hub { reason, .. } if reason.contains("500")), "{error}");
}

#[test]
fn missing_files_are_named() {
    let (files, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(files.path());
    let options = options(&server.address, cache.path());
    let missing = |id: &str| match load(id, &options).unwrap_err() {
        ModelError::HubFileNotFound { at } => format!("{} {}", at.file, at.revision),
        other => panic!("{other}"),
    };
    assert_eq!(missing("org/empty@v2"), "config.json v2");
    write_directory(files.path(), &llama_json(), &weights(&llama_json(), 42));
    std::fs::remove_file(files.path().join("model.safetensors")).unwrap();
    assert_eq!(missing("org/no-weights"), "model.safetensors main");
    std::fs::remove_file(files.path().join("tokenizer.json")).unwrap();
    assert_eq!(missing("org/no-tokenizer"), "tokenizer.json main");
}

#[test]
fn no_network_says_so() {
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(&closed(), cache.path());
    let error = load("org/tiny", &options).unwrap_err();
    assert!(matches!(error, ModelError::Offline { .. }), "{error}");
    assert!(error.to_string().ends_with("; there is no directory org/tiny here"), "{error}");
    options.hub.offline = true;
    let error = load("org/tiny", &options).unwrap_err();
    assert!(matches!(&error, ModelError::Offline { reason, .. } if reason.contains("HF_HUB_OFFLINE")), "{error}");
}

#[test]
fn sources_parse() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let parse = |source: &str| source.parse::<ModelSource>();
    assert_eq!(parse("needle-11m").unwrap(), ModelSource::Embedded);
    assert_eq!(parse(path).unwrap(), ModelSource::Directory(PathBuf::from(path)));
    assert_eq!(parse("a/b/c.gguf").unwrap(), ModelSource::Gguf(PathBuf::from("a/b/c.gguf")));
    let hub = |id: &str, revision: &str| ModelSource::Hub { id: id.to_owned(), revision: revision.to_owned() };
    assert_eq!(parse("Qwen/Qwen3-8B").unwrap(), hub("Qwen/Qwen3-8B", "main"));
    assert_eq!(parse("Qwen/Qwen3-8B@v1").unwrap(), hub("Qwen/Qwen3-8B", "v1"));
    assert_eq!(parse("./nowhere").unwrap(), ModelSource::Directory(PathBuf::from("./nowhere")));
    let weights = directory.path().join("model.safetensors");
    std::fs::write(&weights, "").unwrap();
    for (file, directory) in
        [(weights.to_str().unwrap(), path), ("x/model.safetensors", "x"), ("model.safetensors", ".")]
    {
        let error = parse(file).unwrap_err().to_string();
        let expected = format!("`{file}` is a file: expected the directory of a model, such as `{directory}`, or ");
        assert!(error.starts_with(&expected), "{error}");
    }
    for bad in ["", "llama", "needle 7m"] {
        assert!(matches!(parse(bad), Err(ModelError::InvalidSource { .. })), "{bad:?}");
    }
}
