#!/usr/bin/env bash
# fuzz.sh: feeds one reader of files with bytes that nobody wrote, for a while, from the corpus that is in the repository.
#
#   integration/fuzz.sh TARGET [SECONDS [ARGUMENT...]]
#
# TARGET is a file of fuzz/fuzz_targets, without its ending; SECONDS are 60 unless told. ARGUMENTs go to libFuzzer. What it
# finds new goes to fuzz/target/found/TARGET and not into the repository; an input that fails goes to
# fuzz/target/failed/TARGET-*, and the script ends with another code than 0. It needs no cargo-fuzz and no nightly
# toolchain, but a C++ compiler for libFuzzer.
#
#   integration/fuzz.sh TARGET minimize    brings what is new into fuzz/corpus/TARGET, as little of it as reaches the same code
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../fuzz"

target=${1:?usage: fuzz.sh TARGET [SECONDS [ARGUMENT...]]}
[ -f "fuzz_targets/$target.rs" ] || { echo "fuzz.sh: there is no fuzz_targets/$target.rs" >&2; exit 2; }
seconds=${2:-60}
shift $(($# < 2 ? $# : 2))

# As cargo-fuzz has it without a sanitizer: which code was reached, and what was compared with what. For the target triple
# only, or build scripts would want libFuzzer too.
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
