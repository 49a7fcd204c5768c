#!/usr/bin/env bash
# run.sh: installs what the tests need (scripts/deps.sh), then runs all checks and tests that need no GPU.
#
#   integration/run.sh
#
# REKINDLE_TEST_REQUIRE=root,criu,...  what must be there: a test that lacks it fails instead of printing SKIP. Values:
#                                      root, criu, devices, s3, slurm, package, k8s, systemd, chromium, prometheus,
#                                      uplink, databases, disks, stacks, torch, lint, book, helm, notebook, etcd, zsh, fish
# REKINDLE_CRIU=FILE                   test with this CRIU instead of .deps/criu/criu
#
# Stops at the first failure, with a non-zero exit code. Use integration/gpu.sh on a machine with an NVIDIA GPU.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD

# A test that hangs must not hang this script. The longest step, the tests, took 1,585 s on a slow machine with two processors
# (2026-11-28).
limit=3000
skipped=()

# step NAME COMMAND...
step() {
  local name=$1 began=$SECONDS status=0
  shift
  printf '\n=== %s\n' "$name"
  timeout -k 10 "$limit" "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    [ "$status" -ne 124 ] || echo "it was stopped after $limit s"
    printf '=== %s: FAILED after %d s\n' "$name" $((SECONDS - began))
    exit 1
  fi
  printf '=== %s: ok, %d s\n' "$name" $((SECONDS - began))
}
# skip NAME WHY: reports that a check is left out, now and at the end.
skip() {
  printf '\n=== %s: SKIP, %s\n' "$1" "$2"
  skipped+=("$1: $2")
}
required() { [[ ",${REKINDLE_TEST_REQUIRE:-}," == *",$1,"* ]]; }
have() { command -v "$1" >/dev/null; }

if [ "$(id -u)" -ne 0 ]; then
  ! required root || { echo 'run.sh: REKINDLE_TEST_REQUIRE names root, and this is not root' >&2; exit 1; }
  skip 'tests that need root' 'not root: those of CRIU, namespaces and users say SKIP one by one'
fi

work=$(mktemp -d)
# What is installed beside the compiler's work, and tests that run beside others, if there are any.
ahead='' beside=''
leave() {
  for group in $ahead $beside; do kill -- "-$group" 2>/dev/null || true; done
  rm -rf -- "$work"
}
trap leave EXIT

step 'dependencies: build' scripts/deps.sh build
# Behind the shims of a version manager each start of Python takes a dozen shells.
PATH=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH
# The others are mostly downloaded: that goes on while the compiler works. The steps below say what is missing.
if [ "$(id -u)" -eq 0 ]; then
  later=(python s3 prometheus etcd shells slurm uplink databases disks stacks torch browser lint book package k8s helm notebook docs)
  [ -n "${REKINDLE_CRIU:-}" ] || later=(criu "${later[@]}")
  setsid scripts/deps.sh "${later[@]}" >"$work/dependencies.log" 2>&1 </dev/null &
  ahead=$!
fi

step 'format' cargo fmt --all --check
step 'format of the reaper' cargo fmt --manifest-path native/reaper/Cargo.toml --check
step 'format of the interposer' cargo fmt --manifest-path native/preload/Cargo.toml --check
step 'format of the plugin' cargo fmt --manifest-path native/plugin/Cargo.toml --check
step 'clippy' cargo clippy --quiet --workspace --all-targets --locked -- -D warnings
step 'clippy of the reaper' cargo clippy --quiet --manifest-path native/reaper/Cargo.toml -- -D warnings
step 'clippy of the interposer' cargo clippy --quiet --manifest-path native/preload/Cargo.toml --all-targets -- -D warnings
step 'clippy of the plugin' cargo clippy --quiet --manifest-path native/plugin/Cargo.toml --all-targets -- -D warnings
# All at once, so that tests are compiled while a large crate keeps one processor busy.
step 'build, with the tests' cargo build --quiet --workspace --all-targets --locked

if [ -n "$ahead" ]; then
  # It may have failed. Then the step that it failed in fails again here.
  step 'dependencies: the rest of the downloads' tail --pid="$ahead" -f /dev/null
  ahead=''
