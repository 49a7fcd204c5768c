"""One rank of a training with DDP and gloo on processors; computes the same bits every time.

    gloo.py OUT [--steps N] [--until FILE] [--pause SECONDS]

Appends a line to OUT/RANK for each step: its number and the loss (all its bits). Ends after N steps, or with the step in
which a rank sees FILE; then the last line is the digest of the weights.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 96


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until")
    parser.add_argument("--pause", type=float, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    me, ranks = dist.get_rank(), dist.get_world_size()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with open(os.path.join(args.out, str(me)), "a", buffering=1) as out:
        step, ends = 0, False
        while not ends:
            step += 1
            data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * ranks + me))
            loss = model(data).sub(data.sum(1, keepdim=True).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.write(f"{step} {loss.item().hex()}\n")
            time.sleep(args.pause)
            # All end with the same step.
            flag = torch.tensor(int(step == args.steps or bool(args.until and os.path.exists(args.until))))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            ends = bool(flag)
        digest = hashlib.sha256()
        for weights in model.parameters():
            digest.update(weights.detach().numpy().tobytes())
        out.write(f"weights {digest.hexdigest()}\n")
    # No rank closes its connections while another still waits for the end of the last sum.
    dist.barrier()


main()
