#!/usr/bin/env python3
"""Trains with PyTorch, the same bits every time, among processes that have NVIDIA's devices and do not use CUDA.

    fork_job.py --out DIR [--epochs N] [--seconds S]

Two workers of a DataLoader and one more child are forked when CUDA is there already; one process asks NVML only, five times
a second. DIR gets `metrics.jsonl` and `weights.bin` as those of examples/train_torch.py, and `nvml.txt`: `holds DEVICES` and
its mappings of them once, `ok` or `error N` for each question, and `anew N` for what nvmlInit says after an error.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["OMP_NUM_THREADS"] = "1"


def ask_nvml(path):
    """What a monitor does, as nvidia-ml-py does it."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    used = (ctypes.c_uint * 2)()
    with open(path, "a", buffering=1) as out:

        def begin():
            device = ctypes.c_void_p()
            code = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
            return code, device

        code, device = begin()
        files = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        mappings = sum("/dev/nvidia" in line for line in open("/proc/self/maps"))
        print("holds", *(file for file in files if file.startswith("/dev/nvidia")), mappings, "mappings", file=out)
        while os.getppid() != 1:
            code = code or nvml.nvmlDeviceGetUtilizationRates(device, used)
            print(f"error {code}" if code else "ok", file=out)
            if code:
                nvml.nvmlShutdown()
                code, device = begin()
                print(f"anew {code}", file=out)
            time.sleep(0.2)


def train(opts):
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 2048

        def __getitem__(self, at):
            generator = torch.Generator().manual_seed(at)
            return torch.randn(64, generator=generator) + at % 10, at % 10

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # By forks of a process that uses CUDA, all of them.
    rows = DataLoader(Rows(), batch_size=256, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    sleeper = os.fork()
    if sleeper == 0:
        while True:
            time.sleep(1)
    os.makedirs(opts.out, exist_ok=True)
    asker = subprocess.Popen([sys.executable, __file__, "--nvml", os.path.join(opts.out, "nvml.txt")])
    metrics = open(os.path.join(opts.out, "metrics.jsonl"), "a")
    for epoch in range(1, opts.epochs + 1):
        began = time.monotonic()
        losses = []
        for features, labels in rows:
            loss = torch.nn.functional.cross_entropy(model(features.to("cuda")), labels.to("cuda"))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        print(json.dumps({"epoch": epoch, "losses": losses}), file=metrics, flush=True)
        if os.waitpid(sleeper, os.WNOHANG) != (0, 0) or asker.poll() is not None:
            sys.exit("a child has ended")
        time.sleep(max(0.0, opts.seconds / opts.epochs - (time.monotonic() - began)))
    with open(os.path.join(opts.out, "weights.bin"), "wb") as file:
        file.write(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    for pid in sleeper, asker.pid:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--nvml")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=25)
    opts = parser.parse_args()
    if opts.nvml:
        ask_nvml(opts.nvml)
    else:
        train(opts)


main()
