#!/usr/bin/env python3
"""Takes files from all processes of its user, until it is ended.

    thief.py STOLEN     writes STOLEN when it has read something that is hidden

It reads regular files only: what it took from a pipe or a terminal would be missing in another job of this user.
"""

import ctypes
import os
import stat
import sys

call = ctypes.CDLL(None, use_errno=True).syscall
PIDFD_OPEN, PIDFD_GETFD = 434, 438
FIRST, LAST = 3, 40


def found(text):
    if b"hidden" in text:
        with open(sys.argv[1], "wb") as stolen:
            stolen.write(text)


def of_descriptors(pid):
    pidfd = call(PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        return
    for number in range(FIRST, LAST):
        taken = call(PIDFD_GETFD, pidfd, number, 0)
        if taken < 0:
            continue
        try:
            if stat.S_ISREG(os.fstat(taken).st_mode):
                found(os.pread(taken, 64, 0))
        except OSError:
            pass
        os.close(taken)
    os.close(pidfd)


def of_paths(pid):
    for path in ["cwd/data"] + [f"fd/{number}" for number in range(FIRST, LAST)]:
        path = f"/proc/{pid}/{path}"
        try:
            if stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb", buffering=0) as file:
                    found(file.read(64))
        except OSError:
            continue


def main():
    print("looks", flush=True)
    while True:
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            try:
                if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.getuid():
                    continue
            except OSError:
                continue
            of_descriptors(pid)
            of_paths(pid)


main()
