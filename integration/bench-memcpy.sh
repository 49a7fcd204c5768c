#!/usr/bin/env bash
# bench-memcpy.sh: measures how much the interposer slows a job's memcpy, and how much it speeds up the driver's copies
# (with a stand-in for the driver). Prints one JSON object (bench/memcpy/main.rs describes it). Needs no root, GPU or
# CRIU.
#
#   integration/bench-memcpy.sh [MIB]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
cargo build --quiet --release --package standin-cuda
cargo build --quiet --release --example bench-memcpy
target=${CARGO_TARGET_DIR:-target}/release
exec "$target/examples/bench-memcpy" "$target/libstandin_cuda.so" "$@"
