//! The only file of the crate with unsafe code: the matrix products of a tile, and output rows for several threads.
//!
//! A query tile is stored transposed: one column of `lanes` floats per dimension, and per key for its scores.
//! Neighbouring queries are in neighbouring SIMD lanes, so both products read their left side without packing, and the
//! softmax between them needs no sum across lanes.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use gemm::{Parallelism, gemm};

/// `scores[t][i] = sum_d keys[t][d] q[d][i]` for `lanes` queries `i` and the `keys.len() / depth` keys `t`.
pub(super) fn scores(lanes: usize, depth: usize, q: &[f32], keys: &[f32], scores: &mut [f32]) {
    product(lanes, keys.len() / depth, depth, q, (keys, 1, depth), scores, false);
}

/// `acc[d][i] += sum_t weights[t][i] values[t][d]` for `lanes` queries `i` and the `values.len() / head_dim` keys `t`.
pub(super) fn accumulate(lanes: usize, head_dim: usize, weights: &[f32], values: &[f32], acc: &mut [f32]) {
    product(lanes, head_dim, values.len() / head_dim, weights, (values, head_dim, 1), acc, true);
}

/// `dst[j][i] (+)= sum_p lhs[p][i] rhs(p, j)` with `rhs(p, j) = rhs[p * p_stride + j * j_stride]`.
fn product(
    m: usize,
    n: usize,
    k: usize,
    lhs: &[f32],
    (rhs, p_stride, j_stride): (&[f32], usize, usize),
    dst: &mut [f32],
    add: bool,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(lhs.len() >= m * k && dst.len() >= m * n);
    assert!(rhs.len() > (k - 1) * p_stride + (n - 1) * j_stride);
    let stride = |s: usize| isize::try_from(s).expect("a slice's stride fits isize");
    // SAFETY: the assertions above bound the largest element that each operand reaches: (k-1)*m + (m-1) in `lhs`,
    // (n-1)*m + (m-1) in `dst`, (k-1)*p_stride + (n-1)*j_stride in `rhs`. `dst` is borrowed mutably, so it overlaps
    // neither; all three are initialised f32.
    unsafe {
        gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            stride(m),
            1,
            add,
            lhs.as_ptr(),
            stride(m),
            1,
            rhs.as_ptr(),
            stride(j_stride),
            stride(p_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Prefetches the cache lines of `data`. Ranked keys are scattered in memory, so a hardware prefetcher cannot predict
/// the next key.
#[inline]
pub(super) fn prefetch<T>(data: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in data.chunks((64 / size_of::<T>()).max(1)) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86_64, and a prefetch of an address inside a slice has no effect on memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = data;
}

/// The rows of an output. Each row is written once, by the thread that computes it, until it is opened again.
pub(super) struct OutputRows<'a, T> {
    data: *mut T,
    row_len: usize,
    taken: Vec<AtomicBool>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer replaces the `&'a mut [T]` it was made from, and `write` gives each row to one caller only.
unsafe impl<T: Send> Sync for OutputRows<'_, T> {}

impl<'a, T> OutputRows<'a, T> {
    /// Splits `data` into rows of `row_len`.
    ///
    /// # Panics
    /// If the length of `data` is not a multiple of `row_len`.
    pub(super) fn new(data: &'a mut [T], row_len: usize) -> Self {
        assert!(data.len().is_multiple_of(row_len));
        let taken = (0..data.len() / row_len).map(|_| AtomicBool::new(false)).collect();
        Self { data: data.as_mut_ptr(), row_len, taken, owner: PhantomData }
    }

    /// Calls `write` with row `row`.
    ///
    /// # Panics
    /// If the row does not exist or was already written.
    pub(super) fn write(&self, row: usize, write: impl FnOnce(&mut [T])) {
        assert!(!self.taken[row].swap(true, Ordering::Relaxed), "row {row} is written twice");
        // SAFETY: indexing `taken` checks that the row lies inside the slice. The swap ensures that no other caller
        // gets the row, so this is the only reference to its elements, within the lifetime of the slice.
        let row = unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.row_len), self.row_len) };
        write(row);
    }

    /// A row, written or not.
    pub(super) fn row(&mut self, row: usize) -> &[T] {
        assert!(row < self.taken.len());
        // SAFETY: the row lies inside the slice, and the exclusive borrow means that no `write` runs.
        unsafe { std::slice::from_raw_parts(self.data.add(row * self.row_len), self.row_len) }
    }

    /// Lets a row be written once more.
    pub(super) fn reopen(&mut self, row: usize) {
        *self.taken[row].get_mut() = false;
    }

    /// Whether every row was written.
    pub(super) fn is_complete(&mut self) -> bool {
        self.taken.iter_mut().all(|taken| *taken.get_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "row 1 is written twice")]
    fn a_row_is_handed_out_once() {
        let mut data = [0u8; 6];
        let mut rows = OutputRows::new(&mut data, 3);
        rows.write(1, |row| row.fill(7));
        rows.write(0, |row| row.fill(7));
        assert!(rows.is_complete());
        rows.reopen(1);
        assert!(!rows.is_complete());
        rows.write(1, |row| assert_eq!(row, [7; 3]));
        rows.write(1, |_| {});
    }
}