fi
python=$root/.deps/venv/bin/python
if [ "$(id -u)" -eq 0 ]; then
  step 'dependencies: python' scripts/deps.sh python
elif ! scripts/deps.sh python; then
  python=''
fi
if [ -z "${REKINDLE_CRIU:-}" ]; then
  if required criu; then
    step 'dependencies: criu' scripts/deps.sh criu
    export REKINDLE_CRIU=$root/.deps/criu/criu
  elif scripts/deps.sh criu; then
    export REKINDLE_CRIU=$root/.deps/criu/criu
  else
    skip 'tests with CRIU' 'it could not be had, the reason is above'
  fi
fi
if required s3; then
  step 'dependencies: an S3 server' scripts/deps.sh s3
elif ! scripts/deps.sh s3; then
  skip 'tests with an S3 server' 'it could not be had, the reason is above'
fi
if required prometheus; then
  step 'dependencies: parsers of metrics' scripts/deps.sh prometheus
elif ! scripts/deps.sh prometheus; then
  skip 'parsing of the metrics' 'the parsers could not be had, the reason is above'
fi
if required etcd; then
  step 'dependencies: etcd' scripts/deps.sh etcd
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh etcd; then
  skip 'tests with etcd' 'not root, or etcd could not be installed'
fi
if required zsh || required fish; then
  step 'dependencies: shells' scripts/deps.sh shells
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh shells; then
  skip 'completions of zsh and fish' 'not root, or they could not be installed'
fi
if required slurm; then
  step 'dependencies: Slurm' scripts/deps.sh slurm
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh slurm; then
  skip 'tests with Slurm' 'it could not be had, the reason is above'
fi

if required uplink; then
  step 'dependencies: slirp4netns' scripts/deps.sh uplink
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh uplink; then
  skip 'tests of the uplink' 'slirp4netns could not be had, the reason is above'
fi
if required databases; then
  step 'dependencies: PostgreSQL and Redis' scripts/deps.sh databases
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh databases; then
  skip 'tests with databases' 'PostgreSQL and Redis could not be had, the reason is above'
fi
if required disks; then
  step 'dependencies: file systems' scripts/deps.sh disks
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh disks; then
  skip 'tests with XFS and btrfs' 'what makes them could not be had, the reason is above'
fi
if required stacks; then
  step 'dependencies: Open MPI, LMDB and TensorBoard' scripts/deps.sh stacks
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh stacks; then
  skip 'tests with Open MPI, LMDB and TensorBoard' 'they could not be had, the reason is above'
fi
if required torch; then
  step 'dependencies: PyTorch' scripts/deps.sh torch
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh torch; then
  skip 'tests with PyTorch' 'not root, or it could not be installed'
fi
if required chromium; then
  step 'dependencies: a browser' scripts/deps.sh browser
elif [ "$(id -u)" -ne 0 ] || ! scripts/deps.sh browser; then
  skip 'tests with a browser' 'it could not be had, the reason is above'
fi

lint=''
if required lint; then
  step 'dependencies: checks of licences and scripts' scripts/deps.sh lint
  lint=yes
elif scripts/deps.sh lint; then
  lint=yes
else
  skip 'checks of licences and scripts' 'what they need could not be had, the reason is above'
fi
book=''
if required book; then
  step 'dependencies: mdBook' scripts/deps.sh book
  book=yes
elif scripts/deps.sh book; then
  book=yes
else
  skip 'the site of the documents' 'mdBook could not be had, the reason is above'
fi
packages=''
if required package; then
  step 'dependencies: packages' scripts/deps.sh package
  packages=yes
elif [ "$(id -u)" -eq 0 ] && scripts/deps.sh package; then
  packages=yes
else
  skip 'tests of the packages' 'not root, or what they need could not be had'
fi
if required k8s; then
  step 'dependencies: Kubernetes' scripts/deps.sh k8s
elif ! scripts/deps.sh k8s; then
  skip 'deployment templates' 'the schemas of Kubernetes could not be had, the reason is above'
