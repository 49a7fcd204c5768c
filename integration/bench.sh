#!/usr/bin/env bash
# bench.sh: what rekindle costs, measured side by side in one run; prints one table. Not a test: nothing passes or fails.
# Needs root, python3 and CRIU 4.2 (REKINDLE_CRIU, or .deps/criu from scripts/deps.sh).
#
#   integration/bench.sh [--rekindle FILE] [--mib N] [--tree PxN] [--workers PxN] [--dir DIR] [--store DIR] [--runs N]
#                        [--idle SECONDS] [--store-size MIB] [--only freeze|workers|memcpy|overhead|filter|idle|store]
#
# --mib   memory of the frozen job, 4096 by default: with the images in memory it takes four times that
# --tree  processes and MiB each of the frozen tree, 16x256 by default     --workers  of one with many, 64x100 by default
# --dir   where criu's images are written, /dev/shm by default      --store  where rekindle's store is, /var/tmp by default
# --store-size  content of the section "store", 8192 by default: memory for two of it, and a disk for three
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[ "$(id -u)" -eq 0 ] || { echo 'bench: run it as root' >&2; exit 69; }
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi
case " $* " in *' --rekindle '*) ;; *) (cd "$root" && cargo build --quiet --release --bin rekindle) ;; esac
exec python3 -B "$root/integration/bench/bench.py" "$@"
