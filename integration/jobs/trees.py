#!/usr/bin/env python3
"""Jobs of many processes that count, check themselves, and end when told to, as those of kinds.py do.

    trees.py KIND FOLDER
"""

import ctypes
import errno
import os
import sys

sys.dont_write_bytecode = True

from kinds import count, need, say  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)


def set_up_ring():
    """io_uring_setup(2) with 8 entries: the ring, or the error as a negative number."""
    parameters = ctypes.create_string_buffer(120)
    ring = LIBC.syscall(425, 8, parameters)
    return ring if ring >= 0 else -ctypes.get_errno()


def falls_back():
    """Tries a ring first, as libuv does, in itself and in a child, and counts with what it gets."""
    say("first", set_up_ring())

    def check(_):
        ring = set_up_ring()
        need(ring == -errno.ENOSYS, "io_uring_setup says", ring)
        child = os.fork()
        if child == 0:
            os._exit(set_up_ring() != -errno.ENOSYS)
        need(os.waitpid(child, 0)[1] == 0, "a child has an io_uring")
        # Other calls are what they were.
        need(LIBC.syscall(39) == os.getpid(), "getpid")
        need(LIBC.syscall(9999) == -1 and ctypes.get_errno() == errno.ENOSYS, "a call that is none")

    count(check)


def has_a_ring():
    ring = set_up_ring()
    say("ring", ring)
    count(lambda n: need(n < 3 or os.path.exists("/proc/self/fd/%d" % ring), "the ring is gone"))


KINDS = {
    "uring": falls_back,
    "uring-open": has_a_ring,
}
KINDS[sys.argv[1]]()
