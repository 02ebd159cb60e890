//! [`Arch`]: the build of the kernels for a GPU.

use std::fmt;

/// A build of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// PTX of compute capability 8.0, which the driver compiles for the GPU (8.0 or newer).
    Sm80,
    /// Machine code of compute capability 9.0 (H100, H200). It does not run on any other GPU.
    Sm90a,
}

impl Arch {
    /// The build that displays as `name`.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Sm80, Self::Sm90a].into_iter().find(|arch| arch.to_string() == name)
    }

    /// The best build for a compute capability, or `None` below 8.0.
    pub fn for_capability(major: i32, minor: i32) -> Option<Self> {
        [Self::Sm90a, Self::Sm80].into_iter().find(|arch| arch.runs_on(major, minor))
    }

    /// Whether a GPU of this compute capability can run the build.
    pub fn runs_on(self, major: i32, minor: i32) -> bool {
        match self {
            Self::Sm80 => major >= 8,
            Self::Sm90a => (major, minor) == (9, 0),
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sm80 => "sm80",
            Self::Sm90a => "sm90a",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_takes_its_best_build() {
        let chosen = |major, minor| Arch::for_capability(major, minor);
        assert_eq!(chosen(7, 5), None);
        assert_eq!([chosen(8, 0), chosen(8, 9)], [Some(Arch::Sm80); 2]);
        assert_eq!(chosen(9, 0), Some(Arch::Sm90a));
        assert_eq!([chosen(10, 0), chosen(12, 0)], [Some(Arch::Sm80); 2]);
    }

    #[test]
    fn names_round_trip() {
        for arch in [Arch::Sm80, Arch::Sm90a] {
            assert_eq!(Arch::named(&arch.to_string()), Some(arch));
        }
        assert_eq!(Arch::named("sm_90"), None);
    }
}
