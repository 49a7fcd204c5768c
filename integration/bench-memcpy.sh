#!/usr/bin/env bash
# bench-memcpy.sh: what the interposer costs the memcpy of a job, and what it brings the copies of the driver (a stand-in
# for it); prints one JSON object, which bench/memcpy/main.rs describes. Needs no rights, no GPU and no CRIU.
#
#   integration/bench-memcpy.sh [MIB]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
cargo build --quiet --release --package standin-cuda
cargo build --quiet --release --example bench-memcpy
target=${CARGO_TARGET_DIR:-target}/release
exec "$target/examples/bench-memcpy" "$target/libstandin_cuda.so" "$@"
