#!/usr/bin/env bash
# package.sh [--binary FILE] [--criu DIR] [--out DIR] [--fast] [deb] [tar] [wheel]: makes a Debian package, a tarball
# and a Python wheel (without arguments all three) in dist/.
#   --binary FILE  package this executable instead of building one
#   --criu DIR     bundle the CRIU that `scripts/install-criu.sh --bundle DIR` wrote, instead of .deps/bundle
#   --out DIR      write to this folder instead of dist/
#   --fast         compress little (for tests)
#
# The packages need only Linux with glibc 2.34 or newer. The bundled CRIU has its own C library. The executable uses the
# machine's C library and libgcc, because it loads libcuda.so.1 and NVML, which need the machine's C library too. It
# contains TLS, compression, hashing, the job's init and the interposer.
# The same source, toolchain and bundle give the same bytes: all times are SOURCE_DATE_EPOCH or that of the last commit,
# and the packages contain no paths of this machine. DEBFULLNAME and DEBEMAIL name the maintainer of the packages.
set -euo pipefail
export LC_ALL=C TZ=UTC
umask 022

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf 'package: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Debian 12, Ubuntu 22.04 and RHEL 9 have this or a newer one.
oldest_glibc=2.34

binary='' bundle='' out=$root/dist level=6 kinds=()
while [ $# -gt 0 ]; do
  case $1 in
    --binary | --criu | --out) [ $# -gt 1 ] || { say "$1 needs a value"; exit 2; } ;;&
    --binary) binary=$2; shift 2 ;;
    --criu) bundle=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --fast) level=0; shift ;;
    deb | tar | wheel) kinds+=("$1"); shift ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) say "unknown argument '$1': --help has those there are"; exit 2 ;;
  esac
