"""Trains a small network with JAX on a GPU; the same bits every time. Writes metrics.jsonl and weights.bin to --out."""

import argparse
import json
import os
import time
from pathlib import Path

# Kernels are chosen by timing them otherwise, and not the same ones every time.
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, type=Path)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.2)
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

key = jax.random.PRNGKey(7)
data = jax.random.normal(key, (1024, 64))
target = jnp.sin(data.sum(axis=1, keepdims=True))
weights = [jax.random.normal(jax.random.PRNGKey(n), shape) * 0.1 for n, shape in enumerate([(64, 512), (512, 1)])]


def loss(w):
    return ((jnp.tanh(data @ w[0]) @ w[1] - target) ** 2).mean()


@jax.jit
def step(w):
    value, gradient = jax.value_and_grad(loss)(w)
    return value, [a - 0.05 * g for a, g in zip(w, gradient)]


with open(args.out / "metrics.jsonl", "a", buffering=1) as metrics:
    for epoch in range(args.epochs):
        value, weights = step(weights)
        print(json.dumps({"epoch": epoch, "loss": float(value).hex()}), file=metrics)
        time.sleep(args.pause)
(args.out / "weights.bin").write_bytes(b"".join(np.asarray(w).tobytes() for w in weights))
