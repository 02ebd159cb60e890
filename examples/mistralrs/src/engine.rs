//! mistral.rs with one model on one GPU, and the modes in which its attention runs.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
#[cfg(feature = "s2o")]
use candle_flash_attn::s2o::{self, AttnStats, Policy};
use mistralrs::core::{MistralRs, MistralRsBuilder};
use mistralrs::model_builder_trait::build_text_pipeline;
use mistralrs::{
    DeviceMapSetting, MemoryGpuConfig, ModelDType, NormalRequest, PagedAttentionMetaBuilder, Request, RequestMessage,
    ResponseOk, SamplingParams, TextModelBuilder,
};
use mistralrs_server_core::mistralrs_server_router_builder::MistralRsServerRouterBuilder;

/// How the attention of a run is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The original crate, without candle-s2o.
    #[cfg(not(feature = "s2o"))]
    Original,
    /// candle-s2o, exact.
    #[cfg(feature = "s2o")]
    #[cfg_attr(feature = "nccl", allow(dead_code))]
    Exact,
    /// candle-s2o by the policy of the environment variables.
    #[cfg(feature = "s2o")]
    Policy,
}

/// The modes of this build.
#[cfg(all(feature = "s2o", not(feature = "nccl")))]
pub const MODES: &[Mode] = &[Mode::Exact, Mode::Policy];
/// The modes of this build. The other processes only have the environment variables, so `S2O_OFF=1` makes all exact.
#[cfg(all(feature = "s2o", feature = "nccl"))]
pub const MODES: &[Mode] = &[Mode::Policy];
/// The modes of this build.
#[cfg(not(feature = "s2o"))]
pub const MODES: &[Mode] = &[Mode::Original];

#[cfg(feature = "s2o")]
impl Mode {
    /// The name in the output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Policy => "policy",
        }
    }

    /// From now on attention runs in this mode.
    pub fn set(self) {
        static FROM_ENVIRONMENT: std::sync::OnceLock<Policy> = std::sync::OnceLock::new();
        let policy = FROM_ENVIRONMENT.get_or_init(|| s2o::policy().unwrap_or(Policy::Dense));
        s2o::set_policy(match self {
            Self::Exact => Policy::Dense,
            Self::Policy => policy.clone(),
        });
        s2o::collect_stats(self == Self::Policy);
    }

    /// The density of the calls since [`Self::set`], as text for the end of a line.
    ///
    /// # Errors
    /// If the GPU failed.
    pub fn density(self) -> Result<String> {
        let calls = s2o::take_stats()?;
        if self == Self::Exact || calls.is_empty() {
            return Ok(String::new());
        }
        let density = AttnStats::joint_density(calls.iter().map(|call| &call.stats));
        Ok(format!("  density {density:.3} of {} calls", calls.len()))
    }
}

#[cfg(not(feature = "s2o"))]
impl Mode {
    /// The name in the output.
    pub fn name(self) -> &'static str {
        "original"
    }

    /// Nothing to choose in this build.
    pub fn set(self) {}

    /// No statistics in this build.
    ///
    /// # Errors
    /// None.
    pub fn density(self) -> Result<String> {
        Ok(String::new())
    }
}

/// What a prompt led to.
#[derive(Debug)]
pub struct Answer {
    /// The generated text.
    pub text: String,
    /// Seconds on the clock from the request to the answer's first token, as mistral.rs measures its prompt step.
    pub seconds: f64,
}

/// A loaded model.
pub struct Engine {
    runner: Arc<MistralRs>,
}

impl Engine {
    /// Loads a model directory in bf16 on the first GPU, with a paged KV cache for `tokens` tokens.
    ///
    /// # Errors
    /// Those of mistral.rs.
    pub async fn load(dir: &Path, tokens: usize) -> Result<Self> {
        let cache = PagedAttentionMetaBuilder::default().with_gpu_memory(MemoryGpuConfig::ContextSize(2 * tokens));
        let builder = TextModelBuilder::new(dir.display())
            .with_dtype(ModelDType::BF16)
            .with_device_mapping(DeviceMapSetting::dummy())
            .with_paged_attn(cache.build()?);
        let (pipeline, scheduler, _) = build_text_pipeline(builder).await?;
        // Two runs of one prompt must both prefill it.
        let runner = MistralRsBuilder::new(pipeline, scheduler, false, None).with_no_prefix_cache(true).build().await;
        Ok(Self { runner })
    }

    /// Answers requests of OpenAI's API at `address` with mistral.rs' own server, until the process ends.
    ///
    /// # Errors
    /// If the address cannot be bound, or those of mistral.rs.
    pub async fn serve(&self, address: &str) -> Result<()> {
        let router = MistralRsServerRouterBuilder::new().with_mistralrs(Arc::clone(&self.runner)).build().await?;
        let listener = tokio::net::TcpListener::bind(address).await.with_context(|| format!("--serve {address}"))?;
        println!("listening on http://{}", listener.local_addr()?);
        Ok(axum::serve(listener, router).await?)
    }

    /// Continues `text` by up to `max_len` tokens, greedily.
    ///
    /// # Errors
    /// Those of mistral.rs.
    pub async fn complete(&self, text: &str, max_len: usize) -> Result<Answer> {
        let prompt = RequestMessage::Completion { text: text.to_owned(), echo_prompt: false, best_of: None };
        self.run(prompt, max_len).await
    }

    /// Computes the first token after `prompt`.
    ///
    /// # Errors
    /// Those of mistral.rs.
    pub async fn first_token(&self, prompt: Vec<u32>) -> Result<Answer> {
        let start = Instant::now();
        let answer = self.run(RequestMessage::CompletionTokens(prompt), 1).await?;
        Ok(Answer { seconds: start.elapsed().as_secs_f64(), ..answer })
    }

    async fn run(&self, prompt: RequestMessage, max_len: usize) -> Result<Answer> {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
        let sampling = SamplingParams { max_len: Some(max_len), ..SamplingParams::deterministic() };
        let request = NormalRequest::new_simple(prompt, sampling, sender, 0, None, None);
        self.runner.get_sender(None)?.send(Request::Normal(Box::new(request))).await?;
        let response = receiver.recv().await.context("mistral.rs closed the channel")?;
        match response.as_result().map_err(|error| anyhow::anyhow!("{error}"))? {
            ResponseOk::CompletionDone(done) => Ok(Answer {
                text: done.choices.first().context("mistral.rs returned no choice")?.text.clone(),
                seconds: f64::from(done.usage.total_prompt_time_sec),
            }),
            _ => bail!("mistral.rs: expected a completion, got another response"),
        }
    }
}
