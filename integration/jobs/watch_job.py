#!/usr/bin/env python3
"""Jobs that go wrong in one way each.

    watch_job.py KIND FOLDER [ARGUMENT]

Prints "n 1", "n 2" and so on until FOLDER/wrong is there, then does what KIND says. Ends with 0 once FOLDER/finish is there.
"""

import os
import signal
import socket
import sys
import threading
import time

KIND, FOLDER = sys.argv[1], sys.argv[2]


def there(name):
    return os.path.exists(os.path.join(FOLDER, name))


def say(text):
    os.write(1, (text + "\n").encode())


def notify():
    # As sd_notify(3) does: a socket for each message.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"WATCHDOG=1\n", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def futex():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def pipe():
    reader, _writer = os.pipe()
    os.read(reader, 1)


def sleep():
    time.sleep(1000000)


def spin():
    while not there("finish"):
        pass


def eat():
    hold = []
    while True:
        hold.append(bytearray(b"x" * (8 << 20)))


def starve():
    """In the small control group of ARGUMENT, once it is time."""
    while not there("wrong"):
        if there("finish"):
            os._exit(0)
        time.sleep(0.02)
    with open(os.path.join(sys.argv[3], "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    eat()


def child():
    """The child is killed; the parent ends with an exit code."""
    os.waitpid(CHILD, 0)
    os._exit(1)


def leave():
    os._exit(int(sys.argv[3]))


def nan():
    """Says a loss that is none, until it is brought back to before that."""
    os.unlink(os.path.join(FOLDER, "wrong"))
    count = 0
    while not there("finish"):
        count += 1
        say("step %d loss nan" % count)
        time.sleep(0.02)


def last_words():
    say("fatal: the disk is on fire")
    os._exit(9)


CHILD = os.fork() if KIND == "child" else None
if CHILD == 0:
    starve()
n = 0
while not there("finish"):
    n += 1
    say("n %d" % n)
    if KIND == "notify":
        notify()
    if there("wrong"):
        if KIND == "notify":
            # It works and prints on.
            while not there("finish"):
                say("more")
                time.sleep(0.02)
        else:
            {"stop": stop, "futex": futex, "pipe": pipe, "sleep": sleep, "spin": spin, "eat": eat, "child": child,
             "leave": leave, "nan": nan, "last-words": last_words}[KIND]()
    # Some milliseconds, so that the kernel, which counts in ticks of 10 ms, counts it on a slow machine too.
    for _ in range(100000):
        pass
    time.sleep(0.02)
