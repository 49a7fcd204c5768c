#!/usr/bin/env bash
# install.sh PACKAGE [ROOT]: installs a package, runs a job, kills it with -9 and waits until it is restored, with the
# commands that a user types. It prints how long that took.
#
#   PACKAGE  a .deb, .tar.gz or .whl of scripts/package.sh; - if ROOT contains rekindle, as a container image of
#            examples/deploy/Containerfile does
#   ROOT     the root folder of a distribution, by default this machine's (/). One way to make it:
#            debootstrap --variant=minbase bookworm ROOT (for a wheel with --include=python3-venv)
#
# ROOT is not changed: the script writes to a layer over it, which is removed with the namespaces. It uses the files of
# ROOT and this machine's kernel, not REKINDLE_CRIU and not what this machine has installed. Needs root.
# Fails if it takes more than 4 commands or 60 seconds, from the first command to the first line of the restored job.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
fail() { printf 'install: FAILED: %s\n' "$*" >&2; exit 1; }

package=${1:-} root=${2:-/}
if [ ! -d "$root" ] || { [ ! -f "$package" ] && [ "$package" != - ]; }; then fail 'usage: install.sh PACKAGE [ROOT]'; fi

if [ -z "${REKINDLE_INSTALL_INSIDE:-}" ]; then
  work=$(mktemp -d)
  trap 'rmdir -- "$work"' EXIT
  # Nothing is left in any case: processes and mounts end with their namespaces.
  REKINDLE_INSTALL_INSIDE=$work timeout -k 5 180 unshare --mount --propagation private --pid --fork --kill-child \
    integration/install.sh "$package" "$root"
  exit
fi

