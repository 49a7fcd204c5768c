#!/usr/bin/env bash
# bench-gpu.sh: measures what a snapshot costs on a machine with an NVIDIA GPU, side by side in one run of at most 9
# minutes: the plain recipe (cuda-checkpoint's four actions around criu dump), rekindle without and with the interposer,
# and PyTorch by itself. At the end it prints one table in markdown. Needs root, driver 570 or newer, python3 with
# torch, and CRIU 4.2 (REKINDLE_CRIU, or .deps/criu from scripts/deps.sh).
#
#   integration/bench-gpu.sh [--rekindle FILE] [--sizes 1,16,64,96] [--rounds N] [--minutes M] [--dir DIR] [--logs DIR]
#                            [--only table|steps|ddp] [--gib N]
#   integration/bench-gpu.sh --self-test     tests the script with the stand-in driver, without GPU and PyTorch
#
# --sizes   GiB of device memory beside the network's      --rounds  snapshots of each job, 3 by default
# --dir     where stores and plain images are written: on a disk, /var/tmp by default
# --logs    write the logs to this folder
# --only    measure only the snapshots (table), or only the time of a step between snapshots (steps). ddp, on two GPUs:
#           compare the freeze of two ranks with that of one, each with --gib of device memory, 16 by default
#
# If there is no room or time for a trial, the table says why. Exits 1 if a trial failed or changed a bit.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
rekindle='' self_test='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    --rekindle) rekindle=${2:?}; shift 2 ;;
    --sizes | --rounds | --minutes | --dir | --logs | --only | --gib) options+=("$1" "${2:?}"); shift 2 ;;
    --self-test) self_test=yes; shift ;;
    *) echo "bench-gpu: unknown argument $1" >&2; exit 2 ;;
  esac
done
[ "$(id -u)" -eq 0 ] || { echo 'bench-gpu: run it as root' >&2; exit 69; }
if [ -n "$self_test" ]; then
  (cd "$root" && cargo build --quiet --package rekindle --package standin-cuda)
  rekindle=${rekindle:-$target/debug/rekindle}
  options=(--sizes '0.03125,0.0625' --gib 0.03125 --minutes 3 --stand-in "$target/debug/libstandin_cuda.so" "${options[@]}")
else
  rekindle=${rekindle:-$target/release/rekindle}
  command -v nvidia-smi >/dev/null || { echo 'bench-gpu: there is no NVIDIA driver here' >&2; exit 69; }
  python3 -c 'import torch' 2>/dev/null || { echo 'bench-gpu: python3 has no torch' >&2; exit 69; }
fi
[ -x "$rekindle" ] || { echo "bench-gpu: build first: cargo build --release ($rekindle)" >&2; exit 69; }
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi
# -B: no folders of byte code in the working tree.
exec python3 -B "$root/integration/bench/bench_gpu.py" --rekindle "$rekindle" --criu "$REKINDLE_CRIU" "${options[@]}"
