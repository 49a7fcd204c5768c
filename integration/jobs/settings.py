#!/usr/bin/env python3
"""Jobs that have set something once which CRIU loses, and check that they still have it.

    settings.py KIND FOLDER

Counts and ends as kinds.py does."""

import os
import select
import signal
import sys
import time

from kinds import count, need

KIND = sys.argv[1]


def semaphores():
    """Eventfds of which a read takes 1; two processes and an epoll set have one of them."""
    flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK
    shared, counter = os.eventfd(3, flags), os.eventfd(5, os.EFD_NONBLOCK)
    large = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(large, 1 << 40)
    ready = select.epoll()
    ready.register(shared, select.EPOLLIN)

    def take_and_give():
        need(os.eventfd_read(shared) == 1, "a read took more than 1")
        os.eventfd_write(shared, 1)

    child = os.fork()
    if child == 0:
        while True:
            take_and_give()
            time.sleep(0.005)

    def check(n):
        need(ready.poll(0) == [(shared, select.EPOLLIN)], "the epoll set has another eventfd")
        take_and_give()

    def last(n):
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED)
        taken = 0
        while ready.poll(0):
            taken += os.eventfd_read(shared)
        need(taken in (2, 3), "taken", taken)
        need(os.eventfd_read(counter) == 5 and os.eventfd_read(large) == 1 << 40, "another count")
        os.kill(child, signal.SIGKILL)

    count(check, last)


KINDS = {
    "semaphores": semaphores,
}
if __name__ == "__main__":
    KINDS[KIND]()
