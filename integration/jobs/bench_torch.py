"""A training loop for measurements: the same bits every time, and the clock beside every step.

    bench_torch.py OUT --gib N [--still SHARE] [--pause FILE] [--resident] [--ranks N --backend gloo|nccl --port P]

Appends a line a step to OUT: its number, the time of day at its end, its length in seconds, the loss as a hexadecimal
float and the sum of the ballast; before the first, a line with 0, the bytes of device memory that PyTorch holds, and
its version. Each step takes batches from pageable host memory to the device, as a data loader does, and rewrites all of
the ballast, except for the share that --still says, which it only reads. While the file of --pause is there, no step begins. With --resident the batches are on the device from the
beginning: how fast pageable memory is copied differs by per cents between two processes that are otherwise the same.
With --ranks it is so many processes, each on a GPU of its own and with all that memory, that train the network together
(DistributedDataParallel); the first one writes OUT.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
# Before torch: it sets what makes cuBLAS deterministic.
from train_torch import ballast, stir

import torch

WIDTH, BATCH, BATCHES = 4096, 512, 8


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--still", type=float, default=0)
    parser.add_argument("--pause")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--backend", choices=["gloo", "nccl"])
    parser.add_argument("--port", type=int)
    return parser.parse_args()


def work(rank, args):
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    ).to(device)  # fmt: skip
    if args.ranks:
        meet = f"tcp://127.0.0.1:{args.port}"
        torch.distributed.init_process_group(args.backend, meet, rank=rank, world_size=args.ranks)
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    chunks = ballast(args.gib, device)
    moved = round(len(chunks) * (1 - args.still))
    data = torch.randn(BATCHES, BATCH, WIDTH)
    if args.resident:
        data = data.to(device)
    labels = (torch.arange(BATCH) % 10).to(device)

    def train():
        losses = []
        for batch in data:
            loss = torch.nn.functional.cross_entropy(model(batch.to(device)), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        still = sum(chunk.sum().item() for chunk in chunks[moved:])
        return torch.stack(losses).sum().item(), (stir(chunks[:moved]) + still) % 2**64

    with open(args.out if rank == 0 else os.devnull, "a", buffering=1) as out:
        step = 0
        while True:
            while args.pause and os.path.exists(args.pause):
                time.sleep(0.001)
            began = time.perf_counter()
            loss, total = train()
            step += 1
            if step == 1:
                print(0, torch.cuda.memory_reserved(), torch.__version__, file=out)
            print(step, f"{time.time():.6f} {time.perf_counter() - began:.6f} {loss.hex()} {total:016x}", file=out)


def main():
    args = options()
    if args.ranks:
        torch.multiprocessing.spawn(work, (args,), nprocs=args.ranks)
    else:
        work(0, args)


if __name__ == "__main__":
    main()
