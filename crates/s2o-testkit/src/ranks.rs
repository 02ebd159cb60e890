//! Ranks as threads of a test.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;
use std::{process, thread};

use s2o_comm::{Group, Rendezvous};

/// An address at which nobody listens. Its port is below those that the system gives to outgoing connections: a
/// connection of another test cannot take it meanwhile.
pub fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let port = 10_000 + (process::id() * 97 + NEXT.fetch_add(1, Relaxed)) % 20_000;
        let address = format!("127.0.0.1:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// The place of a rank, with a time limit that suits tests.
pub fn rendezvous(rank: usize, world_size: usize, address: &str) -> Rendezvous {
    Rendezvous { rank, world_size, address: address.into(), timeout: Duration::from_secs(20) }
}

/// Runs `work` on each of these ranks in its own thread: the results in this order.
///
/// # Panics
/// If a thread panics.
pub fn run_all<T: Send>(rendezvous: &[Rendezvous], work: impl Fn(&Rendezvous) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = rendezvous.iter().map(|rendezvous| scope.spawn(|| work(rendezvous))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Runs `work` on the ranks of one group: the results in the order of the ranks.
///
/// # Panics
/// If the ranks do not meet, or a thread panics.
pub fn run<T: Send>(world_size: usize, work: impl Fn(Arc<Group>) -> T + Sync) -> Vec<T> {
    let address = free_address();
    let all: Vec<_> = (0..world_size).map(|rank| rendezvous(rank, world_size, &address)).collect();
    run_all(&all, |rendezvous| work(Group::join(rendezvous).expect("the ranks meet")))
}
