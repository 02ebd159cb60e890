//! Several GPUs: the flags, the ranks of this host, and the end of all when one fails.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::Device;
use clap::Args;
use s2o_comm::{Communicator, Group, JOIN_TIMEOUT, Rendezvous, Tcp, local};
use s2o_models::Parallel;
use s2o_models::parallel::Mode;

use crate::exit;
use crate::model_flags::ModelFlags;

/// Flags for several GPUs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Several GPUs")]
pub struct RankFlags {
    /// Run on this many GPUs of this host, one process each; with --cpu, that many processes [default: 1]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// What the GPUs share: `sequence`, the tokens of a prompt, with all weights on each; `tensor`, the weights; `auto`,
    /// sequence if the weights fit
    #[arg(long, value_name = "MODE", default_value = "auto")]
    parallel: Mode,
    /// Number of this process, from 0, if you start each yourself, as on several hosts [or S2O_RANK]
    #[arg(long, value_name = "R", requires = "rendezvous", conflicts_with = "gpus")]
    rank: Option<usize>,
    /// Number of processes that you start [or S2O_WORLD_SIZE]
    #[arg(long, value_name = "N", requires = "rendezvous", conflicts_with = "gpus")]
    world_size: Option<usize>,
    /// Where rank 0 listens, the same for all processes [or S2O_RENDEZVOUS]
    #[arg(long, value_name = "HOST:PORT", requires_all = ["rank", "world_size"])]
    rendezvous: Option<String>,
}

/// This process among the ranks.
pub struct Ranks {
    group: Arc<Group>,
    mode: Mode,
    has_own_gpu: bool,
}

impl RankFlags {
    /// Joins the other ranks, after starting them if they are to run on this host. `None` for one process.
    pub fn join(&self, model: &ModelFlags) -> Result<Option<Ranks>> {
        let Some(rendezvous) = self.place(model)? else { return Ok(None) };
        let group = local::join(&rendezvous)?;
        Ok(Some(Ranks { group, mode: self.parallel, has_own_gpu: self.gpus.is_some() }))
    }

    fn place(&self, model: &ModelFlags) -> Result<Option<Rendezvous>> {
        if let (Some(rank), Some(world_size), Some(address)) = (self.rank, self.world_size, &self.rendezvous) {
            return Ok(Some(Rendezvous { rank, world_size, address: address.clone(), timeout: JOIN_TIMEOUT }));
        }
        if let Some(place) = local::place()? {
            return Ok(Some(place));
        }
        let Some(world_size) = self.gpus.filter(|gpus| *gpus != 1) else { return Ok(None) };
        ensure!(world_size > 0, "--gpus: expected at least 1, got 0");
        model.check_gpus(world_size)?;
        Ok(Some(local::start(world_size)?))
    }
}

impl Ranks {
    /// The ranks on `device` for a decoder.
    pub fn parallel(&self, device: &Device) -> Result<Parallel> {
        let comm: Arc<dyn Communicator> = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Arc::new(s2o_comm::Nccl::new(Arc::clone(&self.group), device)?),
            _ => Arc::new(Tcp::new(Arc::clone(&self.group))),
        };
        Ok(Parallel::new(self.mode, comm))
    }

    /// The GPU of a rank that this program started; `None` if the user chose it.
    pub fn gpu(&self) -> Option<usize> {
        self.has_own_gpu.then_some(self.group.rank())
    }

    /// Whether this rank reads the prompt and prints.
    pub fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// The tokens of the first rank, on all ranks.
    pub fn tokens_of_first(&self, tokens: &[u32]) -> Result<Vec<u32>> {
        let own: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        let all = self.group.exchange(&own)?;
        Ok(all[0].chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect())
    }

    /// Refuses ranks that were started with other options.
    pub fn agree(&self, options: &str) -> Result<()> {
        Ok(self.group.agree("the options", options)?)
    }

    /// Runs the work of this rank. An error ends all ranks.
    pub fn run(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        match work() {
            Err(error) if !exit::is_closed_pipe(&error) => {
                local::fail(&self.group, error.as_ref(), &exit::one_line(&error))
            }
            result => {
                local::wait();
                result
            }
        }
    }
}
