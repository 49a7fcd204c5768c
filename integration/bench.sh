#!/usr/bin/env bash
# bench.sh: measures what rekindle costs, side by side in one run, and prints one table. Not a test: nothing can fail.
# Needs root, python3 and CRIU 4.2 (REKINDLE_CRIU, or .deps/criu from scripts/deps.sh).
#
#   integration/bench.sh [--rekindle FILE] [--mib N] [--tree PxN] [--workers PxN] [--dir DIR] [--store DIR] [--runs N]
#                        [--idle SECONDS] [--store-size MIB] [--only freeze|workers|memcpy|overhead|filter|idle|store]
#
# --mib         memory of the frozen job, 4096 by default; with the images in memory the bench needs four times that
# --tree        processes of the frozen tree, and MiB of each, 16x256 by default
# --workers     the same for a tree with many workers, 64x100 by default
# --dir         where criu's images are written, /dev/shm by default
# --store       where rekindle's store is, /var/tmp by default
# --store-size  MiB of content in the section "store", 8192 by default; needs memory for two of it and disk for three
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[ "$(id -u)" -eq 0 ] || { echo 'bench: run it as root' >&2; exit 69; }
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi
case " $* " in *' --rekindle '*) ;; *) (cd "$root" && cargo build --quiet --release --bin rekindle) ;; esac
exec python3 -B "$root/integration/bench/bench.py" "$@"
