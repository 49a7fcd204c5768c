#!/usr/bin/env bash
# gpu-matrix.sh: runs real GPU workloads, one for each line: snapshot, kill -9, restore, and a result that is equal to
# an uninterrupted run's, bit for bit. docs/workloads.md has the lines and the results. Needs root, driver 570 or newer,
# python3 with the frameworks (a line whose framework is missing prints SKIP), and CRIU 4.2 (REKINDLE_CRIU, or
# .deps/criu from scripts/deps.sh).
#
#   integration/gpu-matrix.sh [--rekindle FILE] [--only LINE,...] [--jobs N] [--logs DIR] [--markdown] [--dir DIR]
#                             [--limit SECONDS] [--minutes M] [--touch GIB]
#   integration/gpu-matrix.sh --self-test     tests the script with the stand-in driver, without GPU
#
# --jobs     lines at the same time, spread over the GPUs, 4 by default; a line with two GPUs counts twice
# --limit    time limit of a line in seconds, 90 by default, 150 if it compiles
# --minutes  time limit of all lines, 9 by default
# --dir      where the stores are: on a disk, /var/tmp by default
# --logs     write a folder for each line to this folder
# --touch    touch this much host memory first, for virtual machines that get their memory only when they use it
#
# Exits 0 if every line did what is expected: managed memory is expected to be refused.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
rekindle='' self_test='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    --rekindle) rekindle=${2:?}; shift 2 ;;
    --only | --jobs | --logs | --dir | --limit | --minutes | --touch) options+=("$1" "${2:?}"); shift 2 ;;
    --markdown) options+=("$1"); shift ;;
    --self-test) self_test=yes; shift ;;
    *) echo "gpu-matrix: unknown argument $1" >&2; exit 2 ;;
  esac
done
[ "$(id -u)" -eq 0 ] || { echo 'gpu-matrix: run it as root' >&2; exit 69; }
if [ -n "$self_test" ]; then
  (cd "$root" && cargo build --quiet --package rekindle --package standin-cuda)
  rekindle=${rekindle:-$target/debug/rekindle}
  options=(--stand-in "$target/debug/libstandin_cuda.so" "${options[@]}")
else
  rekindle=${rekindle:-$target/release/rekindle}
  command -v nvidia-smi >/dev/null || { echo 'gpu-matrix: there is no NVIDIA driver here' >&2; exit 69; }
fi
[ -x "$rekindle" ] || { echo "gpu-matrix: build first: cargo build --release ($rekindle)" >&2; exit 69; }
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi
# -B: no folders of byte code in the working tree.
exec python3 -B "$root/integration/bench/gpu_matrix.py" --rekindle "$rekindle" "${options[@]}"
