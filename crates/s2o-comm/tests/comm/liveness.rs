//! Ranks that end, stop, leave or do something else.

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{env, thread};

use candle_core::{DType, Device, Tensor};
use s2o_comm::{CommError, Communicator, Group, LOST_AFTER, Tcp};

use s2o_testkit::ranks::{free_address, rendezvous, run, run_all};

/// The variable that makes [`child`] a rank: its number and the address.
const CHILD: &str = "S2O_COMM_TEST_CHILD";

fn tensor() -> Tensor {
    Tensor::ones((64, 64), DType::F32, &Device::Cpu).unwrap()
}

/// Not a test: the process of rank 2 of 3, which the tests below start. It joins and then only waits.
#[test]
fn child() {
    let Ok(address) = env::var(CHILD) else { return };
    let group = Group::join(&rendezvous(2, 3, &address)).unwrap();
    let tcp = Tcp::new(group);
    tcp.all_reduce(&tensor()).unwrap();
    thread::sleep(Duration::from_secs(60));
}

fn start_child(address: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "liveness::child", "--test-threads=1"])
        .env(CHILD, address)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Two ranks wait in a call for rank 2, a process that gets this signal. Returns how long they waited.
fn lose_child(signal: &str) -> Vec<Duration> {
    let address = free_address();
    let mut child = start_child(&address);
    let pid = child.id().to_string();
    let waits = run_all(&[0, 1].map(|rank| rendezvous(rank, 3, &address)), |rendezvous| {
        let group = Group::join(rendezvous).unwrap();
        let (called, calls) = mpsc::channel();
        group.on_loss(move |error| called.send(error.to_string()).unwrap());
        let tcp = Tcp::new(group);
        tcp.all_reduce(&tensor()).unwrap();
        tcp.group().check().unwrap();
        if tcp.rank() == 0 {
            let (signal, pid) = (signal.to_string(), pid.clone());
            thread::spawn(move || {
                // Both calls wait by then.
                thread::sleep(Duration::from_millis(300));
                assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
            });
        }
        let begin = Instant::now();
        let error = tcp.all_reduce(&tensor()).unwrap_err();
        let wait = begin.elapsed();
        assert!(matches!(error, CommError::Lost { rank: 2 }), "{error}");
        assert!(matches!(tcp.group().check(), Err(CommError::Lost { rank: 2 })));
        assert!(matches!(tcp.all_reduce(&tensor()), Err(CommError::Lost { rank: 2 })));
        assert_eq!(calls.recv_timeout(Duration::from_secs(1)).unwrap(), error.to_string());
        // The function is gone: it is called once.
        assert!(calls.recv_timeout(Duration::from_secs(1)).is_err());
        // A late one is called, too.
        let (called, calls) = mpsc::channel();
        tcp.group().on_loss(move |error| called.send(error.to_string()).unwrap());
        assert_eq!(calls.recv_timeout(Duration::from_secs(1)).unwrap(), error.to_string());
        wait
    });
    child.kill().unwrap();
    child.wait().unwrap();
    waits
}

#[test]
fn a_killed_process_is_lost_at_once() {
    let waits = lose_child("-KILL");
    assert!(waits.iter().all(|wait| *wait < Duration::from_secs(2)), "{waits:?}");
}

#[test]
fn a_stopped_process_is_lost_after_the_time() {
    let waits = lose_child("-STOP");
    let limits = LOST_AFTER - Duration::from_secs(3)..LOST_AFTER + Duration::from_secs(3);
    assert!(waits.iter().all(|wait| limits.contains(wait)), "{waits:?}");
}

#[test]
fn a_rank_that_leaves_ends_calls_that_need_it() {
    for leave in [|group: Arc<Group>| drop(group), |group: Arc<Group>| group.leave()] {
        run(3, |group| {
            let (called, calls) = mpsc::channel::<()>();
            group.on_loss(move |_| called.send(()).unwrap());
            group.exchange(b"a").unwrap();
            if group.rank() == 1 {
                thread::sleep(Duration::from_millis(200));
                leave(group);
                return;
            }
            let begin = Instant::now();
            let tcp = Tcp::new(group);
            // Too large for the buffers of the system: it waits to send and to receive.
            let x = Tensor::ones((4 << 20,), DType::F32, &Device::Cpu).unwrap();
            let error = tcp.all_reduce(&x).unwrap_err();
            assert!(matches!(error, CommError::Left { rank: 1 }), "{error}");
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
            // Nobody was lost.
            drop(tcp);
            assert!(calls.recv().is_err());
        });
    }
}

#[test]
fn a_normal_end_is_no_loss() {
    for _ in 0..20 {
        run(4, |group| {
            let (called, calls) = mpsc::channel::<String>();
            group.on_loss(move |error| called.send(error.to_string()).unwrap());
            let sum = Tcp::new(group).all_reduce(&tensor());
            // The last owner of the group is gone: it said goodbye, while others may still be in the call.
            assert!(sum.is_ok(), "{sum:?}");
            assert!(calls.recv().is_err());
        });
    }
}

