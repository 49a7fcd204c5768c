#!/usr/bin/env python3
"""A job without CUDA: counts in memory and checks a pattern there.

    plain_job.py OUT [--mib N] [--sleep-ms N] [--finish FILE]

Each round adds one to two counters that must agree, checks the pattern and appends the number to the file OUT. Ends with 0
when FILE is there, with 3 when the pattern differs, with 4 when the counters do.
"""

import argparse
import os
import random
import sys
import time
import zlib


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--sleep-ms", type=int, default=10)
    parser.add_argument("--finish")
    args = parser.parse_args()

    pattern = bytearray(random.Random(7).randbytes(1 << 20) * args.mib)
    digest = zlib.crc32(pattern)
    rounds = 0
    other = bytearray(8)
    with open(args.out, "a", buffering=1) as out:
        while not (args.finish and os.path.exists(args.finish)):
            rounds += 1
            other[:] = (int.from_bytes(other, "little") + 1).to_bytes(8, "little")
            if int.from_bytes(other, "little") != rounds:
                print("the counters differ at", rounds, file=sys.stderr)
                sys.exit(4)
            if zlib.crc32(pattern) != digest:
                print("the pattern in memory differs", file=sys.stderr)
                sys.exit(3)
            out.write(f"{rounds}\n")
            time.sleep(args.sleep_ms / 1000)


main()
