//! [`Library`]: the kernels of one GPU, loaded on first use and kept for the life of the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DevicePtr, result, sys};
use cudarc::nvrtc::Ptx;
use s2o_kernels::{Arch, Code, Function, LaunchInfo, Module, modules};

use crate::error::{CudaError, Doing};
use crate::memory::{Pool, refuse_capture};

/// Environment variable that selects the build of the kernels: `sm80` or `sm90a`.
const ARCH_VARIABLE: &str = "S2O_CUDA_ARCH";

/// Streams next to Candle's.
pub(crate) const OTHER_STREAMS: usize = 3;

/// The kernels and the scratch memory pool of one GPU.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) arch: Arch,
    pub(crate) multiprocessors: usize,
    pub(crate) pool: Pool,
    /// For work next to that of Candle's stream ([`Aside`](crate::Aside)).
    pub(crate) other_streams: [Arc<CudaStream>; OTHER_STREAMS],
    context: Arc<CudaContext>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    functions: HashMap<Function, Loading>,
}

/// A kernel, or the bytes of shared memory of a block that it needs and that the GPU has.
type Loading = Result<Entry, [usize; 2]>;

/// A kernel ready to launch.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) function: CudaFunction,
    pub(crate) info: LaunchInfo,
    /// Largest dynamic shared memory of a launch, in bytes.
    pub(crate) shared_limit: usize,
    /// Blocks of a persistent kernel that fit one multiprocessor; 0 for other kernels.
    pub(crate) fitting: usize,
}

/// Libraries by context and build. Candle devices of one GPU share its primary context, and thus its library. A library
/// keeps its context alive, so no other context can get the same address.
static LIBRARIES: Mutex<Vec<(usize, Arc<Library>)>> = Mutex::new(Vec::new());

impl Library {
    /// The library of the GPU that `stream` belongs to.
    pub(crate) fn of(stream: &CudaStream) -> Result<Arc<Self>, CudaError> {
        let context = stream.context();
        let (major, minor) = context.compute_capability().doing("asking for the compute capability")?;
        let arch = match std::env::var_os(ARCH_VARIABLE) {
            None => Arch::for_capability(major, minor).ok_or(CudaError::ComputeCapability { major, minor })?,
            Some(name) => {
                let name = name.to_string_lossy().into_owned();
                let arch = Arch::named(&name).ok_or(CudaError::UnknownArch(name))?;
                if !arch.runs_on(major, minor) {
                    return Err(CudaError::ArchMismatch { arch, major, minor });
                }
                arch
            }
        };
        let address = context.cu_ctx() as usize;
        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        let known = libraries.iter().find(|(of, library)| *of == address && library.arch == arch);
        if let Some((_, library)) = known {
            return Ok(Arc::clone(library));
        }
        let multiprocessors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .doing("counting multiprocessors")?;
        let library = Arc::new(Self {
            arch,
            multiprocessors: multiprocessors as usize,
            pool: Pool::new(context)?,
            other_streams: other_streams(context)?,
            context: Arc::clone(context),
            loaded: Mutex::default(),
        });
        libraries.push((address, Arc::clone(&library)));
        Ok(library)
    }

    /// Returns a kernel, loaded on first use.
    pub(crate) fn entry(&self, function: Function, stream: &Arc<CudaStream>) -> Result<Entry, CudaError> {
        let function = function.or_fallback(self.arch);
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loading) = loaded.functions.get(&function) {
            return or_too_large(function, loading.clone());
        }
        refuse_capture(stream, "the first call of a kernel", "make one such call before the capture")?;
        let name = function.to_string();
        let holder = modules(self.arch).iter().find(|module| module.kernels.contains(&name.as_str()));
        let holder = holder.ok_or(CudaError::MissingKernel { name: name.clone(), arch: self.arch })?;
        let module = match loaded.modules.get(holder.name) {
            Some(module) => Arc::clone(module),
            None => {
                let module = self.load(holder)?;
                loaded.modules.insert(holder.name, Arc::clone(&module));
                module
            }
        };
        let loading = entry_of(&module, function, stream)?;
        loaded.functions.insert(function, loading.clone());
        or_too_large(function, loading)
    }

    fn load(&self, module: &Module) -> Result<Arc<CudaModule>, CudaError> {
        let code = match module.code {
            Code::Cubin(code) => Ptx::from_binary(code.to_vec()),
            Code::Ptx(text) => Ptx::from_src(text),
        };
        self.context.load_module(code).map_err(|source| {
            let mut driver_version = 0;
            // SAFETY: the pointer is to a local of the right type. If the call fails the version stays 0.
            let _ = unsafe { sys::cuDriverGetVersion(&mut driver_version) };
            CudaError::Load { module: module.name, driver_version, source }
        })
    }
}

/// Streams that are never destroyed: their library lives as long as the process.
fn other_streams(context: &Arc<CudaContext>) -> Result<[Arc<CudaStream>; OTHER_STREAMS], CudaError> {
    context.bind_to_thread().doing("binding the context")?;
    let mut streams = Vec::with_capacity(OTHER_STREAMS);
    for _ in 0..OTHER_STREAMS {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).doing("making a stream")?;
        // `CudaContext::new_stream` would make every later allocation of Candle record events.
        // SAFETY: the stream is of this context and never destroyed. `Aside` orders its work with the first stream's.
        streams.push(unsafe { context.wrap_borrowed_stream(stream) });
    }
    Ok(streams.try_into().expect("as many as there are asides"))
}

fn or_too_large(function: Function, loading: Loading) -> Result<Entry, CudaError> {
    loading.map_err(|[expected, got]| CudaError::SharedMemory { name: function.to_string(), expected, got })
}

/// Looks up a kernel, reads its launch info, and allows it its shared memory.
fn entry_of(module: &Arc<CudaModule>, function: Function, stream: &Arc<CudaStream>) -> Result<Loading, CudaError> {
    let kernel = module.load_function(&function.to_string()).doing("looking a kernel up")?;
    let symbol = module.get_global(&function.launch_symbol(), stream).doing("looking up how to launch a kernel")?;
    let mut bytes = [0; size_of::<LaunchInfo>()];
    let (address, _read) = symbol.device_ptr(stream);
    // SAFETY: the symbol is a LaunchInfo of the same size (launch.cuh asserts it); the copy is awaited below, before
    // `bytes` is read or dropped.
    unsafe { result::memcpy_dtoh_async(&mut bytes, address, stream.cu_stream()) }
        .and_then(|()| stream.synchronize())
        .doing("reading how to launch a kernel")?;
    let info = LaunchInfo::from_bytes(bytes);
    let own = kernel.shared_size_bytes().doing("asking for a kernel's shared memory")?;
    let of_block = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let most = stream.context().attribute(of_block).doing("asking for shared memory")? - own;
    if info.shared_bytes > most {
        return Ok(Err([info.shared_bytes, most].map(|dynamic| (dynamic + own) as usize)));
    }
    let shared_limit = if function.kernel.sizes_its_shared_memory() { most } else { info.shared_bytes };
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    kernel.set_attribute(attribute, shared_limit).doing("allowing a kernel its shared memory")?;
    let fitting = match info.blocks_per_sm {
        0 => 0,
        _ => kernel
            .occupancy_max_active_blocks_per_multiprocessor(info.threads as u32, info.shared_bytes as usize, None)
            .doing("asking how many blocks of a kernel fit")?,
    };
    Ok(Ok(Entry { function: kernel, info, shared_limit: shared_limit as usize, fitting: fitting as usize }))
}
