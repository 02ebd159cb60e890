#!/usr/bin/env bash
# Compiles every kernel with the CUDA toolchain in the environment, prints registers and shared memory, and fails on a
# spill or on wgmma that ptxas had to serialise. Needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# check ARCH SOURCE...
check() {
    local arch=$1 source
    shift
    for source in "$@"; do
        echo "$source ($arch)"
        "${NVCC:-nvcc}" -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v -cubin \
            -o "$out/kernel.cubin" "$source" 2> "$out/log" || { cat "$out/log" >&2; exit 1; }
        grep -E 'Compiling entry|Used [0-9]+ registers|spill' "$out/log"
        if grep -E '[1-9][0-9]* bytes spill|C75[0-9][0-9]|serializ' "$out/log" >&2; then
            echo "$source: expected no spills and no serialised wgmma" >&2
            exit 1
        fi
    done
}

shopt -s nullglob
check 90a kernels/cuda/*.cu kernels/cuda/sm90/*.cu
check 80 kernels/cuda/*.cu kernels/cuda/sm80/*.cu
