#!/usr/bin/env bash
# Packs every published crate for crates.io without building it. Fails if a package exceeds the size limit of crates.io
# or lacks the readme or a licence.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
limit=$((10 * 1024 * 1024))
out="${CARGO_TARGET_DIR:-target}/package"

names=$(cargo metadata --no-deps --format-version 1 --locked | python3 -c '
import json, sys
print(*("--package=" + p["name"] for p in json.load(sys.stdin)["packages"] if p["publish"] is None))')
rm -rf "$out"
# shellcheck disable=SC2086  # One argument for each name.
cargo package --no-verify --allow-dirty --locked --quiet $names

for crate in "$out"/*.crate; do
    size=$(wc -c < "$crate")
    echo "$(basename "$crate"): $size bytes"
    if [ "$size" -gt "$limit" ]; then
        echo "$(basename "$crate"): expected at most $limit bytes, got $size" >&2
        exit 1
    fi
    files=$(tar -tzf "$crate")
    for file in LICENSE-MIT LICENSE-APACHE README.md; do
        grep -q "^[^/]*/$file$" <<< "$files" || { echo "$(basename "$crate"): expected $file" >&2; exit 1; }
    done
done
