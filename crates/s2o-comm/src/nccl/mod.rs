//! [`Nccl`]: ranks on NVIDIA GPUs, one process each.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::{DType, Device, Shape, Tensor};
use cudarc::driver::{DevicePtrMut, DeviceRepr};
use half::{bf16, f16};
use s2o_cuda::{Launcher, unaligned_address};

use crate::Communicator;
use crate::communicator::check_sends;
use crate::{CommError, Group, Result};

mod library;

use library::{Handle, IdArgument, Library, Stream, UniqueId};

/// Longest time that a call of NCCL takes on the host while all ranks are there.
const LONGEST_CALL: Duration = Duration::from_secs(5);
/// `ncclSum`.
const SUM: c_int = 0;

/// Communication by NCCL on the stream of a Candle device. No call waits for the GPU.
///
/// All-to-all is grouped send and receive, so it moves what it must and nothing else. [`Communicator::all_reduce`] adds
/// in the order and with the roundings of NCCL's algorithm, which are the same on every rank.
pub struct Nccl {
    group: Arc<Group>,
    device: CudaDevice,
    library: &'static Library,
    handle: Arc<Mutex<SharedHandle>>,
}

/// NCCL's communicator, until it is destroyed or aborted.
struct SharedHandle(Option<Handle>);

// SAFETY: NCCL's communicators may be used from any thread, one at a time, and `ncclCommAbort` is made for another
// thread than the one that waits.
unsafe impl Send for SharedHandle {}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Joins the ranks of `group` on `device`, each on a GPU of its own. Waits for all of them. If a rank is lost
    /// later, what the GPU waits for is aborted, and the next call fails.
    ///
    /// # Errors
    /// [`CommError::NoNccl`] if NCCL is not installed, [`CommError::Nccl`] if it fails, for example because two ranks
    /// have the same GPU, [`CommError::NotOnGpu`] for another device than an NVIDIA GPU.
    pub fn new(group: Arc<Group>, device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else {
            return Err(CommError::NotOnGpu { name: "device" });
        };
        let library = Library::get();
        // All ranks fail if one has no NCCL, and none waits for it.
        let versions = group.exchange(&[u8::from(library.is_ok())])?;
        let library = library?;
        if let Some(rank) = versions.iter().position(|has| has != &[1]) {
            return Err(CommError::NoNccl { reason: format!("rank {rank} has none") });
        }
        device.cuda_stream().context().bind_to_thread().map_err(candle_core::Error::wrap)?;
        let mut id: UniqueId = [0; 128];
        if group.rank() == 0 {
            // SAFETY: the pointer is to a local of the right type.
            library.check("making an id", unsafe { (library.get_unique_id)(&mut id) })?;
        }
        let ids = group.exchange(&id)?;
        if let Ok(first) = UniqueId::try_from(ids[0].as_slice()) {
            id = first;
        }
        let mut handle: Handle = ptr::null_mut();
        let (ranks, rank) = (group.world_size() as c_int, group.rank() as c_int);
        // SAFETY: the pointer is to a local, the id is that of rank 0, and the context of the device is current.
        let status = unsafe { (library.comm_init_rank)(&mut handle, ranks, IdArgument(id), rank) };
        library.check("joining the ranks; is each on a GPU of its own?", status)?;
        let handle = Arc::new(Mutex::new(SharedHandle(Some(handle))));
        let of_watch = Arc::clone(&handle);
        group.on_loss(move |_| abort(library, &of_watch));
        let nccl = Self { group, device: device.clone(), library, handle };
        nccl.connect()?;
        Ok(nccl)
    }

    /// Makes the connections of all messages that a decoder sends. NCCL makes them at the first message of each algorithm,
    /// and chooses that of an all-reduce by its size: without this the first decoded token waits a quarter of a second.
    fn connect(&self) -> Result<()> {
        let zeros = |rows: usize| Tensor::zeros((rows, 4096), DType::BF16, &Device::Cuda(self.device.clone()));
        for rows in [1, 4096] {
            self.all_reduce(&zeros(rows)?)?;
        }
        self.all_to_all(&vec![zeros(1)?; self.world_size()], &vec![1; self.world_size()])?;
        Ok(())
    }

    fn check_device(&self, name: &'static str, x: &Tensor) -> Result<()> {
        if x.device().same_device(&Device::Cuda(self.device.clone())) {
            Ok(())
        } else {
            Err(CommError::NotOnGpu { name })
        }
    }

    /// Enqueues with NCCL's communicator and the device's stream.
    fn enqueue(&self, run: impl FnOnce(&Library, Handle, Stream) -> Result<()>) -> Result<()> {
        self.group.check()?;
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = handle.0 else {
            return Err(CommError::Nccl { doing: "communicating", reason: "it was aborted".to_owned() });
        };
        run(self.library, handle, self.device.cuda_stream().cu_stream().cast())
    }

    fn exchange_rows<T: Element>(&self, sends: &[Tensor], rows: &[usize], width: usize) -> Result<Tensor> {
        let launcher = Launcher::new(&self.device)?;
        let stream = launcher.stream();
        let shape = Shape::from((rows.iter().sum::<usize>(), width));
        let of_rank = |send: &Tensor| if send.dim(0)? == 0 { Ok(None) } else { send.contiguous().map(Some) };
        let sends = sends.iter().map(of_rank).collect::<std::result::Result<Vec<_>, _>>()?;
        let storages: Vec<_> = sends.iter().map(|send| send.as_ref().map(Tensor::storage_and_layout)).collect();
        let mut out = launcher.uninit::<T>(&shape)?;
        {
            let (out, _out) = out.device_ptr_mut(stream);
            let mut addresses = Vec::with_capacity(storages.len());
            for storage in &storages {
                addresses.push(match storage {
                    None => None,
                    Some((storage, layout)) => {
                        Some((unaligned_address::<T>(storage, layout, stream)?, layout.shape().elem_count()))
                    }
                });
            }
            self.enqueue(|nccl, handle, stream| {
                // SAFETY: NCCL's calls between start and end enqueue on the stream; every address holds `count`
                // elements until then, and memory is released in stream order.
                unsafe {
                    nccl.check("beginning a group of messages", (nccl.group_start)())?;
                    let mut start = 0;
                    for (peer, (address, &rows)) in addresses.iter().zip(rows).enumerate() {
                        if let Some(((address, _), count)) = address {
                            let address = *address as *const c_void;
                            nccl.check(
                                "sending",
                                (nccl.send)(address, *count, T::NUMBER, peer as c_int, handle, stream),
                            )?;
                        }
                        let count = rows * width;
                        if count > 0 {
                            let address = (out as usize + start * size_of::<T>()) as *mut c_void;
                            nccl.check(
                                "receiving",
                                (nccl.recv)(address, count, T::NUMBER, peer as c_int, handle, stream),
                            )?;
                        }
                        start += count;
                    }
                    nccl.check("sending and receiving", (nccl.group_end)())
                }
            })?;
        }
        Ok(launcher.tensor(out, shape))
    }

    fn sum<T: Element>(&self, x: &Tensor) -> Result<Tensor> {
        let launcher = Launcher::new(&self.device)?;
        let stream = launcher.stream();
        let x = x.contiguous()?;
        let mut out = launcher.uninit::<T>(x.shape())?;
        {
            let (storage, layout) = x.storage_and_layout();
            let (from, _from) = unaligned_address::<T>(&storage, layout, stream)?;
            let (to, _to) = out.device_ptr_mut(stream);
            let (from, to) = (from as *const c_void, to as *mut c_void);
            self.enqueue(|nccl, handle, stream| {
                // SAFETY: both addresses hold as many elements as `x`, and memory is released in stream order.
                let status = unsafe { (nccl.all_reduce)(from, to, x.elem_count(), T::NUMBER, SUM, handle, stream) };
                nccl.check("adding", status)
            })?;
        }
        Ok(launcher.tensor(out, x.shape().clone()))
    }
}

