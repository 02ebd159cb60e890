//! CUDA kernels of candle-s2o. The sources are in `cuda/`, a program that checks and times them in `bench/`
//! (docs/kernels.md); nothing of them is compiled into this crate yet, so the CPU backend needs no CUDA toolchain.
