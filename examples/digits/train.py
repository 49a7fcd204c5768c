#!/usr/bin/env python3
"""Trains a classifier of handwritten digits with numpy, and computes the same bits every time.

    scripts/deps.sh python
    .deps/venv/bin/python examples/digits/train.py --out /tmp/digits --seconds 25

The data set is the one that comes with scikit-learn: 1797 images of 8 x 8 pixels. The network has two hidden layers,
dropout and momentum, so that an epoch depends on the random generator and on everything computed before it. It knows
nothing of rekindle and saves nothing on the way: who kills it loses all, unless somebody keeps images of it.

In the folder --out it leaves
    metrics.jsonl   opened 'a': the start and one line an epoch, no times, so that two runs can be compared
    progress.txt    opened 'w': the number of the epoch last done, one a line
    weights.bin     at the end: every weight as raw little-endian float64
"""

import os

# One thread: how a BLAS splits a sum over threads depends on how many it gets, and float sums depend on their order.
# To be set before numpy loads it. On another type of CPU other kernels are chosen, and the last bits may differ.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import argparse
import hashlib
import json
import sys
import time

import numpy as np
from sklearn.datasets import load_digits

BATCH = 48
HIDDEN = (128, 64)
KEEP = 0.8  # of the hidden units, in dropout
RATE = 0.02
MOMENTUM = 0.9
TEST_IMAGES = 360


class Network:
    """A perceptron with ReLU layers, dropout and a softmax at the end."""

    def __init__(self, sizes, rng):
        self.rng = rng
        self.weights = [rng.standard_normal((a, b)) * np.sqrt(2 / a) for a, b in zip(sizes, sizes[1:])]
        self.biases = [np.zeros(b) for b in sizes[1:]]
        self.speeds = [np.zeros_like(p) for p in self.parameters()]

    def parameters(self):
        return self.weights + self.biases

    def scores(self, x):
        for w, b in zip(self.weights[:-1], self.biases[:-1]):
            x = np.maximum(x @ w + b, 0)
        return x @ self.weights[-1] + self.biases[-1]

    def step(self, x, y):
        """One step of gradient descent; returns the mean loss of the batch."""
        inputs, masks = [x], []
        for w, b in zip(self.weights[:-1], self.biases[:-1]):
            h = np.maximum(inputs[-1] @ w + b, 0)
            mask = (self.rng.random(h.shape) < KEEP) / KEEP
            inputs.append(h * mask)
            masks.append((h > 0) * mask)
        p = softmax(inputs[-1] @ self.weights[-1] + self.biases[-1])
        rows = np.arange(len(y))
        loss = -np.log(p[rows, y] + 1e-12).mean()
        p[rows, y] -= 1
        error = p / len(y)
        count = len(self.weights)
        gradients = [None] * (2 * count)
        for layer in reversed(range(count)):
            gradients[layer] = inputs[layer].T @ error
            gradients[count + layer] = error.sum(axis=0)
            if layer:
                error = (error @ self.weights[layer].T) * masks[layer - 1]
        for parameter, speed, gradient in zip(self.parameters(), self.speeds, gradients):
            speed *= MOMENTUM
            speed -= RATE * gradient
            parameter += speed
        return loss


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def options():
    parser = argparse.ArgumentParser(description="Trains a classifier of handwritten digits.")
    parser.add_argument("--out", required=True, help="folder for the metrics and the weights")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=25, help="spread the work over so long; 0: as fast as it goes")
    parser.add_argument("--seed", type=int, default=7)
    opts = parser.parse_args()
    if opts.epochs < 1 or opts.seconds < 0:
        parser.error("--epochs must be at least 1, --seconds at least 0")
    return opts


def main():
    opts = options()
    os.makedirs(opts.out, exist_ok=True)
    rng = np.random.default_rng(opts.seed)

    data = load_digits()
    images, labels = data.data / 16.0, data.target
    order = rng.permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    network = Network((images.shape[1], *HIDDEN, 10), rng)
    # The work itself takes about a second: the rest is waiting, spread over the steps, so that one can watch.
    steps = -(-len(train) // BATCH)
    pause = opts.seconds / (opts.epochs * steps)

    metrics = open(os.path.join(opts.out, "metrics.jsonl"), "a")
    progress = open(os.path.join(opts.out, "progress.txt"), "w")

    def record(**fields):
        print(json.dumps(fields), file=metrics, flush=True)

    record(start=True, seed=opts.seed, epochs=opts.epochs, train=len(train), test=len(test))
    for epoch in range(1, opts.epochs + 1):
        losses = []
        shuffled = rng.permutation(train)
        for at in range(0, len(train), BATCH):
            batch = shuffled[at : at + BATCH]
            losses.append(network.step(images[batch], labels[batch]))
            time.sleep(pause)
        loss = float(np.mean(losses))
        accuracy = float((network.scores(images[test]).argmax(axis=1) == labels[test]).mean())
        record(epoch=epoch, loss=loss.hex(), accuracy=accuracy)
        print(epoch, file=progress, flush=True)
        print(f"epoch {epoch:3}/{opts.epochs}  loss {loss:.4f}  test accuracy {accuracy:.4f}", flush=True)

    raw = b"".join(np.ascontiguousarray(p, dtype="<f8").tobytes() for p in network.parameters())
    path = os.path.join(opts.out, "weights.bin")
    with open(path + ".new", "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    print(f"test accuracy {accuracy:.4f}")
    print(f"weights sha256 {hashlib.sha256(raw).hexdigest()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
