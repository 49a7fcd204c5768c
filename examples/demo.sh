#!/usr/bin/env bash
# demo.sh: trains a classifier under rekindle, kills it three times, and compares the result with an undisturbed run,
# bit for bit. Needs Debian or Ubuntu, root and a Rust toolchain; installs the rest itself (in .deps). Takes two minutes
# once everything is built. With an NVIDIA GPU and PyTorch it does the same there.
#
#   examples/demo.sh [--seconds N] [--gib N] [--only cpu|gpu] [--keep] [--rekindle FILE]
#
#   --seconds N      duration of one training run (30)
#   --gib N          device memory that the GPU job fills besides its model (2)
#   --only cpu|gpu   run only this part; `gpu` fails on a machine without a GPU
#   --keep           keep the working folder, with rekindle's log
#   --rekindle FILE  use this binary instead of building one
#
# It kills the job twice, each time after a new image was published, then rekindle. Exits 0 only if every weight and
# every logged loss is the same and no run was started from the beginning.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
seconds=30 gib=2 only='' keep='' rekindle=''

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=yes ;;
    -h | --help) usage; exit 0 ;;
    --seconds | --gib | --only | --rekindle)
      [ $# -gt 1 ] || { echo "demo: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"; shift ;;
    *) echo "demo: unknown argument $1, see --help" >&2; exit 2 ;;
  esac
  shift
done
case $seconds in '' | *[!0-9]*) echo 'demo: --seconds takes a whole number' >&2; exit 2 ;; esac
case $only in '' | cpu | gpu) ;; *) echo 'demo: --only takes cpu or gpu' >&2; exit 2 ;; esac
# Each kill waits for a new image: a shorter run would end too soon.
[ "$seconds" -ge 20 ] || { echo 'demo: --seconds must be at least 20' >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo 'demo: run it as root: CRIU needs it to freeze and restore processes' >&2; exit 69; }

work=$(mktemp -d "${TMPDIR:-/tmp}/rekindle-demo.XXXXXX")
supervisor='' log='' tree=()

die() {
  say "FAILED: $*"
  if [ -n "$log" ] && [ -s "$log" ]; then
    echo "--- the last lines of rekindle's log, $log"
    tail -n 30 "$log"
  fi
  exit 1
}

# --- processes: found by their place in the tree and by their command line, never by name alone

