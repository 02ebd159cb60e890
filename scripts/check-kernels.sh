#!/usr/bin/env bash
# Compiles every kernel with the CUDA toolchain in the environment, prints registers and shared memory, and fails on a
# spill or on wgmma that ptxas had to serialise. Needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# check ARCH SOURCE
check() {
    local arch=$1 source=$2 log
    log=$(mktemp -p "$out")
    "${NVCC:-nvcc}" -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v -cubin \
        -o "$log.cubin" "$source" 2> "$log" || { cat "$log" >&2; return 1; }
    # In one piece: other jobs print too.
    printf '%s\n' "$source ($arch)" "$(grep -E 'Compiling entry|Used [0-9]+ registers|spill' "$log")"
    if grep -E '[1-9][0-9]* bytes spill|C75[0-9][0-9]|serializ' "$log" >&2; then
        echo "$source: expected no spills and no serialised wgmma" >&2
        return 1
    fi
}
export -f check
export out

shopt -s nullglob
{
    printf '90a %s\n' kernels/cuda/*.cu kernels/cuda/sm90/*.cu
    printf '80 %s\n' kernels/cuda/*.cu kernels/cuda/sm80/*.cu
} | xargs -P "$(nproc)" -L 1 bash -euc 'check "$@"' check
