#!/usr/bin/env bash
# systemd.sh [--binary FILE]: tests config/rekindle@.service with a real systemd: the unit is started, reloaded, killed,
# made to hang, stopped with a slow store, and completes. Each time a counting job continues where it was.
#
# systemd is process 1 of a PID namespace, on a layer over this machine's root. Nothing of it is left. Needs root,
# systemd, overlayfs, python3 and REKINDLE_CRIU.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
fail() { printf 'systemd: FAILED: %s\n' "$*" >&2; exit 1; }

# ---- inside: this runs as the only unit that is started at boot ----
if [ "${1:-}" = --inside ]; then
  trap 'echo "ended with $?" >/out/rc; systemctl exit 0' EXIT
  unit=rekindle@count log=/var/lib/rekindle/count/log/stdout.log dropins=/run/systemd/system/rekindle@count.service.d
  value() { systemctl show -P "$1" "$unit"; }
  counted() { local n; n=$(sed -n '$s/^n //p' "$log" 2>/dev/null || true); echo "${n:-0}"; }
  until_() { # WHAT COMMAND...
    local what=$1 end=$((SECONDS + 90))
    shift
    until "$@"; do
      [ $SECONDS -lt $end ] || { systemctl status "$unit" --no-pager -l; fail "waited in vain until $what"; }
      sleep 0.1
    done
  }
  # shellcheck disable=SC2317,SC2329 # called by until_
  beyond() { [ "$(counted)" -gt "$1" ]; }
  goes_on() { until_ 'it counts on' beyond $(($(counted) + 2)); }
  # shellcheck disable=SC2053 # a pattern
  says() { [[ $(value StatusText) == $1 ]]; }
  is() { [ "$(value "$1")" = "$2" ]; }
  dropin() { mkdir -p "$dropins"; printf '[Service]\nRestartSec=100ms\n%s\n' "$1" >"$dropins/test.conf"; systemctl daemon-reload; }

  dropin ''
  systemctl start "$unit"
  says 'running*' || fail "start came back, and it says: $(value StatusText)"
  goes_on
  # That of rekindle's own files is another matter: they are its alone.
  [ "$(cat /out/umask)" = 0o22 ] || fail "the job's umask is $(cat /out/umask)"
  open=$(find /var/lib/rekindle -ignore_readdir_race ! -type l -perm /077 ! -name 'reaper-*')
  [ -z "$open" ] || fail "others may read $open"
  systemctl reload "$unit"
  until_ 'there is an image' says 'running; image 1 taken just now,*'
  goes_on

  kill -9 "$(value MainPID)"
  until_ 'it is started again' is NRestarts 1
  until_ 'it runs again' says 'running*'
  goes_on

  dropin 'WatchdogSec=10s'
  systemctl restart "$unit"
  until_ 'it was fed' says 'running*'
  main=$(value MainPID)
  [ "$main" -gt 1 ] || fail "it has no process: $main"
  kill -STOP "$main"
  until_ 'the watchdog has it started again' is NRestarts 1
  until_ 'it runs again' says 'running*'
  goes_on

  # Storing the image takes longer than systemd waits by itself.
  dropin $'TimeoutStopSec=5s\nEnvironment=REKINDLE_STORE_PERSIST_RATE=1MiB'
  systemctl restart "$unit"
  until_ 'it runs again' says 'running*'
  # No image contains any of this data yet.
  before=$(date +%s)
  : >/out/grow
  goes_on
  systemctl stop "$unit"
  took=$(($(date +%s) - before))
  [ "$took" -ge 8 ] || fail "the stop took $took s: it was not slow, so nothing was tested"
  is Result success || fail "the slow stop: $(value Result)"
  # The journal reads what the service has written in its own time.
  # shellcheck disable=SC2317,SC2329 # called by until_
  stored() { [[ $(journalctl -u "$unit" -o cat --no-pager | tail -n 3) == *'was stored in'* ]]; }
  until_ 'the last image is in the store' stored

  dropin ''
  systemctl start "$unit"
  goes_on
  : >/out/finish
  until_ 'it ends' is ActiveState inactive
  is Result success || fail "the end: $(value Result)"
  # Each number once, in order: nothing was lost, and nothing was done twice.
  last=$(counted)
  seq "$last" | sed 's/^/n /' | cmp - "$log" || fail 'the output is not that of an undisturbed run'
  # As at the next boot: the job has completed, so there is nothing to do.
  systemctl start "$unit" || fail "a completed job makes the unit fail: $(value Result)"
  until_ 'it ends' is ActiveState inactive
  is Result success || fail "the unit of a completed job: $(value Result)"
  [ "$(counted)" = "$last" ] || fail 'a completed job was run again'
  echo "systemd: ok, counted to $last"
  exit
