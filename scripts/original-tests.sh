#!/usr/bin/env bash
# Runs the test file of the original candle-flash-attn against the drop-in, unchanged, on a GPU. The file comes from the
# package in the registry, and is a test of the workspace examples/swap while this script runs. Arguments go to
# `cargo test`; `--no-run` builds on a machine without a GPU.
set -euo pipefail
version=0.11.1
swap=$(cd "$(dirname "${BASH_SOURCE[0]}")/../examples/swap" && pwd)
test="$swap/tests/original.rs"

fetch=$(mktemp -d)
trap 'rm -rf "$fetch" "$test"' EXIT
mkdir "$fetch/src"
touch "$fetch/src/lib.rs"
printf '[package]\nname = "fetch"\nedition = "2024"\n[dependencies]\ncandle-flash-attn = "=%s"\n' "$version" > "$fetch/Cargo.toml"
(cd "$fetch" && cargo fetch --quiet)
found=$(find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -path "*/candle-flash-attn-$version/tests/flash_attn_tests.rs" | head -n 1)
[ -n "$found" ] || { echo "candle-flash-attn $version: expected tests/flash_attn_tests.rs in the package" >&2; exit 1; }
# The file has another name for candle-core.
printf 'extern crate candle_core as candle;\ninclude!("%s");\n' "$found" > "$test"
cargo test --release --manifest-path "$swap/Cargo.toml" --locked --test original "$@"
