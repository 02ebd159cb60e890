//! The Hugging Face hub through `hf-hub`: files land in the cache that Python's tools share, and errors say what to do.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::safetensors::{CONFIG, GENERATION_CONFIG, INDEX, SINGLE, TOKENIZER, shard_names};
use super::{LoadOptions, read_text};
use crate::error::{HubFile, ModelError, Result};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_REVISION: &str = "main";
/// Further attempts after a download broke off; they resume where it stopped.
const RETRIES: usize = 3;

/// Where the hub and its cache are, and who asks.
#[derive(Clone)]
pub struct HubOptions {
    /// Address of the hub or of a mirror.
    pub endpoint: String,
    /// Directory of the cache (`.../huggingface/hub`).
    pub cache: PathBuf,
    /// Access token, for gated and private repositories.
    pub token: Option<String>,
    /// Never use the network, only the cache.
    pub offline: bool,
}

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret: logs learn only whether there is one.
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish()
    }
}

impl HubOptions {
    /// As Python's `huggingface_hub`: `HF_ENDPOINT`; `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or in
    /// `~/.cache/huggingface`; the token from `HF_TOKEN`, or the file `HF_TOKEN_PATH`, or `token` in that home;
    /// `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let home = variable("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| env::home_dir().map(|home| home.join(".cache")));
            cache.unwrap_or_else(env::temp_dir).join("huggingface")
        });
        let token_file = variable("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let token = variable("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file).ok());
        Self {
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            cache: variable("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: variable("HF_HUB_OFFLINE")
                .is_some_and(|value| matches!(value.to_lowercase().as_str(), "1" | "on" | "yes" | "true")),
        }
    }
}

/// `org/name[@revision]`, or nothing.
pub(super) fn parse_id(source: &str) -> Option<(String, String)> {
    let (id, revision) = source.split_once('@').unwrap_or((source, DEFAULT_REVISION));
    let (org, name) = id.split_once('/')?;
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let revision_ok = !revision.is_empty() && !revision.contains(char::is_whitespace) && !revision.contains("..");
    (is_part(org) && is_part(name) && revision_ok).then(|| (id.to_owned(), revision.to_owned()))
}

/// Brings the files of a repository into the cache and returns their directory. What is there already is not asked for
/// again, and a complete cache makes no request at all.
pub(super) fn fetch(id: &str, revision: &str, options: &LoadOptions) -> Result<PathBuf> {
    let repository = Repository::new(id, revision, &options.hub)?;
    if let Some(directory) = repository.complete(options)? {
        return Ok(directory);
    }
    let config = repository.get(CONFIG)?;
    match repository.get(GENERATION_CONFIG) {
        Ok(_) | Err(ModelError::HubFileNotFound { .. } | ModelError::Offline { .. }) => {}
        Err(error) => return Err(error),
    }
    if options.tokenizer.is_none() {
        repository.get(TOKENIZER)?;
    }
    let index = match repository.cached(INDEX) {
        Some(index) => Some(index),
        None => match repository.get(SINGLE) {
            Ok(_) => None,
            // A sharded repository has an index instead; when it has neither, the plain name is the one to report.
            Err(missing @ ModelError::HubFileNotFound { .. }) => Some(repository.get(INDEX).map_err(|_| missing)?),
            Err(error) => return Err(error),
        },
    };
    if let Some(index) = index {
        for shard in shard_names(&read_text(&index, "")?, &index.display().to_string())? {
            repository.get(&shard)?;
        }
    }
    config.parent().map(Path::to_owned).ok_or_else(|| repository.error(CONFIG, "the cache path has no parent"))
}

struct Repository<'a> {
    id: &'a str,
    revision: &'a str,
    options: &'a HubOptions,
    endpoint: String,
    repo: Repo,
    cache: CacheRepo,
    api: Api,
}

impl<'a> Repository<'a> {
    fn new(id: &'a str, revision: &'a str, options: &'a HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let repo = Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned());
        let cache = Cache::new(options.cache.clone());
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(endpoint.clone())
            .with_token(options.token.clone())
            .with_retries(RETRIES)
            .with_progress(true)
            .build()
            .map_err(|error| ModelError::Hub {
                at: Box::new(HubFile {
                    id: id.to_owned(),
                    file: CONFIG.to_owned(),
                    revision: revision.to_owned(),
                    endpoint: endpoint.clone(),
                }),
                reason: error.to_string(),
            })?;
        Ok(Self { id, revision, options, endpoint, cache: cache.repo(repo.clone()), repo, api })
    }

