//! Exact probes against f64 on the host: their error, and the correction of the other rows.

use std::ops::Range;

use candle_core::DType;
use candle_s2o::{ProbeStride, Ranking, S2oConfig, S2oConfigBuilder, SegmentLen, StopRule, TileStats, TriggeringTile};
use rayon::prelude::*;
use s2o_core::{Plan, ProbeStats, cpu, probe_runs};

use crate::Runner;
use crate::exact::{bits, values};
use crate::problem::{Memory, Problem, Sizes};
use crate::sparse::{TILE, op, row_visits};

fn config(stride: usize, change: impl FnOnce(S2oConfigBuilder) -> S2oConfigBuilder) -> S2oConfig {
    let builder = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_below(0).tau(0.3);
    change(builder.probe_stride(ProbeStride::Every(stride))).build().unwrap()
}

/// A row of a head outside the dense tail.
struct Row {
    row: usize,
    /// Number of rows that it stands for, if it is a probe.
    weight: Option<f64>,
    /// Of the call without probes.
    sparse: Vec<f64>,
    exact: Vec<f64>,
    /// Share of the mass.
    skipped: f64,
    /// Expected mass of the skipped keys, up to a factor of the segment.
    expected: Option<f64>,
}

/// Attention to all keys in f64, the share of the mass that the query skipped, and the logarithm of the mass that it visited if
/// it skipped keys. `sparse` is the output of the call without probes.
fn exact_row(
    problem: &Problem,
    (batch, head): (usize, usize),
    row: usize,
    (start, order, tile): (usize, &[u32], TileStats),
    (sparse, discards): (&[f64], bool),
) -> (Vec<f64>, f64, Option<f64>) {
    let shape = &problem.shape;
    let d = shape.head_dim();
    let kv_head = shape.kv_head(head);
    let q = &problem.host[0][((batch * shape.q_len() + row) * shape.num_heads() + head) * d..][..d];
    let kv = |key: usize| ((batch * shape.k_len() + key) * shape.num_kv_heads() + kv_head) * d;
    let dot = |key: &[f32]| q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let position = shape.q_offset() + row;
    let scores: Vec<f64> =
        (0..=position).map(|key| problem.score_scale().score(dot(&problem.host[1][kv(key)..][..d]))).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let masses: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let all: f64 = masses.iter().sum();
    let add = |out: &mut [f64], key: usize, weight: f64| {
        out.iter_mut().zip(&problem.host[2][kv(key)..][..d]).for_each(|(x, v)| *x += weight * f64::from(*v));
    };
    let mut exact = vec![0.0; d];
    (0..=position).for_each(|key| add(&mut exact, key, masses[key] / all));
    if tile.prefix_tiles == 0 {
        return (exact, 0.0, None);
    }
    let of = |keys: &[u32]| keys.iter().map(|&key| masses[key as usize]).sum::<f64>();
    let before = (tile.visited - 1) * TILE;
    let last_tile = &order[before..order.len().min(before + TILE)];
    let last = of(last_tile);
    if tile.visited == tile.prefix_tiles {
        // The counts do not tell whether the last of all tiles was discarded. The output does.
        let mut without: Vec<f64> = exact.iter().map(|x| x * all / (all - last)).collect();
        last_tile.iter().for_each(|&key| add(&mut without, key as usize, -masses[key as usize] / (all - last)));
        if !discards || distance(sparse, &exact) <= distance(sparse, &without) {
            return (exact, 0.0, None);
        }
    }
    let window: f64 = masses[start..].iter().sum();
    let visited = window + of(&order[..before]) + if discards { 0.0 } else { last };
    (exact, 1.0 - visited / all, Some(max + visited.ln()))
}

