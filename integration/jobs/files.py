#!/usr/bin/env python3
"""Jobs that change files in place, and compare them with what they remember.

    files.py KIND FOLDER

Prints "n 1", "n 2" and so on, and checks before each that the files are what its memory says; ends with 7 where they are
not. Once FOLDER/finish is there, it makes its last checks, prints "done" and ends with 0.
"""

import ctypes
import fcntl
import mmap
import os
import random
import signal
import sqlite3
import struct
import sys
import time

KIND, FOLDER = sys.argv[1], sys.argv[2]


def path(name):
    return os.path.join(FOLDER, name)


def say(*words):
    # One write a line: the file is shared with children.
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def need(true, *words):
    if not true:
        say("WRONG", *words)
        os._exit(7)


def count(check, last=lambda: None, pause=0.02):
    n = 0
    while True:
        n += 1
        check(n)
        say("n", n)
        if os.path.exists(path("finish")):
            last()
            say("done")
            os._exit(0)
        time.sleep(pause)


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mapped(name, size, flags, access, address=0):
    """A shared mapping of a file, with no descriptor left; at `address` if that is not 0."""
    fd = os.open(path(name), flags)
    fixed = 0x100000 if address else 0
    found = libc.mmap(address, size, access, mmap.MAP_SHARED | fixed, fd, 0)
    need(found not in (None, ctypes.c_void_p(-1).value), "no mapping:", ctypes.get_errno())
    os.close(fd)
    return found


ROWS = 3000
FILLER = "x" * 2000


class Database:
    """Rows of a database, and what is remembered of them."""

    def __init__(self, mode, first=0, rows=ROWS):
        self.rows = range(first, first + rows)
        self.known = {row: 0 for row in self.rows}
        self.base = sqlite3.connect(path("data.db"), isolation_level=None, timeout=60)
        self.base.execute(f"pragma journal_mode = {mode}")
        self.base.execute("pragma cache_size = 50")
        self.base.execute("create table if not exists t (id integer primary key, n integer, filler text)")
        self.change(self.rows, 0)
        self.random = random.Random(first)

    def change(self, rows, n):
        self.base.execute("begin immediate")
        self.base.executemany("insert or replace into t values (?, ?, ?)", [(row, n, FILLER) for row in rows])
        self.base.execute("commit")
        for row in rows:
            self.known[row] = n

    def check(self, rows):
        for row in rows:
            found = self.base.execute("select n from t where id = ?", (row,)).fetchone()
            need(found == (self.known[row],), "row", row, "is", found, "and was", self.known[row])

    def step(self, n):
        rows = self.random.sample(self.rows, 40)
        self.check(rows)
        self.change(rows, n)

    def whole(self):
        self.check(self.rows)
        answer = self.base.execute("pragma quick_check").fetchall()
        need(answer == [("ok",)], "the database is damaged:", answer)


def sqlite(mode):
    data = Database(mode)
    count(data.step, data.whole)


def sqlite_in_a_transaction():
    # The journal is there, and the database has pages of a change that is not committed.
    data = Database("delete")

    def step(n):
        rows = data.random.sample(data.rows, 400)
        data.check(rows)
        data.base.execute("begin immediate")
        data.base.executemany("insert or replace into t values (?, ?, ?)", [(row, n, FILLER) for row in rows])
        time.sleep(0.1)
        data.base.execute("commit" if n % 2 else "rollback")
        for row in rows if n % 2 else []:
            data.known[row] = n

    count(step, data.whole, 0)


def two_writers():
    made = os.pipe()
    child = os.fork()
    if child == 0:
        # SQLite does not wait for a lock while it changes the journal's mode: one at a time.
        os.read(made[0], 1)
        data = Database("wal", ROWS)
        n = 0
        while not os.path.exists(path("finish")):
            n += 1
            data.step(n)
            time.sleep(0.01)
        data.check(data.rows)
        os._exit(0)
    data = Database("wal", 0)
    os.write(made[1], b"x")

    def last():
        need(os.waitpid(child, 0)[1] == 0, "the child has found something wrong")
        data.whole()

    count(data.step, last)


