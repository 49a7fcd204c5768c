"""Trains a small network with what is built on PyTorch: Lightning, Accelerate, checkpoints and TensorBoard in the loop,
DeepSpeed, mpi4py. The same bits every time.

    matrix_stacks.py MODE --out DIR

The mode mpi imports mpi4py, which starts MPI in this one process; with mpirun each rank is a process that MPI started.
"""

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from matrix_steps import Steps, options
from matrix_torch import BATCH, batch, determined, network, weights
from torch import nn

MODES = ["lightning", "accelerate", "checkpoint", "tensorboard", "deepspeed", "mpi", "mpirun"]


class Numbers(torch.utils.data.IterableDataset):
    """A batch for each step."""

    def __iter__(self):
        number = 0
        while True:
            number += 1
            yield batch(number, torch.device("cpu"))


def plain(args, device, steps, after=lambda model, number, loss: None):
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    number = 0
    while True:
        number += 1
        images, labels = batch(number, device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        after(model, number, loss)
        if steps.done(loss.item(), weights(model)):
            return


def lightning(args, device):
    """Where mpi4py is installed Lightning imports it, to see whether MPI started it."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(torch.device("cpu"))

        def training_step(self, both, _):
            images, labels = both
            self.loss = nn.functional.cross_entropy(self.network(images), labels)
            return self.loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    class Lines(pl.Callback):
        def __init__(self):
            self.steps = Steps(args)

        def on_train_batch_end(self, trainer, module, *_):
            if self.steps.done(module.loss.item(), weights(module.network)):
                trainer.should_stop = True

    trainer = pl.Trainer(
        max_steps=1_000_000, accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[Lines()], default_root_dir=args.out,
    )  # fmt: skip
    print("mpi4py is imported:", "mpi4py.MPI" in sys.modules, flush=True)
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), batch_size=None))


def accelerate(args, device):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    model = network(torch.device("cpu"))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=1e-4), torch.utils.data.DataLoader(Numbers(), batch_size=None)
    )
    steps = Steps(args)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if steps.done(loss.item(), weights(model)):
            return


def checkpoint(args, device):
    """torch.distributed.checkpoint writes on a thread while the training goes on."""
    import torch.distributed.checkpoint as dcp

    torch.distributed.init_process_group("gloo", f"file://{args.out}/meet", rank=0, world_size=1)
    under_way = []

    def save(model, number, _):
        if not under_way or not under_way[-1].is_alive():
            state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            write = lambda: dcp.save(state, checkpoint_id=args.out / f"checkpoint-{number % 4}", no_dist=True)
            under_way[:] = [threading.Thread(target=write)]
            under_way[-1].start()

    plain(args, device, Steps(args), save)


def tensorboard(args, device):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(args.out / "board")

    def log(model, number, loss):
        writer.add_scalar("loss", loss, number)
        writer.add_histogram("first layer", model[0].weight, number)

    plain(args, device, Steps(args), log)


def deepspeed(args, device):
    """ZeRO-2 with NCCL."""
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("nccl", f"file://{args.out}/meet", rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    model = network(device)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        config={"train_batch_size": BATCH, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True},
    )  # fmt: skip
    steps, number = Steps(args), 0
    while True:
        number += 1
        images, labels = batch(number, device)
        loss = nn.functional.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        if steps.done(loss.item(), weights(engine.module)):
            return


def mpi(args, device):
    from mpi4py import MPI

    total = MPI.COMM_WORLD

    def reduce(_model, number, _loss):
        if total.allreduce(number) != number * total.size:
            sys.exit(3)

    plain(args, device, Steps(args), reduce)


def mpirun(args, device):
    """Gradients are summed through MPI, from host memory."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if device.type == "cuda":
        device = torch.device("cuda", world.rank % torch.cuda.device_count())
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    steps, number = Steps(args, world.rank), 0
    while True:
        number += 1
        images, labels = batch(number * world.size + world.rank, device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            own = parameter.grad.cpu().numpy()
            both = numpy.empty_like(own)
            world.Allreduce(own, both)
            parameter.grad.copy_(torch.from_numpy(both))
        optimizer.step()
        # All ranks end after the same step.
        if world.bcast(steps.done(loss.item(), weights(model))):
            return


def main():
    args = options(*MODES)
    determined()
    torch.manual_seed(7)
    globals()[args.mode](args, torch.device(args.device))


if __name__ == "__main__":
    main()
