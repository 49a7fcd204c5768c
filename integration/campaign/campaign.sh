#!/usr/bin/env bash
# campaign.sh: kills jobs, their children, their supervisors and CRIU at random moments, fills the disk, loses memory
# and machines. It fails if work was lost or is wrong, a job was started from the beginning, an image was marked as bad,
# or anything is left behind.
#
#   integration/campaign/campaign.sh [--kills N] [--jobs N] [--seed N] [--gpu] [--rekindle FILE] [--dir DIR] [--logs DIR]
#                                    [--minutes M] [--python FILE] [--debug]
#
# --kills    number of faults, 60 by default
# --jobs     number of jobs at the same time, 2 by default; the faults are spread over them
# --seed     repeat the faults of a run, as far as the clock allows
# --debug    let rekindle log at level debug
# --gpu      give the jobs a tensor of 512 MiB on a GPU (needs PyTorch in --python, /usr/bin/python3 by default)
# --dir      a folder on a disk, /var/tmp by default
# --logs     where the logs of a failed job are copied
# --minutes  start no fault after this time
#
# Needs root and CRIU 4.2 (REKINDLE_CRIU, or .deps/criu from scripts/deps.sh). docs/internals/campaign.md has the results.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
[ "$(id -u)" -eq 0 ] || { echo 'campaign: run it as root' >&2; exit 69; }
rekindle=$target/debug/rekindle
[ -x "$rekindle" ] || rekindle=$target/release/rekindle
if [ -z "${REKINDLE_CRIU:-}" ]; then
  "$root/scripts/deps.sh" criu
  export REKINDLE_CRIU=$root/.deps/criu/criu
fi
# -B: no folders of byte code in the working tree.
exec python3 -B "$root/integration/campaign/campaign.py" --rekindle "$rekindle" "$@"
