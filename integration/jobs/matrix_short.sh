#!/usr/bin/env bash
# A shell loop over short CUDA programs: each step is a process, which spends most of its time in the driver's start and
# end.
#
#   matrix_short.sh --out DIR
set -euo pipefail
out=$2
here=$(dirname -- "${BASH_SOURCE[0]}")
mkdir -p -- "$out"
nvcc -o "$out/short" "$here/short_cuda.cu"
echo $$ >"$out/pid.0"
exec 3>>"$out/steps.0"
state=7 step=0
while [ ! -e "$out/last" ] || [ "$step" -lt "$(cat "$out/last")" ]; do
  step=$((step + 1))
  state=$("$out/short" "$state" "$step")
  echo "$step $state" >&3
done