fi

binary=${CARGO_TARGET_DIR:-target}/debug/rekindle
[ "${1:-}" != --binary ] || binary=$2
binary=$(readlink -f "$binary")
: "${REKINDLE_CRIU:?names no CRIU}"

# ---- outside: the root, and systemd in it ----
work=${REKINDLE_SYSTEMD_INSIDE:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rm -rf -- "$work"' EXIT
  mkdir "$work/out" "$work/ground"
  status=0
  REKINDLE_SYSTEMD_INSIDE=$work timeout -k 5 600 unshare --mount --pid --fork --kill-child --cgroup --uts \
    --propagation private integration/systemd.sh --binary "$binary" >"$work/log" 2>&1 || status=$?
  cat "$work/out/said" 2>/dev/null || true
  [ -f "$work/out/rc" ] || { tail -n 30 "$work/log"; fail "systemd did not come up (status $status)"; }
  [ "$(cat "$work/out/rc")" = 'ended with 0' ] || fail 'see the lines above'
  exit 0
fi
ground=$work/ground root=$work/ground/root
mount -t tmpfs -o mode=755 tmpfs "$ground"
mkdir "$ground/upper" "$ground/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$ground/upper,workdir=$ground/work" "$root"
# As in container managers: this systemd must not change the kernel's settings.
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/out" "$root/opt/tested" "$root/etc/rekindle/jobs"
mount --bind "$work/out" "$root/out"
# The layer below does not contain files of other file systems.
install -m 755 "$binary" "$root/opt/tested/rekindle"
criu=$REKINDLE_CRIU
[ -x "$root$criu" ] || { cp -rL -- "$(dirname -- "$criu")" "$root/opt/tested/criu.d"; criu=/opt/tested/criu.d/${criu##*/}; }
install -m 755 integration/systemd.sh "$root/opt/tested/systemd.sh"
sed 's#/usr/local/bin/rekindle#/opt/tested/rekindle#' config/rekindle@.service >"$root/etc/systemd/system/rekindle@.service"
cat >"$root/opt/tested/job.py" <<'END'
import os, time
open("/out/umask", "w").write(oct(os.umask(0o22)))
n, ballast = 0, b""
while not os.path.exists("/out/finish"):
    n += 1
    print("n", n, flush=True)
    if not ballast and os.path.exists("/out/grow"):
        ballast = os.urandom(12 << 20)
    time.sleep(0.1)
END
cat >"$root/etc/rekindle/jobs/count.toml" <<END
version = 1
[job]
command = ["/usr/bin/python3", "-S", "/opt/tested/job.py"]
directory = "/opt/tested"
[snapshot]
interval = "off"
[log]
level = "info"
[store]
min-free = "1MiB"
compression = "none"
[restart]
min-uptime = "1ms"
[criu]
path = "$criu"
END
cat >"$root/etc/systemd/system/tested.service" <<'END'
[Service]
Type=oneshot
ExecStart=/bin/bash /opt/tested/systemd.sh --inside
StandardOutput=file:/out/said
StandardError=inherit
END
cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=tested.service \
  --log-target=console --show-status=0 </dev/null
