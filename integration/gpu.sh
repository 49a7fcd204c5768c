#!/usr/bin/env bash
# gpu.sh: tests rekindle on a machine with an NVIDIA GPU: the counter, the process-checkpoint sample, PyTorch, and JAX
# if it is installed. Each job runs under `rekindle run`, is killed with -9, and is compared with an uninterrupted run.
# The table at the end has the freeze by phase. Needs root, a driver of 570 or newer, nvcc, python3 with torch, and CRIU
# 4.2 (REKINDLE_CRIU).
#
#   integration/gpu.sh [--rekindle FILE] [--gib N] [--only NAME] [--logs DIR]
#
# Exits 0 if every job was restored and gave the same result.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
rekindle=$root/target/release/rekindle gib=16 logs='' only=''
while [ $# -gt 0 ]; do
  case $1 in
    --rekindle) rekindle=${2:?}; shift 2 ;;
    --gib) gib=${2:?}; shift 2 ;;
    --only) only=${2:?}; shift 2 ;;
    --logs) logs=${2:?}; shift 2 ;;
    *) echo "gpu: unknown argument $1" >&2; exit 2 ;;
  esac
done
[ "$(id -u)" -eq 0 ] || { echo 'gpu: run it as root' >&2; exit 69; }
[ -x "$rekindle" ] || { echo "gpu: build first: cargo build --release ($rekindle)" >&2; exit 69; }
command -v nvidia-smi >/dev/null || { echo 'gpu: there is no NVIDIA driver here' >&2; exit 69; }
exec python3 -B "$root/integration/bench/gpu.py" --rekindle "$rekindle" --gib "$gib" ${logs:+--logs "$logs"} ${only:+--only "$only"}
