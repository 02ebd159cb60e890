//! Several GPUs: the flags, the ranks of this host, and the end of all when one fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use clap::Args;
use s2o_comm::{Communicator, Group, JOIN_TIMEOUT, Rendezvous, Tcp, local};
use s2o_models::parallel::Mode;
use s2o_models::{HeadTiles, Parallel};

use crate::model_flags::ModelFlags;
use crate::{exit, writable};

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
    /// Give the GPUs KV heads of equal work, as this file has it from an earlier run; if there is no such file, measure
    /// S2O's work in each head and write it [default: consecutive heads]
    #[arg(long, value_name = "FILE")]
    head_tiles: Option<PathBuf>,
}

/// This process among the ranks.
pub struct Ranks {
    group: Arc<Group>,
    mode: Mode,
    has_own_gpu: bool,
    /// Those of the first rank's file.
    tiles: Option<HeadTiles>,
    /// The file to write, if the first rank has none yet.
    new_tiles: Option<PathBuf>,
}

impl RankFlags {
    /// Joins the other ranks, after starting them if they are to run on this host. `None` for one process.
    pub fn join(&self, model: &ModelFlags) -> Result<Option<Ranks>> {
        let (own, new_tiles) = match &self.head_tiles {
            Some(path) if path.exists() => (Some(read_tiles(path)?), None),
            path => (None, path.clone()),
        };
        new_tiles.as_deref().map_or(Ok(()), writable::file)?;
        let Some(rendezvous) = self.place(model)? else {
            ensure!(self.head_tiles.is_none(), "--head-tiles: expected several GPUs (--gpus N), got one");
            let mode = self.parallel;
            ensure!(mode == Mode::Auto, "--parallel {mode}: expected several GPUs (--gpus N), got one");
            return Ok(None);
        };
        let group = local::join(&rendezvous)?;
        // Other hosts need no file.
        let of_ranks = group.exchange(&serde_json::to_vec(&own)?)?;
        let tiles = serde_json::from_slice(&of_ranks[0])?;
        Ok(Some(Ranks { group, mode: self.parallel, has_own_gpu: self.gpus.is_some(), tiles, new_tiles }))
    }

    /// The flag of a file that says how to share the heads, if it was given.
    pub fn given_tiles(&self) -> Option<String> {
        self.head_tiles.as_ref().map(|_| "--head-tiles".to_owned())
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
        let parallel = Parallel::new(self.mode, comm);
        Ok(match &self.tiles {
            Some(tiles) => parallel.balanced(tiles.clone()),
            None => parallel,
        })
    }

    /// Writes the tiles of all heads to the file of --head-tiles, if it is new.
    pub fn keep_tiles(&self, tiles: &HeadTiles) -> Result<()> {
        let Some(path) = &self.new_tiles else { return Ok(()) };
        fs::write(path, serde_json::to_string(tiles)? + "\n").with_context(|| writable::cannot_write(path))
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

fn read_tiles(path: &Path) -> Result<HeadTiles> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!("--head-tiles {}: expected a file that a run with this flag has written", path.display())
    })
}