done
[ ${#kinds[@]} -gt 0 ] || kinds=(deb tar wheel)

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct 2>/dev/null || stat -c %Y "$root/Cargo.toml")
fi
export SOURCE_DATE_EPOCH

if [ -z "$bundle" ]; then
  bundle=$root/.deps/bundle
  "$root/scripts/install-criu.sh" --bundle "$bundle"
fi
if [ ! -x "$bundle/criu" ] || [ ! -s "$bundle/criu.doc/packages.txt" ]; then
  die "$bundle is not a bundle of CRIU: make one with scripts/install-criu.sh --bundle $bundle"
fi

# Where the tests' package is made from an executable that is there, nothing is built.
if [ -z "$binary" ]; then
  [ "$(uname -m)" = x86_64 ] || die 'rekindle works on x86-64 only'
  cargo_home=${CARGO_HOME:-$HOME/.cargo}
  export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$root=."$'\x1f'"--remap-path-prefix=$cargo_home=/cargo"
  target=x86_64-unknown-linux-gnu
  (cd "$root" && cargo build --quiet --release --locked --bin rekindle --target "$target")
  binary=${CARGO_TARGET_DIR:-$root/target}/$target/release/rekindle
fi
[ -x "$binary" ] || die "$binary is not an executable"
command -v objdump >/dev/null || die 'packages need binutils (apt-get install binutils)'
# The loader refuses a program if one version that it names is missing, whatever the program would call.
needs=$(objdump -p "$binary" | awk '$4 ~ /^GLIBC_/ { print $4 }' | sort -uV | tail -n 1)
[ -n "$needs" ] || die "$binary names no version of the C library: it is not a dynamic executable for Linux"
[ "$(printf '%s\nGLIBC_%s\n' "$needs" "$oldest_glibc" | sort -V | tail -n 1)" = "GLIBC_$oldest_glibc" ] \
  || die "$binary needs $needs, and packages promise to run with GLIBC_$oldest_glibc: build it on Debian 12, or on another system with an older C library"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
chmod 755 "$work"
who="${DEBFULLNAME:-Rekindle maintainers} <${DEBEMAIL:-maintainers@rekindle.example}>"

# tree BASE: what all have, below BASE. Made once.
tree() {
  [ -d "$work/common" ] || common "$work/common"
  mkdir -p "$1"
  cp -a "$work/common/." "$1/"
}

common() {
  local base=$1
  install -D -m 755 "$binary" "$base/bin/rekindle"
  strip --strip-unneeded "$base/bin/rekindle"
  "$binary" man "$base/share/man"
  mkdir -p "$base/share/man/man1" "$base/share/man/man5"
  mv "$base"/share/man/*.1 "$base/share/man/man1/"
  mv "$base"/share/man/*.5 "$base/share/man/man5/"
  gzip -9n "$base"/share/man/man?/*
  local completions=(bash:bash-completion/completions/rekindle zsh:zsh/vendor-completions/_rekindle
    fish:fish/vendor_completions.d/rekindle.fish) entry
  for entry in "${completions[@]}"; do
    mkdir -p "$(dirname -- "$base/share/${entry#*:}")"
    "$binary" completions "${entry%%:*}" >"$base/share/${entry#*:}"
  done
  # Rekindle looks there: crates/criu. Its CRIU, and no other file of the bundle's folder.
  local lib=$base/lib/rekindle/criu doc=$base/share/doc/rekindle
  mkdir -p "$lib" "$doc/docs" "$doc/examples"
  cp -r --no-preserve=all "$bundle/criu.lib" "$lib/"
  install -m 755 "$bundle/criu" "$bundle/criu.bin" "$lib/"
  chmod 755 "$lib"/criu.lib/ld-linux-*
  cp -r --no-preserve=all "$bundle/criu.doc" "$doc/criu"
  offer >"$doc/criu/README"
  install -m 644 "$root"/{README,SECURITY,CHANGELOG}.md "$root/NOTICE" "$doc/"
  install -m 644 "$root"/docs/*.md "$doc/docs/"
  install -D -m 644 -t "$doc/docs/internals" "$root"/docs/internals/*.md
  install -m 644 "$root/config/rekindle.service" "$doc/examples/"
  cp -r --no-preserve=all "$root/examples/deploy" "$doc/examples/"
  { echo 'What the executable contains, with the licences of each.'; echo
    (cd "$root" && cargo tree --quiet --offline --edges normal --prefix none --format '{p}  {l}' --no-dedupe) \
      | sed 's/ (\/[^)]*)//; s/ (proc-macro)//' | sort -u | grep -v '^rekindle '; } >"$doc/third-party.txt"
}

# offer: what GPL and LGPL ask for, beside their texts.
offer() {
  cat <<END
CRIU and its libraries, from Debian, unchanged

The folder lib/rekindle/criu holds the program CRIU, the libraries that it needs, and their C library. rekindle starts CRIU
as a separate program. Each file is under the licence of its package:

  packages.txt   each file, its Debian package and version, and the source package and version that it was built from
  copyright/     who wrote each package, and its licences
  licenses/      the full texts of the licences that those files name; CRIU's is GPL-2

The sources

CRIU and several of the libraries are under the GNU General Public License or the GNU Lesser General Public License. The
complete source of exactly these versions is published together with this release, as the file
rekindle-$version-criu-source.tar. If you did not get that file: for three years after you got this package, $who sends
it to anyone who asks, for no more than the cost of sending it. Debian publishes the same sources: apt-get source
PACKAGE=VERSION, with the names in the last two columns of packages.txt; Debian's snapshot archive keeps all versions.

You may replace any of these files, or all of them: rekindle uses the CRIU that criu.path or REKINDLE_CRIU names.
END
}

# Times and owners of files are not those of whoever makes the package.
settle() { find "$1" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +; }

deb() {
  local dir=$work/deb name=rekindle_${version}_amd64.deb
  command -v dpkg-shlibdeps >/dev/null || die 'a Debian package needs dpkg-dev (apt-get install dpkg-dev)'
  tree "$dir/usr"
  install -D -m 644 "$root/config/rekindle@.service" "$dir/lib/systemd/system/rekindle@.service"
  sed -i 's#/usr/local/bin/rekindle#/usr/bin/rekindle#' "$dir/lib/systemd/system/rekindle@.service" \
    "$dir/usr/share/doc/rekindle/examples/rekindle.service"
  install -D -m 644 "$root/config/rekindle.toml" "$dir/etc/rekindle/rekindle.toml"
  install -d -m 755 "$dir/etc/rekindle/jobs"
  local doc=$dir/usr/share/doc/rekindle
  cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: rekindle

Files: *
Copyright: 2026 the rekindle authors
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0. What the executable contains of others is in
 /usr/share/doc/rekindle/third-party.txt, with the licences of each.

Files: usr/lib/rekindle/criu/*
Copyright: the authors that /usr/share/doc/rekindle/criu/copyright/ names, package by package
License: GPL-2.0-only and others
 CRIU and its libraries, as Debian built them. /usr/share/doc/rekindle/criu/README says where their source is,
 packages.txt beside it lists files and packages. On Debian systems the text of the GNU General Public License, version 2,
 is in /usr/share/common-licenses/GPL-2; all licences are in /usr/share/doc/rekindle/criu/licenses/.
END
  mkdir -p "$dir/usr/share/lintian/overrides"
  cat >"$dir/usr/share/lintian/overrides/rekindle" <<'END'
# CRIU with its own libraries and loader: no release of Debian and Ubuntu has one that is new enough for newer kernels.
rekindle: embedded-library * [usr/lib/rekindle/criu/criu.lib/*]
rekindle: shared-library-is-executable 0755 [usr/lib/rekindle/criu/criu.lib/*]
rekindle: shared-library-lacks-prerequisites [usr/lib/rekindle/criu/criu.lib/*]
END
  printf 'rekindle (%s) unstable; urgency=medium\n\n  * See README.md.\n\n -- %s  %s\n' "$version" "$who" \
    "$(date --date="@$SOURCE_DATE_EPOCH" --rfc-email)" | gzip -9n >"$doc/changelog.gz"

  mkdir -p "$dir/DEBIAN" "$work/shlibs/debian"
  echo /etc/rekindle/rekindle.toml >"$dir/DEBIAN/conffiles"
  printf 'Source: rekindle\n\nPackage: rekindle\nArchitecture: amd64\n' >"$work/shlibs/debian/control"
  local depends
  depends=$(cd "$work/shlibs" && dpkg-shlibdeps -O "-e$dir/usr/bin/rekindle" | sed -n 's/^shlibs:Depends=//p')
  [ -n "$depends" ] || die 'dpkg-shlibdeps found nothing that the executable depends on, which cannot be'
  cat >"$dir/DEBIAN/control" <<END
Package: rekindle
Version: $version
Architecture: amd64
Maintainer: $who
Depends: $depends
Suggests: slirp4netns
Section: admin
Priority: optional
Installed-Size: $(du -k --apparent-size -s --exclude=DEBIAN "$dir" | cut -f 1)
Description: keeps long GPU jobs alive
 Launches a job, takes an image of all of it on an interval, GPU memory
 included, and restores it from the newest good image when it crashes, is
 killed, or the machine goes down. The job is not changed.
 .
 Works for any tree of Linux processes, by CRIU, and for CUDA processes, by
 the checkpoint of the NVIDIA driver (570 or newer).
END
  # The store is the users' work: neither removing nor purging the package touches /var/lib/rekindle, nor jobs that run.
  local script
  for script in postinst postrm; do
    cat >"$dir/DEBIAN/$script" <<'END'
#!/bin/sh
set -e
if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
  systemctl daemon-reload || true
fi
END
    chmod 755 "$dir/DEBIAN/$script"
  done
  (cd "$dir" && find . -path ./DEBIAN -prune -o -type f ! -path './etc/*' -printf '%P\n' | sort | xargs -d '\n' md5sum) \
    >"$dir/DEBIAN/md5sums"
  settle "$dir"
  dpkg-deb --build --root-owner-group -Zxz "-z$level" --threads-max=1 "$dir" "$work/$name" >/dev/null
  mv -- "$work/$name" "$out/"
  echo "$out/$name"
}

tar_() {
  local top=rekindle-$version dir
  dir=$work/tar
  # `tar -xzf FILE -C /usr/local --strip-components=1` installs it. Not xz: small installations cannot unpack that.
  tree "$dir/$top"
  install -D -m 644 "$root/config/rekindle@.service" "$dir/$top/lib/systemd/system/rekindle@.service"
  install -m 644 "$root/config/rekindle.toml" "$dir/$top/share/doc/rekindle/examples/"
  # In a Debian package the file `copyright` names the licence.
  install -m 644 "$root/LICENSE" "$dir/$top/share/doc/rekindle/"
  settle "$dir"
  tar --sort=name --owner=0 --group=0 --numeric-owner --format=gnu -C "$dir" -c "$top" | gzip -n "-$((level > 0 ? 9 : 1))" >"$work/$top.tar.gz"
  mv -- "$work/$top.tar.gz" "$out/$top-x86_64-linux-gnu.tar.gz"
  echo "$out/$top-x86_64-linux-gnu.tar.gz"
}

wheel() {
  local dir=$work/wheel
  tree "$dir/tree"
  install -m 644 "$root/LICENSE" "$dir/tree/share/doc/rekindle/"
  # The system's Python: version managers put a script of one user first in PATH.
  PATH=/usr/bin:$PATH python3 "$root/scripts/wheel.py" --version "$version" --glibc "$oldest_glibc" --level "$level" \
    --tree "$dir/tree" --module "$root/python/rekindle" --readme "$root/README.md" --out "$out"
}

mkdir -p -- "$out"
for kind in "${kinds[@]}"; do
  case $kind in
    deb) deb ;;
    tar) tar_ ;;
    wheel) wheel ;;
  esac
done
