"""One rank of a training over several machines, as torchrun starts it; computes the same bits every time.

    group_job.py ddp|fsdp|bandwidth --out DIR [--gib N] [--steps N]

Appends a line to DIR/RANK for each step: its number, the loss (all its bits), and the time of day; after --steps the
digest of the rank's weights. `bandwidth` writes one line: the GB/s (bus bandwidth) of an all-reduce of 256 MiB.
"""

import argparse
import faulthandler
import hashlib
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 2048


class Block(nn.Module):
    """16 MiB, with gradients 32."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


def network(kind, gib, ranks):
    torch.manual_seed(7)
    count = max(2, int(gib * 2**30 / (2 * 4 * WIDTH * WIDTH)))
    blocks = nn.Sequential(*(Block().cuda() for _ in range(count * (ranks if kind == "fsdp" else 1))))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(blocks)
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(blocks)
    torch.cuda.empty_cache()
    return blocks


def train(args, me, ranks, out):
    model = network(args.kind, args.gib, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(1, args.steps + 1):
        data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number * ranks + me)).cuda()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.write(f"{number} {loss.item().hex()} {time.time():.4f}\n")
    digest = hashlib.sha256()
    for weights in model.parameters():
        local = weights.to_local() if hasattr(weights, "to_local") else weights
        digest.update(local.detach().cpu().numpy().tobytes())
    out.write(f"{args.steps + 1} {digest.hexdigest()} {time.time():.4f}\n")


def bandwidth(ranks, out):
    tensor = torch.ones(64 << 20, device="cuda")
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / 10
    out.write(f"{2 * (ranks - 1) / ranks * tensor.nbytes / took / 1e9:.3f}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ddp", "fsdp", "bandwidth"])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    if "GROUP_JOB_STACKS" in os.environ:
        faulthandler.dump_traceback_later(int(os.environ["GROUP_JOB_STACKS"]), repeat=True)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    me, ranks = dist.get_rank(), dist.get_world_size()
    with open(args.out / str(me), "a", buffering=1) as out:
        if args.kind == "bandwidth":
            bandwidth(ranks, out)
        else:
            train(args, me, ranks, out)
    dist.destroy_process_group()


main()