fi
helm=''
if required helm; then
  step 'dependencies: helm' scripts/deps.sh helm
  helm=$root/.deps/helm/helm
elif scripts/deps.sh helm; then
  helm=$root/.deps/helm/helm
else
  skip 'the Helm chart' 'helm could not be had, the reason is above'
fi
notebook=''
if required notebook; then
  step 'dependencies: a Jupyter kernel' scripts/deps.sh notebook
  notebook=yes
elif [ "$(id -u)" -eq 0 ] && [ -n "${REKINDLE_CRIU:-}" ] && scripts/deps.sh notebook; then
  notebook=yes
else
  skip 'a notebook' 'not root, no CRIU, or the kernel could not be had'
fi

# One run names all tests that fail. A job gets the signals that its caller ignores, and in the background of a script that is
# SIGINT.
tests=(env '--default-signal=INT,QUIT,HUP' cargo test --quiet --workspace --locked --no-fail-fast)
# These wait nearly all the time: for leases, etcd and Slurm. They run beside the others.
waiting=(group etcd slurm slurm_wrapper)
others=$(cargo metadata --quiet --locked --no-deps --format-version 1 | python3 -c '
import json, sys
targets = [target for package in json.load(sys.stdin)["packages"] for target in package["targets"]]
print(*{target["name"] for target in targets if target["kind"] == ["test"]} - set(sys.argv[1:]), sep="\n")' "${waiting[@]}")
mapfile -t others <<<"$others"
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(nproc)}
setsid timeout -k 10 "$limit" "${tests[@]}" "${waiting[@]/#/--test=}" >"$work/beside.log" 2>&1 </dev/null &
beside=$!
failed=''
# Most of these wait for something most of the time, too.
(step 'tests' env RUST_TEST_THREADS=$((2 * RUST_TEST_THREADS)) "${tests[@]}" --lib --bins "${others[@]/#/--test=}") || failed=yes
wait "$beside" || failed=yes
beside=''
step "tests of ${waiting[*]}, which ran beside them" cat "$work/beside.log"
[ -z "$failed" ] || { echo "run.sh: tests have failed, see above" >&2; exit 1; }
step 'examples in the documentation' "${tests[@]}" --doc
step 'tests of the interposer' cargo test --quiet --manifest-path native/preload/Cargo.toml
step 'tests of the plugin' cargo test --quiet --manifest-path native/plugin/Cargo.toml
# With private items: it is read by those who work on it, and links to them must not be broken either.
step 'documentation' env RUSTDOCFLAGS='-D warnings -A rustdoc::private-intra-doc-links' \
  cargo doc --quiet --workspace --no-deps --locked --document-private-items
if [ -n "$lint" ]; then
  # cargo-deny looks at the crates of all platforms; builds have fetched those of this one only.
  step 'crates of all platforms' cargo fetch --quiet --locked
  step 'licences and sources' env PATH="$root/.deps/cargo/bin:$PATH" cargo deny --offline --log-level error check bans licenses sources
  step 'shell scripts' shellcheck .ci/run scripts/*.sh examples/*.sh examples/deploy/*/*.sbatch examples/deploy/slurm/rekindle-* \
    integration/*.sh integration/*/*.sh
fi
step 'lock file of the fuzz targets' cargo tree --quiet --locked --depth 0 --manifest-path fuzz/Cargo.toml
step 'measuring scripts' env PYTHONDONTWRITEBYTECODE=1 python3 -m unittest discover -s integration/bench
rekindle=${CARGO_TARGET_DIR:-$root/target}/debug/rekindle
# As docs/install.md says, with the build that is there.
step 'cargo install' cargo install --quiet --debug --locked --offline --no-track --target-dir "${CARGO_TARGET_DIR:-$root/target}" --path . --root "$work/cargo"
step 'the executable of cargo install' "$work/cargo/bin/rekindle" --version
# A CRIU of the machine that is new enough comes first.
if [ -n "${REKINDLE_CRIU:-}" ] && [ -z "$(PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/bin command -v criu)" ]; then
  # It finds a CRIU beside it, as one that scripts/install-criu.sh makes.
  mkdir -p "$work/cargo/lib/rekindle/criu"
  ln -s "$REKINDLE_CRIU" "$work/cargo/lib/rekindle/criu/criu"
  # shellcheck disable=SC2016 # for the shell inside
  step 'its CRIU' env -u REKINDLE_CRIU PATH=/usr/bin:/bin COLUMNS=200 sh -c '
    said=$("$1/bin/rekindle" doctor 2>&1)
    case $? in 0 | 69) ;; *) echo "$said"; exit 1 ;; esac
    echo "$said" | grep -F "$1/lib/rekindle/criu/criu" || { echo "$said"; exit 1; }' sh "$work/cargo"
