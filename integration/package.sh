#!/usr/bin/env bash
# package.sh [--binary FILE]: makes packages and a release from an executable (target/debug/rekindle by default), checks
# their contents, installs, uses and removes the Debian package, and uses the other packages.
#
# The Debian package is installed in a layer over this machine's root: dpkg sees the packages of this machine, and
# nothing is left. Needs root, Debian or Ubuntu, and what `scripts/deps.sh package` installs.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

binary=${CARGO_TARGET_DIR:-target}/debug/rekindle
[ "${1:-}" != --binary ] || binary=$2
fail() { printf 'package: FAILED: %s\n' "$*" >&2; exit 1; }
# has PATTERN COMMAND...: whether the command prints PATTERN. Reads all of it: a command may fail if nobody reads on.
has() {
  local pattern=$1 said
  shift
  said=$("$@") && grep -q -- "$pattern" <<<"$said"
}

# Mounts end with their namespace. The layer is on a tmpfs, because overlayfs cannot be on an overlayfs.
work=${REKINDLE_PACKAGE_INSIDE:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rmdir -- "$work"' EXIT
  REKINDLE_PACKAGE_INSIDE=$work unshare --mount --propagation private integration/package.sh --binary "$binary"
  exit
fi
mount -t tmpfs -o mode=755 tmpfs "$work"

bundle=$PWD/.deps/bundle python=$PWD/.deps/package/bin/python
if [ ! -d "$bundle" ] || [ ! -x "$python" ]; then fail 'run scripts/deps.sh package first'; fi

# ---- a release, which makes the packages: the same bytes on each machine and for each user ----
# Made from a copy, because this tree has no dated section in its CHANGELOG.
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard >"$work/files"
tar --null --ignore-failed-read -T "$work/files" -cf - 2>/dev/null | tar -xf - -C "$work/tree"
export SOURCE_DATE_EPOCH=1790000000
# The sources are many and large: one file replaces them here.
cp -r "$bundle" "$work/bundle"
bundle=$work/bundle
release() { "$work/tree/scripts/release.sh" --fast --binary "$(realpath -- "$binary")" --criu "$bundle" "$@"; }
# refused WHY COMMAND...: the command must fail and print WHY.
refused() {
  local why=$1 said
  shift
  said=$("$@" 2>&1) && fail "not refused, though: $why"
  [[ $said == *"$why"* ]] || fail "refused, and did not say '$why': $said"
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
refused "name that section '## $version - " release --out "$work/refused"
sed -i "s/^## Unreleased$/## $version - 2026-01-02/" "$work/tree/CHANGELOG.md"
export DEBFULLNAME='A Tester' DEBEMAIL=tester@rekindle.example
refused 'has no sources' release --out "$work/refused"
mkdir "$bundle/criu.source"
echo 'of this version' >"$bundle/criu.source/criu.dsc"
cp "$bundle/criu.doc/packages.txt" "$bundle/criu.source/"
refused 'set DEBFULLNAME and DEBEMAIL' env -u DEBEMAIL "$work/tree/scripts/release.sh" --criu "$bundle" --out "$work/refused"
release --out "$work/dist" 2>"$work/log" || fail "release: $(cat "$work/log")"
refused 'is not empty' release --out "$work/dist"
mv "$work/tree" "$work/elsewhere"
(umask 077; TZ=Asia/Tokyo "$work/elsewhere/scripts/package.sh" --fast --binary "$binary" --criu "$bundle" --out "$work/again" deb wheel >/dev/null)
deb=$(echo "$work"/dist/*.deb) tarball=$(echo "$work"/dist/*.tar.gz) wheel=$(echo "$work"/dist/*.whl)
cmp "$deb" "$work/again/${deb##*/}" || fail 'the same source gave two packages'
cmp "$wheel" "$work/again/${wheel##*/}" || fail 'the same source gave two wheels'
(cd "$work/dist" && sha256sum --quiet --check SHA256SUMS) || fail 'SHA256SUMS'
[ "$(wc -l <"$work/dist/SHA256SUMS")" = 5 ] || fail "SHA256SUMS names not five files: $(cat "$work/dist/SHA256SUMS")"
has 'of this version' tar -xOf "$work/dist/rekindle-$version-criu-source.tar" "rekindle-$version-criu-source/criu.dsc" || fail 'sources'
# The release's list has all that cargo lists for the executable, and all that the bundle contains.
"$python" - "$work"/dist/*.cdx.json "$bundle/criu.doc/packages.txt" <(cargo tree --quiet --offline --locked --edges normal \
  --target x86_64-unknown-linux-gnu --prefix none --format '{p}' --no-dedupe | cut -d ' ' -f 1,2 | sort -u) <<'END' || fail 'the list of contents'
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text, packages, tree = (open(name).read() for name in sys.argv[1:])
assert not (wrong := JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)), wrong
document = json.loads(text)
listed = [document["metadata"]["component"], *document["components"]]
names = {(entry["name"], entry["version"]) for entry in listed}
wanted = {(line.split()[0], line.split()[1].removeprefix("v")) for line in tree.splitlines()}
wanted |= {tuple(line.split()[1:3]) for line in packages.splitlines() if not line.startswith("#")}
assert len(wanted) > 100, wanted
assert not wanted - names, f"not listed: {wanted - names}"
extra = names - wanted
assert {name for name, _ in extra} == {"rust-std"}, f"listed, and not there: {extra}"
END
lintian --allow-root --fail-on error "$deb" || fail 'lintian'

# A program for a newer C library than the packages promise: CRIU as Debian unstable has it.
refused 'packages promise to run with GLIBC_2.34' \
  scripts/package.sh --fast --binary "$bundle/criu.bin" --criu "$bundle" --out "$work/refused" tar

# ---- the Python module ----
# Its types are correct, and they find a mistake in a program that uses it.
printf 'import rekindle\nnumber: int = rekindle.snapshot()\n' >"$work/mistaken.py"
checked() { MYPYPATH=python "$python" -m mypy --strict --cache-dir=/dev/null "$@" 2>&1; }
said=$(checked python/rekindle) || fail "types: $said"
said=$(checked "$work/mistaken.py") && fail 'a mistake in the use of the module was not found'
[[ $said == *'mistaken.py:2: error: Incompatible types'* ]] || fail "types: $said"
# The oldest Python that it supports.
"$python" -c 'import ast, sys
for name in sys.argv[1:]: ast.parse(open(name).read(), name, feature_version=(3, 8))' python/rekindle/*.py || fail 'the module is not for Python 3.8'
said=$("$python" -m zipfile -l "$wheel")
[[ $said == *$'\n''rekindle/py.typed '* ]] || fail 'the wheel does not say that it has types'

# ---- man pages ----
mkdir "$work/tar"
tar -xzf "$tarball" -C "$work/tar" --strip-components=1
gunzip -r "$work/tar/share/man"
lint=$(mandoc -Tlint -W warning "$work"/tar/share/man/man?/* | grep -v 'skipping paragraph macro: br' | head -n 20 || true)
[ -z "$lint" ] || fail "mandoc: $lint"
shown() { MANWIDTH=100 man -l "$1" 2>/dev/null; }
has 'Time between two snapshots' shown "$work/tar/share/man/man1/rekindle-run.1" || fail 'rekindle-run(1) does not show'
has '^ *interval = "10m"' shown "$work/tar/share/man/man5/rekindle.toml.5" || fail 'rekindle.toml(5) does not show'
needed=$(objdump -p "$work/tar/bin/rekindle" | sed -n 's/^ *NEEDED *//p' | grep -vE '^(lib(c|m|gcc_s)|ld-linux-x86-64)\.so' || true)
[ -z "$needed" ] || fail "the executable needs more than the C library: $needed"
"$work/tar/bin/rekindle" --version >/dev/null || fail 'the executable of the tarball does not run'
# In any folder, and through a link. A CRIU of the machine that is new enough is used first.
ln -s "$work/tar/bin/rekindle" "$work/link"
if [ ! -x /usr/sbin/criu ] && [ ! -x /usr/local/sbin/criu ]; then
  said=$(env -u REKINDLE_CRIU PATH=/usr/bin:/bin COLUMNS=200 "$work/link" doctor 2>&1 || true)
  [[ $said == *" $work/tar/lib/rekindle/criu/criu"* ]] || fail "the CRIU of the tarball is not found: $said"
fi

# ---- installed, used, removed ----
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
mount -t proc proc "$work/root/proc"
mount --rbind /dev "$work/root/dev"
mount -t tmpfs tmpfs "$work/root/run"
mount -t tmpfs tmpfs "$work/root/tmp"
cp "$deb" "$work/root/tmp/rekindle.deb"
# Not chroot: a process that enters a job's mount namespace goes to the root of that namespace.
# shellcheck disable=SC2016 # for the shell inside
inside() {
  unshare --mount --propagation private sh -c 'cd "$1" && shift && pivot_root . mnt && umount -l /mnt &&
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"' sh "$work/root" "$@"
}
inside dpkg -i /tmp/rekindle.deb >"$work/log" 2>&1 || fail "dpkg -i: $(cat "$work/log")"
[ "$(inside rekindle --version)" = "$("$binary" --version)" ] || fail 'the installed executable says another version'
inside rekindle config check >/dev/null || fail 'the installed configuration is not accepted'
has '"/etc/rekindle/rekindle.toml' inside rekindle config show --json || fail 'the installed configuration is not read'
# 69: the machine lacks something, which this test is not about.
status=0
inside rekindle doctor >"$work/log" 2>&1 || status=$?
case $status in 0 | 69) ;; *) fail "doctor: $status $(cat "$work/log")" ;; esac

