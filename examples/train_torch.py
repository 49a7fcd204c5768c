#!/usr/bin/env python3
"""Trains a network with PyTorch on an NVIDIA GPU, and computes the same bits every time.

    python3 examples/train_torch.py --out /tmp/torch --seconds 40 --gib 4

The data are scikit-learn's digits where it is installed, else clusters drawn from a seeded generator. --gib adds that
much device memory which every epoch rewrites and sums up: a byte lost or torn on the way through an image changes all
sums after it. It knows nothing of rekindle and saves nothing on the way.

In the folder --out it leaves
    metrics.jsonl   opened 'a': the start and one line an epoch, losses as hexadecimal floats, no times
    progress.txt    opened 'w': the number of the epoch last done, one a line
    weights.bin     at the end: every weight as raw little-endian float32
"""

import os

# cuBLAS is deterministic only with a workspace of fixed size (its documentation, "Results reproducibility"); read when
# the library starts.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
# The processor side of the data set is computed once, but sums over threads are not reproducible there either.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import hashlib
import json
import sys
import time

import torch

BATCH = 256
CHUNK = 256 * 2**20  # bytes of ballast in one tensor
# A generator of full period modulo 2^64 (the one of Knuth's MMIX): integer arithmetic
# wraps, so the sums do not depend on the order of adding.
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


def digits():
    """The data set as (images, labels, its name)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(4096) % 10
        centres = torch.randn(10, 64, generator=generator)
        return centres[labels] + torch.randn(4096, 64, generator=generator), labels, "synthetic"
    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target), "digits"


def ballast(gib, device):
    """--gib of device memory, filled with a known pattern."""
    chunks, left = [], int(gib * 2**30)
    while left >= 8:
        size = min(left, CHUNK)
        chunks.append(torch.arange(size // 8, dtype=torch.int64, device=device) + len(chunks))
        left -= size
    return chunks


def stir(chunks):
    """Rewrites all the ballast and returns its sum modulo 2^64."""
    total = 0
    for chunk in chunks:
        chunk.mul_(MULTIPLIER).add_(INCREMENT)
        total += chunk.sum().item()
    return total % 2**64


def options():
    parser = argparse.ArgumentParser(description="Trains a network with PyTorch on an NVIDIA GPU.")
    parser.add_argument("--out", required=True, help="folder for the metrics and the weights")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=40, help="spread the work over so long; 0: as fast as it goes")
    parser.add_argument("--gib", type=float, default=0, help="further device memory, in GiB")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the network")
    parser.add_argument("--seed", type=int, default=7)
    opts = parser.parse_args()
    if opts.epochs < 1 or opts.seconds < 0 or opts.gib < 0 or opts.hidden < 1:
        parser.error("--epochs and --hidden must be at least 1, --seconds and --gib at least 0")
    return opts


def main():
    opts = options()
    if not torch.cuda.is_available():
        sys.exit("train_torch.py: PyTorch finds no CUDA device: check nvidia-smi and that this PyTorch is built for CUDA")
    os.makedirs(opts.out, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    # TF32 is deterministic too, but a matter of the card: full precision keeps the log comparable.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # its choice of algorithms depends on timings
    torch.manual_seed(opts.seed)
    device = torch.device("cuda")

    images, labels, source = digits()
    images, labels = images.to(device), labels.to(device)
    model = torch.nn.Sequential(
        torch.nn.Linear(images.shape[1], opts.hidden), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(opts.hidden, opts.hidden), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(opts.hidden, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    chunks = ballast(opts.gib, device)
    pause = opts.seconds / opts.epochs

    metrics = open(os.path.join(opts.out, "metrics.jsonl"), "a")
    progress = open(os.path.join(opts.out, "progress.txt"), "w")

    def record(**fields):
        print(json.dumps(fields), file=metrics, flush=True)

    record(start=True, data=source, seed=opts.seed, epochs=opts.epochs, gib=opts.gib, hidden=opts.hidden)
    for epoch in range(1, opts.epochs + 1):
        began = time.monotonic()
        model.train()
        order = torch.randperm(len(images), device=device)
        losses = []
        for batch in order.split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
        last = losses[-1].item()
        record(epoch=epoch, losses=[loss.item().hex() for loss in losses], accuracy=accuracy, ballast=f"{stir(chunks):016x}")
        print(epoch, file=progress, flush=True)
        print(f"epoch {epoch:3}/{opts.epochs}  loss {last:.4f}  accuracy {accuracy:.4f}", flush=True)
        time.sleep(max(0.0, pause - (time.monotonic() - began)))

    raw = b"".join(p.detach().cpu().contiguous().numpy().tobytes() for p in model.parameters())
    path = os.path.join(opts.out, "weights.bin")
    with open(path + ".new", "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    print(f"accuracy {accuracy:.4f}")
    print(f"weights sha256 {hashlib.sha256(raw).hexdigest()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
