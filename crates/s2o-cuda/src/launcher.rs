//! [`Launcher`]: the only way to launch a kernel.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Shape, Storage, Tensor};
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits, sys};
use s2o_kernels::params::Params;
use s2o_kernels::{Arch, Function, HeadDim, Kernel};

use crate::error::{CudaError, Doing, check_i32};
use crate::library::Library;
use crate::memory::{Regions, Scratch, refuse_capture};
use crate::operand::{View, tensor_map};
use crate::stopwatch::Stopwatch;

/// The head size to name for kernels that do not depend on it.
pub const ANY_HEAD_DIM: HeadDim = HeadDim::D128;

/// Most blocks of a grid in y or z.
const MAX_GRID_YZ: usize = 65535;

/// Thread blocks of a launch.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum Grid {
    /// Blocks that take items from a counter: as many as the GPU holds at once, or fewer if there are fewer items.
    Persistent { items: usize },
    /// One warp for each row.
    Warps { rows: usize },
    /// This many blocks in x, y and z.
    Blocks([usize; 3]),
    /// As [`Grid::Blocks`], for a kernel whose threads or dynamic shared memory are chosen at the launch.
    Shaped {
        /// Blocks in x, y and z.
        blocks: [usize; 3],
        /// Threads per block, or `None` for the kernel's fixed number.
        threads: Option<usize>,
        /// Bytes of dynamic shared memory, or `None` for the kernel's fixed size.
        shared_bytes: Option<usize>,
    },
}

/// A Candle device, its stream and its kernels.
#[derive(Debug, Clone)]
pub struct Launcher {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    library: Arc<Library>,
    stopwatch: Option<Arc<Stopwatch>>,
}

