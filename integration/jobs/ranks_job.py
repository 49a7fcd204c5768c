"""Ranks that train one model with all-reduces, and send each other tensors: NCCL on one GPU a rank.

    ranks_job.py --out DIR [--ranks N] [--steps N] [--gib N] [--port N]

DIR gets metrics.jsonl with a line for each step and weights.bin at the end, both of rank 0; the same bits in every run.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def rank(args):
    import torch
    import torch.distributed as dist

    me = int(os.environ["RANK"])
    torch.cuda.set_device(me)
    torch.manual_seed(7)
    dist.init_process_group("nccl")
    print(f"rank {me}: NCCL {torch.cuda.nccl.version()}", flush=True)
    bandwidth(dist, torch, me, "at the start")
    more = torch.ones(int(args.gib * 2**30), dtype=torch.uint8, device="cuda") if args.gib else None
    weights = torch.randn(512, 512, device="cuda")
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / f"metrics{'' if me == 0 else me}.jsonl", "a") as log:
        for step in range(args.steps):
            batch = torch.full((512, 512), (step % 7 + me) / 64, device="cuda")
            gradient = (weights @ batch).tanh()
            dist.all_reduce(gradient)
            weights -= 0.01 * gradient
            other = torch.empty_like(weights)
            ops = [dist.P2POp(dist.isend, weights, (me + 1) % args.ranks)]
            ops.append(dist.P2POp(dist.irecv, other, (me - 1) % args.ranks))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            # All have the same weights.
            same = bool(torch.equal(other, weights))
            digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16]
            log.write(json.dumps({"step": step, "weights": digest, "same": same}) + "\n")
            log.flush()
            time.sleep(0.1)
    if more is not None and int(more[-1]) != 1:
        sys.exit("the memory besides the weights has changed")
    bandwidth(dist, torch, me, "at the end")
    if me == 0:
        (args.out / "weights.bin").write_bytes(weights.cpu().numpy().tobytes())
    dist.destroy_process_group()


def bandwidth(dist, torch, me, when):
    memory = torch.ones(64 * 2**20, device="cuda")
    dist.all_reduce(memory)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(10):
        dist.all_reduce(memory)
    torch.cuda.synchronize()
    rate = 10 * memory.numel() * memory.element_size() / (time.monotonic() - began) / 1e9
    if me == 0:
        print(f"all-reduce of 256 MiB {when}: {rate:.1f} GB/s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--gib", type=float, default=0)
    parser.add_argument("--port", type=int, default=29431)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    common = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    start = lambda n: subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(n)})
    ranks = [start(n) for n in range(args.ranks)]
    codes = [rank.wait() for rank in ranks]
    sys.exit(next((code & 0xFF for code in codes if code), 0))


main()
