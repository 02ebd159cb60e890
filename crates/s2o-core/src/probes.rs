//! The positions of exact probe queries.

/// Whether the query at an absolute position is a probe. Each run of `stride` positions from a multiple of `stride` has one
/// probe, at a pseudo-random offset, so that probes meet every place in segments and tiles alike. It depends on the
/// position alone, so chunks and whole prompts have the same probes.
///
/// # Panics
/// If `stride` is 0.
pub fn is_probe(position: usize, stride: usize) -> bool {
    let offset = mixed((position / stride) as u64) % stride as u64;
    position % stride == offset as usize
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn mixed(index: u64) -> u64 {
    let z = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_one_probe_at_any_offset() {
        for stride in [1, 2, 64, 100, 256] {
            let probes: Vec<usize> = (0..stride * 400).filter(|&position| is_probe(position, stride)).collect();
            assert!(probes.iter().enumerate().all(|(run, position)| position / stride == run));
            assert_eq!(probes.len(), 400);
            let mean = probes.iter().map(|position| position % stride).sum::<usize>() as f64 / 400.0;
            let (middle, deviation) = ((stride - 1) as f64 / 2.0, stride as f64 / 12f64.sqrt() / 20.0);
            assert!((mean - middle).abs() < 3.0 * deviation, "stride {stride}: mean offset {mean}");
        }
    }
}
