"""Ranks that use NCCL in ways that are hard to stop at one point; each checks what it receives.

    cut_job.py KIND --out FILE --ranks N --port P [--gib N] [--patient] [--own-gpu]

KIND: late      the last rank is late by 100 ms in each step
      ahead     all-reduces are started up to 50 steps ahead of the GPU
      pipeline  each rank sends to the next one, and the last one to the first
      groups    tensor, data and global communicators in one step
      fsdp      FullyShardedDataParallel (fully_shard) over a small transformer
      ddp       DistributedDataParallel
      graph     an all-reduce in a CUDA graph
Each rank has N GiB of GPU memory: the weights and gradients of fsdp and ddp, memory that nothing changes with the others.
With more ranks than GPUs the ranks share them, and use gloo.
--patient: if a rank ends, the others are left alone, as launchers do that look only now and then.
--own-gpu: each rank sees only its own GPU.
Rank 0 appends a line to FILE for each step: its number, and the time of day. Ends with 3 if a result is wrong.
"""

import argparse
import os
import subprocess
import sys
import time


def check(torch, tensor, expected, what):
    if not torch.equal(tensor, torch.full_like(tensor, expected)):
        print(f"{what}: {tensor.flatten()[:4].tolist()} instead of {expected}", file=sys.stderr, flush=True)
        os._exit(3)


class Late:
    def __init__(self, torch, dist, me, ranks, args):
        self.torch, self.dist, self.me, self.ranks = torch, dist, me, ranks
        self.weights = torch.ones(1024, 1024, device="cuda")

    def step(self, number):
        if self.me == self.ranks - 1:
            time.sleep(0.1)
        tensor = self.torch.full((1 << 20,), float(number % 64 + self.me), device="cuda")
        self.weights @ self.weights
        self.dist.all_reduce(tensor)
        check(self.torch, tensor, self.ranks * (number % 64) + sum(range(self.ranks)), "late")


class Ahead:
    def __init__(self, torch, dist, me, ranks, args):
        self.torch, self.dist, self.me, self.ranks = torch, dist, me, ranks
        self.weights = torch.full((2048, 2048), 1e-4, device="cuda")
        self.counter = torch.zeros(1 << 20, device="cuda")
        self.events = []

    def step(self, number):
        one = self.torch.ones_like(self.counter)
        self.weights @ self.weights
        self.dist.all_reduce(one)
        self.counter += one
        event = self.torch.cuda.Event()
        event.record()
        self.events.append(event)
        if len(self.events) > 50:
            self.events.pop(0).synchronize()
        if number % 500 == 0:
            check(self.torch, self.counter, self.ranks * number, "ahead")


class Pipeline:
    def __init__(self, torch, dist, me, ranks, args):
        self.torch, self.dist, self.me, self.ranks = torch, dist, me, ranks
        self.weights = torch.full((1024, 1024), 1e-4, device="cuda")

    def step(self, number):
        for micro in range(4):
            tensor = self.torch.zeros(1 << 18, device="cuda")
            if self.me == 0:
                tensor += number % 1000 + micro
            else:
                self.dist.recv(tensor, self.me - 1)
            self.weights @ self.weights
            tensor += 1
            if self.me < self.ranks - 1:
                self.dist.send(tensor, self.me + 1)
            elif self.ranks > 1:
                self.dist.send(tensor, 0)
            if self.me == 0 and self.ranks > 1:
                self.dist.recv(tensor, self.ranks - 1)
                check(self.torch, tensor, number % 1000 + micro + self.ranks, "pipeline")


class Groups:
    def __init__(self, torch, dist, me, ranks, args):
        self.torch, self.dist, self.me, self.ranks = torch, dist, me, ranks
        half = max(1, ranks // 2)
        tensor = [dist.new_group(list(range(at, min(ranks, at + half)))) for at in range(0, ranks, half)]
        data = [dist.new_group(list(range(at, ranks, half))) for at in range(half)]
        self.tensor, self.data = tensor[me // half], data[me % half]
        self.sizes = dist.get_world_size(self.tensor), dist.get_world_size(self.data)

    def step(self, number):
        for layer in range(4):
            tensor = self.torch.ones(1 << 18, device="cuda")
            self.dist.all_reduce(tensor, group=self.tensor)
            if (self.me + layer) % 3 == 0:
                time.sleep(0.002)
            self.dist.all_reduce(tensor, group=self.data)
        self.dist.all_reduce(tensor)
        check(self.torch, tensor, self.sizes[0] * self.sizes[1] * self.ranks, "groups")


class Ddp:
    def __init__(self, torch, dist, me, ranks, args):
        from torch.nn.parallel import DistributedDataParallel

        self.torch = torch
        model = layers(torch, args.gib)
        self.model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def step(self, number):
        loss = self.model(self.torch.ones(16, 2048, device="cuda")).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


class Fsdp(Ddp):
    def __init__(self, torch, dist, me, ranks, args):
        from torch.distributed.fsdp import fully_shard

        self.torch = torch
        # Each rank has its share of them.
        self.model = layers(torch, args.gib * ranks)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        # What the whole layers needed.
        torch.cuda.empty_cache()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)


class Graph:
    def __init__(self, torch, dist, me, ranks, args):
        self.torch, self.ranks = torch, ranks
        self.tensor = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(self.tensor)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            dist.all_reduce(self.tensor)

    def step(self, number):
        self.tensor.fill_(1)
        self.graph.replay()
        check(self.torch, self.tensor, self.ranks, "graph")


def layers(torch, gib):
    """Of `gib` with gradients, in layers of 16 MiB."""
    count = max(2, int(gib * 2**30 / (2 * 4 * 2048 * 2048)))
    with torch.device("cuda"):
        return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(count)))


KINDS = {
    "late": Late, "ahead": Ahead, "pipeline": Pipeline, "groups": Groups, "ddp": Ddp, "fsdp": Fsdp, "graph": Graph,
}  # fmt: skip


def rank(args):
    me = int(os.environ["RANK"])
    if args.own_gpu:
        # Before CUDA is initialized.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(me)

    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    torch.cuda.set_device(me % gpus)
    torch.manual_seed(7)
    dist.init_process_group("nccl" if args.own_gpu or args.ranks <= gpus else "gloo")
    ballast = None if args.kind in ("ddp", "fsdp") else torch.rand(int(args.gib * 2**28), device="cuda")
    job = KINDS[args.kind](torch, dist, me, args.ranks, args)
    # One rank may be far ahead of the others; the checks wait for the GPU anyway.
    with open(args.out if me == 0 else f"{args.out}.{me}", "a", buffering=1) as out:
        number = 0
        while True:
            number += 1
            job.step(number)
            out.write(f"{number} {time.time():.4f}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--patient", action="store_true")
    parser.add_argument("--own-gpu", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank(args)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port), "WORLD_SIZE": str(args.ranks)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(me)})
        for me in range(args.ranks)
    ]
    if args.patient:
        sys.exit(max(process.wait() & 0xFF for process in ranks))
    # As torchrun does: the first that ends ends all.
    pid, status = os.wait()
    for process in ranks:
        if process.pid != pid:
            process.kill()
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF or 6)


main()