def array():
    # As numpy.memmap has it, but for the descriptor.
    size = 8 << 20
    with open(path("array"), "wb") as file:
        file.truncate(size)
    shared = mapped("array", size, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)
    shared = (ctypes.c_char * size).from_address(shared)
    own = bytearray(size)

    def check(n):
        need(memoryview(shared).cast("B") == own, "the array is not what it was, at", n)
        at = n * 8191 % (size - 8)
        own[at : at + 8] = n.to_bytes(8, "little")
        shared[at : at + 8] = n.to_bytes(8, "little")

    count(check)


def memory():
    from multiprocessing import resource_tracker, shared_memory

    block = shared_memory.SharedMemory(create=True, size=8 << 20)
    # It would remove the block when the job dies, which is not what is tried here.
    resource_tracker.unregister(block._name, "shared_memory")
    need(os.path.exists("/dev/shm/" + block.name), "the block has no name")
    say("block", block.name)
    own = bytearray(block.size)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            n = int.from_bytes(os.read(ready[0], 8), "little")
            at = n * 4096 % block.size
            block.buf[at] = (block.buf[at] + 1) % 256
            os.write(done[1], b"x")

    def check(n):
        need(bytes(block.buf) == bytes(own), "the block is not what it was, at", n)
        os.write(ready[1], n.to_bytes(8, "little"))
        os.read(done[0], 1)
        at = n * 4096 % block.size
        own[at] = (own[at] + 1) % 256

    def last():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        block.unlink()

    count(check, last)


def opened(name, size):
    """A file of some size that is changed in place, and what it holds."""
    file = open(path(name), "w+b", buffering=0)
    own = bytearray(random.Random(os.fsencode(name)).randbytes(size))
    file.write(own)

    def check(n):
        need(os.pread(file.fileno(), size, 0) == own, name, "is not what it was, at", n)
        at = n * 7919 % (size - 8)
        own[at : at + 8] = n.to_bytes(8, "little")
        os.pwrite(file.fileno(), own[at : at + 8], at)

    return file, own, check


def not_utf8():
    # The name is Latin-1: Python shows the byte as a surrogate.
    _, _, check = opened(os.fsdecode(b"caf\xe9"), 64 << 10)
    with open(path(os.fsdecode(b"th\xe9")), "wb") as file:
        file.write(b"only read")
    read = os.open(path(os.fsdecode(b"th\xe9")), os.O_RDONLY)

    def both(n):
        check(n)
        need(os.pread(read, 100, 0) == b"only read", "the file that is only read is another one, at", n)

    count(both)


def rewritten():
    # Smaller and larger than what is copied before the job stands still.
    checks = [opened(name, size)[2] for name, size in [("small", 5000), ("large", 6 << 20)]]

    def check(n):
        for one in checks:
            one(n)

    count(check)


def tracked():
    # Two folders: one is empty at the snapshot, the other is not there.
    folders = [path("empty"), path("missing")]
    os.mkdir(folders[0])
    made = []

    def step(n):
        for folder in folders:
            there = os.listdir(folder) if os.path.isdir(folder) else []
            need(sorted(there) == sorted(made), folder, "has", there, "and not", made)
        if os.path.exists(path("write")):
            for folder in folders:
                os.makedirs(folder, exist_ok=True)
                open(os.path.join(folder, str(n)), "w").close()
            made.append(str(n))

    count(step)


def tracked_link():
    # A file that lost its first name while it has another one, in a tracked folder.
    file = open(path("tracked/gone"), "w+b", buffering=0)
    os.link(path("tracked/gone"), path("tracked/kept"))
    os.unlink(path("tracked/gone"))

    def step(n):
        need(os.fstat(file.fileno()).st_ino == os.stat(path("tracked/kept")).st_ino, "they are two files, at", n)
        with open(path("tracked/kept"), "rb") as kept:
            need(kept.read() == (b"%d" % (n - 1) if n > 1 else b""), "the other name has other content, at", n)
        os.pwrite(file.fileno(), b"%d" % n, 0)

    count(step)


def renamed():
    # The name belongs to another file from some time on, while the first is still open.
    file, own, check = opened("data", 100_000)

    def step(n):
        check(n)
        if os.path.exists(path("rename")):
            with open(path("new"), "w") as new:
                new.write(f"not of this process, {n}")
            os.rename(path("new"), path("data"))
            os.unlink(path("rename"))

    count(step)


