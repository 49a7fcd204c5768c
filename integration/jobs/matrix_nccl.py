"""Two ranks over NCCL that talk in the way that the mode names; every mode computes the same bits every time.

    matrix_nccl.py MODE --out DIR [--gib N]

Started by torchrun, one rank a GPU. Each rank has further GPU memory, which every step rewrites.

    graph       all-reduce in a CUDA graph
    pipeline    rank 0 sends activations to rank 1, which sends gradients back
    late        one rank, another one in each step, comes up to 0.6 s late to the all-reduce, in which its peer waits on the GPU; with
                --pause 0 nobody is late
    ahead       300 all-reduces are queued before anybody waits for one
    uneven      all_to_all with parts of different sizes, which change in every step
    registered  memory of ncclMemAlloc, registered with the communicator
    alone       one rank, no NCCL: what the others are compared with
"""

import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
from train_torch import ballast, stir

import torch
from matrix_steps import Steps, digest, options
from torch import distributed

MODES = ["graph", "pipeline", "late", "ahead", "uneven", "registered", "alone"]
SIZE = 1 << 20
AHEAD = 300


def values(rank, device, size=SIZE):
    return torch.randn(size, generator=torch.Generator().manual_seed(7 + rank)).to(device)


def mixed(tensor, number):
    """Other values than before, of the same size: a sum that was left out or done twice is seen."""
    return tensor.mul_(0.5).add_(0.001 * (number % 97))


def graph(rank, device, args):
    data = values(rank, device)
    for _ in range(3):
        distributed.all_reduce(data)
        mixed(data, 0)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for number in range(4):
            distributed.all_reduce(data)
            mixed(data, number)

    def step(_number):
        captured.replay()
        return data

    return step


def pipeline(rank, device, args):
    torch.manual_seed(7 + rank)
    layer = torch.nn.Linear(512, 512).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step(number):
        optimizer.zero_grad()
        for part in range(4):
            if rank == 0:
                out = layer(torch.full((64, 512), 0.01 * (number % 13 + part), device=device))
                distributed.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                distributed.recv(gradient, 1)
                out.backward(gradient)
            else:
                received = torch.empty(64, 512, device=device)
                distributed.recv(received, 0)
                received.requires_grad_()
                layer(received).square().mean().backward()
                distributed.send(received.grad, 0)
        optimizer.step()
        return layer.weight

    return step


def late(rank, device, args):
    data = values(rank, device)

    def step(number):
        choice = random.Random(number)
        if choice.randrange(2) == rank and args.pause:
            time.sleep(choice.random() * 0.6)
        distributed.all_reduce(data)
        return mixed(data, number)

    return step


def ahead(rank, device, args):
    data = values(rank, device)

    def step(number):
        for _ in range(AHEAD):
            distributed.all_reduce(data)
            mixed(data, number)
        return data

    return step


def uneven(rank, device, args):
    data = values(rank, device)

    def step(number):
        first = 1000 + 7919 * (number % 50)
        # Rank 0 keeps `first` and sends the rest; rank 1 the other way round.
        sent = [first, SIZE - first]
        received = [first, first] if rank == 0 else [SIZE - first, SIZE - first]
        out = torch.empty(sum(received), device=device)
        distributed.all_to_all_single(out, data, received, sent)
        data.mul_(0.999).add_(out.double().mean().float())
        return data

    return step


def registered(rank, device, args):
    backend = distributed.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        data = torch.empty(SIZE, device=device)
    data.copy_(values(rank, device))
    backend.register_mem_pool(pool)

    def step(number):
        distributed.all_reduce(data)
        return mixed(data, number)

    step.pool = pool
    return step


def alone(rank, device, args):
    data = values(rank, device)
    return lambda number: mixed(data, number)


def main():
    args = options(*MODES)
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    if args.mode != "alone":
        distributed.init_process_group("nccl", device_id=device)
        distributed.all_reduce(torch.ones(1, device=device))
    chunks = ballast(float(os.environ.get("BALLAST_GIB", "0.25")), device)
    step, steps = globals()[args.mode](rank, device, args), Steps(args, rank)
    while not steps.done(digest(step(steps.number).detach().cpu().numpy().tobytes()), f"{stir(chunks):016x}"):
        pass
    # A graph with calls of NCCL keeps its communicator: the end of the group would wait for it.
    del step
    if args.mode != "alone":
        distributed.destroy_process_group()


if __name__ == "__main__":
    # cuBLAS computes the same every time with this only.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
