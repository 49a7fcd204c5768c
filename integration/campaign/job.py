"""A job whose whole state is checked in each step, for campaign.py.

    job.py FOLDER [--gpu]

Appends "n HASH" to FOLDER/chain, where each hash is made of the one before. In each step it also compares what it remembers
with a child over two pipes, a SQLite database in WAL mode, a file that it rewrites, a file that it has mapped and, with
--gpu, a tensor on the GPU. Where something is not what it was, it writes why to FOLDER/wrong and ends with 7. Once
FOLDER/finish is there, it checks all of it and ends with 0.
"""

import hashlib
import mmap
import os
import random
import sqlite3
import sys
import time

FOLDER, GPU = sys.argv[1], "--gpu" in sys.argv[2:]
ROWS, BLOCKS, BLOCK = 2000, 256, 4096
PAUSE_S = 0.02


def path(name):
    return os.path.join(FOLDER, name)


def link(before, n):
    """The hash of step n."""
    return hashlib.sha256(before + n.to_bytes(8, "little")).digest()


def wrong(*words):
    # Closed before the end, so that a restore does not take it back.
    with open(path("wrong"), "a") as file:
        print(*words, file=file)
    os._exit(7)


class Child:
    """Has a chain of its own, of the numbers that it is sent."""

    def __init__(self):
        questions, answers = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(questions[1])
            os.close(answers[0])
            own = b""
            while number := os.read(questions[0], 8):
                own = link(own, int.from_bytes(number, "little"))
                os.write(answers[1], own)
            os._exit(0)
        os.close(questions[0])
        os.close(answers[1])
        self.questions, self.answers, self.expected = questions[1], answers[0], b""

    def step(self, n):
        os.write(self.questions, n.to_bytes(8, "little"))
        self.expected = link(self.expected, n)
        answer = os.read(self.answers, 32)
        if not answer:
            sys.exit("the child is gone")
        if answer != self.expected:
            wrong("step", n, "of the child")


class Database:
    def __init__(self):
        for name in ["data.db", "data.db-wal", "data.db-shm"]:
            if os.path.exists(path(name)):
                os.unlink(path(name))
        self.base = sqlite3.connect(path("data.db"), isolation_level=None, timeout=60)
        self.base.execute("pragma journal_mode = wal")
        self.base.execute("pragma cache_size = 50")
        self.base.execute("create table t (id integer primary key, n integer, filler text)")
        self.known = [0] * ROWS
        self.write(range(ROWS), 0)

    def write(self, rows, n):
        self.base.execute("begin immediate")
        self.base.executemany("insert or replace into t values (?, ?, ?)", [(row, n, "x" * 500) for row in rows])
        self.base.execute("commit")
        for row in rows:
            self.known[row] = n

    def check(self, rows):
        for row in rows:
            found = self.base.execute("select n from t where id = ?", (row,)).fetchone()
            if found != (self.known[row],):
                wrong("row", row, "is", found, "and was", self.known[row])

    def step(self, n):
        rows = random.sample(range(ROWS), 20)
        self.check(rows)
        self.write(rows, n)

    def whole(self):
        self.check(range(ROWS))
        answer = self.base.execute("pragma quick_check").fetchall()
        if answer != [("ok",)]:
            wrong("the database is damaged:", answer)
        self.base.close()


class Blocks:
    """Blocks of bytes with a copy in memory, in a file or in a mapping of one."""

    def __init__(self, name, mapped):
        self.name, self.copy = name, bytearray(BLOCKS * BLOCK)
        self.fd = os.open(path(name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(self.fd, BLOCKS * BLOCK)
        self.map = mmap.mmap(self.fd, BLOCKS * BLOCK) if mapped else None
        if mapped:
            os.close(self.fd)

    def read(self, at, size):
        return self.map[at : at + size] if self.map else os.pread(self.fd, size, at)

    def step(self, n):
        at = random.randrange(BLOCKS) * BLOCK
        if self.read(at, BLOCK) != self.copy[at : at + BLOCK]:
            wrong("step", n, "block", at // BLOCK, "of", self.name)
        block = link(b"", n) * (BLOCK // 32)
        self.copy[at : at + BLOCK] = block
        if self.map:
            self.map[at : at + BLOCK] = block
        else:
            os.pwrite(self.fd, block, at)

    def whole(self):
        if self.read(0, BLOCKS * BLOCK) != self.copy:
            wrong("the whole of", self.name)


class Tensor:
    """Integers on the GPU, so that all orders of adding give the same."""

    def __init__(self):
        import torch

        self.torch = torch
        self.data = torch.zeros(64 << 20, dtype=torch.int64, device="cuda")
        self.expected = 0

    def step(self, n):
        found = int(self.data[n * 7919 % len(self.data)].item())
        if found != self.expected:
            wrong("step", n, "of the tensor:", found, "and was", self.expected)
        self.data.mul_(3).add_(n)
        # As the GPU's integers overflow.
        self.expected = (self.expected * 3 + n + (1 << 63)) % (1 << 64) - (1 << 63)

    def whole(self):
        if not bool((self.data == self.expected).all().item()):
            wrong("the whole of the tensor")


def main():
    child, parts = Child(), [Database(), Blocks("rewritten", False), Blocks("mapped", True)]
    if GPU:
        parts.append(Tensor())
    # An image of a moment before this one knows nothing of the file, and a restore leaves what is in it.
    chain = os.open(path("chain"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    n, last = 0, b""
    while not os.path.exists(path("finish")):
        n += 1
        for part in [child, *parts]:
            part.step(n)
        last = link(last, n)
        os.write(chain, f"{n} {last.hex()}\n".encode())
        time.sleep(PAUSE_S)
    for part in parts:
        part.whole()


if __name__ == "__main__":
    main()
