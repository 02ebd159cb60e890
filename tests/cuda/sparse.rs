//! S2O with given orders: the output against the keys that were visited, and the visits against the CPU path.

use candle_core::{DType, Tensor};
use candle_s2o::{
    AttnStats, GainFrame, Permutation, ProbeStride, Ranking, S2oConfig, S2oConfigBuilder, S2oOp, SegmentLen, StopRule,
    Tau, TileStats, TriggeringTile,
};
use s2o_core::{Plan, cpu};

use crate::Runner;
use crate::exact::{Row, bits, check};
use crate::problem::{Memory, Problem, Sizes};

pub const TILE: usize = 128;

/// An op on a problem with given orders.
pub fn op(problem: &Problem, config: &S2oConfig, prompt_len: usize, ranking: &Ranking) -> S2oOp {
    let op = S2oOp::new(problem.scale, config.clone()).with_prompt_len(prompt_len).with_ranking(ranking.clone());
    problem.softcap.map_or(op.clone(), |softcap| op.with_softcap(softcap))
}

/// Runs the op on the GPU and checks its output and its statistics.
pub fn check_s2o(runner: &Runner, problem: &Problem, config: &S2oConfig, prompt_len: usize) -> (Tensor, AttnStats) {
    let ranking = cpu::rank(&problem.inputs(), config, prompt_len).unwrap();
    check_ranked(runner, problem, config, prompt_len, &ranking)
}

/// [`check_s2o`] with given orders. Two runs must give the same bits.
fn check_ranked(
    runner: &Runner,
    problem: &Problem,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: &Ranking,
) -> (Tensor, AttnStats) {
    let [q, k, v] = &problem.on_gpu;
    problem.poison();
    let (out, stats) = op(problem, config, prompt_len, ranking).apply_with_stats(q, k, v).unwrap();
    check_output(problem, config, prompt_len, ranking, &stats, &out);
    check_visits(runner, problem, config, prompt_len, ranking, &stats);
    problem.poison();
    let again = op(problem, config, prompt_len, ranking).apply(q, k, v).unwrap();
    assert!(bits(&again) == bits(&out), "two runs differ");
    (out, stats)
}

/// The output is attention to the window and to the tiles that the statistics say were visited.
pub fn check_output(
    problem: &Problem,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: &Ranking,
    stats: &AttnStats,
    out: &Tensor,
) {
    let shape = &problem.shape;
    let plan = Plan::new(config, shape, prompt_len, S2oConfig::CPU_BREAK_EVEN).unwrap();
    let discards = config.triggering_tile() == TriggeringTile::Discard && config.tau() != Tau::Fixed(0.0);
    let visits = row_visits(problem, config, &plan, ranking, stats);
    check(problem, out, |at: Row| {
        let head = at.batch * shape.num_heads() + at.head;
        let position = (shape.q_offset() + at.row) as u32;
        // The dense tail, and calls that use the dense path.
        let Some((s, tile)) = visits[head][at.row] else { return vec![(0..=position).collect()] };
        let segment = &plan.segments[s];
        let with = |kept: usize| {
            let kv_perm = ranking[head][s].kv_perm.as_slice();
            let prefix = &kv_perm[..(kept * TILE).min(kv_perm.len())];
            (segment.start as u32..=position).chain(prefix.iter().copied()).collect::<Vec<u32>>()
        };
        match tile.visited {
            visited if discards && visited > 0 && visited < tile.prefix_tiles => vec![with(visited - 1)],
            // The count does not show whether the last tile triggered.
            visited if discards && visited > 0 => vec![with(visited - 1), with(visited)],
            visited => vec![with(visited)],
        }
    });
}

/// For each head and row: segment of the plan, and the row's tile. `None` for the dense tail and the dense path.
pub fn row_visits(
    problem: &Problem,
    config: &S2oConfig,
    plan: &Plan,
    ranking: &Ranking,
    stats: &AttnStats,
) -> Vec<Vec<Option<(usize, TileStats)>>> {
    let shape = &problem.shape;
    (stats.heads.iter().zip(ranking))
        .map(|(head, orders)| {
            let mut rows = vec![None; shape.q_len()];
            let mut tiles = head.tiles.iter();
            for (s, (segment, order)) in plan.segments.iter().zip(orders).enumerate() {
                for _ in segment.tail_rows.clone().step_by(TILE) {
                    assert!(tiles.next().unwrap().dense_tail);
                }
                let mut first = 0;
                for cut in segment.ranked_tiles(shape.q_offset(), config) {
                    let tile = tiles.next().unwrap();
                    assert_eq!((tile.rows, tile.dense_tail), (cut.len(), false));
                    let permuted = &order.q_perm.as_slice()[first..first + cut.len()];
                    for (row, &from) in cut.clone().zip(permuted) {
                        let row = if config.q_perm() { segment.rows.start + from as usize } else { row };
                        rows[row] = Some((s, *tile));
                    }
                    first += cut.len();
                }
            }
            rows
        })
        .collect()
}

