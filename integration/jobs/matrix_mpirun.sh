#!/usr/bin/env bash
# mpirun starts two ranks, which communicate through shared memory.
#
#   matrix_mpirun.sh MODE --port N --out DIR [ARGS of matrix_stacks.py]
set -euo pipefail
mode=$1
shift 3
here=$(dirname -- "${BASH_SOURCE[0]}")
exec mpirun --allow-run-as-root --oversubscribe -n 2 --mca pml ob1 --mca btl self,vader \
  python3 "$here/matrix_stacks.py" "$mode" "$@"
