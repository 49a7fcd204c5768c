#!/usr/bin/env python3
"""Several processes that use the stand-in libcuda, in one tree.

    standin_ranks.py OUT RANKS [--late FILE] [--leave FILE] [--collective MS] [-- ARGS of standin_job.py]

Rank 0 is this process and writes OUT; rank N is a child of it and writes OUT.N. With --late rank 1 begins to use CUDA
when FILE is there; with --leave the last rank but one ends, with 0, when FILE is there. With --collective each round has a
collective of all ranks, for which the last rank is late by so many milliseconds. Ends with 6 when a rank ends badly.
"""

import argparse
import ctypes
import mmap
import os
import runpy
import sys
import threading
import time

JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standin_job.py")


def watch_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    os._exit(0)


def wait_for_ranks(pids):
    for _ in pids:
        pid, status = os.wait()
        if status != 0:
            print(f"rank {pids.index(pid) + 1} ended with status {status}", file=sys.stderr)
            os._exit(6)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--late")
    parser.add_argument("--leave")
    parser.add_argument("--collective", type=int)
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()

    # Shared with the children.
    begun = ctypes.c_uint64.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    rank, pids = 0, []
    for number in range(1, args.ranks):
        pid = os.fork()
        if pid == 0:
            rank = number
            break
        pids.append(pid)
    if rank == 0:
        threading.Thread(target=wait_for_ranks, args=(pids,), daemon=True).start()
    elif rank == 1 and args.late:
        while not os.path.exists(args.late):
            time.sleep(0.01)
    if rank == args.ranks - 2 and args.leave:
        threading.Thread(target=watch_for, args=(args.leave,), daemon=True).start()
    out = args.out if rank == 0 else f"{args.out}.{rank}"
    sys.argv = [JOB, out, *args.rest]

    def collective(cuda):
        if rank == args.ranks - 1:
            time.sleep(args.collective / 1000)
        return cuda.standin_collective(ctypes.byref(begun), ctypes.c_uint64(args.ranks))

    shared = {} if args.collective is None else {"collective": collective}
    runpy.run_path(JOB, init_globals=shared, run_name="__main__")


main()
