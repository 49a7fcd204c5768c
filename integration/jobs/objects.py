#!/usr/bin/env python3
"""objects.py FOLDER: has kernel objects of many kinds, counts, and says which of them is not as it was at its start.

It ends when FOLDER/finish exists."""

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import time

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
F_SETPIPE_SZ, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS = 1031, 1032, 1033, 1034
PR_SET_TIMERSLACK, IOPRIO_SET, IOPRIO_GET = 29, 251, 252

reader, writer = os.pipe()
os.write(writer, b"abc")
fcntl.fcntl(writer, F_SETPIPE_SZ, 8192)
event = libc.eventfd(7, 0)
epoll = select.epoll()
epoll.register(event, select.EPOLLIN)
memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
os.write(memory, b"sealed")
fcntl.fcntl(memory, F_ADD_SEALS, 2)
plain = open(os.path.join(folder, "plain"), "w+")
plain.write("0123456789")
plain.flush()
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
client = socket.create_connection(listener.getsockname())
served = listener.accept()[0]
datagrams = socket.socket(type=socket.SOCK_DGRAM)
# (socket, level, name, value): those that a restore by CRIU 4.2.1 alone loses.
options = [
    (listener, socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 7),
    (listener, socket.SOL_SOCKET, socket.SO_PRIORITY, 5),
    (client, socket.IPPROTO_TCP, 18, 4321),  # TCP_USER_TIMEOUT
    (client, socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (datagrams, socket.IPPROTO_IP, socket.IP_TOS, 8),
    (datagrams, socket.IPPROTO_IP, 8, 1),  # IP_PKTINFO
    (datagrams, socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 9),
    (datagrams, socket.IPPROTO_IP, 10, 3),  # IP_MTU_DISCOVER
]
for each, level, name, value in options:
    each.setsockopt(level, name, value)
# TCP_CONGESTION
client.setsockopt(socket.IPPROTO_TCP, 13, b"reno")
libc.prctl(PR_SET_TIMERSLACK, 1234)
libc.syscall(IOPRIO_SET, 1, 0, 3 << 13)
with open("/proc/self/coredump_filter", "w") as filter:
    filter.write("0x7f")
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
os.umask(0o027)
if os.geteuid() == 0:
    os.setgroups([])


def text(name):
    with open(f"/proc/self/{name}") as file:
        return file.read().strip()


def values():
    yield from ((f"option {level} {name}", each.getsockopt(level, name)) for each, level, name, _ in options)
    yield "congestion", client.getsockopt(socket.IPPROTO_TCP, 13, 16)
    yield "timer slack", text("timerslack_ns")
    yield "I/O priority", libc.syscall(IOPRIO_GET, 1, 0)
    yield "core dump filter", text("coredump_filter")
    yield "pipe size", fcntl.fcntl(reader, F_GETPIPE_SZ)
    yield "groups", os.getgroups()
    yield "seals", fcntl.fcntl(memory, F_GET_SEALS)


at_first = dict(values())
n = 0
while not os.path.exists(os.path.join(folder, "finish")):
    n += 1
    for name, value in values():
        if value != at_first[name]:
            print(f"changed {name}: was {at_first[name]}, is {value}", flush=True)
    print("n", n, flush=True)
    time.sleep(0.02)
print("done", flush=True)
