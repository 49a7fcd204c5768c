#!/usr/bin/env python3
"""Jobs with something that no restore would give back. They count, and give it up once FOLDER/release is there.

    refused.py KIND FOLDER
"""

import ctypes
import fcntl
import os
import signal
import socket
import sys
import termios
import threading
import time

sys.dont_write_bytecode = True

from kinds import KIND, await_all, count, need, path  # noqa: E402

libc = ctypes.CDLL(None, use_errno=True)
FS, FILES = 0x200, 0x400
NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000


def released():
    while not os.path.exists(path("release")):
        time.sleep(0.01)


def unshare(flags):
    need(libc.unshare(flags) == 0, "unshare", ctypes.get_errno())


def counted(has_given_up):
    """Counts, and removes FOLDER/release once all is given up."""

    def check(_):
        if os.path.exists(path("release")) and has_given_up():
            os.unlink(path("release"))

    count(check)


def in_a_thread(flags):
    begun = threading.Event()

    def apart():
        unshare(flags)
        begun.set()
        released()

    thread = threading.Thread(target=apart)
    thread.start()
    begun.wait()
    counted(lambda: not thread.is_alive())


def in_a_child(before):
    """A child of its own, which ends when it is told to."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        before()
        os.write(told, b"x")
        released()
        os._exit(0)
    os.read(ready, 1)
    counted(lambda: os.waitpid(child, os.WNOHANG)[0] == child)


def cloned(flags):
    """A child whose end its parent is told in another way."""
    child = libc.syscall(56, ctypes.c_long(flags), 0, 0, 0, 0)
    if child == 0:
        released()
        os._exit(0)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    every = 0x40000000
    counted(lambda: os.waitpid(child, os.WNOHANG | every)[0] == child)


def left_session(has_groups):
    """Two processes in a session whose leader is dead, as after `setsid sh -c "a & b &"`."""
    ready, told = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        for number in range(2):
            if os.fork() == 0:
                if has_groups and number:
                    os.setpgid(0, 0)
                os.write(told, b"%8d" % os.getpid())
                released()
                os._exit(0)
        os._exit(0)
    os.waitpid(leader, 0)
    left = [int(os.read(ready, 8)) for _ in range(2)]
    await_all(lambda: all(f"PPid:\t{leader}" not in status(pid) for pid in left), "not adopted")
    counted(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left))


def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return file.read()


def connected():
    """Two ends of a connection of TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    return one, other


def urgent(one, other, is_inline=False):
    """An urgent byte that was not read, between other data."""
    other.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, is_inline)
    one.send(b"abc")
    one.send(b"X", socket.MSG_OOB)
    one.send(b"def")

    def read():
        last = b"" if is_inline else other.recv(1, socket.MSG_OOB)
        need(other.recv(3) == b"abc", "the data is not the same")
        rest = b"Xdef" if is_inline else b"def"
        need((other.recv(9), last) == (rest, b"" if is_inline else b"X"), "not the urgent data")
        return True

    counted(read)


def reset():
    """An error that waits behind data, because the other end was closed with data that it had not read."""
    one, other = socket.socketpair()
    other.send(b"unread")
    one.send(b"data")
    one.close()

    def read():
        need(other.recv(9) == b"data", "the data is lost")
        try:
            need(False, "no error", other.recv(9))
        except ConnectionResetError:
            return True

    counted(read)


def sharing(flags):
    """A child that shares with its parent what only threads share for CRIU."""
    child = libc.syscall(56, ctypes.c_long(flags | signal.SIGCHLD), 0, 0, 0, 0)
    if child == 0:
        released()
        os._exit(0)
    counted(lambda: os.waitpid(child, os.WNOHANG)[0] == child)


def sent_timer():
    """A timer that is on its way through a socket."""
    timer = libc.timerfd_create(1, 0)
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [timer])
    os.close(timer)
    counted(lambda: socket.recv_fds(other, 1, 1)[0] == b"x")


def removed_folder():
    """A folder that is open and was removed, and a file that was in it."""
    os.mkdir(path("removed"))
    folder = os.open(path("removed"), os.O_RDONLY)
    file = os.open(path("removed/file"), os.O_RDWR | os.O_CREAT)
    os.unlink(path("removed/file"))
    os.rmdir(path("removed"))
    counted(lambda: os.close(folder) is None and os.close(file) is None)


def in_the_way():
    """A deleted file, and another file where its folder was."""
    os.mkdir(path("folder"))
    file = os.open(path("folder/file"), os.O_RDWR | os.O_CREAT)
    os.unlink(path("folder/file"))
    os.rmdir(path("folder"))
    with open(path("folder"), "w"):
        counted(lambda: os.unlink(path("folder")) is None and os.fstat(file) is not None)


def long_name():
    """A deleted file with the longest name that there can be."""
    file = os.open(path("x" * 255), os.O_RDWR | os.O_CREAT)
    os.unlink(path("x" * 255))
    counted(lambda: os.close(file) is None)


def deleted_fifo():
    os.mkfifo(path("fifo"))
    fifo = os.open(path("fifo"), os.O_RDWR)
    os.unlink(path("fifo"))
    counted(lambda: os.close(fifo) is None)


def pending_signals():
    """More signals that wait than may wait now."""
    import resource

    number = signal.SIGRTMIN + 5
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    before = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    for _ in range(2):
        need(libc.sigqueue(os.getpid(), number, None) == 0, "sigqueue")
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, before[1]))

    def handle():
        for _ in range(2):
            need(signal.sigtimedwait({number}, 0), "a signal is lost")
        resource.setrlimit(resource.RLIMIT_SIGPENDING, before)
        return True

    counted(handle)


def hung_up():
    """A terminal that was hung up."""
    master, slave = os.openpty()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        libc.vhangup()
        os._exit(0)
    os.waitpid(child, 0)
    need(os.read(slave, 1) == b"", "it is not hung up")
    counted(lambda: os.close(slave) is None and os.close(master) is None)


KINDS = {
    "thread-folder": lambda: in_a_thread(FS),
    "thread-descriptors": lambda: in_a_thread(FILES),
    "thread-network": lambda: in_a_thread(NEWNET),
    "thread-host-name": lambda: in_a_thread(NEWUTS),
    "thread-ipc": lambda: in_a_thread(NEWIPC),
    "thread-cgroup": lambda: in_a_thread(NEWCGROUP),
    "pid-for-children": lambda: in_a_child(lambda: unshare(NEWPID)),
    "no-exit-signal": lambda: cloned(0),
    "exit-signal": lambda: cloned(signal.SIGUSR2),
    "left-session": lambda: left_session(False),
    "urgent": lambda: urgent(*connected()),
    "urgent-inline": lambda: urgent(*connected(), True),
    "unix-urgent": lambda: urgent(*socket.socketpair()),
    "unix-urgent-inline": lambda: urgent(*socket.socketpair(), True),
    "reset": reset,
    "sent-timer": sent_timer,
    "removed-folder": removed_folder,
    "in-the-way": in_the_way,
    "long-name": long_name,
    "deleted-fifo": deleted_fifo,
    "pending-signals": pending_signals,
    "hung-up": hung_up,
    "shared-folder": lambda: sharing(FS),
    "left-groups": lambda: left_session(True),
}
if __name__ == "__main__":
    KINDS[KIND]()
