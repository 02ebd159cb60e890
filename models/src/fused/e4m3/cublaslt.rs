//! Products of e4m3 matrices by cuBLASLt, with a scale for each row and column.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUdeviceptr;
use s2o_cuda::{CudaError, Launcher, Regions};
use s2o_kernels::Dtype;

/// Bytes that an algorithm may use: what NVIDIA recommends for compute capability 9.0.
const WORKSPACE: usize = 32 << 20;

/// Plans that are kept: the last chunk of a prompt may have any length.
const MOST_PLANS: usize = 1024;

/// Sizes of `x W^T` for `x` `(rows, size_in)` and `W` `(size_out, size_in)`, with a result of `dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) size_out: usize,
    pub(super) size_in: usize,
    pub(super) dtype: Dtype,
}

/// Addresses of contiguous matrices in row order, and of the scales of their rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) x: CUdeviceptr,
    pub(super) x_scales: CUdeviceptr,
    pub(super) weight: CUdeviceptr,
    pub(super) weight_scales: CUdeviceptr,
    pub(super) out: CUdeviceptr,
}

/// Whether the library has a scale for each row and column: version 12.9 or newer.
pub(super) fn is_new_enough() -> bool {
    // SAFETY: the function takes nothing and returns a number.
    unsafe { sys::cublasLtGetVersion() >= 120_900 }
}

/// Enqueues a product. The sums over `size_in` are in f32.
///
/// # Errors
/// If cuBLASLt is older than 12.9 or fails.
///
/// # Safety
/// The addresses must be those of matrices of these sizes until the product has run.
pub(super) unsafe fn multiply(launcher: &Launcher, sizes: Sizes, product: Product) -> Result<(), CudaError> {
    let library = Library::of(launcher)?;
    let mut plans = library.plans.lock().unwrap_or_else(PoisonError::into_inner);
    if plans.len() >= MOST_PLANS {
        plans.clear();
    }
    let plan = match plans.entry(sizes) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => new.insert(Plan::new(library.handle, sizes, product)?),
    };
    // SAFETY: passed on.
    unsafe { plan.run(library.handle, launcher, product) }
}

/// cuBLASLt on one GPU, with what was prepared for each size.
struct Library {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<Sizes, Plan>>,
}

// SAFETY: cuBLASLt's handle may be used by several threads; the plans are locked.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// By number of the GPU. They live as long as the process.
static LIBRARIES: Mutex<Vec<(usize, Arc<Library>)>> = Mutex::new(Vec::new());

impl Library {
    fn of(launcher: &Launcher) -> Result<Arc<Self>, CudaError> {
        let ordinal = launcher.stream().context().ordinal();
        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, library)) = libraries.iter().find(|(of, _)| *of == ordinal) {
            return Ok(Arc::clone(library));
        }
        // The launcher has bound its context to this thread.
        let handle = result::create_handle().map_err(|error| failed("creating a handle", error.0))?;
        let library = Arc::new(Self { handle, plans: Mutex::default() });
        libraries.push((ordinal, Arc::clone(&library)));
        Ok(library)
    }
}

/// A product of some sizes: its descriptors, and the algorithm that cuBLASLt chose.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

