#!/usr/bin/env python3
"""A job for the stand-in libcuda: counts in device memory and checks a pattern there.

    standin_job.py OUT [--mib N] [--until N] [--finish FILE] [--busy-ms N] [--sleep-ms N] [--fork]
                       [--times] [--pause FILE] [--devices CONTROL MEMORY SEEN] [--keep DEVICE]
                       [--library FILE] [--init child|thread FILE]
                       [--occupy-ms N]

Each round adds one to the counter in device memory, checks the counter and the pattern, and appends the counter to the
file OUT. Ends with 0 at --until or once there is FILE of --finish, with 3 when the pattern differs, with 4 when the
counter differs from the one that it keeps in host memory, with 5 when a CUDA call fails. --busy-ms runs a "kernel" of that length each round, so that a
shorter lock times out. --fork leaves a child behind that holds the device descriptor but does not use CUDA. --devices
leaves one behind that has these two as a child of a real CUDA process has NVIDIA's, CONTROL open and MEMORY open and mapped,
and writes to the file SEEN what it finds of them; --keep has the job itself hold one beside CUDA, and
--library map this file as the code of a library is. --init
has a child without CUDA or a thread call cuInit when FILE is there, and write the answer to FILE.done. --occupy-ms has a
thread compute nearly all the time with a lock that the driver's thread wants, N milliseconds at a time. --times
writes the lines that bench_torch.py writes, with the counter and the checksum of the pattern in the place of the loss
and the sum; --pause is that job's, too.
"""

import argparse
import ctypes
import mmap
import os
import random
import sys
import threading
import time
import zlib

PIECE = 2 << 20


def hold(control, memory, seen):
    # The stand-in's own, for which nothing stands.
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "userfaultfd" in os.readlink(f"/proc/self/fd/{fd}"):
                os.close(int(fd))
        except OSError:
            pass
    files = [os.open(control, os.O_RDWR), os.open(memory, os.O_RDONLY)]
    held = mmap.mmap(files[1], 3 * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    place = None
    while True:
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in files]
        lines = [line.split() for line in open("/proc/self/maps")]
        place = place or next(line[0] for line in lines if line[-1] == memory)
        _, rights, *rest = next(line for line in lines if line[0] == place)
        # What is not a device any more can be read.
        what = "device" if rest[-1] == memory else "zeros" if held[:] == bytes(len(held)) else "something"
        with open(seen + ".new", "w") as file:
            print(*names, rights, what, file=file)
        os.rename(seen + ".new", seen)
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--finish")
    parser.add_argument("--busy-ms", type=int, default=0)
    parser.add_argument("--sleep-ms", type=int, default=20)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--devices", nargs=3)
    parser.add_argument("--keep")
    parser.add_argument("--library")
    parser.add_argument("--init", nargs=2)
    parser.add_argument("--occupy-ms", type=int)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--pause")
    args = parser.parse_args()

    cuda = ctypes.CDLL("libcuda.so.1")

    def initialize(file):
        while not os.path.exists(file):
            time.sleep(0.005)
        with open(file + ".done", "w") as done:
            print(cuda.cuInit(0), file=done)

    if args.init and args.init[0] == "child" and os.fork() == 0:
        initialize(args.init[1])
        while True:
            time.sleep(1)

    def check(code, what):
        if code != 0:
            print(f"{what} failed with {code}", file=sys.stderr)
            sys.exit(5)

    check(cuda.cuInit(0), "cuInit")
    context = ctypes.c_void_p()
    check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), "cuCtxCreate")

    def allocate(size):
        pointer = ctypes.c_size_t()
        check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), "cuMemAlloc")
        return pointer

    size = args.mib << 20
    host = ctypes.create_string_buffer(random.Random(7).randbytes(PIECE) * max(size // PIECE, 1), max(size, PIECE))
    size = len(host)
    digest = zlib.crc32(host)
    pattern = allocate(size)
    check(cuda.cuMemcpyHtoD_v2(pattern, host, ctypes.c_size_t(size)), "cuMemcpyHtoD")
    counter = allocate(8)
    number = ctypes.c_uint64(0)
    check(cuda.cuMemcpyHtoD_v2(counter, ctypes.byref(number), ctypes.c_size_t(8)), "cuMemcpyHtoD")

    if args.fork and os.fork() == 0:
        while True:
            time.sleep(1)
    if args.devices and os.fork() == 0:
        hold(*args.devices)
    if args.keep:
        os.open(args.keep, os.O_RDWR)
    if args.library:
        with open(args.library, "rb") as library:
            loaded = mmap.mmap(library.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)  # noqa: F841

    def occupy():
        while True:
            cuda.standin_occupy(args.occupy_ms)
            time.sleep(0.0002)

    def compute():
        # Outside of Python's lock: a thread that has nothing to do with it, and is met before the other.
        while True:
            zlib.crc32(bytes(1 << 22))

    if args.init and args.init[0] == "thread":
        threading.Thread(target=initialize, args=args.init[1:], daemon=True).start()
    if args.occupy_ms:
        threading.Thread(target=compute, daemon=True).start()
        threading.Thread(target=occupy, daemon=True).start()

    def line(number, began):
        if not args.times:
            return f"{number}\n"
        times = f"{number} {time.time():.6f} {time.perf_counter() - began:.6f} {float(number).hex()} {digest:016x}\n"
        return times if number > 1 else f"0 {size + 8} stand-in\n{times}"

    rounds = 0
    with open(args.out, "a", buffering=1) as out:
        while (args.until == 0 or rounds < args.until) and not (args.finish and os.path.exists(args.finish)):
            while args.pause and os.path.exists(args.pause):
                time.sleep(0.001)
            rounds += 1
            began = time.perf_counter()
            check(cuda.standin_increment(counter), "standin_increment")
            if "collective" in globals():
                # Of standin_ranks.py.
                check(globals()["collective"](cuda), "standin_collective")
            if args.busy_ms:
                check(cuda.standin_busy(args.busy_ms), "standin_busy")
            check(cuda.cuMemcpyDtoH_v2(ctypes.byref(number), counter, ctypes.c_size_t(8)), "cuMemcpyDtoH")
            if number.value != rounds:
                print(f"counter is {number.value}, not {rounds}", file=sys.stderr)
                sys.exit(4)
            ctypes.memset(host, 0, size)
            check(cuda.cuMemcpyDtoH_v2(host, pattern, ctypes.c_size_t(size)), "cuMemcpyDtoH")
            if zlib.crc32(host) != digest:
                print("the pattern in device memory differs", file=sys.stderr)
                sys.exit(3)
            out.write(line(number.value, began))
            time.sleep(args.sleep_ms / 1000)


main()
