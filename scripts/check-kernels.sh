#!/usr/bin/env bash
# Compiles every kernel for sm_90a with the CUDA toolchain in the environment, prints registers and shared memory, and
# fails on a spill or on wgmma that ptxas had to serialise. Needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for source in kernels/cuda/*.cu; do
    echo "$source"
    "${NVCC:-nvcc}" -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Xptxas -v -cubin \
        -o "$out/kernel.cubin" "$source" 2> "$out/log" || { cat "$out/log" >&2; exit 1; }
    grep -E 'Compiling entry|Used [0-9]+ registers|spill' "$out/log"
    if grep -E '[1-9][0-9]* bytes spill|C75[0-9][0-9]|serializ' "$out/log" >&2; then
        echo "$source: expected no spills and no serialised wgmma" >&2
        exit 1
    fi
done
