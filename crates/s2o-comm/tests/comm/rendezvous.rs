//! Ranks that find one another, and those that must not.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use s2o_comm::{CommError, Group, Rendezvous};

use s2o_testkit::ranks::{free_address, rendezvous, run_all};

fn fail_all(ranks: &[Rendezvous]) -> Vec<CommError> {
    run_all(ranks, |rendezvous| Group::join(rendezvous).unwrap_err())
}

#[test]
fn one_rank_needs_no_address() {
    let group = Group::join(&rendezvous(0, 1, "")).unwrap();
    assert_eq!((group.rank(), group.world_size()), (0, 1));
    assert_eq!(group.exchange(b"a").unwrap(), [b"a"]);
    group.agree("the model", "tiny").unwrap();
    group.check().unwrap();
}

#[test]
fn wrong_numbers_are_refused_without_a_connection() {
    for (rank, world_size, wrong) in [(2, 2, "rank"), (0, 0, "world_size"), (0, 257, "world_size")] {
        let error = Group::join(&rendezvous(rank, world_size, &free_address())).unwrap_err();
        assert!(matches!(error, CommError::Size { name, .. } if name == wrong), "{error}");
    }
}

#[test]
fn addresses_that_mean_nothing_are_refused() {
    for address in ["", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:0", "no-such-host.invalid:1"] {
        for rank in 0..2 {
            let error = Group::join(&rendezvous(rank, 2, address)).unwrap_err();
            assert!(matches!(error, CommError::Address { .. }), "{error}");
        }
    }
}

#[test]
fn different_world_sizes_fail_on_every_rank() {
    let address = free_address();
    let ranks = [rendezvous(0, 3, &address), rendezvous(1, 4, &address), rendezvous(2, 3, &address)];
    for error in fail_all(&ranks) {
        assert!(matches!(error, CommError::WorldSize { rank: 1, expected: 3, got: 4 }), "{error}");
    }
}

#[test]
fn a_rank_given_twice_fails_on_every_rank() {
    let address = free_address();
    let ranks = [0, 1, 1, 2].map(|rank| rendezvous(rank, 3, &address));
    // With rank 2 in time the ranks 0, 1 and 2 would be enough: it comes late, and hears of it all the same.
    let errors = run_all(&ranks, |rendezvous| {
        thread::sleep(Duration::from_millis(if rendezvous.rank == 2 { 500 } else { 0 }));
        Group::join(rendezvous).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, CommError::RankTwice { rank: 1 }), "{error}");
    }
}

#[test]
fn missing_ranks_are_named_on_every_rank() {
    let address = free_address();
    let timeout = Duration::from_millis(700);
    let ranks = [0, 2].map(|rank| Rendezvous { timeout, ..rendezvous(rank, 4, &address) });
    for error in fail_all(&ranks) {
        assert!(matches!(&error, CommError::MissingRanks { missing, .. } if *missing == [1, 3]), "{error}");
    }
}

#[test]
fn no_rank_0_is_an_error_after_the_time() {
    let timeout = Duration::from_millis(300);
    let begin = Instant::now();
    let error = Group::join(&Rendezvous { timeout, ..rendezvous(1, 2, &free_address()) }).unwrap_err();
    assert!(matches!(error, CommError::Unreachable { .. }), "{error}");
    assert!(begin.elapsed() >= timeout);
}

#[test]
fn a_port_in_use_is_an_error_of_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let error = Group::join(&rendezvous(0, 2, &address)).unwrap_err();
    assert!(matches!(&error, CommError::PortInUse { address: at } if *at == address), "{error}");
}

#[test]
fn another_program_in_place_of_rank_0_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = thread::spawn(move || {
        for answer in [b"HTTP/1.1 400 Bad Request\r\n\r\n".as_slice(), b""] {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 12]).unwrap();
            stream.write_all(answer).unwrap();
        }
    });
    let error = Group::join(&rendezvous(1, 2, &address)).unwrap_err();
    assert!(matches!(error, CommError::NotARank { .. }), "{error}");
    let error = Group::join(&rendezvous(1, 2, &address)).unwrap_err();
    assert!(matches!(error, CommError::Closed { .. }), "{error}");
    other.join().unwrap();
}

/// Connects as soon as rank 0 listens.
fn call(address: &str) -> TcpStream {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn connections_of_other_programs_are_ignored() {
    let address = free_address();
    let garbage: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        // A hello of 4 GiB, a hello without content, and one that is cut off.
        b"S2OCOMM\x01\xff\xff\xff\xff",
        b"S2OCOMM\x01\0\0\0\0",
        b"S2OCOMM\x01\x40\0\0\0\x01",
    ];
    thread::scope(|scope| {
        let first = scope.spawn(|| Group::join(&rendezvous(0, 2, &address)).unwrap());
        for bytes in garbage {
            call(&address).write_all(bytes).unwrap();
        }
        let second = Group::join(&rendezvous(1, 2, &address)).unwrap();
        let first = first.join().unwrap();
        let other = scope.spawn(move || first.exchange(b"a").unwrap());
        assert_eq!(second.exchange(b"b").unwrap(), [b"a", b"b"]);
        other.join().unwrap();
    });
}

#[test]
fn two_runs_one_after_the_other_share_an_address() {
    let address = free_address();
    let ranks: Vec<_> = (0..3).map(|rank| rendezvous(rank, 3, &address)).collect();
    let first = run_all(&ranks, |rendezvous| Group::join(rendezvous).unwrap());
    // The first run is alive: its listener is closed.
    let second = run_all(&ranks, |rendezvous| Group::join(rendezvous).unwrap());
    for groups in [first, second] {
        thread::scope(|scope| {
            let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.exchange(b"a").unwrap())).collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap().len(), 3));
        });
    }
}
