//! Description of the machine, which every output contains.

use candle_core::Device;
use s2o_eval::provenance::{self, proc_entry};

/// The device as rows name it: the GPU, or the CPU and its number of threads.
pub fn name(device: &Device) -> String {
    gpu(device).map_or_else(provenance::cpu, |[name, _]| name)
}

/// The GPU if it is used, threads, CPU and memory on one line.
pub fn describe(device: &Device) -> String {
    let gpu = gpu(device).map(|[name, memory]| format!("{name} with {memory} in use"));
    let mut parts: Vec<String> = gpu.into_iter().collect();
    let threads = rayon::current_num_threads();
    parts.push(format!("{threads} thread{}", if threads == 1 { "" } else { "s" }));
    parts.extend(proc_entry("/proc/cpuinfo", "model name"));
    let peak = proc_entry("/proc/self/status", "VmHWM");
    if let Some(kib) = peak.and_then(|value| value.strip_suffix(" kB")?.parse::<usize>().ok()) {
        parts.push(format!("peak memory {} MiB", kib / 1024));
    }
    parts.join(", ")
}

/// The name of a GPU, and its memory in use of all.
#[cfg(feature = "cuda")]
fn gpu(device: &Device) -> Option<[String; 2]> {
    let stream = device.as_cuda_device().ok()?.cuda_stream();
    let (free, total) = stream.context().mem_get_info().ok()?;
    Some([stream.context().name().ok()?, format!("{} of {} MiB", (total - free) >> 20, total >> 20)])
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: &Device) -> Option<[String; 2]> {
    None
}
