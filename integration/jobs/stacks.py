"""Jobs that write files as libraries do, and compare them with what they remember.

    stacks.py KIND FOLDER

Prints "n 1", "n 2" and so on; ends with 7 where a file is not what it was. Once FOLDER/finish is there, it makes its last
checks, prints "done" and ends with 0.
"""

import os
import random
import sys
import time

KIND, FOLDER = sys.argv[1], sys.argv[2]


def path(name):
    return os.path.join(FOLDER, name)


def say(*words):
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def need(true, *words):
    if not true:
        say("WRONG", *words)
        os._exit(7)


def count(step, last=lambda n: None, pause=0.02):
    n = 0
    while not os.path.exists(path("finish")):
        n += 1
        step(n)
        say("n", n)
        time.sleep(pause)
    last(n)
    say("done")
    os._exit(0)


def lmdb(mapped):
    import lmdb

    base = lmdb.open(path("lmdb"), map_size=64 << 20, writemap=mapped)
    known = {}

    def step(n):
        keys = [b"%d" % random.randrange(2000) for _ in range(20)]
        with base.begin() as look:
            for key in keys:
                need(look.get(key) == known.get(key), "key", key, "is", look.get(key), "and was", known.get(key))
        with base.begin(write=True) as change:
            for key in keys:
                known[key] = (b"%d " % n) * 100
                change.put(key, known[key])

    def last(n):
        with base.begin() as look:
            found = {bytes(key): bytes(value) for key, value in look.cursor()}
        need(found == known, "the whole database")

    count(step, last)


def memmap():
    import numpy

    shape = (512, 4096)
    array = numpy.memmap(path("array"), dtype="int64", mode="w+", shape=shape)
    own = numpy.zeros(shape, dtype="int64")

    def step(n):
        row = random.randrange(shape[0])
        need((array[row] == own[row]).all(), "row", row)
        array[row] += n
        own[row] += n

    count(step, lambda n: need((array == own).all(), "the whole array"))


def tensorboard():
    """It closes its file after each flush: the folder has to be in files.track."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    os.mkdir(path("events"))
    writer = EventFileWriter(path("events"))

    def step(n):
        value = Summary(value=[Summary.Value(tag="loss", simple_value=1 / n)])
        writer.add_event(Event(wall_time=time.time(), step=n, summary=value))
        writer.flush()

    def last(n):
        writer.close()
        names = [name for name in os.listdir(path("events")) if ".rolled-back." not in name]
        need(len(names) == 1, "the files are", names)
        steps = [event.step for event in EventFileLoader(path("events/" + names[0])).Load() if event.step]
        need(steps == list(range(1, n + 1)), "the steps are", steps)

    count(step, last)


def mpi():
    """A rank: sums, and messages in a ring that are too long to be sent at once."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    buffer = bytearray(1 << 16)
    n = 0
    while True:
        n += 1
        # All ranks end with the same step.
        ends, total = world.allreduce(os.path.exists(path("finish"))), world.allreduce(n)
        need(total == n * size, "the sum of step", n)
        left = (rank - 1) % size
        message = bytes([(n + rank) % 256]) * len(buffer)
        world.Sendrecv(message, (rank + 1) % size, recvbuf=buffer, source=left)
        need(bytes(buffer) == bytes([(n + left) % 256]) * len(buffer), "the message of step", n)
        if rank == 0:
            say("n", n)
        if ends:
            break
        time.sleep(0.02)
    MPI.Finalize()
    if rank == 0:
        say("done")


KINDS = {
    "lmdb": lambda: lmdb(False),
    "lmdb-mapped": lambda: lmdb(True),
    "memmap": memmap,
    "tensorboard": tensorboard,
    "mpi": mpi,
}

KINDS[KIND]()
