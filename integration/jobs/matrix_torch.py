"""Trains a network with PyTorch in the way that the mode names; every mode computes the same bits every time.

    matrix_torch.py MODE --out DIR [--port N]

The modes ddp-gloo, ddp-nccl and fsdp are two ranks on two GPUs: started here, or by torchrun, which is known by its
variables. Each rank has further GPU memory, which every step rewrites: a byte that is lost or torn changes all sums after
it.
"""

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
# Before torch: it sets what makes cuBLAS deterministic.
from train_torch import ballast, stir

import torch
from matrix_steps import Steps, digest, options
from torch import nn

WIDTH, BATCH, SAMPLES, WORKERS = 512, 256, 2048, 4
BALLAST_GIB = 0.25
MODES = ["eager", "compile", "amp", "graphs", "expandable", "loader-fork", "loader-spawn"]
RANKED = ["ddp-gloo", "ddp-nccl", "fsdp"]


def network(device):
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).to(device)


def batch(number, device):
    """The data of a step."""
    images = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
    return images.to(device), ((torch.arange(BATCH) + number) % 10).to(device)


def weights(model):
    """The digest of a model's weights; of a sharded one, of the part that is here."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return digest(*(p.detach().cpu().numpy().tobytes() for p in local))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)), number % 10


def batches(mode, device):
    """The data of all steps: made here, or by workers of a DataLoader in pinned memory."""
    if not mode.startswith("loader"):
        number = 0
        while True:
            number += 1
            yield batch(number, device)
    loader = torch.utils.data.DataLoader(
        Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7), num_workers=WORKERS,
        pin_memory=device.type == "cuda", multiprocessing_context=mode.removeprefix("loader-"),
        # As it is by default: by fork, workers end and begin with every epoch. A spawned one imports torch first.
        persistent_workers=mode == "loader-spawn",
    )  # fmt: skip
    while True:
        for images, labels in loader:
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def train(args, steps, model, step, device):
    """`step` does one on a batch, and answers the loss."""
    chunks = ballast(BALLAST_GIB if device.type == "cuda" else 1 / 256, device)
    for images, labels in batches(args.mode, device):
        loss = step(images, labels)
        if steps.done(loss.item(), weights(model), f"{stir(chunks):016x}"):
            break


def plain_step(args, model, optimizer, device):
    scaler = torch.amp.GradScaler(device.type) if args.mode == "amp" else None
    forward = torch.compile(model) if args.mode == "compile" else model

    def step(images, labels):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.float16) if scaler else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(forward(images), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def graph_step(model, device):
    """A whole training step in one CUDA graph, as PyTorch's documentation has it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=True)
    images, labels = batch(0, device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(new_images, new_labels):
        images.copy_(new_images)
        labels.copy_(new_labels)
        graph.replay()
        return loss

    return replay


def one(args):
    device = torch.device(args.device)
    model = network(device)
    if args.mode == "graphs":
        step = graph_step(model, device)
    else:
        step = plain_step(args, model, torch.optim.Adam(model.parameters(), lr=1e-4), device)
    if args.mode == "expandable":
        step(*batch(0, device))
        if not any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
            sys.exit("no segment is expandable: is PYTORCH_ALLOC_CONF=expandable_segments:True set?")
    train(args, Steps(args), model, step, device)


def rank(number, ranks, args):
    """One of the ranks, each with a GPU of its own."""
    determined()
    device = torch.device(args.device, number) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if args.mode == "ddp-gloo" or device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, f"tcp://127.0.0.1:{args.port}", rank=number, world_size=ranks)
    model = network(device)
    if args.mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[number] if device.type == "cuda" else None)
    step = plain_step(args, model, torch.optim.Adam(model.parameters(), lr=1e-4), device)
    # Each rank has data of its own, so that a sum over the ranks is seen.
    shifted = lambda images, labels: step(images + number, labels)
    train(args, Steps(args, number), model, shifted, device)
    torch.distributed.destroy_process_group()


def determined():
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # its choice of algorithms depends on timings


def main():
    args = options(*MODES, *RANKED)
    determined()
    if args.mode not in RANKED:
        one(args)
    elif "RANK" in os.environ:
        rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
    else:
        torch.multiprocessing.spawn(rank, (2, args), nprocs=2)


if __name__ == "__main__":
    main()
