//! Downloads from the Hugging Face hub with `hf-hub`, into the cache that Python's tools share.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::hub::HubOptions;
use super::safetensors::{CONFIG, GENERATION_CONFIG, INDEX, SINGLE, TOKENIZER, shard_names};
use super::{LoadOptions, read_text};
use crate::error::{HubFile, ModelError, Result};

/// Further attempts after an interrupted download; they resume where it stopped.
const RETRIES: usize = 3;

/// Downloads the files of a repository into the cache and returns their directory. Files that are already present are
/// not requested again, and a complete cache makes no request at all.
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
            // A sharded repository has an index instead; if it has neither, the plain name is reported.
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

    /// The directory, if it has everything that loading needs. `generation_config.json` does not count, because not
    /// every repository has one; it is requested before the weights, so if these are present it has been requested.
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

    /// Converts a failed request to a typed error.
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
