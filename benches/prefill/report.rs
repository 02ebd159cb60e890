//! The printed and recorded results.

use anyhow::Result;
use comfy_table::presets::ASCII_BORDERS_ONLY_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use s2o_models::{DecoderConfig, Parallel};

use crate::checkpoint::{DTYPE, Weights};
use crate::decode::Decoded;
use crate::measure::gpu::Gpu;
use crate::measure::{Machine, Place, Row};
use crate::memory::Peak;
use crate::methods::Method;
use crate::split::Split;

/// One method at one length.
#[derive(Debug)]
pub struct Measured {
    pub method: Method,
    pub peak: Peak,
    /// Error of the logits against our exact decoder's, and whether the token is the same.
    pub error: Option<(f64, bool)>,
    pub times: Vec<f64>,
    /// The median time to first token.
    pub ms: f64,
    pub density: Option<f64>,
    pub split: Option<Split>,
    /// The matrix products alone: milliseconds, and 1e12 FLOP.
    pub linear: Option<(f64, f64)>,
    /// Tokens per chunk.
    pub chunk: Option<usize>,
}

impl Measured {
    pub fn new(method: Method, peak: Peak) -> Self {
        Self {
            method,
            peak,
            error: None,
            times: Vec::new(),
            ms: f64::NAN,
            density: None,
            split: None,
            linear: None,
            chunk: None,
        }
    }
}

/// Destination of the results.
pub struct Report<'a> {
    machine: Machine,
    config: &'a DecoderConfig,
    /// Shape and weights, as rows name them.
    model: String,
}

impl<'a> Report<'a> {
    pub fn new(
        gpu: &Gpu,
        config: &'a DecoderConfig,
        shape: &str,
        weights: Weights,
        parallel: Option<&Parallel>,
    ) -> Result<Self> {
        let mut model = format!("{shape} {} layers {} weights", config.num_layers, weights.name());
        if let Some(parallel) = parallel {
            model = format!("{model}, {} GPUs {} parallel", parallel.world_size(), parallel.mode());
        }
        Ok(Self { machine: gpu.machine()?, config, model })
    }

    pub fn heading(&self) {
        let bytes = self.config.num_parameters() * DTYPE.size_in_bytes();
        println!("{}\n{}, {} of weights", self.machine.device(), self.model, gib(bytes as u64));
    }

    /// Prints the times of decoded tokens after a prompt and appends their rows.
    pub fn decoding(&self, tokens: usize, decoded: &[(Method, Decoded)], place: &Place) -> Result<()> {
        let heading =
            ["decoding with", "ms a token", "tokens/s", "not waiting for ids, ms", "memory alone, ms", "of the bound"];
        let mut table = self::table(heading);
        let mut rows = Vec::new();
        for (method, decoded) in decoded {
            table.add_row(vec![
                Cell::new(method.name()),
                Cell::new(format!("{:.2}", decoded.token)),
                Cell::new(format!("{:.1}", 1e3 / decoded.token)),
                Cell::new(format!("{:.2}", decoded.enqueued)),
                Cell::new(format!("{:.2}", decoded.bound)),
                Cell::new(format!("{:.0} %", 100.0 * decoded.bound / decoded.token)),
            ]);
            let heads = [self.config.num_heads, self.config.num_kv_heads, self.config.head_dim];
            let name = format!("{}, {}", method.name(), self.model);
            let row = self.machine.row_of("decoding", &name, [1, tokens], heads, DTYPE);
            rows.push(row.against("its bytes at the rate of a copy", decoded.token, decoded.bound));
        }
        println!("\n{tokens} tokens, then decoding\n{table}");
        self.machine.append(&rows, place)?;
        Ok(())
    }