/// Number of prefix tiles that the GPU visits if the CPU path visited those of `tile`.
pub fn expected_visits(runner: &Runner, problem: &Problem, config: &S2oConfig, tile: &TileStats) -> usize {
    let late = runner.stops_late
        && problem.shape.head_dim() <= 128
        && problem.softcap.is_none()
        && match config.stop_rule() {
            StopRule::Auto | StopRule::AllRows => config.gain_frame() == GainFrame::NewMax,
            rule => matches!(rule, StopRule::MaxWeight | StopRule::MeanWeight),
        }
        && config.triggering_tile() == TriggeringTile::Keep
        && !config.q_perm()
        && config.tau() != Tau::Fixed(0.0);
    (tile.visited + usize::from(late && !tile.dense_tail)).min(tile.prefix_tiles)
}

/// The visits are those of the CPU path, plus one tile if the rule decides late. Rounding may change a few visits.
fn check_visits(
    runner: &Runner,
    problem: &Problem,
    config: &S2oConfig,
    prompt_len: usize,
    ranking: &Ranking,
    stats: &AttnStats,
) {
    let on_cpu = |tau: f32| {
        let config = config.to_builder().tau(tau).build().unwrap();
        let [q, k, v] = &problem.on_cpu;
        op(problem, &config, prompt_len, ranking).apply_with_stats(q, k, v).unwrap().1
    };
    let expected = |tile: &TileStats| expected_visits(runner, problem, config, tile);
    let tau = config.tau().resolve(prompt_len);
    let want = on_cpu(tau);
    let place = |tile: &TileStats| (tile.segment, tile.dense_tail, tile.rows, tile.window_tiles, tile.prefix_tiles);
    let tiles = |stats: &AttnStats| stats.heads.iter().flat_map(|head| head.tiles.clone()).collect::<Vec<_>>();
    let (got, want) = (tiles(stats), tiles(&want));
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(place(got), place(want));
    }
    let differ: Vec<usize> = (0..got.len()).filter(|&i| got[i].visited != expected(&want[i])).collect();
    if differ.is_empty() {
        return;
    }
    // A larger threshold stops no later.
    let (earlier, later) = (tiles(&on_cpu(tau * 1.02)), tiles(&on_cpu(tau * 0.98)));
    for &i in &differ {
        let (least, most) = (expected(&earlier[i]), expected(&later[i]));
        let got = got[i].visited;
        assert!((least..=most).contains(&got), "tile {i}: visited {got}, expected {least} to {most}");
    }
    assert!(differ.len() <= 2 + got.len() / 20, "{} of {} tiles stop elsewhere", differ.len(), got.len());
    println!("  {} of {} tiles stop elsewhere, within 2 % of tau", differ.len(), got.len());
}

fn config(change: impl FnOnce(S2oConfigBuilder) -> S2oConfigBuilder) -> S2oConfig {
    let builder = S2oConfig::builder().segment_len(SegmentLen::Fixed(256)).dense_below(0).tau(0.1).dense_tail(0);
    change(builder).build().unwrap()
}

pub fn cases(runner: &mut Runner) {
    rules(runner);
    rising(runner);
    shapes(runner);
    tails(runner);
    long(runner);
}

