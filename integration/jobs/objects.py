#!/usr/bin/env python3
"""objects.py FOLDER: has kernel objects of many kinds, counts, and says which of them is not as it was at its start.

It ends when FOLDER/finish exists."""

import ctypes
import fcntl
import mmap
import os
import pty
import resource
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
import tty

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
F_SETPIPE_SZ, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS = 1031, 1032, 1033, 1034
PR_SET_CHILD_SUBREAPER, MEMBARRIER = 36, 324
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK, IOPRIO_SET, IOPRIO_GET = 1, 29, 251, 252
PR_SET_MEMORY_MERGE = 67

handlers_stack = ctypes.create_string_buffer(1 << 16)
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
datagrams.bind(("127.0.0.1", 0))
datagrams.sendto(b"waits", datagrams.getsockname())
connected = socket.socket(type=socket.SOCK_DGRAM)
connected.connect(datagrams.getsockname())
left, right = socket.socketpair()
left.send(b"waits")
client.send(b"waits")
half, other_half = socket.socketpair()
half.shutdown(socket.SHUT_RD)
master, terminal = pty.openpty()
tty.setraw(terminal)
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 81, 0, 0))
fcntl.ioctl(terminal, termios.TIOCEXCL)
os.write(terminal, b"output")
timer_descriptor = libc.timerfd_create(1, 0)
libc.timerfd_settime(timer_descriptor, 0, struct.pack("4q", 100, 0, 5000, 0), None)
signals = libc.signalfd(-1, struct.pack("Q", 1 << (signal.SIGRTMIN + 2)), 0)
# SIGEV_SIGNAL, CLOCK_MONOTONIC
timer = ctypes.c_void_p()
libc.timer_create(1, struct.pack("qii48x", 5, signal.SIGRTMIN + 1, 0), ctypes.byref(timer))
shared = mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED)
copy = os.dup(plain.fileno())
gone = open(os.path.join(folder, "gone"), "w+")
gone.write("no name")
gone.flush()
os.unlink(gone.name)
fcntl.flock(plain, fcntl.LOCK_EX)
fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)
resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192))


def has_child():
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        while True:
            signal.pause()
    return child


child, another_child = has_child(), has_child()
process = os.pidfd_open(child)
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
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
libc.prctl(PR_SET_TIMERSLACK, 1234)
libc.syscall(IOPRIO_SET, 1, 0, 3 << 13)
with open("/proc/self/coredump_filter", "w") as filter:
    filter.write("0x7f")
# The kernel takes the handler of a blocked signal away if it forces the signal, as a single step of a tracer does with SIGTRAP.
for number in signal.SIGUSR1, signal.SIGTRAP:
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGTRAP])
for _ in range(2):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
os.umask(0o027)
if os.geteuid() == 0:
    os.setgroups([])
os.kill(os.getpid(), signal.SIGUSR2)
# SIGEV_SIGNAL, CLOCK_MONOTONIC, armed; a timer for SIGALRM, a stack for signal handlers, memory barriers.
libc.timer_settime(timer, 0, struct.pack("4q", 11, 0, 7000, 0), None)
signal.setitimer(signal.ITIMER_REAL, 5000)
libc.sigaltstack(struct.pack("Qi4xQ", ctypes.addressof(handlers_stack), 0, len(handlers_stack)), None)
libc.syscall(MEMBARRIER, 16, 0, 0)
advised = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)
advised.madvise(mmap.MADV_DONTDUMP)
advised.madvise(mmap.MADV_DONTFORK, 1 << 19)
libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
libc.prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0)
if os.path.exists("/proc/self/autogroup"):
    with open("/proc/self/autogroup", "w") as group:
        group.write("3")
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
# NETLINK_EXT_ACK of SOL_NETLINK.
netlink.setsockopt(270, 11, 1)
inotify = libc.inotify_init1(0)
libc.inotify_add_watch(inotify, folder.encode(), 0x400)


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
