//! The Hugging Face hub: names of repositories, and the settings shared with Python's tools.

use std::env;
use std::fmt;
use std::path::PathBuf;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_REVISION: &str = "main";

/// Addresses of the hub and its cache, and the access token.
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
        // The token is a secret: logs show only whether it is set.
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish()
    }
}

impl HubOptions {
    /// Reads the variables of Python's `huggingface_hub`: `HF_ENDPOINT`; `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or in
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

/// Parses `org/name[@revision]`.
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
