#!/usr/bin/env bash
# package.sh [--binary FILE]: makes the packages of an executable (target/debug/rekindle without an argument), looks at what
# is in them, installs and removes the Debian one in a root of its own, and uses what it brought.
#
# That root is this machine's with a layer over it: dpkg sees the packages that are here, and nothing stays. Needs root,
# Debian or Ubuntu, and what `scripts/deps.sh package` installs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

binary=${CARGO_TARGET_DIR:-target}/debug/rekindle
[ "${1:-}" != --binary ] || binary=$2
fail() { printf 'package: FAILED: %s\n' "$*" >&2; exit 1; }

# A namespace of mounts takes its mounts with it; the layer lies on a tmpfs, as overlayfs cannot be on itself.
work=${REKINDLE_PACKAGE_INSIDE:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rmdir -- "$work"' EXIT
  REKINDLE_PACKAGE_INSIDE=$work unshare --mount --propagation private integration/package.sh --binary "$binary"
  exit
fi
mount -t tmpfs -o mode=755 tmpfs "$work"

# ---- the same bytes, wherever and by whomever it is made ----
scripts/package.sh --fast --binary "$binary" --out "$work/dist" >/dev/null
(umask 077; TZ=Asia/Tokyo scripts/package.sh --fast --binary "$binary" --out "$work/again" deb >/dev/null)
deb=$(echo "$work"/dist/*.deb) tarball=$(echo "$work"/dist/*.tar.xz)
cmp "$deb" "$work/again/${deb##*/}" || fail 'the same source gave two packages'
lintian --allow-root --fail-on error "$deb" || fail 'lintian'

# ---- man pages ----
mkdir "$work/tar"
tar -xJf "$tarball" -C "$work/tar" --strip-components=1
gunzip -r "$work/tar/share/man"
lint=$(mandoc -Tlint -W warning "$work"/tar/share/man/man?/* | grep -v 'skipping paragraph macro: br' | head -n 20 || true)
[ -z "$lint" ] || fail "mandoc: $lint"
shown() { MANWIDTH=100 man -l "$1" 2>/dev/null; }
shown "$work/tar/share/man/man1/rekindle-run.1" | grep -q 'Time between two snapshots' || fail 'rekindle-run(1) does not show'
shown "$work/tar/share/man/man5/rekindle.toml.5" | grep -q '^ *interval = "10m"' || fail 'rekindle.toml(5) does not show'
needed=$(objdump -p "$work/tar/bin/rekindle" | sed -n 's/^ *NEEDED *//p' | grep -vE '^(lib(c|m|gcc_s)|ld-linux-x86-64)\.so' || true)
[ -z "$needed" ] || fail "the executable needs more than the C library: $needed"
"$work/tar/bin/rekindle" --version >/dev/null || fail 'the executable of the tarball does not run'

# ---- installed, used, removed ----
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
mount -t proc proc "$work/root/proc"
mount --rbind /dev "$work/root/dev"
mount -t tmpfs tmpfs "$work/root/run"
mount -t tmpfs tmpfs "$work/root/tmp"
cp "$deb" "$work/root/tmp/rekindle.deb"
# Not chroot, which a job of its own mount namespace would leave: entering one goes to its root.
# shellcheck disable=SC2016 # for the shell inside
inside() {
  unshare --mount --propagation private sh -c 'cd "$1" && shift && pivot_root . mnt && umount -l /mnt &&
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"' sh "$work/root" "$@"
}
inside dpkg -i /tmp/rekindle.deb >"$work/log" 2>&1 || fail "dpkg -i: $(cat "$work/log")"
[ "$(inside rekindle --version)" = "$("$binary" --version)" ] || fail 'the installed executable says another version'
inside rekindle config check >/dev/null || fail 'the installed configuration is not accepted'
inside rekindle config show --json | grep -q '"/etc/rekindle/rekindle.toml' || fail 'the installed configuration is not read'
# 69 where the machine lacks something, which this is not about.
status=0
inside rekindle doctor >"$work/log" 2>&1 || status=$?
case $status in 0 | 69) ;; *) fail "doctor: $status $(cat "$work/log")" ;; esac

# shellcheck disable=SC2016 # for the shell inside
inside bash -c 'complete() { [ "${!#}" != rekindle ] || echo has; builtin complete "$@"; }
  . /usr/share/bash-completion/completions/rekindle' | grep -q has || fail 'bash does not complete'
! command -v zsh >/dev/null || inside zsh -n /usr/share/zsh/vendor-completions/_rekindle || fail 'zsh cannot read its completions'
! command -v fish >/dev/null || inside fish --no-execute /usr/share/fish/vendor_completions.d/rekindle.fish || fail 'fish'
said=$(inside systemd-analyze verify --man=no rekindle@train.service 2>&1) || fail "the unit: $said"
[ -z "$said" ] || fail "the unit: $said"

if [ -n "${REKINDLE_CRIU:-}" ]; then
  # By its file alone, as the unit does. A job that ends is enough: how it comes back is tested elsewhere.
  printf 'version = 1\n[job]\ncommand = ["/bin/echo", "it runs"]\n' >"$work/root/etc/rekindle/jobs/train.toml"
  # What lies on another file system is not in the layer below.
  criu=$REKINDLE_CRIU
  [ -x "$work/root$criu" ] || { cp -rL -- "$(dirname -- "$criu")" "$work/root/opt/criu-tested"; criu=/opt/criu-tested/${criu##*/}; }
  read -ra command <<<"$(sed -n 's/^ExecStart=//; T; s/%i/train/gp' "$work/root/lib/systemd/system/rekindle@.service")"
  said=$(inside REKINDLE_CRIU="$criu" "${command[@]}" 2>&1) || fail "${command[*]}: $said"
  [[ $said == *'it runs'* ]] || fail "${command[*]}: $said"
else
  echo 'SKIP: a job of the installed package: REKINDLE_CRIU names no CRIU'
  mkdir -p "$work/root/var/lib/rekindle/train"
fi
echo '# mine' >>"$work/root/etc/rekindle/rekindle.toml"
inside dpkg -r rekindle >"$work/log" 2>&1 || fail "dpkg -r: $(cat "$work/log")"
[ ! -e "$work/root/usr/bin/rekindle" ] || fail 'removed, and still there'
grep -q '# mine' "$work/root/etc/rekindle/rekindle.toml" || fail 'removing took the configuration'
inside dpkg -P rekindle >"$work/log" 2>&1 || fail "dpkg -P: $(cat "$work/log")"
[ ! -e "$work/root/etc/rekindle/rekindle.toml" ] || fail 'purged, and the configuration is still there'
[ -d "$work/root/var/lib/rekindle/train" ] || fail 'purging took the store'
[ -z "${REKINDLE_CRIU:-}" ] || [ -f "$work/root/etc/rekindle/jobs/train.toml" ] || fail "purging took a job's file"
echo 'package: ok'