fi
if have systemd-analyze; then
  # The command must exist; the unit gets its name from the file.
  for unit in rekindle.service rekindle@.service; do
    sed "s#/usr/local/bin/rekindle#$rekindle#" "config/$unit" >"$work/$unit"
    step "systemd unit $unit" systemd-analyze verify --man=no "$work/$unit"
  done
else
  skip 'systemd units' 'there is no systemd-analyze'
fi
if [ "$(id -u)" -eq 0 ] && [ -n "${REKINDLE_CRIU:-}" ]; then
  step 'dependencies: what the documents use' scripts/deps.sh docs
  step 'documents, and every command in them' python3 -B integration/docs.py --run --rekindle "$rekindle"
else
  step 'documents' python3 -B integration/docs.py --rekindle "$rekindle"
fi
if [ -n "$notebook" ]; then
  step 'a notebook' .deps/notebook/bin/python -B integration/notebook.py --rekindle "$rekindle"
fi
if [ -n "$book" ]; then
  step 'the site of the documents' python3 -B scripts/site.py --out "$work/site"
fi
if [ -n "$packages" ]; then
  step 'packages' integration/package.sh --binary "$rekindle"
fi
if [ "$(id -u)" -eq 0 ] && [ -x /lib/systemd/systemd ] && [ -n "${REKINDLE_CRIU:-}" ]; then
  step 'under a real systemd' integration/systemd.sh --binary "$rekindle"
elif required systemd; then
  step 'systemd is required' false
else
  skip 'under a real systemd' 'it needs root, systemd and CRIU'
fi
if [ -x .deps/k8s/bin/python ]; then
  step 'deployment templates' .deps/k8s/bin/python integration/deploy.py --out "$work/k8s" ${helm:+--helm "$helm"}
  for configuration in "$work"/k8s/*.toml; do
    step "configuration of a template, ${configuration##*/}" "$rekindle" config check "$configuration"
  done
fi

if [ -z "$python" ]; then
  skip 'example: training' 'no Python with numpy and scikit-learn, the reason is above'
else
  # The demo compares runs. That proves something only if two undisturbed runs are equal.
  for run in 1 2; do
    step "example: training, run $run" "$python" examples/digits/train.py --out "$work/train$run" --seconds 0 --epochs 10
  done
  step 'example: training, equal bits' diff -r "$work/train1" "$work/train2"
fi
if [ "$(id -u)" -eq 0 ] && [ -n "${REKINDLE_CRIU:-}" ]; then
  step 'example: crash loop' examples/crash-loop.sh --rekindle "$rekindle"
  step 'example: demonstration' examples/demo.sh --only cpu --rekindle "$rekindle"
  step 'campaign of kills' integration/campaign/campaign.sh --kills 60 --jobs 3 --rekindle "$rekindle"
  # Shows that the script still works, before somebody rents a GPU for it. It measures nothing here.
  step 'measuring script for GPUs' integration/bench-gpu.sh --self-test --rekindle "$rekindle"
  step 'workload matrix' integration/gpu-matrix.sh --self-test --rekindle "$rekindle"
else
  skip 'examples under rekindle' 'they need root and CRIU'
fi

echo
for line in "${skipped[@]+"${skipped[@]}"}"; do echo "SKIP  $line"; done
echo "PASS  all that was run, in $SECONDS s"
