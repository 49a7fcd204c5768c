"""What a PyTorch program can do by itself, and what the machine can: prints JSON, a line more complete than the one
before as soon as there is something to add.

    save_torch.py DIR --gib N

torch_save    seconds of torch.save of N GiB of device tensors to a file in DIR, with fsync
async_save    seconds that torch.distributed.checkpoint.async_save of the same blocks the program, until the tensors
              may change again; what it writes afterwards is not waited for, and is left to the caller to remove
out, in       GB/s between device memory and pinned host memory, the best of five copies of 1 GiB
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
from train_torch import ballast

import torch
import torch.distributed.checkpoint as checkpoint

SIZE = 1 << 30


def timed(work):
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def pinned():
    device = torch.empty(SIZE, dtype=torch.uint8, device="cuda").fill_(1)
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    out = min(timed(lambda: host.copy_(device, non_blocking=True)) for _ in range(5))
    back = min(timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))
    return {"out": SIZE / out / 1e9, "in": SIZE / back / 1e9}


def save(tensors, path):
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def async_save(tensors, path):
    begun = checkpoint.async_save(tensors, checkpoint_id=path)
    # Newer versions may stage in the background as well, and then say when the tensors may be written to.
    staged = getattr(begun, "staging_completion", None)
    if staged is not None:
        staged.result()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gib", type=float, required=True)
    args = parser.parse_args()
    result = pinned()
    tensors = {str(n): chunk for n, chunk in enumerate(ballast(args.gib, "cuda"))}
    result["bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    result["torch_save"] = timed(lambda: save(tensors, args.dir / "saved"))
    os.unlink(args.dir / "saved")
    print(json.dumps(result), flush=True)
    # Without a process group it takes the program for the only rank.
    result["async_save"] = timed(lambda: async_save(tensors, args.dir / "async"))
    print(json.dumps(result), flush=True)
    # Without waiting for the writer.
    os._exit(0)


main()
