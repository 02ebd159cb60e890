//! Tensors: results against plain definitions, and refused arguments.

use candle_core::{DType, Device, Tensor};
use s2o_comm::{CommError, Communicator, Tcp};

use s2o_testkit::ranks::run;

const WIDTH: usize = 5;

/// Rows from `from` to `to`: none for some pairs.
fn rows(from: usize, to: usize) -> usize {
    (3 * from + 2 * to) % 4
}

/// What rank `from` sends to rank `to`: values that name both and the place.
fn sent(from: usize, to: usize, rows: usize, dtype: DType) -> Tensor {
    let values: Vec<u32> = (0..rows * WIDTH).map(|i| (from * 64 + to * 16 + i) as u32).collect();
    Tensor::from_vec(values, (rows, WIDTH), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn all_to_all_is_its_definition() {
    for world_size in 1..=4 {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::U32, DType::U8] {
            let results = run(world_size, |group| {
                let rank = group.rank();
                let tcp = Tcp::new(group);
                let sends: Vec<_> = (0..world_size).map(|to| sent(rank, to, rows(rank, to), dtype)).collect();
                let counts: Vec<_> = (0..world_size).map(|from| rows(from, rank)).collect();
                tcp.all_to_all(&sends, &counts).unwrap()
            });
            for (rank, result) in results.iter().enumerate() {
                let parts: Vec<_> = (0..world_size).map(|from| sent(from, rank, rows(from, rank), dtype)).collect();
                let expected: Vec<f64> = parts.iter().flat_map(values).collect();
                assert_eq!(result.dims(), [expected.len() / WIDTH, WIDTH], "{world_size} ranks, {dtype:?}");
                assert_eq!(result.dtype(), dtype);
                assert_eq!(values(result), expected, "rank {rank} of {world_size}, {dtype:?}");
            }
        }
    }
}

#[test]
fn all_to_all_takes_views() {
    // Columns of a larger tensor, and contiguous rows from its middle.
    for contiguous in [false, true] {
        let results = run(2, |group| {
            let whole = sent(group.rank(), 0, WIDTH, DType::F32);
            let whole = if contiguous { whole } else { whole.t().unwrap() };
            let view = whole.narrow(0, 1, 2).unwrap();
            assert_eq!(view.is_contiguous(), contiguous);
            let result = Tcp::new(group).all_to_all(&[view.clone(), view.clone()], &[2, 2]).unwrap();
            (values(&view), values(&result))
        });
        let expected = [results[0].0.clone(), results[1].0.clone()].concat();
        assert!(results.iter().all(|(_, result)| *result == expected), "contiguous: {contiguous}");
    }
}

#[test]
fn all_gather_is_the_rows_of_all() {
    let counts = [2, 0, 3];
    let results = run(3, |group| {
        let rank = group.rank();
        let x = sent(rank, 0, counts[rank], DType::BF16);
        values(&Tcp::new(group).all_gather(&x, &counts).unwrap())
    });
    let expected: Vec<f64> = (0..3).flat_map(|rank| values(&sent(rank, 0, counts[rank], DType::BF16))).collect();
    assert!(results.iter().all(|result| *result == expected));
}

/// Numbers of very different size, so that another order or another place of rounding gives other bits.
fn addends(rank: usize, count: usize, dtype: DType) -> Tensor {
    let value = |i: usize| {
        let noise = ((i * 7919 + rank * 104_729) % 2003) as f32 / 977.0 - 1.0;
        noise * 10_f32.powi((i * 5 + rank * 3) as i32 % 7 - 3)
    };
    Tensor::from_iter((0..count).map(value), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn all_reduce_has_the_bits_of_the_sum_in_rank_order() {
    for world_size in 1..=4 {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // Fewer elements than ranks, a remainder, and parts that are sent by threads.
            for count in [0, 1, 3, 1001, 40_000] {
                let results = run(world_size, |group| {
                    let x = addends(group.rank(), count, dtype);
                    values(&Tcp::new(group).all_reduce(&x).unwrap())
                });
                let f32s = |rank| addends(rank, count, dtype).to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
                let mut sum = f32s(0);
                for rank in 1..world_size {
                    sum.iter_mut().zip(f32s(rank)).for_each(|(sum, x)| *sum += x);
                }
                let expected = values(&Tensor::from_vec(sum, count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap());
                for (rank, result) in results.iter().enumerate() {
                    assert!(*result == expected, "rank {rank} of {world_size}, {count} elements of {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn all_reduce_keeps_the_shape() {
    for shape in [vec![], vec![2, 3, 4]] {
        let results = run(2, |group| {
            let x = Tensor::ones(shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
            Tcp::new(group).all_reduce(&x).unwrap()
        });
        assert!(results.iter().all(|sum| sum.dims() == shape && values(sum).iter().all(|&x| x == 2.0)));
    }
}

/// All ranks send 64 MiB at once, far more than the system buffers.
#[test]
fn large_tensors_pass() {
    let (rows, width) = (16 << 10, 1 << 10);
    run(3, |group| {
        let rank = group.rank();
        let tcp = Tcp::new(group);
        let fill = |value: usize| Tensor::full(value as f32, (rows, width), &Device::Cpu).unwrap();
        let sends: Vec<_> = (0..3).map(|to| fill(10 * rank + to)).collect();
        let received = tcp.all_to_all(&sends, &[rows; 3]).unwrap();
        for from in 0..3 {
            let part = received.narrow(0, from * rows, rows).unwrap();
            let [min, max] = [part.min_all(), part.max_all()].map(|x| x.unwrap().to_scalar::<f32>().unwrap());
            let expected = (10 * from + rank) as f32;
            assert_eq!([min, max], [expected, expected]);
        }
    });
}

#[test]
fn arguments_are_refused_before_anything_is_sent() {
    let results = run(2, |group| {
        let rank = group.rank();
        let tcp = Tcp::new(group);
        let x = sent(rank, 0, 2, DType::F32);
        let other_width = Tensor::zeros((2, WIDTH + 1), DType::F32, &Device::Cpu).unwrap();
        let other_dtype = x.to_dtype(DType::BF16).unwrap();
        let not_sent = x.to_dtype(DType::I64).unwrap();
        let vector = x.flatten_all().unwrap();
        let pair = |other: &Tensor| [x.clone(), other.clone()];
        let errors = [
            tcp.all_to_all(std::slice::from_ref(&x), &[2, 2]),
            tcp.all_to_all(&pair(&x), &[2]),
            tcp.all_to_all(&pair(&x), &[3, 3]),
            tcp.all_to_all(&pair(&other_width), &[2, 2]),
            tcp.all_to_all(&pair(&other_dtype), &[2, 2]),
            tcp.all_to_all(&[vector.clone(), vector], &[2, 2]),
            tcp.all_to_all(&[not_sent.clone(), not_sent.clone()], &[2, 2]),
            // Rows that no memory holds.
            tcp.all_to_all(&pair(&x), if rank == 0 { &[2, usize::MAX] } else { &[usize::MAX, 2] }),
            tcp.all_to_all(&pair(&x), if rank == 0 { &[2, 1 << 50] } else { &[1 << 50, 2] }),
            tcp.all_reduce(&x.to_dtype(DType::U32).unwrap()),
            tcp.all_reduce(&not_sent),
            tcp.all_gather(&x, &[3, 3]),
            tcp.all_gather(&x, &[]),
        ];
        let errors = errors.map(|result| match result.unwrap_err() {
            CommError::Size { name, .. } => name,
            CommError::DType { name, got: DType::I64 | DType::U32, .. } if name == "sends" || name == "x" => "dtype",
            CommError::Memory { .. } => "memory",
            other => panic!("{other}"),
        });
        // The ranks are still in step.
        assert_eq!(tcp.all_reduce(&x).unwrap().dims(), [2, WIDTH]);
        errors
    });
    let expected =
        ["sends", "rows", "rows", "sends", "sends", "sends", "dtype", "rows", "memory", "dtype", "dtype", "x", "rows"];
    assert_eq!(results, [expected, expected]);
}