#[test]
fn a_rank_that_gives_up_tells_the_others() {
    run(3, |group| {
        let (called, calls) = mpsc::channel();
        group.on_loss(move |error| called.send(error.to_string()).unwrap());
        if group.rank() == 2 {
            group.abort("no such file");
        }
        let error = group.exchange(b"a").unwrap_err();
        assert!(matches!(&error, CommError::GaveUp { rank: 2, reason } if reason == "no such file"), "{error}");
        // Only the other ranks lost one.
        let rank = group.rank();
        assert_eq!(calls.recv_timeout(Duration::from_secs(1)).is_ok(), rank != 2);
    });
}

#[test]
fn a_callback_may_leave_and_drop_the_group() {
    run(2, |group| {
        if group.rank() == 1 {
            return group.abort("a reason");
        }
        let (left, leaves) = mpsc::channel();
        let weak = Arc::downgrade(&group);
        group.on_loss(move |_| {
            let group = weak.upgrade().unwrap();
            group.leave();
            drop(group);
            left.send(()).unwrap();
        });
        leaves.recv_timeout(Duration::from_secs(5)).unwrap();
    });
}

#[test]
fn a_panic_is_no_goodbye() {
    let results = run(2, |group| {
        if group.rank() == 0 {
            return Some(group.exchange(b"a").unwrap_err());
        }
        // Its message in the output of this test is expected.
        thread::spawn(move || {
            let _group = group;
            panic!("expected");
        })
        .join()
        .unwrap_err();
        None
    });
    assert!(matches!(results[0], Some(CommError::GaveUp { rank: 1, .. })), "{results:?}");
}

#[test]
fn ranks_out_of_step_say_what_they_expect() {
    let x = |rows: usize| Tensor::zeros((rows, 4), DType::F32, &Device::Cpu).unwrap();
    type Call<'a> = &'a (dyn Fn(&Tcp) -> Option<CommError> + Sync);
    let gather: Call = &|tcp| tcp.all_to_all(&[x(1), x(1)], &[1, 1]).err();
    let cases: [(Call, Call, &str, &str); 4] = [
        (gather, &|tcp| tcp.all_reduce(&x(4)).err(), "all_to_all of 1 x 4 F32", "all_reduce, first step of 16 x 8 F32"),
        (gather, &|tcp| tcp.group().exchange(b"").err(), "all_to_all of 1 x 4 F32", "exchange of 1 x 0 U8"),
        (
            gather,
            &|tcp| tcp.all_to_all(&[1, 1].map(|n| x(n).to_dtype(DType::U32).unwrap()), &[1, 1]).err(),
            "all_to_all of 1 x 4 F32",
            "all_to_all of 1 x 4 U32",
        ),
        (gather, &|tcp| tcp.all_to_all(&[x(3), x(1)], &[1, 1]).err(), "1 x 4", "3 x 4"),
    ];
    for (i, (first, second, expected_part, got_part)) in cases.into_iter().enumerate() {
        let errors = run(2, |group| {
            let tcp = Tcp::new(group);
            tcp.group().exchange(b"a").unwrap();
            let call = if tcp.rank() == 0 { first } else { second };
            call(&tcp).map(|error| (error, tcp.group().check().is_err()))
        });
        let Some((CommError::OutOfStep { rank: 1, expected, got }, true)) = &errors[0] else { panic!("{errors:?}") };
        assert!(expected.starts_with("operation 2: ") && expected.contains(expected_part), "case {i}: {expected}");
        assert!(got.starts_with("operation 2: ") && got.contains(got_part), "case {i}: {got}");
        // Rank 1 expects exactly what rank 0 sends in the last case, and may finish.
        if i < 3 {
            assert!(matches!(&errors[1], Some((CommError::OutOfStep { rank: 0, .. }, true))), "case {i}: {errors:?}");
        }
    }
}

/// Alone in a process, so that other tests start no threads: counts those that are left.
#[test]
#[cfg(target_os = "linux")]
fn threads_end_with_the_group() {
    const ALONE: &str = "S2O_COMM_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let mut alone = Command::new(env::current_exe().unwrap());
        alone.args(["--exact", "liveness::threads_end_with_the_group"]).env(ALONE, "");
        let output = alone.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let all = || [count("/proc/self/task"), count("/proc/self/fd")];
    let before = all();
    for i in 0..5 {
        // With and without an error at the end, which may end the exchange of a slower rank.
        let aborts = i % 2 == 0;
        run(3, |group| {
            if let Err(error) = group.exchange(b"a") {
                assert!(aborts && matches!(error, CommError::GaveUp { rank: 0, .. }), "{error}");
            }
            if aborts && group.rank() == 0 {
                group.abort("a reason");
            }
        });
    }
    assert_eq!(all(), before, "threads and open files");
}
