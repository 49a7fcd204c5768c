#!/usr/bin/env bash
# install-criu.sh DIR: puts a CRIU of at least 4.2 at DIR/criu, for machines whose distribution has an older one.
#   1. DIR/criu is there, runs and is new enough: nothing to do.
#   2. The system has one that is new enough: DIR/criu becomes a link to it.
#   3. The distribution's own package is new enough: it is installed, then as 2 (needs root).
#   4. On Debian: the package and its libraries are taken from unstable, through the mirror and the keyring that this
#      machine's apt already uses, and unpacked into DIR (about 20 MB). No package of the system is touched, and DIR
#      may be copied to another machine of the same architecture, Ubuntu too.
# Then: REKINDLE_CRIU=DIR/criu rekindle run ..., or `path` under [criu] in the configuration.
set -euo pipefail

# Kernels from 6.16 on answer socket queries in a way that older ones of CRIU do not understand.
need=4.2
suite=sid

say() { printf 'install-criu: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

version_of() { timeout 20 "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }
# new_enough VERSION: an empty version is none.
new_enough() { [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$need" "$1" | sort -V | head -n 1)" = "$need" ]; }

if [ $# -ne 1 ] || [ -z "$1" ]; then
  say 'usage: install-criu.sh DIR'
  exit 2
fi
mkdir -p -- "$1" || die "cannot create $1: choose a folder that you may write to"
out=$(cd -- "$1" && pwd)

link_to_system() {
  local system version
  # /usr/sbin is not in everybody's PATH.
  system=$(PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v criu) || return 1
  [ "$(readlink -f "$system")" != "$(readlink -f "$out/criu")" ] || return 1
  version=$(version_of "$system") || true
  new_enough "$version" || return 1
  ln -sfn -- "$system" "$out/criu"
  say "$out/criu is the system's CRIU $version"
}

[ ! -x "$out/criu" ] || ! new_enough "$(version_of "$out/criu" || true)" || exit 0
! link_to_system || exit 0

manual="copy the folder that this script makes on a Debian machine of the same architecture to $out, or install CRIU $need \
from the CRIU project (criu.org names its packages and its source), then run this again"
command -v apt-get >/dev/null || die "no CRIU of at least $need found, and this system has no apt to get it with: $manual"
# shellcheck source=/dev/null
. /etc/os-release

candidate() { apt-cache policy criu 2>/dev/null | sed -n 's/^ *Candidate: *//p' | grep -v '^(none)$' || true; }
own=$(candidate)
if [ -z "$own" ] && [ "$(id -u)" -eq 0 ] && [ -z "$(find /var/lib/apt/lists -name '*_Packages*' -print -quit)" ]; then
  say 'this machine has no package lists yet, getting them'
  apt-get -qq update || die 'apt-get update failed: see the lines above, check the network and the sources in /etc/apt'
  own=$(candidate)
fi
# A Debian version may have an epoch in front: 1:4.2-1.
if new_enough "${own#*:}"; then
  [ "$(id -u)" -eq 0 ] || die "the package criu $own of this system is new enough: install it (sudo apt-get install criu), then run this again"
  say "installing the system's own package criu $own"
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends criu >/dev/null \
    || die 'apt-get install criu failed: see the lines above'
  link_to_system || die "criu is installed but does not run or is older than $need: try 'criu --version'"
  exit 0
fi
[ "${ID:-}" = debian ] || die "the newest criu that ${PRETTY_NAME:-this system} has is '${own:-none}', at least $need is needed: $manual"

# The mirror and key of this machine's main archive: what it already trusts, for another suite.
# shellcheck disable=SC2016 # apt replaces them
targets=$(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)' 'Created-By: Packages')
target=$(awk -F'|' -v release="${VERSION_CODENAME:-}" '($2 == release || $2 == "stable" || $2 == "testing") && $3 == "main" { print; exit }' <<<"$targets")
[ -n "$target" ] || die "apt has no source for '${VERSION_CODENAME:-this release} main': add the release's usual one under /etc/apt, then run this again"
mirror=${target%%|*}
signed_by=${target##*|}
# Not every apt knows SIGNED_BY, and it may be a fingerprint. Without a file apt checks against all keys of trusted.gpg.d.
for keyring in /usr/share/keyrings/debian-archive-keyring.pgp /usr/share/keyrings/debian-archive-keyring.gpg; do
  [ "${signed_by#/}" = "$signed_by" ] || break
  [ ! -r "$keyring" ] || signed_by=$keyring
done
source_line="deb $mirror $suite main"
[ ! -r "$signed_by" ] || source_line="deb [signed-by=$signed_by] $mirror $suite main"

work=$(mktemp -d)
new=$out/.new.$$
trap 'rm -rf -- "$work" "$new"' EXIT
# apt fetches as the user _apt where that exists and warns when it cannot reach the folder, which mktemp makes 0700.
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/debs/partial" "$work/root"
! { [ "$(id -u)" -eq 0 ] && getent passwd _apt >/dev/null; } || chown _apt "$work/lists/partial" "$work/debs/partial"
# An empty status file: every library comes along, whatever this system has installed.
: >"$work/status"
echo "$source_line" >"$work/sources.list"
apt=(timeout 300 apt-get -qq
  -oDir::Etc::SourceList="$work/sources.list" -oDir::Etc::SourceParts=/dev/null -oDir::State::Lists="$work/lists"
  -oDir::State::status="$work/status" -oDir::Cache::Archives="$work/debs" -oDir::Cache::pkgcache= -oDir::Cache::srcpkgcache=
  -oAPT::Default-Release= -oAPT::Get::AllowUnauthenticated=false -oAcquire::AllowInsecureRepositories=false
  -oAcquire::AllowDowngradeToInsecureRepositories=false -oAPT::Update::Error-Mode=any -oAcquire::Retries=2)

say "fetching CRIU from Debian $suite (the system's own packages stay as they are)"
"${apt[@]}" update || die "cannot get a signed list of Debian $suite's packages. \
NO_PUBKEY above: update the package debian-archive-keyring; else check the network and the mirror in /etc/apt"
"${apt[@]}" install -y --download-only --no-install-recommends criu >/dev/null \
  || die 'cannot download criu and its libraries: see the lines above, check the network and the space in /tmp'
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done

binary=$(find "$work/root" -path '*bin/criu' -type f -print -quit)
loader=$(find "$work/root" -name 'ld-linux-*.so.*' -type f -print -quit)
if [ -z "$binary" ] || [ -z "$loader" ]; then die "Debian's package of criu has changed its layout: $manual"; fi
mkdir -p "$new/criu.lib"
cp -- "$binary" "$new/criu.bin"
cp -- "$loader" "$new/criu.lib/"
"$loader" --library-path "$(dirname "$loader")" --list "$binary" >"$work/needed"
awk '/=> \//{print $3}' "$work/needed" | while read -r library; do
  # A library of this system would tie the folder to it.
  [ "${library#"$work/root"}" != "$library" ] || die "$library is not part of the download: please report this"
  cp -L -- "$library" "$new/criu.lib/"
done
cat >"$new/criu" <<WRAPPER
#!/bin/sh
# Runs the CRIU beside this file with the C library it was built for.
d=\$(dirname "\$(readlink -f "\$0")")
exec "\$d/criu.lib/$(basename "$loader")" --library-path "\$d/criu.lib" "\$d/criu.bin" "\$@"
WRAPPER
chmod 755 "$new/criu" "$new/criu.bin"

version=$(version_of "$new/criu" || true)
new_enough "$version" || die "the CRIU just unpacked says it is version '${version:-nothing, it does not run}', at least $need is needed: $manual"
rm -rf -- "$out/criu" "$out/criu.bin" "$out/criu.lib"
# The wrapper last: DIR/criu exists only when all it needs does.
mv -- "$new/criu.lib" "$new/criu.bin" "$out/"
mv -- "$new/criu" "$out/criu"
say "CRIU $version is at $out/criu"
