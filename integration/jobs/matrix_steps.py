"""What the jobs of gpu-matrix.sh have in common: the lines that are compared, and when to end. Only the standard library.

A job is called with `--out DIR [--pause SECONDS]` and leaves there, for each rank N,

    steps.N   opened 'a': a line a step, its number and what was computed, with every bit
    pid.N     its own number of itself

It goes on until the file `last` is there, with the number of the step after which it ends. That number lies so far ahead
that all ranks read it before they get there.

With MATRIX_GATE in its environment a job waits for the file of that name, once all is imported and before it uses a GPU.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path


def options(*modes):
    """The arguments of a job; `modes`: the first argument is one of them."""
    parser = argparse.ArgumentParser()
    if modes:
        parser.add_argument("mode", choices=modes)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--pause", type=float, default=0.25)
    parser.add_argument("--port", type=int, default=0, help="where the ranks meet")
    parser.add_argument("--device", default="cuda", help="cpu, to try a job where there is no GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gate = os.environ.get("MATRIX_GATE")
    while gate and not os.path.exists(gate):
        time.sleep(0.02)
    return args


def digest(*parts):
    """16 hexadecimal digits for the bytes of all parts."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


class Steps:
    def __init__(self, args, rank=0):
        self.last, self.pause, self.number = args.out / "last", args.pause, 0
        (args.out / f"pid.{rank}").write_text(str(os.getpid()))
        self.file = open(args.out / f"steps.{rank}", "a", buffering=1)
        self.began = time.monotonic()

    def done(self, *results):
        """Writes the line of a step and waits until it is time for the next; answers whether there is none."""
        self.number += 1
        print(self.number, *(r.hex() if isinstance(r, float) else r for r in results), file=self.file)
        time.sleep(max(0.0, self.pause - (time.monotonic() - self.began)))
        self.began = time.monotonic()
        return self.last.exists() and self.number >= int(self.last.read_text())
