#!/bin/sh
# A launcher of a user's own: starts the ranks of this machine, and ends with the first exit code that is not 0.
#
#   gloo_ranks.sh PER_MACHINE PROGRAM...
set -eu
count=$1
shift
export MASTER_ADDR="$REKINDLE_GROUP_FIRST" MASTER_PORT=29500 WORLD_SIZE=$((REKINDLE_GROUP_SIZE * count))
pids=
local=0
while [ "$local" -lt "$count" ]; do
  RANK=$((REKINDLE_GROUP_RANK * count + local)) LOCAL_RANK=$local "$@" &
  pids="$pids $!"
  local=$((local + 1))
done
for pid in $pids; do
  wait "$pid"
done
