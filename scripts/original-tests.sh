#!/usr/bin/env bash
# Runs the test file of the original candle-flash-attn against the drop-in, unchanged, on a GPU. The file comes from the
# package in the registry. Arguments go to `cargo test`; `--no-run` builds on a machine without a GPU.
set -euo pipefail
version=0.11.1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target="${CARGO_TARGET_DIR:-$root/target}"
package="$target/original-tests"

mkdir -p "$package/fetch/src" "$package/tests" "$package/src"
touch "$package/fetch/src/lib.rs" "$package/src/lib.rs"
cat > "$package/fetch/Cargo.toml" << EOF
[workspace]
[package]
name = "fetch"
edition = "2024"
[dependencies]
candle-flash-attn = "=$version"
EOF
(cd "$package/fetch" && cargo fetch --quiet)
found=$(find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -path "*/candle-flash-attn-$version/tests/flash_attn_tests.rs")
[ -n "$found" ] || { echo "candle-flash-attn $version: expected tests/flash_attn_tests.rs in the package" >&2; exit 1; }
cp "$(head -n 1 <<< "$found")" "$package/tests/"

cat > "$package/Cargo.toml" << EOF
[workspace]
[package]
name = "original-tests"
edition = "2024"
[dependencies]
anyhow = "1.0"
candle-flash-attn = { path = "$root/crates/candle-flash-attn" }
candle = { package = "candle-core", version = "0.11.1", features = ["cuda"] }
EOF
cp "$root/examples/swap/Cargo.lock" "$package/Cargo.lock"
cargo test --release --manifest-path "$package/Cargo.toml" --target-dir "$target" --test flash_attn_tests "$@"
