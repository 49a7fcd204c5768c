"""What the measuring scripts ask of the machine. Only the standard library.

    host.py BYTES     takes so much memory, lets it go, and says how long that took
"""

import ctypes
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def available():
    """Bytes of memory that can be taken without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024


def free_on(folder):
    """Bytes that are free on the file system of a folder."""
    stat = os.statvfs(folder)
    return stat.f_frsize * stat.f_bavail


def supervisor_ticks(pid):
    """The processor time of a process, children not counted, in clock ticks."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def touch(size):
    """Takes so many bytes of memory; answers how many it got, and the seconds. A virtual machine may get its memory
    only when it is used for the first time, which whoever comes first would pay for, and MemTotal may tell too little
    till then."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    failed = ctypes.c_void_p(-1).value
    # The machine may need a while for more memory: not faster than that.
    parts = min(4, os.cpu_count() or 1)
    part = size // parts & ~(mmap.PAGESIZE - 1)

    def take(_):
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return libc.mmap(None, part, protection, flags, -1, 0)

    began = time.monotonic()
    with ThreadPoolExecutor(parts) as pool:
        taken = list(pool.map(take, range(parts)))
    return part * sum(address != failed for address in taken), time.monotonic() - began


def main():
    # When there is less than somebody thought, nobody else shall die for it.
    Path("/proc/self/oom_score_adj").write_text("1000")
    got, took = touch(int(sys.argv[1]))
    print(f"{got / (1 << 30):.1f} GiB in {took:.1f} s")


if __name__ == "__main__":
    main()
