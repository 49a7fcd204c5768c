#!/usr/bin/env python3
"""A training loop that uses rekindle's job API.

    rekindle run -- python3 examples/job_api.py

It asks for a snapshot before each "epoch", blocks snapshots while it writes its own "checkpoint", and reconnects after a
restore. It also runs without rekindle.
"""
import os
import sys
import time

# The wheel installs the module; this is for a checkout.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))
import rekindle


def reconnect(state):
    # A logger, a licence, a metrics server: what was connected to the outside is gone.
    print(f"restored on {state['host']} as process {state['pid']}, restore {state['restores']}", flush=True)


rekindle.on_restored(reconnect)
for epoch in range(int(os.environ.get("EPOCHS", "100"))):
    print(f"epoch {epoch}, snapshot: {rekindle.snapshot()}", flush=True)
    for step in range(100):
        time.sleep(0.02)
        rekindle.check()
    with rekindle.hold(seconds=10):
        for name in ("weights", "optimizer"):
            with open(f"{name}.txt", "w") as file:
                file.write(f"{epoch}\n")
