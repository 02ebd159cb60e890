//! The ops as a Candle user calls them: layouts, dtypes, errors, gradients, the `Attention` trait.

use candle_core::{DType, Device, Tensor};
use candle_s2o::{
    Attention, AttnError, BlockError, BlockLists, BlockSelection, Dense, DenseBelow, KeyColumns, LayerSetting,
    LayerSettings, Mask, PrefillCall, S2o, S2oConfig, S2oError, S2oOp, SegmentLen, ShapeError, TunedOn,
    block_mask_attn, block_sparse_attn, break_even, dense_attn, s2o_attn, s2o_attn_with_stats,
};
use s2o_testkit::max_difference;

const SCALE: f32 = 0.125;

fn random(dims: (usize, usize, usize, usize)) -> Tensor {
    Tensor::randn(0f32, 1.0, dims, &Device::Cpu).unwrap()
}

/// Options with which short random tensors are sparse.
fn sparse() -> S2oConfig {
    S2oConfig::builder()
        .segment_len(SegmentLen::Fixed(128))
        .tile_q(32)
        .tile_k(16)
        .dense_below(0)
        .dense_tail(16)
        .tau(0.2)
        .build()
        .unwrap()
}

/// Attention with Candle's matmul and softmax, bottom-right causal or full.
fn by_matmul(q: &Tensor, k: &Tensor, v: &Tensor, mask: Mask) -> Tensor {
    let group = q.dim(2).unwrap() / k.dim(2).unwrap();
    let heads_first = |t: &Tensor| t.transpose(1, 2).unwrap().contiguous().unwrap();
    let repeat = |t: &Tensor| {
        let (b, s, h, d) = t.dims4().unwrap();
        let wide = t.unsqueeze(3).unwrap().expand((b, s, h, group, d)).unwrap();
        heads_first(&wide.reshape((b, s, h * group, d)).unwrap())
    };
    let (q_len, k_len) = (q.dim(1).unwrap(), k.dim(1).unwrap());
    let mut scores =
        (heads_first(q).matmul(&repeat(k).t().unwrap().contiguous().unwrap()).unwrap() * f64::from(SCALE)).unwrap();
    if mask.is_causal() {
        let mask: Vec<f32> = (0..q_len)
            .flat_map(|i| (0..k_len).map(move |t| if t > k_len - q_len + i { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let mask = Tensor::from_vec(mask, (1, 1, q_len, k_len), &Device::Cpu).unwrap();
        scores = scores.broadcast_add(&mask).unwrap();
    }
    let weights = candle_nn::ops::softmax_last_dim(&scores).unwrap();
    weights.matmul(&repeat(v)).unwrap().transpose(1, 2).unwrap().contiguous().unwrap()
}

/// The README's replacements, with a threshold that skips nothing.
#[test]
fn the_calls_of_the_readme_replace_attention_by_matmul() -> candle_core::Result<()> {
    let (q, k, v) = (random((1, 300, 4, 64)), random((1, 300, 2, 64)), random((1, 300, 2, 64)));
    let want = by_matmul(&q, &k, &v, Mask::Causal);
    let config = sparse().to_builder().tau(0.0).build().unwrap();
    let heads_first = [&q, &k, &v].map(|x| x.transpose(1, 2).unwrap().contiguous().unwrap());
    let [q, k, v] = heads_first;
    let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
    assert!(max_difference(&s2o_attn(&q, &k, &v, SCALE, &config)?, &want) < 1e-5);
    let op = S2oOp::new(SCALE, config).with_prompt_len(300);
    let chunk = q.narrow(1, 100, 60)?.apply_op3(&k.narrow(1, 0, 160)?, &v.narrow(1, 0, 160)?, op)?;
    assert!(max_difference(&chunk, &want.narrow(1, 100, 60)?) < 1e-5);
    Ok(())
}

#[test]
fn dense_equals_candle() {
    for (q_dims, k_len, kv_heads) in
        [((1, 1, 2, 64), 1, 2), ((2, 70, 4, 32), 200, 2), ((1, 333, 8, 64), 333, 1), ((1, 1, 4, 128), 900, 2)]
    {
        let q = random(q_dims);
        let (k, v) = (random((q_dims.0, k_len, kv_heads, q_dims.3)), random((q_dims.0, k_len, kv_heads, q_dims.3)));
        for mask in [Mask::Causal, Mask::Full] {
            let out = dense_attn(&q, &k, &v, SCALE, mask).unwrap();
            assert_eq!(out.dims(), q.dims());
            assert!(max_difference(&out, &by_matmul(&q, &k, &v, mask)) < 2e-5, "{q_dims:?} {mask:?}");
        }
    }
}

#[test]
fn s2o_that_never_stops_equals_dense() {
    let (q, k, v) = (random((2, 400, 4, 64)), random((2, 600, 2, 64)), random((2, 600, 2, 64)));
    let config = sparse().to_builder().tau(0.0).build().unwrap();
    let (out, stats) = s2o_attn_with_stats(&q, &k, &v, SCALE, &config).unwrap();
    assert!(max_difference(&out, &dense_attn(&q, &k, &v, SCALE, Mask::Causal).unwrap()) < 2e-5);
    assert_eq!(stats.density(), 1.0);
    assert_eq!(stats.heads.len(), 8);
}

#[test]
fn layouts_and_dtypes() {
    let (q, k, v) = (random((1, 400, 4, 64)), random((1, 600, 2, 64)), random((1, 600, 2, 64)));
    let config = sparse();
    let (want, stats) = s2o_attn_with_stats(&q, &k, &v, SCALE, &config).unwrap();
    assert!(stats.density() < 1.0, "the case should skip something");
    // Views into a longer cache, heads before length, and a head_dim that is not innermost.
    let view = |t: &Tensor| {
        let padded = Tensor::cat(&[&random((1, 9, t.dim(2).unwrap(), 64)), t, t], 1).unwrap();
        padded.narrow(1, 9, t.dim(1).unwrap()).unwrap()
    };
    let heads_first = |t: &Tensor| t.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
    let dim_first = |t: &Tensor| t.transpose(1, 3).unwrap().contiguous().unwrap().transpose(1, 3).unwrap();
    let layouts: [&dyn Fn(&Tensor) -> Tensor; 3] = [&view, &heads_first, &dim_first];
    for layout in layouts {
        let (q, k, v) = (layout(&q), layout(&k), layout(&v));
        assert_eq!(max_difference(&s2o_attn(&q, &k, &v, SCALE, &config).unwrap(), &want), 0.0);
        let dense = dense_attn(&q, &k, &v, SCALE, Mask::Causal).unwrap();
        assert!(max_difference(&dense, &by_matmul(&q, &k, &v, Mask::Causal)) < 2e-5);
    }
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let cast = |t: &Tensor| t.to_dtype(dtype).unwrap();
        let (q, k, v) = (cast(&q), cast(&k), cast(&v));
        let out = s2o_attn(&q, &k, &v, SCALE, &config).unwrap();
        assert_eq!(out.dtype(), dtype);
        let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let want = s2o_attn(&wide(&q), &wide(&k), &wide(&v), SCALE, &config).unwrap();
        assert!(max_difference(&out, &want) < tolerance, "{dtype:?}");
    }
}

#[test]
fn gradients_are_an_error_not_silence() {
    let q = candle_core::Var::from_tensor(&random((1, 8, 1, 8))).unwrap();
    let kv = random((1, 8, 1, 8));
    for (out, op) in [
        (s2o_attn(&q, &kv, &kv, SCALE, &sparse()).unwrap(), "s2o-attention"),
        (q.apply_op3(&kv, &kv, S2oOp::new(SCALE, sparse())).unwrap(), "s2o-attention"),
        (dense_attn(&q, &kv, &kv, SCALE, Mask::Causal).unwrap(), "dense-attention"),
    ] {
        let error = out.sum_all().unwrap().backward().unwrap_err().to_string();
        assert!(error.contains(op), "{error}");
    }
}

#[test]
fn candle_applies_the_op_itself() {
    let (q, k, v) = (random((2, 400, 4, 64)), random((2, 600, 2, 64)), random((2, 600, 2, 64)));
    let op = || S2oOp::new(SCALE, sparse());
    let out = q.apply_op3(&k, &v, op()).unwrap();
    assert_eq!(out.dims(), q.dims());
    assert_eq!(max_difference(&out, &s2o_attn(&q, &k, &v, SCALE, &sparse()).unwrap()), 0.0);
    // A middle chunk of a prompt of 900 tokens, which has no dense tail, in bf16 and with a view of `q`.
    let chunk = op().with_prompt_len(900);
    let cast = |x: &Tensor| x.to_dtype(DType::BF16).unwrap();
    let (q, k, v) = (cast(&q).narrow(1, 100, 300).unwrap(), cast(&k), cast(&v));
    let out = q.apply_op3(&k, &v, chunk.clone()).unwrap();
    assert_eq!(out.dtype(), DType::BF16);
    assert_eq!(max_difference(&out, &chunk.apply(&q, &k, &v).unwrap()), 0.0);
}

#[test]
fn errors_of_an_op_that_candle_applies_have_the_same_words() {
    let (ok, wide) = (random((1, 16, 2, 8)), random((1, 16, 2, 12)));
    let op = || S2oOp::new(SCALE, sparse());
    let flat = ok.squeeze(0).unwrap();
    let double = ok.to_dtype(DType::F64).unwrap();
    for (op, q, k, v) in [
        (op(), &flat, &ok, &ok),
        (op(), &ok, &double, &ok),
        (op(), &double, &double, &double),
        (op(), &wide, &wide, &wide),
        (op().with_prompt_len(10), &ok, &ok, &ok),
        (op().with_ranking(Vec::new()), &ok, &ok, &ok),
        (S2oOp::new(f32::NAN, sparse()), &ok, &ok, &ok),
    ] {
        let typed = op.clone().apply(q, k, v).unwrap_err();
        let untyped = q.apply_op3(k, v, op).unwrap_err();
        assert!(untyped.to_string().contains(&typed.to_string()), "{untyped}");
    }
}

#[test]
fn a_ranking_alone_is_that_of_the_call() {
    let (q, k, v) = (random((1, 256, 2, 16)), random((1, 512, 1, 16)), random((1, 512, 1, 16)));
    let op = S2oOp::new(SCALE, sparse());
    let ranking = op.clone().rank(&q, &k).unwrap();
    assert_eq!(ranking.len(), 2);
    let given = op.clone().with_ranking(ranking).apply(&q, &k, &v).unwrap();
    assert_eq!(max_difference(&given, &op.apply(&q, &k, &v).unwrap()), 0.0);
}

/// The errors of both entry points.
fn refused(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> [AttnError; 2] {
    [s2o_attn(q, k, v, scale, &sparse()).unwrap_err(), dense_attn(q, k, v, scale, Mask::Causal).unwrap_err()]
}

#[test]
fn bad_tensors_are_typed_errors() {
    let ok = random((1, 16, 2, 8));
    for error in refused(&ok.squeeze(0).unwrap(), &ok, &ok, SCALE) {
        assert!(matches!(&error, AttnError::Rank { name: "q", got } if got == &[16, 2, 8]), "{error}");
        assert_eq!(error.to_string(), "q: expected 4 dimensions (batch, length, heads, head_dim), got [16, 2, 8]");
    }
    let unlike = |name, expected, got| ShapeError::Mismatch { name, expected, got };
    let heads_first = |q: [usize; 4], kv: [usize; 4]| (q, kv, kv, ShapeError::HeadsFirst { got: q, k_len: kv[1] });
    let kv = [1, 16, 2, 8];
    for (q, k, v, want) in [
        ([1, 16, 3, 8], kv, kv, ShapeError::Heads { num_heads: 3, num_kv_heads: 2 }),
        (kv, kv, [1, 15, 2, 8], unlike("v", kv, [1, 15, 2, 8])),
        ([2, 16, 2, 8], kv, kv, unlike("k", [2, 16, 2, 8], kv)),
        ([1, 16, 2, 16], kv, kv, unlike("k", [1, 16, 2, 16], kv)),
        ([1, 17, 2, 8], kv, kv, ShapeError::MoreQueriesThanKeys { q_len: 17, k_len: 16 }),
        ([1, 16, 2, 12], [1, 16, 2, 12], [1, 16, 2, 12], ShapeError::HeadDim { got: 12 }),
        ([1, 4, 2, 264], [1, 4, 2, 264], [1, 4, 2, 264], ShapeError::HeadDim { got: 264 }),
        ([1, 0, 2, 8], kv, kv, ShapeError::Empty { name: "q_len" }),
        heads_first([1, 2, 300, 8], [1, 2, 300, 8]),
        heads_first([2, 8, 257, 8], [2, 2, 257, 8]),
        heads_first([1, 2, 300, 8], [1, 300, 2, 8]),
    ] {
        let zeros = |dims: [usize; 4]| Tensor::zeros(&dims[..], DType::F32, &Device::Cpu).unwrap();
        for error in refused(&zeros(q), &zeros(k), &zeros(v), SCALE) {
            assert!(matches!(&error, AttnError::S2o(S2oError::Shape(got)) if *got == want), "{error:?}, not {want:?}");
        }
    }
    // Keys and values alone have their heads first.
    for error in refused(&random((1, 300, 8, 8)), &random((1, 2, 300, 8)), &random((1, 2, 300, 8)), SCALE) {
        assert!(error.to_string().ends_with("(batch, heads, length, head_dim) need transpose(1, 2)"), "{error}");
    }
    let wide = ok.to_dtype(DType::F64).unwrap();
    for error in refused(&wide, &wide, &wide, SCALE) {
        assert!(matches!(error, AttnError::DType { name: "q", got: DType::F64 }), "{error}");
    }
    for error in refused(&ok, &ok.to_dtype(DType::F16).unwrap(), &ok, SCALE) {
        let expected = AttnError::DTypeMismatch { name: "k", expected: DType::F32, got: DType::F16 };
        assert_eq!(format!("{error:?}"), format!("{expected:?}"));
    }
}

#[test]
fn many_heads_of_few_tokens_are_not_refused() {
    let (q, kv) = (random((1, 1, 256, 8)), random((1, 2, 128, 8)));
    assert_eq!(dense_attn(&q, &kv, &kv, SCALE, Mask::Causal).unwrap().dims(), q.dims());
    let long = random((1, 300, 300, 8));
    assert_eq!(dense_attn(&long, &long, &long, SCALE, Mask::Causal).unwrap().dims(), long.dims());
}

#[test]
fn bad_options_are_typed_errors() {
    let qkv = random((1, 512, 2, 8));
    for scale in [f32::NAN, f32::INFINITY] {
        for error in refused(&qkv, &qkv, &qkv, scale) {
            assert!(matches!(error, AttnError::S2o(S2oError::SoftmaxScale { .. })), "{error}");
        }
    }
    let tight = sparse().to_builder().workspace_cap(1).build().unwrap();
    let error = s2o_attn(&qkv, &qkv, &qkv, SCALE, &tight).unwrap_err();
    assert!(matches!(error, AttnError::S2o(S2oError::WorkspaceTooSmall { got: 1, prefix_len: 384, .. })), "{error}");
}

#[test]
fn errors_reach_candle_with_their_words() {
    let qkv = random((1, 4, 2, 12));
    let call = PrefillCall { layer: 0, softmax_scale: SCALE, prompt_len: 4 };
    let methods: [&dyn Attention; 2] = [&Dense, &S2o::new(sparse())];
    for method in methods {
        let error = method.prefill(&call, &qkv, &qkv, &qkv).unwrap_err();
        assert!(error.to_string().contains("head_dim: expected a multiple of 8 up to 256, got 12"), "{error}");
    }
}

#[test]
fn layers_have_options_of_their_own() {
    let qkv = random((1, 512, 2, 16));
    let method = S2o::new(sparse()).with_stats().skip_layers([1]).layer_tau(2, 0.9).unwrap();
    assert!(S2o::new(sparse()).layer_tau(2, 1.0).is_err());
    for layer in 0..3 {
        let call = PrefillCall { layer, softmax_scale: SCALE, prompt_len: 512 };
        method.prefill(&call, &qkv, &qkv, &qkv).unwrap();
    }
    let stats = method.take_stats().unwrap();
    let density = |layer: usize| stats[&layer].density();
    assert_eq!(density(1), 1.0);
    assert!(density(2) < density(0) && density(0) < 1.0, "{} {}", density(2), density(0));
    assert!(method.take_stats().unwrap().is_empty(), "taken");
    let silent = S2o::new(sparse());
    silent.prefill(&PrefillCall { layer: 0, softmax_scale: SCALE, prompt_len: 512 }, &qkv, &qkv, &qkv).unwrap();
    assert!(silent.take_stats().unwrap().is_empty(), "not asked for");
}

#[test]
fn tuned_layers_have_their_settings_and_no_others_follow() {
    let layers = vec![LayerSetting::Dense, LayerSetting::Tau(0.9)];
    let settings = LayerSettings::new(TunedOn::default(), layers).unwrap();
    let method = S2o::with_layers(sparse(), &settings).unwrap().with_stats();
    let qkv = random((1, 512, 2, 16));
    let prefill =
        |layer| method.prefill(&PrefillCall { layer, softmax_scale: SCALE, prompt_len: 512 }, &qkv, &qkv, &qkv);
    for layer in [0, 1] {
        prefill(layer).unwrap();
    }
    let stats = method.take_stats().unwrap();
    assert!(stats[&0].density() == 1.0 && stats[&1].density() < 1.0);
    assert_eq!(method.config_of(1), &sparse().to_builder().tau(0.9).build().unwrap());
    let error = prefill(2).unwrap_err().to_string();
    assert!(error.contains("expected layers 0 to 1, got a call for layer 2"), "{error}");
}

#[test]
fn automatic_prompts_are_dense_below_the_break_even() {
    let config = sparse().to_builder().dense_below(DenseBelow::Auto).build().unwrap();
    let shortest = break_even(&Device::Cpu);
    let density = |len| {
        let qkv = random((1, len, 1, 16));
        s2o_attn_with_stats(&qkv, &qkv, &qkv, SCALE, &config).unwrap().1.density()
    };
    assert_eq!(density(shortest - 1), 1.0);
    assert!(density(shortest) < 1.0);
}

#[test]
fn the_dense_tail_waits_for_the_prompts_end() {
    let qkv = random((1, 256, 2, 16));
    let config = sparse().to_builder().dense_tail(256).tau(0.9).build().unwrap();
    let density_of = |method: S2o, prompt_len| {
        let method = method.with_stats();
        let call = PrefillCall { layer: 0, softmax_scale: SCALE, prompt_len };
        method.prefill(&call, &qkv, &qkv, &qkv).unwrap();
        method.take_stats().unwrap()[&0].density()
    };
    let density = |prompt_len| density_of(S2o::new(config.clone()), prompt_len);
    assert!(density(512) < 1.0);
    assert_eq!(density(256), 1.0);
    assert_eq!(density_of(S2o::new(config.clone()).without_prompt_end(), 512), 1.0, "each chunk is taken for the end");
}

#[test]
fn statistics_are_those_of_the_last_prompt() {
    let (first, second) = (random((1, 256, 2, 16)), random((1, 512, 2, 16)));
    let method = S2o::new(sparse()).with_stats();
    let call = |prompt_len| PrefillCall { layer: 0, softmax_scale: SCALE, prompt_len };
    let chunk = second.narrow(1, 256, 256).unwrap();
    let rows = || method.take_stats().unwrap()[&0].heads[0].tiles.iter().map(|tile| tile.rows).sum::<usize>();
    for _ in 0..3 {
        method.prefill(&call(512), &first, &first, &first).unwrap();
    }
    assert_eq!(rows(), 256, "a prompt from its beginning starts anew");
    method.prefill(&call(512), &first, &first, &first).unwrap();
    method.prefill(&call(512), &chunk, &second, &second).unwrap();
    assert_eq!(rows(), 512, "its chunks are joined");
}

#[test]
fn clones_of_an_op_keep_their_results_apart() {
    let (small, large) = (random((1, 200, 1, 16)), random((1, 400, 4, 16)));
    let op = S2oOp::new(SCALE, sparse());
    std::thread::scope(|scope| {
        for (qkv, heads) in [(&small, 1), (&large, 4)] {
            let op = op.clone();
            scope.spawn(move || {
                for _ in 0..50 {
                    let (_, stats) = op.clone().apply_with_stats(qkv, qkv, qkv).unwrap();
                    assert_eq!(stats.heads.len(), heads);
                }
            });
        }
    });
}

#[test]
fn a_mask_of_blocks_is_its_lists() {
    // A chunk: its query blocks are the second and third of the prompt.
    let (q, [k, v]) = (random((1, 200, 2, 16)), [(); 2].map(|()| random((1, 384, 1, 16))));
    let mask = Tensor::new(&[[[[1u8, 0, 1], [0, 7, 1]], [[0, 1, 0], [0, 0, 0]]]], &Device::Cpu).unwrap();
    let by_mask = |seen| block_mask_attn(&q, &k, &v, SCALE, seen, &mask, None).unwrap();
    let by_lists = |lists: [&[usize]; 4], seen| {
        let selection = BlockSelection::from(BlockLists::new(lists.map(|list| list.iter().copied())));
        block_sparse_attn(&q, &k, &v, SCALE, seen, selection).unwrap().0
    };
    // Blocks beyond the diagonal are ignored.
    assert_eq!(max_difference(&by_mask(Mask::Causal), &by_lists([&[0], &[1, 2], &[1], &[]], Mask::Causal)), 0.0);
    assert_eq!(max_difference(&by_mask(Mask::Full), &by_lists([&[0, 2], &[1, 2], &[1], &[]], Mask::Full)), 0.0);

    // The first head has the keys 3 and 130. The second head has 200 keys and room for 128.
    let chosen = (0..384u32).map(|key| u8::from(key == 3 || key == 130));
    let chosen: Vec<u8> = chosen.chain((0..384u32).map(|key| u8::from(key < 200))).collect();
    let keys = Tensor::from_vec(chosen, (1, 2, 384), &Device::Cpu).unwrap();
    let columns = KeyColumns { keys, at_most: 100 };
    let by_mask = block_mask_attn(&q, &k, &v, SCALE, Mask::Causal, &mask, Some(&columns)).unwrap();
    let lists = BlockLists::new([vec![0], vec![1, 2], vec![1], vec![]]);
    let single = Some(vec![vec![3, 130], (0..128).collect()]);
    let by_lists = BlockSelection { columns: single, ..lists.into() };
    let (by_lists, _) = block_sparse_attn(&q, &k, &v, SCALE, Mask::Causal, by_lists).unwrap();
    assert_eq!(max_difference(&by_mask, &by_lists), 0.0);

    let refused = |mask: &Tensor| block_mask_attn(&q, &k, &v, SCALE, Mask::Causal, mask, None).unwrap_err();
    let unfit = |columns: Tensor, seen| {
        let columns = KeyColumns { keys: columns, at_most: 1 };
        block_mask_attn(&q, &k, &v, SCALE, seen, &mask, Some(&columns)).unwrap_err().to_string()
    };
    let short = BlockError::ColumnMask { expected: [1, 2, 384], got: vec![1, 2, 383] };
    assert_eq!(unfit(columns.keys.narrow(2, 1, 383).unwrap(), Mask::Causal), S2oError::from(short).to_string());
    assert_eq!(unfit(columns.keys.clone(), Mask::Full), S2oError::from(BlockError::ColumnsNotCausal).to_string());
    let wide = columns.keys.to_dtype(DType::U32).unwrap();
    assert_eq!(unfit(wide, Mask::Causal), AttnError::MaskDType { name: "columns", got: DType::U32 }.to_string());
    let expected = BlockError::Mask { expected: [1, 2, 2, 3], got: vec![1, 2, 3, 2] };
    let turned = mask.transpose(2, 3).unwrap();
    assert_eq!(refused(&turned).to_string(), S2oError::from(expected).to_string());
    let wide = mask.to_dtype(DType::F32).unwrap();
    assert!(matches!(refused(&wide), AttnError::MaskDType { name: "mask", got: DType::F32 }));
}
