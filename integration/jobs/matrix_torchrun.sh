#!/usr/bin/env bash
# As users of a cluster start it: a shell script that runs torchrun and pipes its output.
#
#   matrix_torchrun.sh MODE --port N --out DIR [ARGS of matrix_torch.py]
set -euo pipefail
mode=$1 port=$3 out=$5
shift 3
here=$(dirname -- "${BASH_SOURCE[0]}")
mkdir -p -- "$out"
echo "begins with $(nproc) processors"
# The ranks use torchrun's own store, because torchrun sets TORCHELASTIC_USE_AGENT_STORE.
python3 -m torch.distributed.run --nnodes 1 --nproc_per_node 2 --master_addr 127.0.0.1 --master_port "$port" \
  "$here/matrix_torch.py" "$mode" --port "$port" "$@" 2>&1 | tee -a -- "$out/train.log"
echo 'ends'
