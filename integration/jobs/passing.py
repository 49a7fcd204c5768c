#!/usr/bin/env python3
"""Processes that send each other descriptors through UNIX sockets, and receive them only once FOLDER/receive is there.

    passing.py KIND FOLDER

  sent    a child sends to its parent, and to another child, which have nothing to send
  both    parent and child have sent each other one
  pipe    a child has sent the end of a pipe
  stream  a child has sent data, and a descriptor after that
  empty   a child has sent a descriptor without data, in a datagram
  later   as both; what is sent is received once FOLDER/dumped is there
"""

import array
import os
import socket
import struct
import sys
import time

sys.dont_write_bytecode = True

from kinds import KIND, count, need, path, say  # noqa: E402


def memory(text):
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd


def deleted(text):
    fd = os.open(path(text), os.O_RDWR | os.O_CREAT)
    os.unlink(path(text))
    os.write(fd, text.encode())
    return fd


def event(number):
    return os.eventfd(number)


DATA = b"" if KIND == "empty" else b"m"


def send(channel, *descriptors):
    """In one packet; from then on they are only on their way."""
    rights = array.array("i", descriptors)
    need(channel.sendmsg([DATA], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]) == len(DATA), "not sent")
    for fd in descriptors:
        os.close(fd)


def received(channel):
    data, control, _, _ = channel.recvmsg(10, socket.CMSG_SPACE(40))
    need(data == DATA and control, "a packet is lost:", data, control)
    return array.array("i", control[0][2])


def compare(channel, *expected):
    for text in expected:
        if isinstance(text, int):
            (fd,) = received(channel)
            need(struct.unpack("Q", os.read(fd, 8))[0] == text, "another event than", text)
            continue
        fds = received(channel)
        for fd, part in zip(fds, text.split()):
            found = os.pread(fd, 100, 0) if KIND != "pipe" else os.read(fd, 100)
            need(found == part.encode(), "found", found, "and not", part)
            os.close(fd)
    say(os.getpid(), "has", *expected)


def is_time():
    # The latter: not before CRIU has looked.
    return os.path.exists(path("receive" if KIND != "later" else "dumped"))


def child(channel, to_send, expected):
    ready, sent = os.pipe()
    if os.fork() != 0:
        # What it sends is on its way when this one counts.
        os.close(sent)
        need(os.read(ready, 1) == b"x", "a child has sent nothing")
        os.close(ready)
        return
    os.close(ready)
    to_send()
    os.write(sent, b"x")
    os.close(sent)
    while not is_time():
        time.sleep(0.01)
    compare(channel, *expected)
    while True:
        time.sleep(1)


def passing():
    own, first = socket.socketpair(type=socket.SOCK_SEQPACKET if KIND == "empty" else socket.SOCK_STREAM)
    one, other = socket.socketpair()

    def of_the_first():
        own.close()
        other.close()
        if KIND == "pipe":
            out, into = os.pipe()
            os.write(into, b"through-a-pipe")
            send(first, out)
        elif KIND == "sent":
            send(first, memory("from-child"), deleted("gone"))
            send(first, event(7))
            first.send(b"m")
            send(one, memory("from-brother"))
        else:
            if KIND == "stream":
                first.send(b"m")
            send(first, memory("from-child"))

    expected = {"pipe": ["through-a-pipe"], "sent": ["from-child gone", 7]}.get(KIND, ["from-child"])
    goes_up = KIND in ("both", "later")
    child(first, of_the_first, ["from-parent"] if goes_up else [])
    if KIND == "sent":
        child(other, lambda: (one.close(), own.close(), first.close()), ["from-brother"])
    first.close()
    one.close()
    other.close()
    if goes_up:
        send(own, memory("from-parent"))
    has = False

    def check(n):
        nonlocal has
        if not has and is_time():
            need(KIND != "stream" or own.recv(1) == b"m", "data before a descriptor")
            compare(own, *expected)
            need(KIND != "sent" or own.recv(1) == b"m", "data behind descriptors")
            has = True

    count(check, lambda _: need(has, "nothing was received"))


passing()
