#!/usr/bin/env bash
# install-criu.sh [--bundle [--sources]] DIR: installs CRIU 4.2.1 or newer as DIR/criu, for machines whose distribution
# has an older one. It takes the first of these that works:
#   1. DIR/criu exists, runs and is new enough: nothing is done.
#   2. The system has one that is new enough: DIR/criu becomes a link to it.
#   3. The distribution's package is new enough: it is installed, then DIR/criu becomes a link (needs root).
#   4. On Debian: downloads the package and its libraries from unstable, through the mirror and the keyring that this
#      machine's apt already uses, and unpacks them into DIR (about 20 MB). No package of the system is changed. DIR
#      contains the C library and its loader, so it can be copied to another machine of the same architecture.
# To use it: REKINDLE_CRIU=DIR/criu rekindle run ..., or `path` under [criu] in the configuration.
#
#   --bundle   for scripts/package.sh: always does 4, and writes DIR/criu.doc, a list of the contents and their licences
#   --sources  with --bundle: also downloads the source packages of the contents, into DIR/criu.source
set -euo pipefail

# Kernels from 6.16 on answer socket queries in a way that CRIU before 4.2 does not understand, and 4.2 itself has CVE-2026-18107.
need=4.2.1
suite=sid

say() { printf 'install-criu: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

version_of() { timeout 20 "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }
# new_enough VERSION: an empty version is none.
new_enough() { [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$need" "$1" | sort -V | head -n 1)" = "$need" ]; }

bundle='' sources=''
while :; do
  case ${1:-} in
    --bundle) bundle=yes; shift ;;
    --sources) sources=yes; shift ;;
    *) break ;;
  esac
