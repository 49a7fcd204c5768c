#!/usr/bin/env bash
# fuzz.sh: fuzzes one reader of files, starting from the corpus in the repository.
#
#   integration/fuzz.sh TARGET [SECONDS [ARGUMENT...]]
#
# TARGET is a file of fuzz/fuzz_targets, without its extension. SECONDS is 60 by default. ARGUMENTs go to libFuzzer. New
# inputs are written to fuzz/target/found/TARGET, not to the repository. An input that fails is written to
# fuzz/target/failed/TARGET-*, and the exit code is not 0. Needs a C++ compiler for libFuzzer, but no cargo-fuzz and no
# nightly toolchain.
#
#   integration/fuzz.sh TARGET minimize    adds the fewest new inputs that reach the same code to fuzz/corpus/TARGET
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../fuzz"

target=${1:?usage: fuzz.sh TARGET [SECONDS [ARGUMENT...]]}
[ -f "fuzz_targets/$target.rs" ] || { echo "fuzz.sh: there is no fuzz_targets/$target.rs" >&2; exit 2; }
seconds=${2:-60}
shift $(($# < 2 ? $# : 2))

# The flags of cargo-fuzz without a sanitizer: they record which code was reached and which values were compared. Only
# for the target triple, or build scripts would need libFuzzer too.
triple=$(rustc -vV | sed -n 's/^host: //p')
flags='-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters'
flags+=' -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares'
flags+=' -Ccodegen-units=1 -Cdebug-assertions=yes -Coverflow-checks=yes -Clink-dead-code --cfg fuzzing'
RUSTFLAGS=$flags cargo build --quiet --locked --release --target "$triple" --bin "$target"
program=target/$triple/release/$target

mkdir -p "corpus/$target" "target/found/$target" target/failed
if [ "$seconds" = minimize ]; then
  mkdir -p target/minimal
  rm -rf "target/minimal/$target"
  mkdir "target/minimal/$target"
  "$program" -merge=1 -max_len=65536 "target/minimal/$target" "corpus/$target" "target/found/$target" "$@"
  rm -rf "corpus/$target"
  mv "target/minimal/$target" "corpus/$target"
  exit 0
fi
exec "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
  -artifact_prefix="target/failed/$target-" "target/found/$target" "corpus/$target" "$@"
