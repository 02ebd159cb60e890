//! [`Counters`]: what the kernels of a call count in scratch memory, set to zero at once.

use std::cell::Cell;

use s2o_cuda::{CudaError, Region, Regions, Scratch};

/// Counters that are zero when a kernel begins: those of the ranking, all passes and the probes together, because each memset
/// between two kernels delays the second.
#[derive(Debug)]
pub(super) struct Counters {
    region: Region<u32>,
    arrivals: usize,
    /// Counters of work items that launches have.
    taken: Cell<usize>,
}

impl Counters {
    /// `arrivals` for the ranking, and one for each of at most `launches` persistent kernels.
    pub(super) fn new(regions: &mut Regions, arrivals: usize, launches: usize) -> Self {
        Self { region: regions.add(arrivals + launches), arrivals, taken: Cell::new(0) }
    }

    /// Sets them to zero. Must be called once, before the first kernel, unless that kernel does it.
    pub(super) fn zero(&self, scratch: &Scratch) -> Result<(), CudaError> {
        scratch.zero(self.region)
    }

    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.region.len
    }

    /// Those of the ranking, which come first and whose kernels leave them at zero.
    pub(super) fn arrivals(&self, scratch: &Scratch) -> *mut u32 {
        scratch.at(self.region)
    }

    /// The counter of work items of one more launch.
    ///
    /// # Panics
    /// If there are more launches than planned.
    pub(super) fn next_item(&self, scratch: &Scratch) -> *mut i32 {
        let place = self.arrivals + self.taken.replace(self.taken.get() + 1);
        assert!(place < self.region.len, "more launches than counters");
        scratch.at(self.region).wrapping_add(place).cast()
    }
}
