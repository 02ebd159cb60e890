//! CUDA kernels of candle-s2o. The CPU backend needs none of them: this crate is empty until the CUDA backend lands.