/// The logarithm of the mean weight of the keys before a segment for a row, if they were normally distributed with independent
/// columns: from evenly spaced keys, with the default factor of the variance.
fn prefix_score(problem: &Problem, (batch, head): (usize, usize), row: usize, keys: usize) -> f64 {
    let shape = &problem.shape;
    let d = shape.head_dim();
    let q = &problem.host[0][((batch * shape.q_len() + row) * shape.num_heads() + head) * d..][..d];
    let count = keys.min(256);
    let key = |i: usize| {
        let position = i * keys / count;
        &problem.host[1][((batch * shape.k_len() + position) * shape.num_kv_heads() + shape.kv_head(head)) * d..][..d]
    };
    let scale = f64::from(problem.scale);
    let of_column = |(i, &q): (usize, &f32)| {
        let column = || (0..count).map(|j| f64::from(key(j)[i]));
        let mean = column().sum::<f64>() / count as f64;
        let variance = column().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64;
        scale * mean * f64::from(q) + 0.35 * variance * (scale * f64::from(q)).powi(2)
    };
    q.iter().enumerate().map(of_column).sum()
}

/// Draws one row of each run by its expected errors, with the number of rows that it stands for.
/// A draw that rounding may move to a neighbour has it too. The rows of head `head` of the call are ascending, the
/// first at `position`.
fn draw_probes(rows: &[Row], position: usize, stride: usize, head: usize) -> Vec<Vec<(usize, f64)>> {
    const ROUNDING: f64 = 5e-4;
    let of_run = |run: Range<usize>| {
        let (number, first) = ((position + run.start) / stride, run.start);
        let rows = &rows[run];
        let size = |row: &Row| row.expected.unwrap_or(0.0) * row.sparse.iter().map(|x| x * x).sum::<f64>().sqrt();
        let total: f64 = rows.iter().map(size).sum();
        let even = 1.0 / rows.len() as f64;
        let probability = |row: &Row| if total > 0.0 { 0.25 * even + 0.75 * size(row) / total } else { even };
        // SplitMix64.
        let mut z = ((number as u64 ^ (head as u64) << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let drawn = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        let mut end = 0.0;
        let near = rows.iter().enumerate().filter_map(|(i, row)| {
            let begin = end;
            end += probability(row);
            (begin - ROUNDING..end + ROUNDING).contains(&drawn).then(|| (first + i, 1.0 / probability(row)))
        });
        near.collect()
    };
    probe_runs(0..rows.len(), position, stride).map(of_run).collect()
}

/// All ways to take one element of each list, at most `LIMIT`.
fn combinations(lists: &[Vec<(usize, f64)>]) -> Vec<Vec<(usize, f64)>> {
    const LIMIT: usize = 4096;
    lists.iter().fold(vec![Vec::new()], |ways, list| {
        let longer = ways.iter().flat_map(|way| list.iter().map(move |one| [way.as_slice(), &[*one]].concat()));
        longer.take(LIMIT).collect()
    })
}

/// The common tail of probes: its mean value, and the skipped mass over its expectation.
fn tail<'r>(probes: impl Iterator<Item = &'r Row>) -> Option<(Vec<f64>, f64)> {
    let (mut skipped, mut expected, mut value) = (0.0, 0.0, Vec::new());
    for row in probes {
        let weight = row.weight.unwrap();
        skipped += weight * row.skipped;
        expected += weight * row.expected.unwrap_or(0.0) * (1.0 - row.skipped);
        value.resize(row.exact.len(), 0.0);
        for ((sum, exact), out) in value.iter_mut().zip(&row.exact).zip(&row.sparse) {
            *sum += weight * (exact - (1.0 - row.skipped) * out);
        }
    }
    value.iter_mut().for_each(|sum| *sum /= skipped);
    (skipped > 0.0 && expected > 0.0).then(|| (value, skipped / expected))
}

fn corrected(row: &Row, tail: Option<&(Vec<f64>, f64)>) -> Vec<f64> {
    let (Some((value, scale)), Some(expected)) = (tail, row.expected) else { return row.sparse.clone() };
    let mass = scale * expected;
    row.sparse.iter().zip(value).map(|(o, u)| (o + mass * u) / (1.0 + mass)).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

/// Checks what was measured on the rows of a segment and head, and returns the outputs that follow from it, or what
/// differs.
fn check_unit(rows: &[Row], got: &ProbeStats) -> Result<Vec<Vec<f64>>, String> {
    let probes: Vec<&Row> = rows.iter().filter(|row| row.weight.is_some()).collect();
    let sum = |f: &dyn Fn(&Row) -> f64| probes.iter().map(|row| row.weight.unwrap() * f(row)).sum::<f64>();
    let rest = |f: &dyn Fn(&Row) -> f64| probes.iter().map(|row| (row.weight.unwrap() - 1.0) * f(row)).sum::<f64>();
    let left_out = |row: &Row| {
        let others = tail(probes.iter().copied().filter(|other| other.row != row.row));
        distance(&corrected(row, others.as_ref()), &row.exact)
    };
    let (norm, uncorrected, confirmed) = (
        sum(&|row| row.exact.iter().map(|x| x * x).sum()),
        sum(&|row| distance(&row.sparse, &row.exact)),
        sum(&left_out),
    );
    assert_eq!((got.rows, got.probes), (rows.len(), probes.len()));
    // The outputs are rounded to 16 bits: relative 2^-9 of the norm at most.
    let near = |what: &str, got: f64, want: f64| {
        let allowed = 0.02 * want + 1e-4 * norm;
        let is_near = (got - want).abs() <= allowed;
        if is_near { Ok(()) } else { Err(format!("{what} {got:.4e}, expected {want:.4e} of a norm of {norm:.4e}")) }
    };
    near("norm", got.norm, norm)?;
    near("uncorrected error", got.uncorrected, uncorrected)?;
    let skipped = sum(&|row| row.skipped);
    let allowed = 1e-3 * skipped + 1e-5 * rows.len() as f64;
    if (got.skipped_mass - skipped).abs() > allowed {
        return Err(format!("{} skipped, not {skipped}", got.skipped_mass));
    }
    // Where both errors are alike, rounding may decide.
    let (without, with) = (rest(&|row| distance(&row.sparse, &row.exact)), rest(&left_out));
    let is_clear = (confirmed - uncorrected).abs() > 0.02 * uncorrected + 1e-4 * norm;
    let helps =
        if is_clear { confirmed < uncorrected } else { (got.corrected - with).abs() < (got.corrected - without).abs() };
    near("remaining error", got.corrected, if helps { with } else { without })?;
    let common = tail(probes.iter().copied()).filter(|_| helps);
    let out = |row: &Row| if row.weight.is_some() { row.exact.clone() } else { corrected(row, common.as_ref()) };
    Ok(rows.iter().map(out).collect())
}

/// Returns the number of rows that were corrected.
fn check_probes(problem: &Problem, config: &S2oConfig, prompt_len: usize, stride: usize) -> usize {
    let shape = &problem.shape;
    let [q, k, v] = &problem.on_gpu;
    let ranking: Ranking = cpu::rank(&problem.inputs(), config, prompt_len).unwrap();
    let plan = Plan::new(config, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    let rule = config.stop_rule().resolve(true, prompt_len);
    let off = config.to_builder().probe_stride(ProbeStride::Off).stop_rule(rule).build().unwrap();
    let (sparse, plain) = op(problem, &off, prompt_len, &ranking).apply_with_stats(q, k, v).unwrap();
    problem.poison();
    let (out, stats) = op(problem, config, prompt_len, &ranking).apply_with_stats(q, k, v).unwrap();
    problem.poison();
    let again = op(problem, config, prompt_len, &ranking).apply(q, k, v).unwrap();
    assert!(bits(&again) == bits(&out), "two runs differ");
    let tiles = |stats: &candle_s2o::AttnStats| stats.heads.iter().flat_map(|h| h.tiles.clone()).collect::<Vec<_>>();
    assert_eq!(tiles(&stats), tiles(&plain), "probes change the visits");

    let discards = config.triggering_tile() == TriggeringTile::Discard;
    let visits = row_visits(problem, config, &plan, &ranking, &stats);
    let (sparse, out) = (values(&sparse), values(&out));
    let d = shape.head_dim();
    let widen = |data: &[f32]| data.iter().copied().map(f64::from).collect::<Vec<f64>>();
    let (mut corrected_rows, mut difference, mut norm, mut worst) = (0, 0.0, 0.0, 0.0f64);
    for (index, (visits, head)) in visits.iter().zip(&stats.heads).enumerate() {
        let at = (index / shape.num_heads(), index % shape.num_heads());
        let place = |row: usize| ((at.0 * shape.q_len() + row) * shape.num_heads() + at.1) * d;
        let rows: Vec<(usize, Row)> = (0..shape.q_len())
            .into_par_iter()
            .filter_map(|row| {
                let (s, tile) = visits[row]?;
                let of = (plan.segments[s].start, ranking[index][s].kv_perm.as_slice(), tile);
                let sparse = widen(&sparse[place(row)..][..d]);
                let (exact, skipped, visited) = exact_row(problem, at, row, of, (&sparse, discards));
                // Rows that saw every key keep their output.
                let exact = if visited.is_none() { sparse.clone() } else { exact };
                let expected =
                    visited.map(|visited| (prefix_score(problem, at, row, of.0) - visited).clamp(-30.0, 0.0).exp());
                Some((s, Row { row, weight: None, sparse, exact, skipped, expected }))
            })
            .collect();
        assert_eq!(head.probes.len(), rows.chunk_by(|a, b| a.0 == b.0).count());
        let mut rows = rows.into_iter().peekable();
        for measured in &head.probes {
            let s = rows.peek().unwrap().0;
            assert_eq!(measured.segment, plan.segments[s].index);
            let mut unit = Vec::new();
            while let Some((_, row)) = rows.next_if(|(of, _)| *of == s) {
                unit.push(row);
            }
            let first = shape.q_offset() + unit[0].row;
            let got = |row: &Row| widen(&out[place(row.row)..][..d]);
            let mut mismatch = String::new();
            let mut best: Option<(f64, Vec<usize>, Vec<Vec<f64>>)> = None;
            for probes in combinations(&draw_probes(&unit, first, stride, at.1 % shape.group_size())) {
                unit.iter_mut().for_each(|row| row.weight = None);
                probes.iter().for_each(|&(i, weight)| unit[i].weight = Some(weight));
                match check_unit(&unit, measured) {
                    Ok(wants) => {
                        let all = unit.iter().zip(&wants).map(|(row, want)| distance(&got(row), want)).sum();
                        if best.as_ref().is_none_or(|(least, ..)| all < *least) {
                            best = Some((all, probes.iter().map(|probe| probe.0).collect(), wants));
                        }
                    }
                    Err(what) => mismatch = what,
                }
            }
            let Some((_, probes, wants)) = best else { panic!("{mismatch}") };
            for (i, (row, want)) in unit.iter().zip(wants).enumerate() {
                corrected_rows += usize::from(!probes.contains(&i) && want != row.sparse);
                let got = got(row);
                let square = want.iter().map(|x| x * x).sum::<f64>();
                difference += distance(&got, &want);
                norm += square;
                worst = worst.max((distance(&got, &want) / square).sqrt());
            }
        }
        // The dense tail is not touched.
        let tail = (0..shape.q_len()).filter(|&row| visits[row].is_none());
        tail.for_each(|row| assert_eq!(out[place(row)..][..d], sparse[place(row)..][..d]));
    }
    // All rows may lie in the dense tail.
    let error = if norm > 0.0 { (difference / norm).sqrt() } else { 0.0 };
    let (most, most_of_row) = if problem.dtype == DType::BF16 { (5e-3, 2e-2) } else { (1e-3, 4e-3) };
    assert!(error < most && worst < most_of_row, "relative error {error:.2e}, of the worst row {worst:.2e}");
    corrected_rows
}

pub fn cases(runner: &mut Runner) {
    // (queries, keys, prompt, stride): whole prompts, chunks that begin and end inside segments, no probe at all.
    let lengths = [
        (2000, 2000, 2000, 16),
        (2000, 2000, 2000, 64),
        (1111, 2345, 2345, 10),
        (700, 1500, 3000, 33),
        (1000, 1000, 4000, 1),
        (3, 1700, 1700, 256),
    ];
    for (i, (q_len, k_len, prompt_len, stride)) in lengths.into_iter().enumerate() {
        for (j, heads) in [[4, 4], [8, 2], [6, 2]].into_iter().enumerate() {
            let dtype = if (i + j) % 2 == 0 { DType::BF16 } else { DType::F16 };
            let head_dim = [128, 64, 256][(i + 2 * j) % 3];
            let memory = [Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed][(i + j) % 3];
            let q_perm = (i + j) % 4 == 1;
            let softcap = ((i + j) % 4 == 2).then_some(4.0);
            let name = format!(
                "probes {q_len} of {k_len} of {prompt_len} every {stride} {heads:?} D{head_dim} q_perm {q_perm} cap {softcap:?}"
            );
            runner.case(&name, |runner| {
                let config = config(stride, |builder| builder.q_perm(q_perm).dense_tail(70).recent(20));
                let sizes = Sizes { batch: 1 + j % 2, heads, q_len, k_len, head_dim };
                let mut problem = Problem::new(&runner.device, sizes, dtype, memory, 4.0);
                problem.softcap = softcap;
                let corrected_rows = check_probes(&problem, &config, prompt_len, stride);
                assert!(corrected_rows > 0 || stride == 1 || q_len < 1000, "the case should correct something");
            });
        }
    }
    for (stop_rule, triggering_tile) in [
        (StopRule::MeanRatio, TriggeringTile::Keep),
        (StopRule::MaxWeight, TriggeringTile::Keep),
        (StopRule::MeanWeight, TriggeringTile::Keep),
        (StopRule::AllRows, TriggeringTile::Discard),
        (StopRule::SumRatio, TriggeringTile::Discard),
    ] {
        runner.case(&format!("probes {stop_rule:?} {triggering_tile:?}"), |runner| {
            let config = config(32, |builder| builder.stop_rule(stop_rule).triggering_tile(triggering_tile));
            let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 3000, k_len: 3000, head_dim: 128 };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
            assert!(check_probes(&problem, &config, 3000, 32) > 0, "the case should correct something");
        });
    }
    runner.case("probes of rows that saw every key", |runner| {
        let config = config(16, |builder| builder.tau(0.0));
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 1000, k_len: 1000, head_dim: 64 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
        assert_eq!(check_probes(&problem, &config, 1000, 16), 0);
    });
    runner.case("probes with NaN and infinities", |runner| {
        let config = config(16, |builder| builder);
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 1500, k_len: 1500, head_dim: 64 };
        let mut problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 4.0);
        // Token 1300 is seen by the queries from there on, in the sixth segment.
        problem.replace(2, |i, x| if i / 64 / 2 == 1300 { f32::NAN } else { x });
        let [q, k, v] = &problem.on_gpu;
        let ranking = cpu::rank(&problem.inputs(), &config, 1500).unwrap();
        let (out, stats) = op(&problem, &config, 1500, &ranking).apply_with_stats(q, k, v).unwrap();
        let out = values(&out);
        for (row, heads) in out.chunks_exact(4 * 64).enumerate() {
            // A tile computes 0 * NaN for its rows before the token.
            let may_be_nan = (1280..1300).contains(&row);
            assert!(may_be_nan || heads.iter().all(|x| x.is_nan() == (row >= 1300)), "row {row}");
        }
        for head in &stats.heads {
            assert!(head.probes[5].relative_error().is_nan(), "NaN shows in the measured error");
        }
    });
}