done
if [ $# -ne 1 ] || [ -z "$1" ] || [[ $1 == -* ]] || [ "${sources:+$bundle}" != "$sources" ]; then
  say 'usage: install-criu.sh [--bundle [--sources]] DIR'
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

is_complete() {
  [ -x "$out/criu" ] && new_enough "$(version_of "$out/criu" || true)" || return 1
  [ -z "$bundle" ] || { [ -s "$out/criu.doc/packages.txt" ] && [ ! -L "$out/criu" ]; }
}
has_sources() { [ -z "$sources" ] || cmp -s "$out/criu.doc/packages.txt" "$out/criu.source/packages.txt"; }
complete=''
! is_complete || complete=yes
if [ -n "$complete" ] && has_sources; then exit 0; fi
[ -n "$bundle" ] || ! link_to_system || exit 0

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
# A Debian version may have an epoch in front: 1:4.2.1-1.
if [ -z "$bundle" ] && new_enough "${own#*:}"; then
  [ "$(id -u)" -eq 0 ] || die "the package criu $own of this system is new enough: install it (sudo apt-get install criu), then run this again"
  say "installing the system's own package criu $own"
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends criu >/dev/null \
    || die 'apt-get install criu failed: see the lines above'
  link_to_system || die "criu is installed but does not run or is older than $need: try 'criu --version'"
  exit 0
fi
[ "${ID:-}" = debian ] || [ -z "$bundle" ] || die "a bundle is made of Debian's packages, and this is ${PRETTY_NAME:-another system}: make it on Debian"
[ "${ID:-}" = debian ] || die "the newest criu that ${PRETTY_NAME:-this system} has is '${own:-none}', at least $need is needed: $manual"

# The mirror and key of this machine's main archive: what it already trusts, for another suite.
# shellcheck disable=SC2016 # apt replaces them
targets=$(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)' 'Created-By: Packages')
target=$(awk -F'|' -v release="${VERSION_CODENAME:-}" '($2 == release || $2 == "stable" || $2 == "testing") && $3 == "main" { print; exit }' <<<"$targets")
[ -n "$target" ] || die "apt has no source for '${VERSION_CODENAME:-this release} main': add the release's usual one under /etc/apt, then run this again"
mirror=${target%%|*}
signed_by=${target##*|}
# Not every apt knows SIGNED_BY, and it may be a fingerprint. Without a file apt checks against all keys of
# trusted.gpg.d.
for keyring in /usr/share/keyrings/debian-archive-keyring.pgp /usr/share/keyrings/debian-archive-keyring.gpg; do
  [ "${signed_by#/}" = "$signed_by" ] || break
  [ ! -r "$keyring" ] || signed_by=$keyring
done
signed=''
[ ! -r "$signed_by" ] || signed="[signed-by=$signed_by] "

work=$(mktemp -d)
new=$out/.new.$$
trap 'rm -rf -- "$work" "$new"' EXIT
# apt fetches as the user _apt where that exists and warns when it cannot reach the folder, which mktemp makes 0700.
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/debs/partial" "$work/root"
! { [ "$(id -u)" -eq 0 ] && getent passwd _apt >/dev/null; } || chown _apt "$work/lists/partial" "$work/debs/partial"
# An empty status file: every library comes along, whatever this system has installed.
: >"$work/status"
echo "deb $signed$mirror $suite main" >"$work/sources.list"
[ -z "$sources" ] || echo "deb-src $signed$mirror $suite main" >>"$work/sources.list"
apt=(timeout 300 apt-get -qq
  -oDir::Etc::SourceList="$work/sources.list" -oDir::Etc::SourceParts=/dev/null -oDir::State::Lists="$work/lists"
  -oDir::State::status="$work/status" -oDir::Cache::Archives="$work/debs" -oDir::Cache::pkgcache= -oDir::Cache::srcpkgcache=
  -oAPT::Default-Release= -oAPT::Get::AllowUnauthenticated=false -oAcquire::AllowInsecureRepositories=false
  -oAcquire::AllowDowngradeToInsecureRepositories=false -oAPT::Update::Error-Mode=any -oAcquire::Retries=2)

say "fetching from Debian $suite (the system's own packages stay as they are)"
"${apt[@]}" update || die "cannot get a signed list of Debian $suite's packages. \
NO_PUBKEY above: update the package debian-archive-keyring; else check the network and the mirror in /etc/apt"
unpack() {
  "${apt[@]}" install -y --download-only --no-install-recommends criu >/dev/null \
    || die 'cannot download criu and its libraries: see the lines above, check the network and the space in /tmp'
  local deb binary loader library path owner
  for deb in "$work"/debs/*.deb; do
    dpkg -x "$deb" "$work/root"
    # A package whose source has its own name and version names no Source.
    # shellcheck disable=SC2016 # dpkg-deb replaces them
    owner=$(dpkg-deb -W --showformat='${Package} ${Version} ${source:Package} ${source:Version}' "$deb")
    dpkg-deb --fsys-tarfile "$deb" | tar -t | sed "s|^\.||; s|\$| $owner|" >>"$work/owners"
  done

  binary=$(find "$work/root" -path '*bin/criu' -type f -print -quit)
  loader=$(find "$work/root" -name 'ld-linux-*.so.*' -type f -print -quit)
  if [ -z "$binary" ] || [ -z "$loader" ]; then die "Debian's package of criu has changed its layout: $manual"; fi
  mkdir -p "$new/criu.lib" "$new/criu.doc/copyright" "$new/criu.doc/licenses"
  cp -- "$binary" "$new/criu.bin"
  cp -- "$loader" "$new/criu.lib/"
  "$loader" --library-path "$(dirname "$loader")" --list "$binary" >"$work/needed"
  awk '/=> \//{print $3}' "$work/needed" >"$work/libraries"
  while read -r library; do
    # A library of this system would tie the folder to it.
    [ "${library#"$work/root"}" != "$library" ] || die "$library is not part of the download: please report this"
    cp -L -- "$library" "$new/criu.lib/"
  done <"$work/libraries"
  cat >"$new/criu" <<WRAPPER
#!/bin/sh
# Runs the CRIU beside this file with the C library it was built for.
d=\$(dirname "\$(readlink -f "\$0")")
exec "\$d/criu.lib/$(basename "$loader")" --library-path "\$d/criu.lib" "\$d/criu.bin" "\$@"
WRAPPER
  chmod 755 "$new/criu" "$new/criu.bin"

  # The files that were copied, their packages, and what the authors of these ask for.
  {
    echo "criu.bin ${binary#"$work/root"}"
    for path in "$loader" $(cat "$work/libraries"); do echo "criu.lib/${path##*/} ${path#"$work/root"}"; done
  } | sort -u | while read -r path library; do
    owner=$(awk -v path="$library" '$1 == path { print $2, $3, $4, $5; exit }' "$work/owners")
    [ -n "$owner" ] || die "no package of the download has $library: please report this"
    echo "$path $owner"
    local copyright=$work/root/usr/share/doc/${owner%% *}/copyright
    [ -r "$copyright" ] || die "the package ${owner%% *} names no licence: please report this"
    cp -L -- "$copyright" "$new/criu.doc/copyright/${owner%% *}"
  done >"$work/packages"
  { echo '# file package version source source-version'; cat "$work/packages"; } >"$new/criu.doc/packages.txt"
  # Debian's files name the common licences by their path and do not repeat them.
  local name
  grep -ohE '/usr/share/common-licenses/[A-Za-z0-9.+-]*[A-Za-z0-9]' "$new"/criu.doc/copyright/* | sort -u | while read -r path; do
    # Without a number it is a link to the newest.
    name=$(basename -- "$(readlink -f "$path")")
    [ -r "$path" ] || die "the licence $path is not on this machine: install base-files"
    [ -e "$new/criu.doc/licenses/$name" ] || cp -L -- "$path" "$new/criu.doc/licenses/$name"
  done
  [ -s "$new/criu.doc/licenses/GPL-2" ] || die "the text of CRIU's licence was not found: please report this"

  local version
  version=$(version_of "$new/criu" || true)
  new_enough "$version" || die "the CRIU just unpacked says it is version '${version:-nothing, it does not run}', at least $need is needed: $manual"
  rm -rf -- "$out/criu" "$out/criu.bin" "$out/criu.lib" "$out/criu.doc"
  # The wrapper last: DIR/criu exists only when all it needs does.
  mv -- "$new/criu.lib" "$new/criu.bin" "$new/criu.doc" "$out/"
  mv -- "$new/criu" "$out/criu"
  say "CRIU $version is at $out/criu"
}

# The sources of exactly what DIR holds, also where DIR was made earlier.
download_sources() {
  local wanted
  rm -rf -- "$out/criu.source"
  mkdir -p "$new/criu.source"
  mapfile -t wanted < <(sed '/^#/d' "$out/criu.doc/packages.txt" | awk '{ print $4 "=" $5 }' | sort -u)
  say "downloading the sources of ${#wanted[@]} packages"
  (cd "$new/criu.source" && "${apt[@]}" -oAPT::Sandbox::User=root source --download-only "${wanted[@]}" >/dev/null) \
    || die "cannot download the sources of ${wanted[*]}: see the lines above. Debian $suite moves on: if it has newer versions by now, delete $out and run this again"
  # Last: it says that the others are whole.
  cp -- "$out/criu.doc/packages.txt" "$new/criu.source/"
  mv -- "$new/criu.source" "$out/"
  say "the sources are in $out/criu.source"
}

[ -n "$complete" ] || unpack
has_sources || download_sources