# descendants PID: every process below it, one a line.
descendants() {
  local child
  # shellcheck disable=SC2013 # the file holds words in one line
  for child in $(cat "/proc/$1/task"/*/children 2>/dev/null); do
    echo "$child"
    descendants "$child"
  done
}

# starttime PID: identifies a process together with its pid (field 22 of stat; the name before it may contain blanks).
# Empty if it has ended.
starttime() { { sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null || true; } | cut -d' ' -f20; }

# find_job: sets `job` to PID:STARTTIME of the process below the supervisor whose command line begins with just the
# Python and the script of this case. A restored job may have the pid of its predecessor, but not its start time.
find_job() {
  local pid argv
  for pid in $(descendants "$supervisor"); do
    { mapfile -d '' -t argv <"/proc/$pid/cmdline"; } 2>/dev/null || continue
    if [ "${argv[0]:-}" = "$python" ] && [ "${argv[1]:-}" = "$script" ]; then
      job=$pid:$(starttime "$pid")
      return 0
    fi
  done
  return 1
}

remember_tree() {
  local pid
  tree=()
  for pid in $(descendants "$supervisor"); do tree+=("$pid:$(starttime "$pid")"); done
}

# left_of_tree: the remembered processes that still live.
left_of_tree() {
  local one pid
  for one in "${tree[@]}"; do
    pid=${one%%:*}
    [ -z "$(starttime "$pid")" ] || [ "$(starttime "$pid")" != "${one##*:}" ] || [ "$(state "$pid")" = Z ] || echo "$pid"
  done
}
state() { { sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null || true; } | cut -d' ' -f1; }

clean_up() {
  local status=$? pid
  trap - EXIT
  if [ -n "$supervisor" ] && kill -0 "$supervisor" 2>/dev/null; then
    remember_tree
    kill -9 "$supervisor" 2>/dev/null || true
    wait "$supervisor" 2>/dev/null || true
    # The job dies with its supervisor. If it did not, that is a bug, but no process must be left.
    sleep 1
    for pid in $(left_of_tree); do kill -9 "$pid" 2>/dev/null || true; done
  fi
  if [ -n "$keep" ]; then
    say "everything is left in $work"
  else
    rm -rf -- "$work"
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- the job's progress, and rekindle's images

# The number of epochs that the job has recorded. A restore also restores this file, so the number can become smaller.
epoch() { tail -n 1 "$out/progress.txt" 2>/dev/null || true; }

# images: the published images, oldest first. A folder with a manifest is an image. One may be renamed or removed meanwhile.
images() {
  { find "$store/$name/images" -mindepth 2 -maxdepth 2 -name manifest.json -printf '%T@ %h\n' 2>/dev/null || true; } \
    | sort -n | sed 's/.*\///'
}

# wait_for SECONDS WHAT COMMAND...: waits until the command succeeds. Ends the demo if it does not, or if rekindle
# ended.
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || die "waited too long for $what"
    kill -0 "$supervisor" 2>/dev/null || die "rekindle ended while waiting for $what: is --seconds too short for this machine?"
    sleep 0.02
  done
}
# Whether there is an image that is not in `known`.
new_image() { [ -n "$(comm -13 <(sort <<<"$known") <(images | sort))" ]; }
other_job() { find_job && [ "$job" != "$victim" ]; }
moved_on() { local now; now=$(epoch); [ -n "$now" ] && [ "$now" -gt "$back" ]; }
tree_gone() { [ -z "$(left_of_tree)" ]; }

start_rekindle() {
  "$rekindle" run --name "$name" --interval 3s --store "$store" -- "$python" "$script" "${args[@]}" \
    </dev/null >>"$work/$name.out" 2>>"$log" &
  supervisor=$!
}

# was_restored SECONDS: after a kill at that time, waits until the job runs again, reports its epoch, and checks that it
# was not started from the beginning.
was_restored() {
  local killed_when=$1 newest
  wait_for 60 'the job to be restored' other_job
  back=$(epoch)
  newest=$(images | tail -n 1)
  [ "${back:-0}" -gt 0 ] || die 'the job was started from the beginning'
  wait_for 60 'the job to continue' moved_on
  # On a busy machine the job may be further than when it was killed before we look at it, so its epoch tells nothing.
  [ -z "$(sort "$out/metrics.jsonl" | uniq -d)" ] || die 'an epoch is in the log twice: its files were not put back'
  # A job that started from the beginning would give the same result, but its log would have two starts.
  [ "$(grep -c '"start"' "$out/metrics.jsonl")" -eq 1 ] || die 'the job was started from the beginning, not from an image'
  say "  restored at epoch $back, newest image $newest, after $(($(date +%s) - killed_when)) s; it continues"
}

# kill_job: kills the job as soon as an image is published that is not in `known`.
has_begun() { [ "$(epoch)" -ge 1 ] 2>/dev/null; }

kill_job() {
  local at began
  # An image of a job that still imports its libraries would prove little.
  has_begun || { wait_for 120 'the first epoch' has_begun; known=$(images); }
  wait_for 90 'a new image' new_image
  find_job || die 'the job is not there to be killed'
  victim=$job
  began=$(date +%s)
  kill -9 "${victim%%:*}"
  at=$(epoch)
  say "  kill -9 of the job, process ${victim%%:*}, at epoch $at (images: $(images | wc -l))"
  known=$(images)
  was_restored "$began"
}

kill_rekindle() {
  local at began end
  wait_for 90 'a new image' new_image
  find_job || die 'the job is not there'
  victim=$job
  remember_tree
  began=$(date +%s)
  kill -9 "$supervisor"
  wait "$supervisor" 2>/dev/null || true
  at=$(epoch)
  say "  kill -9 of rekindle, process $supervisor, at epoch $at"
  end=$((SECONDS + 60))
  until tree_gone; do
    [ "$SECONDS" -lt "$end" ] || die "the job outlived rekindle: process $(left_of_tree | tr '\n' ' ')"
    sleep 0.05
  done
  say '  the job went with it; the same command again'
  start_rekindle
  was_restored "$began"
}

# case_of NAME PYTHON SCRIPT ARGS...: the whole comparison for one job. ARGS are passed before --out.
case_of() {
  name=$1 python=$2 script=$3
  shift 3
  store=$work/store log=$work/$name.log
  local reference=$work/$name.reference began status end
  out=$work/$name.job
  args=("$@" --seconds "$seconds" --out "$out")

  say "$name: the undisturbed run (about $seconds s)"
  timeout $((seconds * 4 + 120)) "$python" "$script" "$@" --seconds "$seconds" --out "$reference" >"$work/$name.reference.out" 2>&1 \
    || { cat "$work/$name.reference.out"; die 'the undisturbed run failed: see above'; }
  say "  $(tail -n 2 "$work/$name.reference.out" | tr '\n' ',' | sed 's/,$//; s/,/, /')"

  say "$name: the same under rekindle, an image every 3 s"
  began=$SECONDS known='' job='' victim='' back=0
  start_rekindle
  kill_job
  kill_job
  kill_rekindle
  end=$((SECONDS + seconds * 4 + 120))
  while kill -0 "$supervisor" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || die 'the job does not end'
    sleep 0.2
  done
  status=0
  wait "$supervisor" || status=$?
  supervisor=''
  [ "$status" -eq 0 ] || die "rekindle ended with $status"
  say "  done after $((SECONDS - began)) s, killed three times"

  # The log has each epoch once, and one start: a second start would show.
  cmp "$reference/metrics.jsonl" "$out/metrics.jsonl" || die 'the logged losses differ from those of the undisturbed run'
  cmp "$reference/progress.txt" "$out/progress.txt" || die 'the progress file differs from that of the undisturbed run'
  cmp "$reference/weights.bin" "$out/weights.bin" || die 'the weights differ from those of the undisturbed run'
  say "  $(stat -c %s "$out/weights.bin") bytes of weights, sha256 $(sha256sum <"$out/weights.bin" | cut -c1-16)...: identical"
  verdicts+=("$name: weights and every logged loss bit-identical to the undisturbed run, after three kills")
}

# --- what is needed

if [ -z "$rekindle" ]; then
  "$root/scripts/deps.sh" build
  say 'building rekindle'
  (cd "$root" && cargo build --quiet --release --locked --bin rekindle)
  rekindle=${CARGO_TARGET_DIR:-$root/target}/release/rekindle
fi
[ -x "$rekindle" ] || die "$rekindle is not there: build it, or name another with --rekindle"
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi

# The real path of the Python that has PyTorch and sees a GPU. A version manager's shim is a script that starts it.
torch_python() {
  timeout 120 "${REKINDLE_DEMO_PYTHON:-python3}" -c \
    'import sys, torch; torch.cuda.is_available() or sys.exit(1); print(sys.executable)' 2>/dev/null
}

verdicts=()
if [ "$only" != gpu ]; then
  "$root/scripts/deps.sh" python
  case_of digits "$root/.deps/venv/bin/python" "$root/examples/digits/train.py"
fi
if [ "$only" != cpu ]; then
  if [ -e /dev/nvidiactl ] && gpu_python=$(torch_python); then
    case_of torch "$gpu_python" "$root/examples/train_torch.py" --gib "$gib"
  elif [ "$only" = gpu ]; then
    die 'no PyTorch that sees an NVIDIA GPU: check nvidia-smi, and name the right Python in REKINDLE_DEMO_PYTHON'
  else
    say 'SKIP the GPU: no /dev/nvidiactl, or no python3 whose PyTorch sees it (REKINDLE_DEMO_PYTHON names another)'
  fi
fi
for verdict in "${verdicts[@]}"; do say "PASS  $verdict"; done
