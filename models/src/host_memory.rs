//! The free memory of the host.

use std::fs;

/// Bytes that the host can still allocate without paging: those of the machine, or fewer where a control group limits this
/// process. `None` where the system does not say (anything but Linux).
pub(crate) fn available() -> Option<u64> {
    let machine = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    // Versions 2 and 1 of control groups, as a container sees its own.
    let files = [
        ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"],
        ["/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"],
    ];
    let limits = files.iter().filter_map(|[most, used]| Some(number(most)?.saturating_sub(number(used)?)));
    Some(limits.fold(machine, u64::min))
}

/// `MemAvailable` of /proc/meminfo, in bytes.
fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read() {
        let text = "MemTotal:       16000 kB\nMemFree:  10 kB\nMemAvailable:    8000 kB\n";
        assert_eq!(meminfo(text), Some(8_192_000));
        assert_eq!(meminfo("MemTotal: 16000 kB\n"), None);
        #[cfg(target_os = "linux")]
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn pinned_memory_runs_out_on_the_host() {
        use crate::error::{ModelError, Need};
        use candle_core::Error;

        let need = Need { what: "a cache", bytes: 7, way_out: "take less" };
        let full = Error::Msg("allocating: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"\")".to_owned());
        assert!(matches!(need.on_host(full), ModelError::OutOfHostMemory { what: "a cache", asked: 7, .. }));
        assert!(matches!(need.on_host(Error::Msg("lost".to_owned())), ModelError::Candle(_)));
    }
}