impl Communicator for Nccl {
    fn group(&self) -> &Group {
        &self.group
    }

    fn all_to_all(&self, sends: &[Tensor], rows: &[usize]) -> Result<Tensor> {
        let (dtype, width) = check_sends(sends, rows, self.rank(), self.world_size())?;
        self.check_device("sends", &sends[0])?;
        match dtype {
            DType::F32 => self.exchange_rows::<f32>(sends, rows, width),
            DType::BF16 => self.exchange_rows::<bf16>(sends, rows, width),
            DType::F16 => self.exchange_rows::<f16>(sends, rows, width),
            DType::U32 => self.exchange_rows::<u32>(sends, rows, width),
            DType::U8 => self.exchange_rows::<u8>(sends, rows, width),
            other => Err(unknown(other)),
        }
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.check_device("x", x)?;
        match x.dtype() {
            DType::F32 => self.sum::<f32>(x),
            DType::BF16 => self.sum::<bf16>(x),
            DType::F16 => self.sum::<f16>(x),
            other => Err(unknown(other)),
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if let Some(handle) = take(&self.handle) {
            // SAFETY: the handle was taken, so nobody else ends it.
            unsafe { (self.library.comm_destroy)(handle) };
        }
    }
}

/// Ends what the GPU waits for. A thread that is in a call of NCCL may itself wait for the lost rank and then never ends
/// it; after [`LONGEST_CALL`] the process has to be ended.
fn abort(library: &Library, handle: &Mutex<SharedHandle>) {
    let start = Instant::now();
    while start.elapsed() < LONGEST_CALL {
        if let Ok(mut handle) = handle.try_lock() {
            if let Some(handle) = handle.0.take() {
                // SAFETY: the handle was taken, so nobody else ends it.
                unsafe { (library.comm_abort)(handle) };
            }
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn take(handle: &Mutex<SharedHandle>) -> Option<Handle> {
    handle.lock().unwrap_or_else(PoisonError::into_inner).0.take()
}

/// Elements that NCCL sends.
trait Element: CudaDType + DeviceRepr + 'static {
    /// Its `ncclDataType_t`.
    const NUMBER: c_int;
}

impl Element for u8 {
    const NUMBER: c_int = 1;
}

impl Element for u32 {
    const NUMBER: c_int = 3;
}

impl Element for f16 {
    const NUMBER: c_int = 6;
}

impl Element for f32 {
    const NUMBER: c_int = 7;
}

impl Element for bf16 {
    const NUMBER: c_int = 9;
}

fn unknown(dtype: DType) -> CommError {
    CommError::DType { name: "tensor", expected: "F32, BF16 or F16", got: dtype }
}