/// Every rule, frame and treatment of the triggering tile, with and without query permutation, in ranked and in
/// scattered orders.
fn rules(runner: &mut Runner) {
    for (stop_rule, tau) in [
        (StopRule::AllRows, 0.1),
        (StopRule::MeanRatio, 0.09),
        (StopRule::SumRatio, 0.09),
        (StopRule::MaxWeight, 0.06),
        (StopRule::MeanWeight, 0.06),
    ] {
        for gain_frame in [GainFrame::NewMax, GainFrame::Literal] {
            for triggering_tile in [TriggeringTile::Keep, TriggeringTile::Discard] {
                for (q_perm, head_dim, softcap) in [
                    (false, 128, None),
                    (true, 128, None),
                    (false, 256, None),
                    (true, 256, None),
                    (false, 64, Some(6.0)),
                    (true, 128, Some(6.0)),
                    (false, 256, Some(6.0)),
                ] {
                    let name = format!(
                        "sparse {stop_rule:?} {gain_frame:?} {triggering_tile:?} q_perm {q_perm} D{head_dim} cap \
                         {softcap:?}"
                    );
                    runner.case(&name, |runner| {
                        let config = config(|builder| {
                            let builder = builder.stop_rule(stop_rule).gain_frame(gain_frame).q_perm(q_perm).tau(tau);
                            builder.triggering_tile(triggering_tile).dense_tail(70)
                        });
                        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 2000, k_len: 2000, head_dim };
                        let mut problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
                        problem.softcap = softcap;
                        let (_, stats) = check_s2o(runner, &problem, &config, 2000);
                        let mut scattered = cpu::rank(&problem.inputs(), &config, 2000).unwrap();
                        for (head, orders) in scattered.iter_mut().enumerate() {
                            for order in orders {
                                // 37 and the lengths, multiples of 256, have no common factor.
                                let len = order.kv_perm.len();
                                let keys = (0..len).map(|i| ((i * 37 + head * 11) % len) as u32).collect();
                                order.kv_perm = Permutation::new(keys).unwrap();
                            }
                        }
                        check_ranked(runner, &problem, &config, 2000, &scattered);
                        if gain_frame == GainFrame::NewMax {
                            assert!(stats.density() < 0.97, "the case should skip: density {}", stats.density());
                        }
                    });
                }
            }
        }
    }
    for (q_perm, head_dim) in [(false, 64), (true, 64), (false, 256), (true, 256)] {
        runner.case(&format!("sparse that never stops, q_perm {q_perm} D{head_dim}"), |runner| {
            let config = config(|builder| builder.tau(0.0).q_perm(q_perm));
            let sizes = Sizes { batch: 2, heads: [4, 1], q_len: 1500, k_len: 1500, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::F16, Memory::HeadsFirst, 4.0);
            let (_, stats) = check_s2o(runner, &problem, &config, 1500);
            assert_eq!(stats.density(), 1.0);
        });
    }
}

/// Keys in the reverse of their order, so that the maxima rise with every tile, by less and by more than they may lag.
fn rising(runner: &mut Runner) {
    let rules = [(StopRule::AllRows, 128), (StopRule::MeanWeight, 128), (StopRule::MaxWeight, 64)];
    for (sharpness, dtype) in [(0.5, DType::BF16), (2.0, DType::F16), (4.0, DType::BF16), (4.0, DType::F16)] {
        for (stop_rule, head_dim) in rules {
            runner.case(&format!("sparse rising x{sharpness} {dtype:?} {stop_rule:?} D{head_dim}"), |runner| {
                let config = config(|builder| builder.stop_rule(stop_rule).tau(1e-30));
                let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 2000, k_len: 2000, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, Memory::Contiguous, sharpness);
                let mut ranking = cpu::rank(&problem.inputs(), &config, 2000).unwrap();
                for order in ranking.iter_mut().flatten() {
                    let keys = order.kv_perm.as_slice().iter().rev().copied().collect();
                    order.kv_perm = Permutation::new(keys).unwrap();
                }
                check_ranked(runner, &problem, &config, 2000, &ranking);
            });
        }
    }
}

