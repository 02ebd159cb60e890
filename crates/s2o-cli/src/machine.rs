//! Description of the machine, which every output contains, and the limit on its threads.

use std::fs;
use std::num::NonZeroUsize;

use candle_core::Device;
use s2o_eval::provenance;

/// Limits every thread pool of the process.
pub fn limit_threads(threads: Option<NonZeroUsize>) {
    let Some(threads) = threads else { return };
    // Candle has a pool next to Rayon's, and both take their size from the environment when they are first used.
    for variable in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
        // SAFETY: main calls this before anything else, so there is no other thread that could read the environment.
        unsafe { std::env::set_var(variable, threads.to_string()) };
    }
}

/// The device as rows name it: the GPU, or the CPU and its number of threads.
pub fn name(device: &Device) -> String {
    gpu_name(device).unwrap_or_else(provenance::cpu)
}

/// The GPU if it is used, threads, CPU and memory on one line.
pub fn describe(device: &Device) -> String {
    let mut parts: Vec<String> = gpu(device).into_iter().collect();
    let threads = rayon::current_num_threads();
    parts.push(format!("{threads} thread{}", if threads == 1 { "" } else { "s" }));
    parts.extend(proc_entry("/proc/cpuinfo", "model name"));
    if let Some(kib) = proc_entry("/proc/self/status", "VmHWM").and_then(|value| kibibytes(&value)) {
        parts.push(format!("peak memory {} MiB", kib / 1024));
    }
    parts.join(", ")
}

#[cfg(feature = "cuda")]
fn gpu_name(device: &Device) -> Option<String> {
    device.as_cuda_device().ok()?.cuda_stream().context().name().ok()
}

#[cfg(not(feature = "cuda"))]
fn gpu_name(_: &Device) -> Option<String> {
    None
}

#[cfg(feature = "cuda")]
fn gpu(device: &Device) -> Option<String> {
    let stream = device.as_cuda_device().ok()?.cuda_stream();
    let context = stream.context();
    let (free, total) = context.mem_get_info().ok()?;
    let mib = |bytes: usize| bytes >> 20;
    Some(format!("{} with {} of {} MiB in use", context.name().ok()?, mib(total - free), mib(total)))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: &Device) -> Option<String> {
    None
}

/// The first value of a key in a file of `key: value` lines; `None` if there is no such file.
fn proc_entry(path: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
    })
}

fn kibibytes(value: &str) -> Option<usize> {
    value.strip_suffix(" kB")?.parse().ok()
}