// cuBLASLt stores matrices in column order, so a matrix in row order is to it the transpose: the result `(rows, size_out)` is
// `(size_out, rows)`, the product of the transposed transpose of the weight with the transpose of x.
impl Plan {
    fn new(handle: sys::cublasLtHandle_t, sizes: Sizes, product: Product) -> Result<Self, CudaError> {
        let Sizes { rows, size_out, size_in, dtype } = sizes;
        let dtype = match dtype {
            Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Dtype::F16 => sys::cudaDataType::CUDA_R_16F,
        };
        let e4m3 = sys::cudaDataType::CUDA_R_8F_E4M3;
        let layout = |kind, height: usize, width: usize| {
            result::create_matrix_layout(kind, height as u64, width as u64, height as i64)
                .map_err(|error| failed("describing a matrix", error.0))
        };
        let operation =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
                .map_err(|error| failed("describing a product", error.0))?;
        let mut plan = Self {
            operation,
            weight: layout(e4m3, size_in, size_out)?,
            x: layout(e4m3, size_in, rows)?,
            out: layout(dtype, size_out, rows)?,
            // SAFETY: a plain array of numbers, replaced below.
            algorithm: unsafe { std::mem::zeroed() },
            workspace: 0,
        };
        plan.set(Attribute::TransposeA, TRANSPOSED)?;
        plan.set(Attribute::ScaleModeA, SCALE_FOR_EACH_ROW_OR_COLUMN)?;
        plan.set(Attribute::ScaleModeB, SCALE_FOR_EACH_ROW_OR_COLUMN)?;
        // No algorithm is chosen for a product without scales.
        plan.set_scales(product)?;
        let preference = result::create_matmul_pref().map_err(|error| failed("describing a preference", error.0))?;
        // SAFETY: the preference and the descriptors were made above; the attribute is a number of 64 bits.
        let chosen = unsafe {
            let bytes = &raw const WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                bytes.cast(),
                size_of::<u64>(),
            )
            .and_then(|()| {
                result::get_matmul_algo_heuristic(
                    handle,
                    plan.operation,
                    plan.weight,
                    plan.x,
                    plan.out,
                    plan.out,
                    preference,
                )
            })
        };
        // SAFETY: made above and not used after this.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        let chosen = chosen.map_err(|error| failed("choosing an algorithm", error.0))?;
        (plan.algorithm, plan.workspace) = (chosen.algo, chosen.workspaceSize);
        Ok(plan)
    }

    fn set_scales(&self, product: Product) -> Result<(), CudaError> {
        self.set(Attribute::ScalesA, product.weight_scales)?;
        self.set(Attribute::ScalesB, product.x_scales)
    }

    fn set<T>(&self, attribute: Attribute, value: T) -> Result<(), CudaError> {
        // SAFETY: the operation is alive, and `value` has the type of the attribute.
        let status = unsafe {
            cublasLtMatmulDescSetAttribute(self.operation, attribute as u32, (&raw const value).cast(), size_of::<T>())
        };
        match status {
            0 => Ok(()),
            status => Err(failed_with("setting an attribute of a product", status)),
        }
    }

    /// # Safety
    /// As [`multiply`].
    unsafe fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        launcher: &Launcher,
        product: Product,
    ) -> Result<(), CudaError> {
        self.set_scales(product)?;
        let mut regions = Regions::default();
        let workspace = regions.add::<u8>(self.workspace);
        let scratch = launcher.allocate(&regions)?;
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the descriptors are alive; cuBLASLt reads the two numbers before it returns; the scratch memory is
        // released on this stream after the product. The caller guarantees the matrices.
        unsafe {
            result::matmul(
                handle,
                self.operation,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                product.weight as *const c_void,
                self.weight,
                product.x as *const c_void,
                self.x,
                product.out as *const c_void,
                self.out,
                product.out as *mut c_void,
                self.out,
                &raw const self.algorithm,
                scratch.at::<u8>(workspace).cast(),
                self.workspace,
                launcher.stream().cu_stream().cast(),
            )
        }
        .map_err(|error| failed("multiplying", error.0))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Plan::new`, and used by nothing else.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.weight, self.x, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

static WORKSPACE_BYTES: u64 = WORKSPACE as u64;

/// `CUBLAS_OP_T`
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`
const SCALE_FOR_EACH_ROW_OR_COLUMN: i32 = 3;

/// Attributes of a product, by their numbers: the bindings name the scale modes only if CUDA 12.8 or newer built them.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
enum Attribute {
    TransposeA = 3,
    ScalesA = 17,
    ScalesB = 18,
    ScaleModeA = 31,
    ScaleModeB = 32,
}

unsafe extern "C" {
    /// The function of the bindings, for attributes and results that their enumerations may lack. It links because the
    /// bindings link to the library (cudarc's feature `dynamic-linking`).
    fn cublasLtMatmulDescSetAttribute(
        operation: sys::cublasLtMatmulDesc_t,
        attribute: u32,
        value: *const c_void,
        bytes: usize,
    ) -> u32;
}

fn failed(doing: &'static str, status: sys::cublasStatus_t) -> CudaError {
    failed_with(doing, status as u32)
}

fn failed_with(doing: &'static str, status: u32) -> CudaError {
    let reason = format!("cuBLASLt, {doing}: status {status}; products of e4m3 need cuBLAS 12.9 or newer");
    CudaError::Candle(candle_core::Error::Msg(reason))
}
