//! [`Library`]: NVIDIA's NCCL, loaded when the first communicator is made.
//!
//! Loaded at run time, because a build that links to it would not start on the many machines that have one GPU and no
//! NCCL. (Candle's choice of cudarc features would make cudarc's own bindings link to it.)

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library as Loaded;

use crate::{CommError, Result};

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first version with `ncclSend` and `ncclRecv`, 2.7.3, as NCCL counts it.
const OLDEST_VERSION: c_int = 2703;

/// Identifies one group of communicators: `ncclUniqueId`.
pub(super) type UniqueId = [u8; 128];

/// The id by value, as C passes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IdArgument(pub(super) UniqueId);

pub(super) type Handle = *mut c_void;
pub(super) type Stream = *mut c_void;
type Status = c_int;

/// The functions of NCCL 2 that are used here.
pub(super) struct Library {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    pub(super) comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, IdArgument, c_int) -> Status,
    pub(super) comm_abort: unsafe extern "C" fn(Handle) -> Status,
    pub(super) comm_destroy: unsafe extern "C" fn(Handle) -> Status,
    pub(super) group_start: unsafe extern "C" fn() -> Status,
    pub(super) group_end: unsafe extern "C" fn() -> Status,
    pub(super) send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    pub(super) recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    pub(super) all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    get_error_string: unsafe extern "C" fn(Status) -> *const c_char,
    /// Keeps the code of the functions mapped.
    _loaded: Loaded,
}

impl Library {
    /// The library of this process.
    ///
    /// # Errors
    /// [`CommError::NoNccl`] if it is not installed or too old.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| Self::load(&NAMES));
        library.as_ref().map_err(|reason| CommError::NoNccl { reason: reason.clone() })
    }

    /// The first library of these names that is there.
    fn load(names: &[&str]) -> std::result::Result<Self, String> {
        let mut reasons = Vec::new();
        for &name in names {
            // SAFETY: NCCL's initialisers have no requirements.
            match unsafe { Loaded::new(name) } {
                Ok(loaded) => return Self::bind(loaded),
                Err(error) => reasons.push(words(&error)),
            }
        }
        Err(reasons.join("; "))
    }

    fn bind(loaded: Loaded) -> std::result::Result<Self, String> {
        fn function<T: Copy>(loaded: &Loaded, name: &str) -> std::result::Result<T, String> {
            // SAFETY: the types above are those of NCCL's header; they have not changed since version 2.7.
            unsafe { loaded.get::<T>(name.as_bytes()) }.map(|function| *function).map_err(|error| words(&error))
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> Status = function(&loaded, "ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: the pointer is to a local of the right type.
        unsafe { get_version(&mut version) };
        if version < OLDEST_VERSION {
            return Err(format!("expected version 2.7.3 or newer, got number {version}"));
        }
        Ok(Self {
            get_unique_id: function(&loaded, "ncclGetUniqueId")?,
            comm_init_rank: function(&loaded, "ncclCommInitRank")?,
            comm_abort: function(&loaded, "ncclCommAbort")?,
            comm_destroy: function(&loaded, "ncclCommDestroy")?,
            group_start: function(&loaded, "ncclGroupStart")?,
            group_end: function(&loaded, "ncclGroupEnd")?,
            send: function(&loaded, "ncclSend")?,
            recv: function(&loaded, "ncclRecv")?,
            all_reduce: function(&loaded, "ncclAllReduce")?,
            get_error_string: function(&loaded, "ncclGetErrorString")?,
            _loaded: loaded,
        })
    }

    /// The error of a call, if it failed.
    pub(super) fn check(&self, doing: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static string for every number.
        let reason = unsafe { CStr::from_ptr((self.get_error_string)(status)) }.to_string_lossy().into_owned();
        Err(CommError::Nccl { doing, reason })
    }
}

/// What the system says, for example which file it did not find. `libloading` itself says only which call failed.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nccl_the_error_says_what_to_install() {
        let reason = Library::load(&["libabsent.so.2", "libabsent.so"]).err().unwrap();
        assert!(reason.contains("libabsent.so.2: ") && reason.contains("; libabsent.so: "), "{reason}");
        let error = CommError::NoNccl { reason }.to_string();
        assert!(error.starts_with("NCCL: libabsent.so.2: ") && error.contains("libnccl2"), "{error}");
        assert!(error.contains("nvidia-nccl") && error.ends_with("LD_LIBRARY_PATH"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn another_library_of_that_name_is_refused() {
        let reason = Library::load(&["libabsent.so", "libc.so.6"]).err().unwrap();
        assert!(reason.contains("ncclGetVersion"), "{reason}");
    }
}