def removed():
    file, own, check = opened("data", 100_000)

    def step(n):
        check(n)
        if os.path.exists(path("remove")):
            os.unlink(path("data"))
            os.unlink(path("remove"))

    count(step)


def with_a_list():
    # Its group may do nothing, but another user may: the mode has the mask of the list where the group's bits are.
    file, own, check = opened("data", 100_000)
    entries = [(1, 6, -1), (2, 6, 4242), (4, 0, -1), (0x10, 6, -1), (0x20, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path("data"), "system.posix_acl_access", acl)
    os.setxattr(path("data"), "user.mime_type", b"application/x-test")
    need(os.stat(path("data")).st_mode & 0o777 == 0o660, "the mask is not in the mode")

    def step(n):
        check(n)
        if os.path.exists(path("data")):
            need(os.getxattr(path("data"), "system.posix_acl_access") == acl, "it has another list, at", n)
            need(os.getxattr(path("data"), "user.mime_type") == b"application/x-test", "another attribute, at", n)
        if os.path.exists(path("remove")):
            os.unlink(path("data"))
            os.unlink(path("remove"))

    count(step)


def sparse():
    file = open(path("sparse"), "w+b", buffering=0)
    file.truncate(2 << 30)
    own = {}

    def check(n):
        for at, value in own.items():
            need(os.pread(file.fileno(), 8, at) == value, "byte", at, "at", n)
        at = n * (5 << 20) % (2 << 30)
        own[at] = n.to_bytes(8, "little")
        os.pwrite(file.fileno(), own[at], at)

    count(check)


def mapped_twice():
    # First a read-only, then a writable shared mapping at one address, with a snapshot in between.
    size = 1 << 20
    with open(path("data"), "wb") as file:
        file.truncate(size)
    address = 0x7000_0000_0000

    mapped("data", size, os.O_RDONLY, mmap.PROT_READ, address)
    state = {"writable": False}

    def check(n):
        if os.path.exists(path("writable")) and not state["writable"]:
            libc.munmap(address, size)
            mapped("data", size, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE, address)
            state["writable"] = True
            say("it is writable")
        if state["writable"]:
            ctypes.c_uint32.from_address(address).value = n

    count(check)


def reader():
    # What it only reads is removed by whoever cleans up behind it.
    os.mkdir(path("session"))
    for name in "open", "mapped":
        with open(path("session/" + name), "wb") as file:
            file.write(name.encode() * 1000)
    file = open(path("session/open"), "rb", buffering=0)
    address = mapped("session/mapped", 6000, os.O_RDONLY, mmap.PROT_READ)

    def check(n):
        need(os.pread(file.fileno(), 4, 0) == b"open", "the open file is another, at", n)
        need(ctypes.string_at(address, 6) == b"mapped", "the mapped file is another, at", n)

    count(check)


def locked(deleted=False):
    # A lock on a file that is mapped too.
    file = open(path("locked"), "w+b", buffering=0)
    file.truncate(4096)
    mapped("locked", 4096, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)
    if deleted:
        os.unlink(path("locked"))
    fcntl.lockf(file, fcntl.LOCK_EX)
    if os.fork() == 0:
        # A child has none of its parent's locks.
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            # Where its parent died, it does not live so long.
            time.sleep(2)
            say("WRONG: the lock was free")
            os._exit(7)
    stopped = os.fork()
    if stopped == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        say("WRONG: the stopped process runs")
        os._exit(7)
    os.waitpid(stopped, os.WUNTRACED)
    count(lambda n: None)


KINDS = {
    "locked": locked,
    "locked-deleted": lambda: locked(deleted=True),
    "reader": reader,
    "sqlite-wal": lambda: sqlite("wal"),
    "sqlite-journal": lambda: sqlite("delete"),
    "sqlite-in-a-transaction": sqlite_in_a_transaction,
    "two-writers": two_writers,
    "array": array,
    "memory": memory,
    "not-utf8": not_utf8,
    "rewritten": rewritten,
    "tracked": tracked,
    "tracked-link": tracked_link,
    "renamed": renamed,
    "removed": removed,
    "with-a-list": with_a_list,
    "sparse": sparse,
    "mapped-twice": mapped_twice,
}

KINDS[KIND]()
