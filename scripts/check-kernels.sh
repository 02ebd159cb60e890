#!/usr/bin/env bash
# Compiles every kernel with the CUDA toolchain in the environment, prints registers and shared memory, and fails on a
# spill or on wgmma that ptxas had to serialise. Needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

modules=$(cargo build --release -p s2o-kernels --features cuda,ladder --locked --message-format=json \
    | grep -o '"out_dir":"[^"]*/s2o-kernels-[^"]*"' | cut -d'"' -f4)/modules.rs

# check FILE: the log of a cubin, or the log that ptxas makes of PTX
check() {
    local log=${1%.*}.log report
    [[ $1 == *.cubin ]] || ptxas -arch=sm_80 -v -o /dev/null "$1" 2> "$log" || { cat "$log" >&2; return 1; }
    report=$(grep -E 'Compiling entry|Used [0-9]+ registers|spill' "$log") || { echo "$log: expected kernels" >&2; return 1; }
    # In one piece: other jobs print too.
    printf '%s\n' "$(basename "$1")" "$report"
    if grep -E '[1-9][0-9]* bytes spill|C75[0-9][0-9]|serializ' "$log" >&2; then
        echo "$(basename "$1"): expected no spills and no serialised wgmma" >&2
        return 1
    fi
}
export -f check
grep -oE '"/[^"]+\.(cubin|ptx)"' "$modules" | xargs -P "$(nproc)" -n 1 bash -euc 'check "$@"' check
