#!/usr/bin/env python3
"""Jobs that have set something once which CRIU loses, and check that they still have it.

    settings.py KIND FOLDER

Counts and ends as kinds.py does."""

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

from kinds import count, need

KIND = sys.argv[1]


def semaphores():
    """Eventfds that are semaphores: a read takes 1 from them. Two processes and an epoll set have one."""
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


def multicast():
    """Sockets in multicast groups of IPv4 and IPv6, which get what is sent to these and nothing else."""
    device = struct.pack("i", socket.if_nametoindex("lo"))
    join_source_group = 46  # MCAST_JOIN_SOURCE_GROUP

    def receiver(group):
        receiver = socket.socket(type=socket.SOCK_DGRAM)
        receiver.bind((group, 0))
        receiver.settimeout(0.5)
        return receiver, receiver.getsockname()[1]

    def address(text):
        return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text)).ljust(128, b"\0")

    of_all, port = receiver("239.77.1.1")
    of_all.setsockopt(0, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.77.1.1") + bytes(4) + device)
    of_one, port_of_one = receiver("232.77.1.1")
    of_one.setsockopt(0, join_source_group, struct.pack("4s4x", device) + address("232.77.1.1") + address("127.0.0.1"))
    # Nothing can be sent to a group of IPv6 over the loopback device: it has no route there.
    ipv6, group = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM), socket.inet_pton(socket.AF_INET6, "ff15::77")
    ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + device)
    sender = socket.socket(type=socket.SOCK_DGRAM)
    sender.setsockopt(0, socket.IP_MULTICAST_IF, bytes(8) + device)
    sender.bind(("127.0.0.1", 0))

    def check(n):
        ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_LEAVE_GROUP, group + device)
        ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + device)
        for receiver, to in [(of_all, ("239.77.1.1", port)), (of_one, ("232.77.1.1", port_of_one))]:
            sender.sendto(b"%d" % n, to)
            try:
                while int(receiver.recv(100)) != n:
                    # What was in its queue at the snapshot.
                    pass
            except TimeoutError:
                need(False, "nothing is received from the group", to)

    def last(n):
        check(n)
        of_all.setsockopt(0, socket.IP_DROP_MEMBERSHIP, socket.inet_aton("239.77.1.1") + bytes(4) + device)

    count(check, last)


def of_threads():
    """Threads, one of them of a child, with a personality and a memory policy of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_policy, get_policy = {"x86_64": (238, 239), "aarch64": (237, 236)}[os.uname().machine]
    default, prefer, bind, interleave, no_randomization, short_inode = 0, 1, 2, 3, 0x0040000, 0x0000200
    node = ctypes.c_ulong(1)

    def policy():
        mode = ctypes.c_int(-1)
        need(libc.syscall(get_policy, ctypes.byref(mode), None, 0, None, 0) == 0, "get_mempolicy")
        return mode.value

    def take(personality, mode):
        """Returns a function that checks it."""
        need(libc.personality(personality) != -1, "personality", personality)
        nodes = (ctypes.byref(node), 64) if mode != default else (None, 0)
        has_nodes = libc.syscall(set_policy, mode, *nodes) == 0
        need(has_nodes or ctypes.get_errno() == errno.ENOSYS, "set_mempolicy", mode)

        def check():
            need(libc.personality(0xFFFFFFFF) == personality, "the personality is", libc.personality(0xFFFFFFFF))
            need(not has_nodes or policy() == mode, "the memory policy is", policy(), "and was", mode)

        return check

    def work(personality, mode):
        check = take(personality, mode)
        while True:
            check()
            time.sleep(0.01)

    threading.Thread(target=work, args=(short_inode, interleave), daemon=True).start()
    threading.Thread(target=work, args=(0, default), daemon=True).start()
    child = os.fork()
    if child == 0:
        threading.Thread(target=work, args=(no_randomization | short_inode, bind), daemon=True).start()
        work(0, prefer)
    check = take(no_randomization, bind)

    def both(n):
        check()
        need(os.waitpid(child, os.WNOHANG) == (0, 0), "the child has ended")

    count(both, lambda n: os.kill(child, signal.SIGKILL))


def undo():
    """A process that has taken a semaphore, which its end gives back."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = libc.semget(0, 1, 0o1600)  # IPC_PRIVATE, IPC_CREAT
    need(own >= 0 and libc.semop(own, struct.pack("Hhh", 0, 1, 0x1000), 1) == 0, "semop")  # SEM_UNDO
    count()


KINDS = {
    "undo": undo,
    "of-threads": of_threads,
    "multicast": multicast,
    "semaphores": semaphores,
}
if __name__ == "__main__":
    KINDS[KIND]()
