//! `s2o heatmap`: one head's attention in the order of the prompt, with keys permuted by PBS-Attn, with keys ranked by
//! S2O for each segment of queries, and with queries permuted too. The tiles that a method computes are outlined, and
//! the rest is grey.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Result, bail};
use candle_core::Device;
use candle_s2o::S2oConfig;
use clap::Args;
use s2o_plot::{AttentionMaps, Figure};

mod head;
mod panel;
mod pbs;
mod pooled;
mod ranked;

use self::head::Head;
use self::panel::Panel;
use self::pooled::Pool;
use crate::layout::{Look, error};
use crate::model_flags::ModelFlags;
use crate::prompt_flags::PromptFlags;
use crate::s2o_flags::{self, S2oFlags};
use crate::{exit, machine, model_flags, writable};

const SIZE: (u32, u32) = (1600, 1520);

/// Draw the attention of one head, with the tiles that PBS-Attn and S2O compute
///
/// The table shows the share of the softmax mass in those tiles.
#[derive(Debug, Args)]
pub struct Flags {
    /// Layer to look at [default: the middle one]
    #[arg(long, value_name = "LAYER")]
    layer: Option<usize>,
    /// Query head to look at
    #[arg(long, value_name = "HEAD", default_value = "0")]
    head: usize,
    /// Directory of the pictures, which is created if it is missing
    #[arg(long, value_name = "DIR", default_value = "heatmaps")]
    out: PathBuf,
    /// Cells of a picture in each direction; a cell pools the probabilities that fall into it
    #[arg(long, value_name = "N", default_value = "128")]
    cells: NonZeroUsize,
    /// Pooling of the probabilities in a cell
    #[arg(long, value_name = "HOW", default_value = "max")]
    pool: Pool,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    prompt: PromptFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        let config = self.s2o.config()?;
        writable::directory(&self.out)?;
        let prompt = self.prompt.read(&self.model)?;
        let model = self.model.load()?;
        let shape = model.config();
        self.s2o.check_layers(shape.num_layers)?;
        let layer = self.layer.unwrap_or(shape.num_layers / 2);
        for (flag, got, count) in [("layer", layer, shape.num_layers), ("head", self.head, shape.num_heads)] {
            if got >= count {
                bail!("--{flag}: expected {flag}s 0 to {}, got {got}", count - 1);
            }
        }
        let prompt = prompt.encode(&model)?;
        let layers = self.model.capture("capturing", &model, &prompt.tokens, &[layer])?;
        let Some(captured) = layers.first() else { bail!("layer {layer} made no attention call") };

        let head = Head::new(captured, self.head)?;
        let panels = panels(&head, &config)?;
        let pooled = pooled::pool(&head, &panels, self.cells.get(), self.pool)?;
        let name = format!("attention-layer{layer}-head{}", self.head);
        let maps = AttentionMaps {
            title: format!("{}, layer {layer}, head {}: computed tiles outlined, the rest grey", model.name, self.head),
            maps: panels
                .iter()
                .zip(&pooled)
                .map(|(panel, pooled)| pooled.map(&head, panel))
                .collect::<Result<_, _>>()?,
            columns: 2,
            unit: format!("attention probability ({} of a cell)", self.pool.name()),
            // A hundredth of each key's probability under uniform attention.
            floor: Some(0.01 / head.k_len() as f64),
        };
        let files = Figure::new(SIZE.0, SIZE.1)?.write(&maps, &self.out, &name)?;

        let mut table = Look::of_stdout().table(["panel", "density", "softmax mass"]);
        for (panel, pooled) in panels.iter().zip(&pooled) {
            table.add_row([panel.title.to_owned(), format!("{:.3}", panel.density), format!("{:.4}", pooled.mass)]);
        }
        let measured: String = panels
            .iter()
            .filter_map(|panel| Some((panel.title, panel.probes?)))
            .map(|(title, probes)| format!("{title}: error {}, measured on the probes\n", error(&probes)))
            .collect();
        exit::print(&format!(
            "model   {}\nprompt  {}\ns2o     {}\n\n{table}\n{measured}\nwritten {} and {}\n{}\n",
            model_flags::describe(&model),
            prompt.description,
            // The head is computed on the CPU, wherever the model ran.
            s2o_flags::describe(&config, false, head.k_len(), &Device::Cpu),
            files.png.display(),
            files.svg.display(),
            machine::describe(model.decoder.device()),
        ))
    }
}

/// The panels of the picture, row by row.
fn panels(head: &Head, config: &S2oConfig) -> Result<Vec<Panel>> {
    let with = |q_perm| config.to_builder().q_perm(q_perm).build();
    Ok(vec![
        Panel::original(head),
        pbs::panel(head)?,
        ranked::panel("(c) K/V-permuted by S2O", head, &with(false)?)?,
        ranked::panel("(d) Q and K/V permuted by S2O", head, &with(true)?)?,
    ])
}