# shellcheck disable=SC2016 # for the shell inside
has registered inside bash -c 'complete() { [ "${!#}" != rekindle ] || echo registered; builtin complete "$@"; }
  . /usr/share/bash-completion/completions/rekindle' || fail 'bash does not complete'
! command -v zsh >/dev/null || inside zsh -n /usr/share/zsh/vendor-completions/_rekindle || fail 'zsh cannot read its completions'
! command -v fish >/dev/null || inside fish --no-execute /usr/share/fish/vendor_completions.d/rekindle.fish || fail 'fish'
said=$(inside systemd-analyze verify --man=no rekindle@train.service 2>&1) || fail "the unit: $said"
[ -z "$said" ] || fail "the unit: $said"

# With a configuration file only, as in the unit, and with the CRIU of the package.
printf 'version = 1\n[job]\ncommand = ["/bin/echo", "it runs"]\n' >"$work/root/etc/rekindle/jobs/train.toml"
read -ra command <<<"$(sed -n 's/^ExecStart=//; T; s/%i/train/gp' "$work/root/lib/systemd/system/rekindle@.service")"
said=$(inside "${command[@]}" 2>&1) || fail "${command[*]}: $said"
[[ $said == *'it runs'* ]] || fail "${command[*]}: $said"
echo '# mine' >>"$work/root/etc/rekindle/rekindle.toml"
inside dpkg -r rekindle >"$work/log" 2>&1 || fail "dpkg -r: $(cat "$work/log")"
[ ! -e "$work/root/usr/bin/rekindle" ] || fail 'removed, and still there'
grep -q '# mine' "$work/root/etc/rekindle/rekindle.toml" || fail 'removing took the configuration'
inside dpkg -P rekindle >"$work/log" 2>&1 || fail "dpkg -P: $(cat "$work/log")"
[ ! -e "$work/root/etc/rekindle/rekindle.toml" ] || fail 'purged, and the configuration is still there'
[ -d "$work/root/var/lib/rekindle/train" ] || fail 'purging took the store'
[ -f "$work/root/etc/rekindle/jobs/train.toml" ] || fail "purging took a job's file"

# ---- from nothing to a restored job, with each package ----
# All at the same time: they mostly wait for images.
declare -A trials
for package in "$deb" "$tarball" "$wheel"; do
  integration/install.sh "$package" >"$work/${package##*/}.log" 2>&1 &
  trials[$package]=$!
done
for package in "${!trials[@]}"; do
  wait "${trials[$package]}" || fail "from nothing: $(cat "$work/${package##*/}.log")"
  tail -n 1 "$work/${package##*/}.log"
done
echo 'package: ok'