    fn cached(&self, file: &str) -> Option<PathBuf> {
        // Python writes no reference for a commit given by its hash.
        let by_hash = || Some(self.cache.pointer_path(self.revision).join(file)).filter(|path| path.exists());
        self.cache.get(file).or_else(by_hash)
    }

    /// The directory, if it has all that loading needs. `generation_config.json` does not count, because not every
    /// repository has one; it is asked for before the weights, so where these are it has been asked for.
    fn complete(&self, options: &LoadOptions) -> Result<Option<PathBuf>> {
        let Some(config) = self.cached(CONFIG) else { return Ok(None) };
        let has_tokenizer = options.tokenizer.is_some() || self.cached(TOKENIZER).is_some();
        let has_weights = match self.cached(INDEX) {
            Some(index) => {
                let shards = shard_names(&read_text(&index, "")?, &index.display().to_string())?;
                shards.iter().all(|shard| self.cached(shard).is_some())
            }
            None => self.cached(SINGLE).is_some(),
        };
        Ok(config.parent().filter(|_| has_tokenizer && has_weights).map(Path::to_owned))
    }

    fn get(&self, file: &str) -> Result<PathBuf> {
        if let Some(path) = self.cached(file) {
            return Ok(path);
        }
        if self.options.offline {
            return Err(self.offline(file, "HF_HUB_OFFLINE is set".to_owned()));
        }
        self.api.repo(self.repo.clone()).download(file).map_err(|error| self.explain(file, error))
    }

    /// What a failure means for the user.
    fn explain(&self, file: &str, error: ApiError) -> ModelError {
        match error {
            ApiError::TooManyRetries(last) => self.explain(file, *last),
            ApiError::RequestError(request) => match *request {
                ureq::Error::StatusCode(status @ (401 | 403)) => ModelError::Gated { at: self.at(file), status },
                ureq::Error::StatusCode(404) => ModelError::HubFileNotFound { at: self.at(file) },
                ureq::Error::StatusCode(status) => self.error(file, format!("HTTP {status}")),
                other => self.offline(file, other.to_string()),
            },
            other => self.error(file, other),
        }
    }

    fn at(&self, file: &str) -> Box<HubFile> {
        Box::new(HubFile {
            id: self.id.to_owned(),
            file: file.to_owned(),
            revision: self.revision.to_owned(),
            endpoint: self.endpoint.clone(),
        })
    }

    fn offline(&self, file: &str, reason: String) -> ModelError {
        ModelError::Offline { at: self.at(file), cache: self.options.cache.clone(), reason }
    }

    fn error(&self, file: &str, reason: impl ToString) -> ModelError {
        ModelError::Hub { at: self.at(file), reason: reason.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_revisions() {
        let parsed = |s| parse_id(s).map(|(id, revision)| format!("{id} {revision}"));
        assert_eq!(parsed("meta-llama/Llama-3.1-8B").as_deref(), Some("meta-llama/Llama-3.1-8B main"));
        assert_eq!(parsed("a/b@refs/pr/1").as_deref(), Some("a/b refs/pr/1"));
        for bad in ["a", "a/", "/b", "a/b/c", "../b", "a/..", "a/b@", "a b/c", "a/b@x y"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }

    #[test]
    fn environment_is_read_as_python_reads_it() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home_text = home.path().display().to_string();
        let from = |pairs: &[(&str, &str)]| {
            let pairs: Vec<(String, String)> = pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            HubOptions::from_variables(move |name| pairs.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()))
        };
        let options = from(&[("HF_HOME", &home_text)]);
        assert_eq!(options.endpoint, DEFAULT_ENDPOINT);
        assert_eq!(options.cache, home.path().join("hub"));
        assert_eq!(options.token.as_deref(), Some("hf_file"));
        assert!(!options.offline);
        let pairs = [("HF_HOME", &*home_text), ("HF_TOKEN", "hf_env"), ("HF_HUB_CACHE", "c"), ("HF_HUB_OFFLINE", "1")];
        let options = from(&[&pairs[..], &[("HF_ENDPOINT", "http://mirror")]].concat());
        assert_eq!(options.token.as_deref(), Some("hf_env"));
        assert_eq!((options.cache, options.endpoint.as_str()), (PathBuf::from("c"), "http://mirror"));
        assert!(options.offline);
        assert_eq!(from(&[("XDG_CACHE_HOME", "/x")]).cache, PathBuf::from("/x/huggingface/hub"));
    }

    #[test]
    fn a_token_is_never_printed() {
        let options = HubOptions { token: Some("hf_secret".to_owned()), ..HubOptions::from_variables(|_| None) };
        assert!(!format!("{options:?}").contains("hf_secret"));
    }
}