impl Launcher {
    /// The launcher of a device, which enqueues on the device's own stream.
    ///
    /// # Errors
    /// If the GPU is too old, `S2O_CUDA_ARCH` names no build that runs on it, or the driver fails.
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().doing("binding the context")?;
        let library = Library::of(&stream)?;
        Ok(Self { device: device.clone(), stream, library, stopwatch: None })
    }

    /// The launcher of the device of a tensor.
    ///
    /// # Errors
    /// As [`Launcher::new`], or if the tensor is not on an NVIDIA GPU.
    pub fn of(tensor: &Tensor) -> Result<Self, CudaError> {
        Self::new(tensor.device().as_cuda_device()?)
    }

    /// The same launcher, with its launches timed.
    pub fn timed(&self, stopwatch: &Arc<Stopwatch>) -> Self {
        Self { stopwatch: Some(Arc::clone(stopwatch)), ..self.clone() }
    }

    /// Whether it times its launches, and so runs them one after the other.
    pub fn is_timed(&self) -> bool {
        self.stopwatch.is_some()
    }

    /// The same launcher on the `i`-th other stream of the GPU.
    pub(crate) fn on_other_stream(&self, i: usize) -> Self {
        Self { stream: Arc::clone(&self.library.other_streams[i]), ..self.clone() }
    }

    /// The stream that kernels are enqueued on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Number of multiprocessors of the GPU.
    pub fn multiprocessors(&self) -> usize {
        self.library.multiprocessors
    }

    /// Whether the build for this GPU has the kernels of sm_90a.
    pub fn is_sm90a(&self) -> bool {
        self.library.arch == Arch::Sm90a
    }

    /// Whether the build of the kernels for this GPU has `kernel`.
    pub fn has(&self, kernel: Kernel) -> bool {
        kernel.is_in(self.library.arch)
    }

    /// Whether the GPU has the shared memory that the kernel needs. Loads the kernel.
    ///
    /// # Errors
    /// If the kernel cannot be loaded.
    pub fn fits(&self, function: Function) -> Result<bool, CudaError> {
        match self.library.entry(function, &self.stream) {
            Ok(_) => Ok(true),
            Err(CudaError::SharedMemory { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Scratch memory for these regions, allocated in stream order.
    pub fn allocate(&self, regions: &Regions) -> Result<Scratch, CudaError> {
        self.library.pool.allocate(&self.stream, regions)
    }

    /// Memory for a tensor of `shape`. Its elements are arbitrary until a kernel has written them.
    pub fn uninit<T: CudaDType + DeviceRepr>(&self, shape: &Shape) -> Result<CudaSlice<T>, CudaError> {
        // SAFETY: the caller launches a kernel that writes every element.
        Ok(unsafe { self.device.alloc::<T>(shape.elem_count()) }?)
    }

    /// Memory for `len` elements, set to zero.
    pub fn zeros<T: CudaDType + DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, CudaError> {
        Ok(self.device.alloc_zeros::<T>(len)?)
    }

    /// Makes a tensor of a slice that a kernel has written.
    pub fn tensor<T: CudaDType>(&self, slice: CudaSlice<T>, shape: Shape) -> Tensor {
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, self.device.clone()));
        Tensor::from_storage(storage, shape, BackpropOp::none(), false)
    }

    /// Largest dynamic shared memory in bytes that a launch of the kernel may request. Loads the kernel.
    ///
    /// # Errors
    /// As [`Launcher::launch`].
    pub fn shared_limit(&self, function: Function) -> Result<usize, CudaError> {
        Ok(self.library.entry(function, &self.stream)?.shared_limit)
    }

    /// [`CudaError::Capturing`] while the stream captures a graph: `doing` would need to wait for the stream, and
    /// `instead` is the advice.
    pub fn refuse_capture(&self, doing: &'static str, instead: &'static str) -> Result<(), CudaError> {
        refuse_capture(&self.stream, doing, instead)
    }

    /// Enqueues a kernel, unless the grid has no blocks. The first launch of a kernel loads it.
    ///
    /// # Errors
    /// If the grid is too large, the kernel cannot be loaded, or the driver fails.
    ///
    /// # Safety
    /// `params` must be the parameters of the kernel, every address in it must hold what the kernel's header says until
    /// the kernel has run, and the kernel must take no tensor maps.
    pub unsafe fn launch<P: Params>(&self, function: Function, params: &P, grid: Grid) -> Result<(), CudaError> {
        // SAFETY: passed on; the kernel takes no views.
        unsafe { self.launch_on(function, [], params, grid) }
    }

    /// [`Launcher::launch`] for a kernel that reads `views` through tensor maps (TMA) if its build uses them.
    ///
    /// # Errors
    /// As [`Launcher::launch`].
    ///
    /// # Safety
    /// As [`Launcher::launch`]; `views` must be those whose tensor maps the kernel takes, of its element type, with
    /// memory that is valid until the kernel has run.
    pub unsafe fn launch_on<P: Params, const N: usize>(
        &self,
        function: Function,
        views: [View; N],
        params: &P,
        grid: Grid,
    ) -> Result<(), CudaError> {
        let entry = self.library.entry(function, &self.stream)?;
        let (mut threads, mut shared_bytes) = (entry.info.threads as usize, entry.info.shared_bytes as usize);
        let blocks = match grid {
            Grid::Persistent { items } => {
                check_i32("work items", items)?;
                [entry.info.persistent_blocks(items, self.library.multiprocessors, entry.fitting), 1, 1]
            }
            Grid::Warps { rows } => [rows.div_ceil(threads / 32), 1, 1],
            Grid::Blocks(blocks) => blocks,
            Grid::Shaped { blocks, threads: of_block, shared_bytes: bytes } => {
                threads = of_block.unwrap_or(threads);
                shared_bytes = bytes.unwrap_or(shared_bytes);
                blocks
            }
        };
        if blocks.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = blocks;
        check_i32("thread blocks", x)?;
        for got in [y, z] {
            if got > MAX_GRID_YZ {
                return Err(CudaError::TooLarge { name: "thread blocks", max: MAX_GRID_YZ, got });
            }
        }
        let maps = match entry.info.tensor_maps {
            0 => Vec::new(),
            _ => views
                .iter()
                .enumerate()
                .map(|(i, view)| {
                    // The first view is the queries.
                    let most = if i == 0 { usize::MAX } else { entry.info.box_rows as usize };
                    tensor_map(view, view.box_rows.min(most), function.dtype)
                })
                .collect::<Result<_, _>>()?,
        };
        let mut arguments: Vec<*mut c_void> = maps.iter().map(|map| ptr::from_ref(map) as *mut c_void).collect();
        arguments.push(ptr::from_ref(params) as *mut c_void);
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut overlap,
            numAttrs: entry.info.overlaps as u32,
        };
        let mut launch = || {
            let function = entry.function.cu_function();
            // SAFETY: the driver copies the configuration and the arguments before it returns: the tensor maps that the
            // kernel takes, then its parameters. The caller guarantees that they fit the kernel.
            unsafe { sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), ptr::null_mut()) }
                .result()
                .doing("launching a kernel")
        };
        match &self.stopwatch {
            Some(stopwatch) => stopwatch.time(function.kernel, &self.stream, launch),
            None => launch(),
        }
    }
}
