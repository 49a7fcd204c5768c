#!/usr/bin/env bash
# crash-loop.sh: shows what rekindle does with a job that dies again and again. Needs root; builds rekindle and installs
# CRIU if they are missing. Takes about a minute.
#
#   examples/crash-loop.sh [--rekindle FILE]      FILE: use this binary instead of building one
#
# Scene 1: the job's state goes bad, and some images contain the bad state before the job crashes. Restored from one of
#          them, the job crashes at once. rekindle passes over these images, newest first, until an older one works. The job
#          completes.
# Scene 2: the job always crashes. rekindle passes over all images, starts the job from the beginning, which this script
#          allows (restart.cold-start = "allow"; not the default), then gives up and says why.
# Lines that begin with "job" are from the job, lines that begin with "   " from this script, all others from rekindle.
# Exits 0 if both scenes went like this.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
rekindle=''
case ${1:-} in
  '') ;;
  --rekindle) rekindle=${2:?--rekindle needs a file} ;;
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "crash-loop: unknown argument $1, see --help" >&2; exit 2 ;;
esac
[ "$(id -u)" -eq 0 ] || { echo 'crash-loop: run it as root: CRIU needs it to freeze and restore processes' >&2; exit 69; }

work=$(mktemp -d "${TMPDIR:-/tmp}/rekindle-crash-loop.XXXXXX")
supervisor=''
clean_up() {
  local status=$?
  trap - EXIT
  if [ -n "$supervisor" ] && kill -0 "$supervisor" 2>/dev/null; then
    # The job ends with it.
    kill -9 "$supervisor" 2>/dev/null || true
    wait "$supervisor" 2>/dev/null || true
  fi
  # The job's last step may still be writing here.
  rm -rf -- "$work" || { sleep 1; rm -rf -- "$work"; }
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '    %s\n' "$*"; }
die() { say "FAILED: $*"; exit 1; }

if [ -z "$rekindle" ]; then
  "$root/scripts/deps.sh" build
  (cd "$root" && cargo build --quiet --release --locked --bin rekindle)
  rekindle=${CARGO_TARGET_DIR:-$root/target}/release/rekindle
fi
[ -x "$rekindle" ] || die "$rekindle is not there: build it, or name another with --rekindle"
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi

# The job counts in memory. `poison` makes its state bad for good, as a flipped bit would. At `trigger` a job with a bad
# state crashes. `doom` crashes any job.
cat >"$work/job.sh" <<'JOB'
count=0 state=sound
echo "job    starts at 0"
while [ "$count" -lt 100 ]; do
  count=$((count + 1))
  if [ -e poison ] && [ "$state" = sound ]; then
    state=bad
    echo "job    at $count: its state has gone bad, and nobody notices"
  fi
  if [ -e doom ] || { [ -e trigger ] && [ "$state" = bad ]; }; then
    echo "job    at $count: crashes, its state is $state"
    exit 3
  fi
  [ $((count % 10)) -ne 0 ] || echo "job    at $count, its state is $state"
  sleep 0.2
done
echo "job    at $count: done, its state is $state"
JOB

# Short times for this demonstration. A real job has minutes.
cat >"$work/config.toml" <<CONFIG
version = 1

[job]
directory = "$work"

[snapshot]
interval = "2s"

[store]
directory = "$work/store"
# Room for one good image, two bad ones, and one more.
keep-last = 4

[restart]
# The pauses double: these stay short.
backoff = "1ms"
# A job that dies sooner than this after a restore has died "at once". After the second time the image is passed over.
min-uptime = "4s"
# Enough to try every image twice and to start from the beginning.
max-restarts = 12
cold-start = "allow"
CONFIG

images() { find "$work/store/$name/images" -mindepth 2 -maxdepth 2 -name manifest.json 2>/dev/null | wc -l; }
# wait_images N: until N images are published.
wait_images() {
  local end=$((SECONDS + 30))
  until [ "$(images)" -ge "$1" ]; do
    [ "$SECONDS" -lt "$end" ] || die "no $1 images after 30 s"
    kill -0 "$supervisor" 2>/dev/null || die 'rekindle ended before it had taken them'
    sleep 0.05
  done
}
start() {
  name=$1
  rm -f "$work/poison" "$work/trigger" "$work/doom"
  "$rekindle" run --config "$work/config.toml" --name "$name" -- /bin/sh "$work/job.sh" </dev/null > >(tee "$work/$name.out") 2>&1 &
  supervisor=$!
}
# finish: waits for rekindle's end and sets `status`.
finish() {
  local end=$((SECONDS + 90))
  while kill -0 "$supervisor" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || die 'rekindle is still at it after 90 s'
    sleep 0.1
  done
  status=0
  wait "$supervisor" || status=$?
  supervisor=''
  sleep 0.2 # tee's last lines
}
said() { grep -c "$1" "$work/$name.out" || true; }

say 'Scene 1: the state goes bad after the first image, two more images are taken of it, then it crashes'
start heals
wait_images 1
: >"$work/poison"
wait_images 3
rm "$work/poison"
: >"$work/trigger"
finish
[ "$status" -eq 0 ] || die "the job should have ended well, rekindle ended with $status"
[ "$(said 'job    starts at 0')" -eq 1 ] || die 'the job was started from the beginning although a sound image was there'
[ "$(said 'crashes, its state is bad')" -ge 3 ] || die 'the bad images were not tried twice before they were passed over'
say "crashed $(said 'crashes, its state is bad') times, went back to the sound image, and came to its end"
echo

say 'Scene 2: two images are taken, then it crashes whatever it is started from'
start gives-up
wait_images 2
: >"$work/doom"
finish
[ "$status" -ne 0 ] || die 'rekindle should have given up, and ended with 0'
[ "$(said 'job    starts at 0')" -ge 2 ] || die 'it was never started from the beginning'
say "crashed $(said 'crashes, its state is') times, $(($(said 'job    starts at 0') - 1)) of them after a start from the beginning; rekindle gave up with exit code $status"
say 'PASS  both scenes went as they should'