/// Lengths, chunks, head groups, dtypes and layouts.
fn shapes(runner: &mut Runner) {
    let memories = [Memory::Contiguous, Memory::HeadsFirst, Memory::Narrowed, Memory::DimFirst, Memory::Unaligned];
    // (queries, keys, prompt)
    let lengths = [
        (1, 1, 1),
        (1, 900, 900),
        (127, 127, 127),
        (300, 300, 300),
        (513, 1025, 1025),
        (1000, 1000, 4000),
        (1111, 2345, 2345),
        (700, 1500, 3000),
        (5000, 5000, 5000),
    ];
    for (i, (q_len, k_len, prompt_len)) in lengths.into_iter().enumerate() {
        for (j, heads) in [[4, 4], [8, 2], [8, 1], [6, 2]].into_iter().enumerate() {
            let dtype = if (i + j) % 2 == 0 { DType::F16 } else { DType::BF16 };
            let head_dim = [64, 128, 256][(i + 2 * j) % 3];
            let memory = memories[(i + j) % memories.len()];
            let q_perm = (i + j) % 4 == 3;
            let segment = if (i + j) % 2 == 0 { 256 } else { 384 };
            let name = format!(
                "sparse {q_len} of {k_len} of {prompt_len} {heads:?} D{head_dim} {dtype:?} {memory:?} S{segment} \
                 q_perm {q_perm}"
            );
            runner.case(&name, |runner| {
                let config = config(|builder| {
                    builder.segment_len(SegmentLen::Fixed(segment)).q_perm(q_perm).front_sink(4).dense_tail(64)
                });
                let sizes = Sizes { batch: 1 + j, heads, q_len, k_len, head_dim };
                let problem = Problem::new(&runner.device, sizes, dtype, memory, 8.0);
                check_s2o(runner, &problem, &config, prompt_len);
            });
        }
    }
    runner.case("sparse below the dense threshold", |runner| {
        let config = config(|builder| builder.dense_below(2000));
        let sizes = Sizes { batch: 1, heads: [8, 2], q_len: 700, k_len: 1700, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        let (_, stats) = check_s2o(runner, &problem, &config, 1700);
        assert_eq!(stats.density(), 1.0);
    });
}

fn tails(runner: &mut Runner) {
    for dense_tail in [0, 1, 64, 128, 300, 3000] {
        for (q_len, k_len) in [(1000, 1000), (900, 2100), (150, 1100)] {
            runner.case(&format!("sparse dense tail {dense_tail} of {q_len} of {k_len}"), |runner| {
                let config = config(|builder| builder.dense_tail(dense_tail).q_perm(dense_tail == 64));
                let sizes = Sizes { batch: 1, heads: [4, 2], q_len, k_len, head_dim: 128 };
                let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
                check_s2o(runner, &problem, &config, k_len);
            });
        }
    }
}

fn long(runner: &mut Runner) {
    runner.case("sparse in groups that fit the workspace, the same bits", |runner| {
        let sizes = Sizes { batch: 1, heads: [4, 2], q_len: 4000, k_len: 6000, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        for q_perm in [false, true] {
            let roomy = config(|builder| builder.q_perm(q_perm).dense_tail(128));
            // Six bytes per key and head: the last segment begins at 5888.
            let tight = roomy.to_builder().workspace_cap(6 * 4 * 2 * 5888).build().unwrap();
            let ranking = cpu::rank(&problem.inputs(), &roomy, 6000).unwrap();
            let [q, k, v] = &problem.on_gpu;
            let (want, want_stats) = op(&problem, &roomy, 6000, &ranking).apply_with_stats(q, k, v).unwrap();
            problem.poison();
            let (got, got_stats) = op(&problem, &tight, 6000, &ranking).apply_with_stats(q, k, v).unwrap();
            assert_eq!(got_stats, want_stats);
            assert!(bits(&got) == bits(&want), "groups change the output");
            problem.poison();
            let again = op(&problem, &roomy, 6000, &ranking).apply(q, k, v).unwrap();
            assert!(bits(&again) == bits(&want), "two runs differ");
        }
    });
    for head_dim in [128, 256] {
        runner.case(&format!("sparse last chunk of 128K D{head_dim}"), |runner| {
            let config = S2oConfig::builder().probe_stride(ProbeStride::Off).build().unwrap();
            let sizes = Sizes { batch: 1, heads: [2, 1], q_len: 3000, k_len: 131_072, head_dim };
            let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
            check_s2o(runner, &problem, &config, 131_072);
        });
    }
    runner.case("sparse 128K whole, rows sampled", |runner| {
        let config = S2oConfig::builder().probe_stride(ProbeStride::Off).build().unwrap();
        let sizes = Sizes { batch: 1, heads: [2, 1], q_len: 131_072, k_len: 131_072, head_dim: 128 };
        let problem = Problem::new(&runner.device, sizes, DType::BF16, Memory::Contiguous, 8.0);
        let ranking = cpu::rank(&problem.inputs(), &config, 131_072).unwrap();
        let [q, k, v] = &problem.on_gpu;
        problem.poison();
        let (out, stats) = op(&problem, &config, 131_072, &ranking).apply_with_stats(q, k, v).unwrap();
        println!("  density {:.3}", stats.density());
        check_output(&problem, &config, 131_072, &ranking, &stats, &out);
    });
}
