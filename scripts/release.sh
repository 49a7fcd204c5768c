#!/usr/bin/env bash
# release.sh [--binary FILE] [--criu DIR] [--out DIR] [--fast]: writes all files of a release to dist/rekindle-VERSION.
# It uploads nothing.
#   --binary, --fast  as in scripts/package.sh
#   --criu DIR        use what `scripts/install-criu.sh --bundle --sources DIR` wrote, instead of downloading it now
#   --out DIR         write to this folder instead of dist/rekindle-VERSION
#
# First it checks that CHANGELOG.md begins with this version and its date, that nothing is under "Unreleased", that
# Cargo.lock is current, and that git has no changes. Then it makes the packages (scripts/package.sh), the list of their
# contents (CycloneDX, from cargo and the bundle), the sources that CRIU's licence requires, and SHA256SUMS of all of
# them.
set -euo pipefail
export LC_ALL=C TZ=UTC
umask 022

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf 'release: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

arguments=() binary='' bundle='' out=''
while [ $# -gt 0 ]; do
  case $1 in
    --binary | --criu | --out) [ $# -gt 1 ] || { say "$1 needs a value"; exit 2; } ;;&
    --binary) binary=$(realpath -- "$2"); shift 2 ;;
    --criu) bundle=$(realpath -- "$2"); shift 2 ;;
    --out) out=$(realpath -m -- "$2"); shift 2 ;;
    --fast) arguments+=(--fast); shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) say "unknown argument '$1': --help lists them"; exit 2 ;;
  esac
done
[ -z "$binary" ] || arguments+=(--binary "$binary")

cd -- "$root"

# ---- what is released ----
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
[ -n "$version" ] || die 'Cargo.toml has no version'
# The first heading that has something below it.
heading=$(awk '/^## / { heading = $0; next } heading && NF { print heading; exit }' CHANGELOG.md)
case $heading in
  "## $version - "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]) ;;
  *) die "CHANGELOG.md begins with '$heading', and Cargo.toml has version $version: name that section '## $version - $(date +%F)', or change the version" ;;
esac
target=x86_64-unknown-linux-gnu
cargo metadata --quiet --locked --offline --format-version 1 --filter-platform "$target" >/dev/null \
  || die 'Cargo.lock is not current, or crates are missing: run cargo fetch, then commit Cargo.lock if it changed'
if [ -e .git ]; then
  changes=$(git status --porcelain)
  [ -z "$changes" ] || die "git has changes that are not committed: $(head -n 3 <<<"$changes" | tr '\n' ' ')"
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
fi
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(stat -c %Y Cargo.toml)}

# The packages offer to send the sources of CRIU: somebody must be there who does.
if [ -z "${DEBFULLNAME:-}" ] || [ -z "${DEBEMAIL:-}" ]; then
  die "set DEBFULLNAME and DEBEMAIL: the packages name who made them, and who sends CRIU's sources to those who ask"
fi

out=${out:-dist/rekindle-$version}
mkdir -p -- "$out"
out=$(realpath -- "$out")
[ -z "$(ls -A -- "$out")" ] || die "$out is not empty: remove it, then run this again"

# ---- its parts ----
if [ -z "$bundle" ]; then
  # Not .deps/bundle, which may be old: its libraries could lack security fixes, and Debian may have newer sources only.
  work=$(mktemp -d)
  trap 'rm -rf -- "$work"' EXIT
  bundle=$work/bundle
  scripts/install-criu.sh --bundle --sources "$bundle"
fi
cmp -s "$bundle/criu.doc/packages.txt" "$bundle/criu.source/packages.txt" \
  || die "$bundle has no sources, or those of other versions: run scripts/install-criu.sh --bundle --sources $bundle"
tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go+r-w,a+X --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
  --transform "s|^\.|rekindle-$version-criu-source|" -C "$bundle/criu.source" -cf "$out/rekindle-$version-criu-source.tar" .
scripts/package.sh "${arguments[@]}" --criu "$bundle" --out "$out" >/dev/null

compiler=$(tar -xzOf "$out/rekindle-$version-x86_64-linux-gnu.tar.gz" "rekindle-$version/bin/rekindle" | strings -a \
  | sed -n 's/^rustc version \([0-9.]*\).*/\1/p' | head -n 1 || true)
[ -n "$compiler" ] || die 'the executable does not say which rustc made it'
PATH=/usr/bin:$PATH python3 scripts/sbom.py --version "$version" --bundle "$bundle" --rustc "$compiler" \
  --tree <(cargo tree --quiet --locked --offline --edges normal --target "$target" --prefix none --format '{p}' --no-dedupe) \
  < <(cargo metadata --quiet --locked --offline --format-version 1 --filter-platform "$target") >"$out/rekindle-$version.cdx.json"

# A file of an earlier version, or half of one, would be uploaded with the others.
cd -- "$out"
expected=("rekindle_${version}_amd64.deb" "rekindle-$version-x86_64-linux-gnu.tar.gz" "rekindle-$version.cdx.json"
  "rekindle-$version-criu-source.tar")
for file in "${expected[@]}" rekindle-*.whl; do [ -s "$file" ] || die "$out/$file is missing or empty"; done
sha256sum -- * >.SHA256SUMS
mv -- .SHA256SUMS SHA256SUMS
sha256sum --quiet --check SHA256SUMS || die 'the files do not have the checksums that were just written'
ls -l -- "$out" >&2
say "rekindle $version is in $out, nothing was uploaded. Try the packages (integration/install.sh), then sign SHA256SUMS, tag the commit v$version, and publish all files together"
