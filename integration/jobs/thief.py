#!/usr/bin/env python3
"""Takes files from all processes of its user, until it is ended.

    thief.py STOLEN     writes STOLEN when it has read something that is hidden
"""

import ctypes
import os
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
            found(os.pread(taken, 64, 0))
        except OSError:
            pass
        os.close(taken)
    os.close(pidfd)


def of_paths(pid):
    for path in ["cwd/data"] + [f"fd/{number}" for number in range(FIRST, LAST)]:
        try:
            descriptor = os.open(f"/proc/{pid}/{path}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            found(os.read(descriptor, 64))
        except OSError:
            pass
        os.close(descriptor)


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
