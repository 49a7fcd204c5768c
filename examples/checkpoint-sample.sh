#!/usr/bin/env bash
# checkpoint-sample.sh: takes a CUDA process with a known pattern in GPU memory through lock, checkpoint, restore and
# unlock by `rekindle cuda`, prints state and milliseconds after each step, and hashes the GPU memory before and after.
# Needs root, an NVIDIA GPU with driver 570 or newer, and nvcc. Builds rekindle unless a binary is named.
#
#   examples/checkpoint-sample.sh [--rekindle FILE] [--mib N] [--rounds N]
#
# --rekindle FILE   use this binary instead of building one
# --mib N           size of the buffer in GPU memory, 256 by default
# --rounds N        number of rounds, 3 by default
# Exits 0 if all hashes are equal, 1 if one differs or a step fails, 69 if something is missing.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
rekindle='' mib=256 rounds=3
while [ $# -gt 0 ]; do
  case $1 in
    --rekindle) rekindle=${2:?--rekindle needs a file}; shift 2 ;;
    --mib) mib=${2:?--mib needs a number}; shift 2 ;;
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "checkpoint-sample: unknown argument $1, see --help" >&2; exit 2 ;;
  esac
done

missing() { echo "checkpoint-sample: $1" >&2; exit 69; }
[ "$(id -u)" -eq 0 ] || missing 'run it as root: the driver lets only CAP_SYS_PTRACE checkpoint other processes'
nvcc=$(command -v nvcc || true)
[ -n "$nvcc" ] || { [ -x /usr/local/cuda/bin/nvcc ] && nvcc=/usr/local/cuda/bin/nvcc; } \
  || missing 'nvcc is not on PATH: install the CUDA toolkit'
if [ -z "$rekindle" ]; then
  command -v cargo >/dev/null || missing 'cargo is not on PATH: name a built rekindle with --rekindle FILE'
  (cd "$root" && cargo build --quiet --release --bin rekindle)
  rekindle=${CARGO_TARGET_DIR:-$root/target}/release/rekindle
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/rekindle-checkpoint-sample.XXXXXX")
sample=''
clean_up() {
  local status=$?
  trap - EXIT
  if [ -n "$sample" ]; then
    kill -9 "$sample" 2>/dev/null || true
    wait "$sample" 2>/dev/null || true
  fi
  rm -rf "$work"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$nvcc" -O2 -o "$work/sample" "$root/examples/checkpoint-sample.cu"

mkfifo "$work/in" "$work/out"
"$work/sample" "$mib" <"$work/in" >"$work/out" &
sample=$!
exec 3>"$work/in" 4<"$work/out"

# The next line of the sample; the time limit covers a sample that hangs after a restore.
answer() {
  IFS= read -r -t 120 line <&4 || { echo 'checkpoint-sample: the sample ended or does not answer' >&2; exit 1; }
}
step() { printf '  '; "$rekindle" cuda "$@" --pid "$sample"; }

answer
read -r word pid first <<<"$line"
if [ "$word" != ready ] || [ "$pid" != "$sample" ]; then
  echo "checkpoint-sample: unexpected: $line" >&2
  exit 1
fi
echo "process $pid: $mib MiB in GPU memory, hash $first"
printf '  state: '; "$rekindle" cuda state --pid "$sample"
printf '  restore thread: '; "$rekindle" cuda restore-tid --pid "$sample"

for round in $(seq "$rounds"); do
  echo "round $round"
  step lock
  step checkpoint
  step restore
  step unlock
  echo >&3
  answer
  echo "  $line"
  [ "$line" = "hash $first" ] || { echo "checkpoint-sample: the hash was $first" >&2; exit 1; }
done

exec 3>&-
wait "$sample"
sample=''
echo "the same after $rounds rounds"