# Runs in the new root. Everything that a user would type goes through `typed`.
# shellcheck disable=SC2016,SC2317,SC2329 # it is passed to another bash, as text
inside() {
  set -euo pipefail
  cd /root
  package=$1 commands=0 supervisor=''
  fail() { printf 'install: FAILED: %s\n' "$*" >&2; cat /root/*.log >&2; exit 1; }
  typed() { commands=$((commands + 1)); printf '  $ %s\n' "$*" >&2; }
  now() { local up; read -r up _ </proc/uptime; echo "${up/./}0"; }
  # within SECONDS COMMAND...
  within() {
    local until=$(($(now) + $1 * 1000))
    shift
    until "$@"; do
      [ "$(now)" -lt "$until" ] || return 1
      sleep 0.05
    done
  }
  count='i=0; while :; do i=$((i + 1)); echo "n $i"; sleep 0.1; done'
  run() {
    typed "rekindle run --name count --interval 1s -- sh -c '...' &"
    : >"$1.out"
    rekindle run --name count --interval 1s -- sh -c "$count" >>"$1.out" 2>>"$1.log" &
    supervisor=$!
  }
  # The newest number that the job printed; 0 for none.
  newest() { sed -n 's/^n //p' "$1.out" | tail -n 1 | grep . || echo 0; }
  has_image() { [[ $(rekindle list count 2>/dev/null) =~ $1-[0-9]{8}T ]]; }
  counts() { [ "$(newest "$1")" -gt "$2" ]; }
  # The shell that counts: it is found by its place below the supervisor.
  job_of() {
    local child
    # shellcheck disable=SC2013 # the file holds words in one line
    for child in $(cat "/proc/$1/task"/*/children 2>/dev/null); do
      if [ "$(tr '\0' ' ' <"/proc/$child/cmdline" 2>/dev/null)" = "sh -c $count " ]; then echo "$child"; else job_of "$child"; fi
    done
  }

  began=$(now)
  case $package in
    /tmp/-) ;;
    *.deb) typed "dpkg -i ${package##*/}"; dpkg -i "$package" >install.log 2>&1 || fail 'dpkg -i' ;;
    *.tar.gz)
      typed "tar -xzf ${package##*/} -C /usr/local --strip-components=1"
      tar -xzf "$package" -C /usr/local --strip-components=1 ;;
    *.whl)
      typed 'python3 -m venv venv'
      python3 -m venv venv >install.log 2>&1 || fail 'python3 -m venv'
      typed "venv/bin/pip install ${package##*/}"
      venv/bin/pip install --no-index --disable-pip-version-check "$package" >install.log 2>&1 || fail 'pip install'
      PATH=$PWD/venv/bin:$PATH ;;
  esac

  run first
  within 30 has_image 000002 || fail 'no second image within 30 seconds'
  reached=$(newest first)
  job=$(job_of "$supervisor")
  [ -n "$job" ] || fail 'the job was not found below its supervisor'
  # The job may be gone at once: the kernel ends it with its supervisor.
  kill -9 "$supervisor" "$job" 2>/dev/null
  # Bash prints that it was killed.
  wait "$supervisor" 2>/dev/null || true
  [ ! -e "/proc/$job" ] || within 5 test ! -e "/proc/$job" || fail 'the job outlived kill -9'
  run second
  within 30 counts second "$reached" || fail "the job did not get beyond $reached again within 30 seconds"
  took=$(($(now) - began))
  ! grep -qx 'n 1' second.out || fail 'the job began anew'

  # If only the job is killed, rekindle restores it by itself.
  within 30 has_image 000004 || fail 'no image after the restart within 30 seconds'
  job=$(job_of "$supervisor")
  reached=$(newest second)
  kill -9 "$job"
  within 30 counts second $((reached + 5)) || fail "the job did not get beyond $reached after it was killed"
  ! grep -qx 'n 1' second.out || fail 'the job began anew'

  if [[ $package == *.whl ]]; then
    said=$(rekindle run --name api -- python3 -c 'import rekindle; print(rekindle.snapshot(), rekindle.state()["job"])' 2>api.log) \
      || fail 'a job that imports the module'
    [ "$said" = 'resumed api' ] || fail "a job that imports the module printed: $said"
    said=$(PATH=/usr/bin:/bin venv/bin/python -m rekindle --version)
    [[ $said == rekindle\ [0-9]* ]] || fail "python -m rekindle printed: $said"
  fi

  # 69: the machine lacks something, which may have nothing to do with the package. But CRIU must not be missing.
  status=0
  COLUMNS=200 rekindle doctor >doctor.log 2>&1 || status=$?
  case $status in 0 | 69) ;; *) fail "doctor: $status" ;; esac
  grep -q 'lib/rekindle/criu/criu' doctor.log || fail 'doctor does not name the CRIU of the package'

  # shellcheck disable=SC1091
  name=$(. /etc/os-release && echo "${PRETTY_NAME:-unknown}")
  printf '%s: %s: %s commands, %s.%s s from nothing to the job after kill -9\n' \
    "$name" "${package#/tmp/}" "$commands" $((took / 1000)) $((took % 1000 / 100))
  [ "$commands" -le 4 ] || fail "it took $commands commands"
  [ "$took" -le 60000 ] || fail 'it took more than 60 seconds'
  rekindle stop count >stop.log 2>&1 || fail 'stop'
}

work=$REKINDLE_INSTALL_INSIDE
# A tmpfs, because overlayfs cannot be on an overlayfs.
mount -t tmpfs -o mode=755 tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" "$work/root"
mount -t proc proc "$work/root/proc"
mount --rbind /sys "$work/root/sys"
mount --rbind /dev "$work/root/dev"
mount -t tmpfs tmpfs "$work/root/run"
mount -t tmpfs -o mode=1777 tmpfs "$work/root/tmp"
[ "$package" = - ] || cp -- "$package" "$work/root/tmp/"
# Not chroot: a process that enters a job's mount namespace goes to the root of that namespace.
cd "$work/root"
pivot_root . mnt
umount -l /mnt
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PIP_NO_INDEX=1 \
  bash -c "$(declare -f inside); inside /tmp/${package##*/}"
