//! Long causal calls under the policy: compares them with the op, and counts them.

use candle_core::DType;
use candle_s2o::{S2oConfig, SegmentLen, s2o_attn};
use s2o_flash_attn::s2o::{Policy, collect_stats, set_policy, take_stats};
use s2o_flash_attn::{flash_attn, flash_attn_windowed};

use crate::{Runner, floats, tensor};

pub fn cases(runner: &mut Runner) {
    runner.case("policy a long prompt by S2O", |runner| {
        let random = |seed, heads| tensor(seed, &[1, 4096, heads, 128], DType::BF16, &runner.device);
        // Peaked attention, so that there is something to skip.
        let q = (random(1, 8) * 4.0).expect("scaled");
        let (k, v) = (random(2, 2), random(3, 2));
        let config = S2oConfig::builder().tau(0.1).segment_len(SegmentLen::Fixed(512)).dense_below(2048).build();
        let config = config.expect("options");
        let op = floats(&s2o_attn(&q, &k, &v, 0.088, &config).expect("S2O"));
        set_policy(Policy::S2o(config));
        collect_stats(true);
        let by_policy = floats(&flash_attn(&q, &k, &v, 0.088, true).expect("by the policy"));
        let same = floats(&flash_attn_windowed(&q, &k, &v, 0.088, None, Some(0)).expect("by the policy"));
        let whole = flash_attn(&q, &k, &v, 0.088, false);
        let calls = take_stats();
        collect_stats(false);
        set_policy(Policy::Dense);
        assert!(by_policy == op && same == op, "the drop-in computes something else than the op");
        whole.expect("not causal");
        assert_eq!(calls.len(), 2, "{calls:?}");
        assert!(calls.iter().all(|call| call.stats.density() < 1.0), "nothing was skipped");
    });
}