    /// Prints the tables of a length and appends its rows.
    pub fn length(&self, tokens: usize, measured: &[Measured], place: &Place) -> Result<()> {
        let ms_of = |method| measured.iter().find(|m| m.method == method).map(|m| m.ms);
        let (stock, dense) = (ms_of(Method::Stock), ms_of(Method::Dense));
        let ratio = |base: Option<f64>, ms: f64| base.map_or("-".to_owned(), |base| format!("{:.2}", base / ms));
        let bytes = |bytes: Option<u64>| bytes.map_or("-".to_owned(), gib);

        let mut table = self::table([
            "method",
            "to first token",
            "x stock",
            "x dense",
            "density",
            "logits off dense",
            "same token",
            "peak: used",
            "reserved",
            "whole GPU",
        ]);
        for m in measured {
            table.add_row(vec![
                Cell::new(m.method.name()),
                Cell::new(time(m.ms)),
                Cell::new(ratio(stock, m.ms)),
                Cell::new(ratio(dense, m.ms)),
                Cell::new(m.density.map_or("-".to_owned(), |density| format!("{density:.4}"))),
                Cell::new(m.error.map_or("-".to_owned(), |(error, _)| format!("{error:.1e}"))),
                Cell::new(m.error.map_or("-", |(_, same)| if same { "yes" } else { "no" })),
                Cell::new(bytes(m.peak.used)),
                Cell::new(bytes(m.peak.reserved)),
                Cell::new(gib(m.peak.device)),
            ]);
        }
        println!("\n{tokens} tokens; peaks are beyond the weights, keys and values included\n{table}");

        let mut table = self::table([
            "method",
            "on the GPU",
            "attention",
            "of it ranking",
            "linear alone",
            "TFLOP/s",
            "the rest",
            "alone / in model",
            "chunk",
            "GPU idle before",
        ]);
        for m in measured {
            if let (Some(split), Some(chunk)) = (m.split, m.chunk) {
                let in_model = split.total - split.attention;
                let (linear, tflop) = m.linear.unwrap_or((f64::NAN, f64::NAN));
                let or_dash = |text: String| if m.linear.is_some() { text } else { "-".to_owned() };
                table.add_row(vec![
                    Cell::new(m.method.name()),
                    Cell::new(time(split.total)),
                    Cell::new(time(split.attention)),
                    Cell::new(time(split.ranking)),
                    Cell::new(time(linear)),
                    Cell::new(or_dash(format!("{:.0}", tflop / linear * 1e3))),
                    Cell::new(or_dash(time((in_model - linear).max(0.0)))),
                    Cell::new(or_dash(format!("{:.3}", linear / in_model))),
                    Cell::new(chunk),
                    Cell::new(format!("{:.1} % of calls", 100.0 * split.idle)),
                ]);
            }
        }
        println!("\n{table}");
        println!("{}", self.machine.append(&self.rows(tokens, measured), place)?.display());
        Ok(())
    }

    fn rows(&self, tokens: usize, measured: &[Measured]) -> Vec<Row> {
        let mut rows = Vec::new();
        for m in measured {
            let row = |bench: &str, method: String| {
                let heads = [self.config.num_heads, self.config.num_kv_heads, self.config.head_dim];
                let row = self.machine.row_of(bench, &method, [tokens; 2], heads, DTYPE);
                let s2o = m.method.config();
                let segment = s2o.as_ref().map(|s2o| s2o.segment_len().resolve(tokens).to_string());
                Row {
                    segment: segment.unwrap_or_default(),
                    tau: s2o.map(|s2o| s2o.tau().resolve(tokens)),
                    density: m.density,
                    error: m.error.filter(|_| m.method != Method::Dense).map(|(error, _)| error),
                    ..row
                }
            };
            let name = m.method.name();
            let whole = || Row { ms: m.ms, ..row("prefill", format!("{name}, {}", self.model)) };
            let baselines = [Method::Stock, Method::Dense]
                .into_iter()
                .filter(|base| *base != m.method && m.method != Method::Stock)
                .filter_map(|base| measured.iter().find(|other| other.method == base));
            let against: Vec<Row> = baselines.map(|base| whole().against(base.method.name(), m.ms, base.ms)).collect();
            if against.is_empty() {
                rows.push(whole());
            }
            rows.extend(against);
            if let Some(split) = m.split {
                let part =
                    |part: &str, ms| Row { ms, ..row("prefill split", format!("{part}, {name}, {}", self.model)) };
                rows.push(part("whole", split.total));
                rows.push(part("attention", split.attention));
                if m.method.config().is_some() {
                    rows.push(part("ranking", split.ranking));
                }
                if let Some((linear, tflop)) = m.linear {
                    rows.push(Row { tflops: Some(tflop / linear * 1e3), ..part("linear alone", linear) });
                }
            }
        }
        rows
    }
}

/// An ASCII table. All columns except the first are right-aligned.
fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_BORDERS_ONLY_CONDENSED).force_no_tty().set_header(header);
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    table
}

/// `-` for what was not measured.
fn time(ms: f64) -> String {
    if ms.is_nan() {
        return "-".to_owned();
    }
    if ms < 1e3 { format!("{ms:.1} ms") } else { format!("{:.2} s", ms / 1e3) }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
