"""Trains a small network with JAX, the same bits every time.

    matrix_jax.py jit|pmap --out DIR      jit: on one GPU; pmap: on two, in one process
"""

import os

# Kernels are chosen by timing them otherwise, and not the same ones every time.
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")
# All of the GPU's memory would be in the image.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from matrix_steps import Steps, digest, options


def weights():
    return [jax.random.normal(jax.random.PRNGKey(n), shape) * 0.1 for n, shape in enumerate([(64, 512), (512, 1)])]


def loss(w, data, target):
    return ((jnp.tanh(data @ w[0]) @ w[1] - target) ** 2).mean()


def update(w, data, axis=None):
    target = jnp.sin(data.sum(axis=1, keepdims=True))
    value, gradient = jax.value_and_grad(loss)(w, data, target)
    if axis:
        value, gradient = jax.lax.pmean((value, gradient), axis)
    return value, [a - 0.05 * g for a, g in zip(w, gradient)]


def main():
    args = options("jit", "pmap")
    data, now = jax.random.normal(jax.random.PRNGKey(7), (1024, 64)), weights()
    step = jax.jit(update)
    if args.mode == "pmap":
        if len(jax.devices()) < 2:
            raise SystemExit(f"two devices are needed, there is {jax.devices()}")
        step = jax.pmap(lambda w, data: update(w, data, "all"), axis_name="all", devices=jax.devices()[:2])
        data, now = data.reshape(2, 512, 64), [jnp.stack([w, w]) for w in now]
    steps = Steps(args)
    while True:
        value, now = step(now, data)
        if steps.done(float(np.asarray(value).ravel()[0]), digest(*(np.asarray(w).tobytes() for w in now))):
            break


main()
