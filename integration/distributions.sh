#!/usr/bin/env bash
# distributions.sh [OPTION...] DIST [SUITE...]: tries the packages of scripts/package.sh on each distribution whose root
# folder debootstrap can make here, with integration/install.sh, and prints the table of docs/install.md.
#
#   DIST          the folder with a .deb, a .tar.gz and a .whl
#   SUITE         bullseye, bookworm, trixie, sid, jammy, noble or resolute; without one, all
#   --roots DIR   where the root folders are, and stay for the next time [default: .deps/roots]; about 350 MB each
#   --debian URL  a mirror of Debian [default: the one that this machine's apt uses]
#   --ubuntu URL  a mirror of Ubuntu [default: the one that debootstrap knows]
#
# A suite whose root folder cannot be made is skipped, with the reason. Where glibc is older than the packages ask for, they
# must be refused. Needs root, Debian or Ubuntu, and the network for root folders that are not there yet: some minutes for
# each. So it is not a part of run.sh.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
say() { printf 'distributions: %s\n' "$*" >&2; }
fail() { say "FAILED: $*"; exit 1; }

roots=.deps/roots debian='' ubuntu=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --roots) roots=${2:-} ;;
    --debian) debian=${2:-} ;;
    --ubuntu) ubuntu=${2:-} ;;
    *) fail "unknown option $1" ;;
  esac
  [ -n "${2:-}" ] || fail "$1 needs a value"
  shift 2
done
[ $# -gt 0 ] || fail 'usage: distributions.sh [OPTION...] DIST [SUITE...]'
dist=$1
shift
[ $# -gt 0 ] || set -- bullseye bookworm trixie sid jammy noble resolute
for suite; do
  case $suite in
    bullseye | bookworm | trixie | sid | jammy | noble | resolute) ;;
    *) fail "unknown suite $suite" ;;
  esac
done
packages=()
for kind in deb tar.gz whl; do
  found=("$dist"/*."$kind")
  if [ ${#found[@]} -ne 1 ] || [ ! -f "${found[0]}" ]; then fail "$dist has not one .$kind: make the packages with scripts/package.sh --out"; fi
  packages+=("${found[0]}")
done
[ "$(id -u)" -eq 0 ] || fail 'run it as root'
# The oldest glibc that the packages promise to run with.
oldest=$(sed -n 's/^oldest_glibc=//p' scripts/package.sh)
[ -n "$oldest" ] || fail 'scripts/package.sh names no oldest_glibc'
scripts/deps.sh roots
mkdir -p -- "$roots"

if [ -z "$debian" ]; then
  # Only Debian's own apt has Debian's mirror; elsewhere debootstrap knows one.
  # shellcheck disable=SC2016 # apt replaces them
  debian=$(apt-get indextargets --format '$(ORIGIN)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian|main|//p' | head -n 1)
fi

# A script for the suites that this debootstrap is older than: all of Ubuntu's have been like this one.
script_of() { if [ -e "/usr/share/debootstrap/scripts/$1" ]; then echo "$1"; else echo gutsy; fi; }

# make SUITE: makes its root folder. Says why not.
make() {
  local suite=$1 mirror=$debian components=main options=() keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
  case $suite in
    jammy | noble | resolute)
      mirror=$ubuntu components=main,universe
      # Without a keyring debootstrap would stop; the table says that nothing was checked.
      if [ -r "$keyring" ]; then options+=("--keyring=$keyring"); else options+=(--no-check-gpg); fi ;;
    *) options+=(--force-check-gpg) ;;
  esac
  local new=$roots/.new-$suite log=$roots/$suite.log
  rm -rf --one-file-system -- "$new" "$roots/$suite.unchecked"
  say "making the root folder of $suite"
  # Its mounts end with the namespace, also when it is stopped.
  if ! timeout -k 10 1200 unshare --mount --propagation private debootstrap --variant=minbase --components="$components" \
    --include=python3-venv "${options[@]}" "$suite" "$new" "$mirror" "$(script_of "$suite")" >"$log" 2>&1; then
    tail -n 1 "$log"
    return 1
  fi
  [ "${options[0]}" != --no-check-gpg ] || : >"$roots/$suite.unchecked"
  rm -rf -- "$new"/var/cache/apt/archives/*.deb
  mv -- "$new" "$roots/$suite"
}

glibc_of() { dpkg-query --admindir="$1/var/lib/dpkg" -W -f '${Version}' libc6 | sed 's/[-+].*//'; }
# shellcheck disable=SC1091
name_of() { (. "$1/etc/os-release" && echo "${NAME%% *} ${VERSION_ID:-unstable}"); }

rows=() skipped=() failed=()
for suite; do
  root=$roots/$suite
  if [ ! -d "$root" ] && ! why=$(make "$suite"); then
    say "SKIP $suite: $why"
    skipped+=("$suite: $why")
    continue
  fi
  glibc=$(glibc_of "$root")
  row="| $(name_of "$root")"
  [ ! -e "$roots/$suite.unchecked" ] || row+=', signature not checked'
  row+=" | $glibc |"
  for package in "${packages[@]}"; do
    status=0
    said=$(integration/install.sh "$package" "$root" 2>"$roots/$suite.log") || status=$?
    if dpkg --compare-versions "$glibc" lt "$oldest"; then
      cell=refused
      [ "$status" -ne 0 ] || { cell='NOT REFUSED'; failed+=("$suite: ${package##*/} was not refused"); }
    elif [ "$status" -eq 0 ]; then
      cell=$(sed -nE 's/.*: ([0-9]+ commands), ([0-9.]+ s) .*/\1, \2/p' <<<"$said")
    else
      cell=FAILED
      failed+=("$suite: ${package##*/}: $(tail -n 3 "$roots/$suite.log" | tr '\n' ' ')")
    fi
    say "$suite: ${package##*/}: $cell"
    row+=" $cell |"
  done
  rows+=("$row")
done

[ ${#rows[@]} -gt 0 ] || fail 'no root folder could be made'
printf '%s\n' '| root folder | glibc | deb | tarball | wheel |' '|---|---|---|---|---|' "${rows[@]}"
for line in "${skipped[@]+"${skipped[@]}"}"; do echo "SKIP  $line"; done
[ ${#failed[@]} -eq 0 ] || fail "$(printf '%s\n' "${failed[@]}")"
