//! Downloads from the Hugging Face hub with `hf-hub`, into the cache that Python's tools share.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::LoadOptions;
use super::hub::HubOptions;
use super::safetensors::{CONFIG, GENERATION_CONFIG, INDEX, SINGLE, TOKENIZER, shard_names};
use crate::error::{HubFile, ModelError, Result};

/// Further attempts after an interrupted download; they resume where it stopped.
const RETRIES: usize = 3;

/// Downloads the files of a repository into the cache and returns their directory. Files that are already present are
/// not requested again, and a complete cache makes no request at all.
pub(super) fn fetch(id: &str, revision: &str, options: &LoadOptions) -> Result<PathBuf> {
    let repository = Repository::new(id, revision, &options.hub)?;
    let config = repository.get(CONFIG)?;
    // Not every repository has it. It is requested before the weights, so if these are present it has been requested.
    if !repository.has_weights()? {
        match repository.get(GENERATION_CONFIG) {
            Ok(_) | Err(ModelError::HubFileNotFound { .. } | ModelError::Offline { .. }) => {}
            Err(error) => return Err(error),
        }
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
        for shard in shard_names(&index)? {
            repository.get(&shard)?;
        }
    }
    config.parent().map(Path::to_owned).ok_or_else(|| repository.error(CONFIG, "the cache path has no parent"))
}

struct Repository<'a> {
    /// For errors; its file is another one each time.
    at: HubFile,
    options: &'a HubOptions,
    repo: Repo,
    cache: CacheRepo,
    api: Api,
}

impl<'a> Repository<'a> {
    fn new(id: &str, revision: &str, options: &'a HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let at = HubFile { id: id.to_owned(), file: CONFIG.to_owned(), revision: revision.to_owned(), endpoint };
        let repo = Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned());
        let cache = Cache::new(options.cache.clone());
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(at.endpoint.clone())
            .with_token(options.token.clone())
            .with_retries(RETRIES)
            .with_progress(true)
            .build()
            .map_err(|error| ModelError::Hub { at: Box::new(at.clone()), reason: error.to_string() })?;
        Ok(Self { at, options, cache: cache.repo(repo.clone()), repo, api })
    }

    fn cached(&self, file: &str) -> Option<PathBuf> {
        // Python writes no reference for a commit given by its hash.
        let by_hash = || Some(self.cache.pointer_path(&self.at.revision).join(file)).filter(|path| path.exists());
        self.cache.get(file).or_else(by_hash)
    }

    fn has_weights(&self) -> Result<bool> {
        match self.cached(INDEX) {
            Some(index) => Ok(shard_names(&index)?.iter().all(|shard| self.cached(shard).is_some())),
            None => Ok(self.cached(SINGLE).is_some()),
        }
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
        Box::new(HubFile { file: file.to_owned(), ..self.at.clone() })
    }

    fn offline(&self, file: &str, reason: String) -> ModelError {
        ModelError::Offline { at: self.at(file), cache: self.options.cache.clone(), reason }
    }

    fn error(&self, file: &str, reason: impl ToString) -> ModelError {
        ModelError::Hub { at: self.at(file), reason: reason.to_string() }
    }
}
