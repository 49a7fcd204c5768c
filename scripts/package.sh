#!/usr/bin/env bash
# package.sh [--binary FILE] [--out DIR] [--fast] [deb] [tar]: makes a Debian package and a tarball (without arguments
# both) in dist/.
#   --binary FILE  of this executable, instead of building one for release
#   --out DIR      there, instead of dist/
#   --fast         compress little, for a test
#
# The executable needs the C library, with libgcc, and nothing else: TLS, compression and hashing are in it, and so are
# the job's init and the interposer. The C library cannot be: libcuda.so.1 and NVML are opened while rekindle runs, and
# need the one of the machine, from 2.34 on (Debian 12, Ubuntu 22.04, RHEL 9) where it is made on Debian 12. The same
# source and toolchain give the same bytes: times are those of the last commit (SOURCE_DATE_EPOCH, where it is set), and
# paths of this machine stay out. DEBFULLNAME and DEBEMAIL name who made it.
set -euo pipefail
export LC_ALL=C TZ=UTC
umask 022

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf 'package: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

binary='' out=$root/dist level=6 kinds=()
while [ $# -gt 0 ]; do
  case $1 in
    --binary | --out) [ $# -gt 1 ] || { say "$1 needs a value"; exit 2; } ;;&
    --binary) binary=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --fast) level=0; shift ;;
    deb | tar) kinds+=("$1"); shift ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) say "unknown argument '$1': --help has those there are"; exit 2 ;;
  esac
done
[ ${#kinds[@]} -gt 0 ] || kinds=(deb tar)

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct 2>/dev/null || stat -c %Y "$root/Cargo.toml")
fi
export SOURCE_DATE_EPOCH

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

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
chmod 755 "$work"

# tree DIR PREFIX: what both have, below DIR/PREFIX.
tree() {
  local dir=$1 prefix=$2 base
  base=$dir$prefix
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
  # The newest CRIU is in no release of Debian and Ubuntu yet.
  install -D -m 755 "$root/scripts/install-criu.sh" "$base/share/rekindle/install-criu.sh"
  local doc=$base/share/doc/rekindle
  mkdir -p "$doc/docs" "$doc/examples"
  install -m 644 "$root"/{README,SECURITY,CHANGELOG}.md "$root/NOTICE" "$doc/"
  install -m 644 "$root"/docs/*.md "$doc/docs/"
  install -m 644 "$root/config/rekindle.service" "$doc/examples/"
  cp -r --no-preserve=all "$root/examples/deploy" "$doc/examples/"
  { echo 'What the executable contains, with the licences of each.'; echo
    (cd "$root" && cargo tree --quiet --offline --edges normal --prefix none --format '{p}  {l}' --no-dedupe) \
      | sed 's/ (\/[^)]*)//; s/ (proc-macro)//' | sort -u | grep -v '^rekindle '; } >"$doc/third-party.txt"
}

# Times and owners of files are not those of whoever makes the package.
settle() { find "$1" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +; }

deb() {
  local dir=$work/deb name=rekindle_${version}_amd64.deb
  command -v dpkg-shlibdeps >/dev/null || die 'a Debian package needs dpkg-dev (apt-get install dpkg-dev)'
  tree "$dir" /usr
  install -D -m 644 "$root/config/rekindle@.service" "$dir/lib/systemd/system/rekindle@.service"
  sed -i 's#/usr/local/bin/rekindle#/usr/bin/rekindle#' "$dir/lib/systemd/system/rekindle@.service" \
    "$dir/usr/share/doc/rekindle/examples/rekindle.service"
  install -D -m 644 "$root/config/rekindle.toml" "$dir/etc/rekindle/rekindle.toml"
  install -d -m 755 "$dir/etc/rekindle/jobs"
  local doc=$dir/usr/share/doc/rekindle who="${DEBFULLNAME:-Rekindle maintainers} <${DEBEMAIL:-maintainers@rekindle.example}>"
  cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: rekindle

Files: *
Copyright: 2026 the rekindle authors
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0. What the executable contains of others is in
 /usr/share/doc/rekindle/third-party.txt, with the licences of each.
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
Recommends: criu (>= 4.0)
Suggests: slirp4netns
Section: admin
Priority: optional
Installed-Size: $(du -k --apparent-size -s --exclude=DEBIAN "$dir" | cut -f 1)
Description: keeps long GPU jobs alive
 Launches a job, takes an image of all of it on an interval, GPU memory
 included, and brings it back from the newest good image when it crashes, is
 killed, or the machine goes down. The job is not changed and does not know.
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
  # `tar -xJf FILE -C /usr/local --strip-components=1` installs it.
  tree "$dir" "/$top"
  install -D -m 644 "$root/config/rekindle@.service" "$dir/$top/lib/systemd/system/rekindle@.service"
  install -m 644 "$root/config/rekindle.toml" "$dir/$top/share/doc/rekindle/examples/"
  # In a Debian package the file `copyright` names the licence.
  install -m 644 "$root/LICENSE" "$dir/$top/share/doc/rekindle/"
  settle "$dir"
  tar --sort=name --owner=0 --group=0 --numeric-owner --format=gnu -C "$dir" -c "$top" | xz -T1 "-$level" >"$work/$top.tar.xz"
  mv -- "$work/$top.tar.xz" "$out/$top-x86_64-linux-gnu.tar.xz"
  echo "$out/$top-x86_64-linux-gnu.tar.xz"
}

mkdir -p -- "$out"
for kind in "${kinds[@]}"; do
  case $kind in
    deb) deb ;;
    tar) tar_ ;;
  esac
done
