"""A job with things in a folder of its own that CRIU makes anew by their path: what it is asked for, of

    owner      a file whose signals go to the job (F_SETOWN), opened before all others
    keys       writes the keys that it can see to FOLDER/keys
    socket     a bound UNIX socket, d/daemon.sock
    ghost      a file that has lost its name, d/ghost, executable
    hardlink   a file that has lost one of its names, d/first, and is d/second still
    fifo       a FIFO, d/fifo
    log        a file that it appends to, d/log
    data       a file that it rewrites, d/data
    mapped     a file that it maps, d/mapped
    cwd        its working directory is d/deep/further

    bound_job.py FOLDER WHAT...

It says "ready", then counts in the file FOLDER/alive.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import sys
import time

folder, wanted = sys.argv[1], set(sys.argv[2:])
d = os.path.join(folder, "d")
os.makedirs(d, exist_ok=True)
held = []
if "owner" in wanted:
    fd = os.open(os.path.join(folder, "owned"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    held.append(fd)
if "socket" in wanted:
    listener = socket.socket(socket.AF_UNIX)
    path = os.path.join(d, "daemon.sock")
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    os.chmod(path, 0o777)
    listener.listen()
    held.append(listener)
if "ghost" in wanted:
    path = os.path.join(d, "ghost")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o755)
    os.write(fd, b"#!/bin/sh\nid\n")
    os.fchmod(fd, 0o755)
    os.unlink(path)
    held.append(fd)
if "hardlink" in wanted:
    first, second = os.path.join(d, "first"), os.path.join(d, "second")
    fd = os.open(first, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(fd, b"linked twice")
    if not os.path.exists(second):
        os.link(first, second)
    os.unlink(first)
    held.append(fd)
if "fifo" in wanted:
    path = os.path.join(d, "fifo")
    if not os.path.exists(path):
        os.mkfifo(path, 0o600)
    held.append(os.open(path, os.O_RDWR))
if "log" in wanted:
    held.append(os.open(os.path.join(d, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
if "data" in wanted:
    fd = os.open(os.path.join(d, "data"), os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"rewritten")
    held.append(fd)
if "mapped" in wanted:
    fd = os.open(os.path.join(d, "mapped"), os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 8192)
    held.append(mmap.mmap(fd, 8192))
    os.close(fd)
if "cwd" in wanted:
    os.makedirs(os.path.join(d, "deep/further"), exist_ok=True)
    os.chdir(os.path.join(d, "deep/further"))
alive = os.open(os.path.join(folder, "alive"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
libc = ctypes.CDLL(None)


def note_keys():
    # KEYCTL_READ of the session keyring: the number of bytes of its keys.
    size = libc.syscall(250, 11, -3, None, 0)
    # Never empty, whenever it is looked at.
    keys = os.open(os.path.join(folder, "keys"), os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(keys, f"{size}\n".encode())
    os.close(keys)


if "keys" in wanted:
    note_keys()
print("ready", flush=True)
while True:
    if "keys" in wanted:
        note_keys()
    os.write(alive, b".")
    time.sleep(0.02)
