#!/usr/bin/env python3
"""Ranks that use the stand-ins for libcuda and libnccl, and check what they receive.

    standin_nccl.py OUT RANKS MODE [--linked LIBRARY] [--never FILE] [--survive]
                    [--second LIBRARY] [--scribble] [--static FILE] [--launch] [--orphans] [--heavy FILE]

Rank 0 is this process and writes OUT; rank N is a child of it and writes OUT.N: the number of each step that was right.
MODE:
  late      the last rank is late by 60 ms in each step
  ahead     all-reduces are started up to 20 steps ahead of the GPU
  ring      each rank sends to the next one and receives from the one before, one call after the other
  groups    sends, receives and collectives in groups, and groups in groups
  crossing  two communicators with a stream each, which odd ranks use in the other order
  split     halves, what lies across them, and all: a number goes through the three
  barrier   all-reduces of halves, and a barrier without NCCL before or after them
  kinds     every operation once a step, with a new communicator from time to time
  joins     all ranks make a new communicator from time to time
  churn     a new communicator in each step; a thousand in a hurry, then slowly
  background  communicators that do not block
With --linked the functions are called by symbol, by way of the library of linked_to_libnccl.rs; without, by dlsym. While
FILE of --never is there, the last rank starts nothing and makes FILE.stands; in the mode joins it does not join. Ends
with 3 when a number is wrong, with 5 when a call fails, with 6 when a rank ends badly, unless --survive is given. With --second each rank first
finds functions of another NCCL; with --scribble rank 0 writes random numbers to the table of the interposer all the time.
With --static the functions are those of FILE, called by their addresses: as those of an NCCL that is linked statically,
they have no symbols that a loader looks up. With --launch this process is no rank: all ranks are its children, and as soon
as one ends it kills the others. With --orphans the ranks have no parent in the job, and this process waits for ever. Once FILE of --heavy is there, the last rank has 1 GiB that it gives back when it ends.
"""

import argparse
import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time

PIECE = 2 << 20
WORD = 8
U64, SUM = 5, 0
NO_COLOR = -1
IN_PROGRESS = 7


class UniqueId(ctypes.Structure):
    _fields_ = [("word", ctypes.c_uint64 * 16)]


def fail(code, what):
    print(what, file=sys.stderr, flush=True)
    os._exit(code)


class Library:
    def __init__(self, path, prefix=""):
        self.library, self.prefix = ctypes.CDLL(path), prefix

    def function(self, name):
        return getattr(self.library, self.prefix + name)

    def __call__(self, name, *args):
        # Numbers of all sizes as what fits all.
        args = (ctypes.c_uint64(arg & (1 << 64) - 1) if isinstance(arg, int) else arg for arg in args)
        code = self.function(name)(*args)
        if code not in (0, IN_PROGRESS):
            fail(5, f"{name} failed with {code}")
        return code


class Static(Library):
    """The functions of an ELF file by their addresses, without a look-up by the loader."""

    def __init__(self, path):
        super().__init__(path)
        with open("/proc/self/maps") as maps:
            base = min(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(path))
        with open(path, "rb") as file:
            data = file.read()
        sections, size, count = struct.unpack_from("<Q10xHH", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + size * at) for at in range(count)]
        symbols = next(header for header in headers if header[1] == 11)  # SHT_DYNSYM
        names = headers[symbols[6]][4]
        self.addresses = {}
        for at in range(symbols[4], symbols[4] + symbols[5], 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", names + name)
            self.addresses[data[names + name : end].decode()] = base + value

    def function(self, name):
        return ctypes.CFUNCTYPE(ctypes.c_int)(self.addresses[name])


class Rank:
    def __init__(self, number, ranks, shared, args):
        self.number, self.ranks, self.shared, self.args = number, ranks, shared, args
        self.cuda = Library("libcuda.so.1")
        if args.static:
            self.nccl = Static(args.static)
        else:
            self.nccl = Library(args.linked, "linked_") if args.linked else Library("libnccl.so.2")
        self.cuda("cuInit", 0)
        context, memory = ctypes.c_void_p(), ctypes.c_size_t()
        self.cuda("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
        self.cuda("cuMemAlloc_v2", ctypes.byref(memory), PIECE)
        self.memory = memory.value
        if args.second:
            second = ctypes.CDLL(args.second)
            [getattr(second, name) for name in ("ncclCommInitRank", "ncclAllReduce", "ncclGroupStart")]
        self.barriers = 0
        self.world = self.communicator(0)

    # Device memory is numbers here.
    def at(self, place):
        return self.memory + WORD * place

    def put(self, place, *numbers):
        data = (ctypes.c_uint64 * len(numbers))(*numbers)
        self.cuda("cuMemcpyHtoD_v2", self.at(place), data, WORD * len(numbers))

    def get(self, place, count=1):
        data = (ctypes.c_uint64 * count)()
        self.cuda("cuMemcpyDtoH_v2", data, self.at(place), WORD * count)
        return list(data)

    def expect(self, what, place, *numbers):
        found = self.get(place, len(numbers))
        if found != list(numbers):
            fail(3, f"rank {self.number}: {what}: {found} instead of {list(numbers)}")

    def synchronise(self, stream=0):
        self.cuda("cuStreamSynchronize", stream)

    def communicator(self, slot):
        """One of all ranks, whose unique id is passed on in a slot."""
        handle = ctypes.c_void_p()
        at = 2 + slot * 17
        if self.number == 0:
            unique = UniqueId()
            self.nccl("ncclGetUniqueId", ctypes.byref(unique))
            for index, word in enumerate(unique.word):
                self.shared[at + 1 + index] = word
            self.shared[at] += 1
        self.barrier()
        unique = UniqueId()
        for index in range(16):
            unique.word[index] = self.shared[at + 1 + index]
        self.before_joining()
        make, more = ("ncclCommInitRank", []) if slot == 0 and not self.config() else ("ncclCommInitRankConfig", [self.config()])
        self.nccl(make, ctypes.byref(handle), self.ranks, unique, self.number, *more)
        self.until_done(handle.value)
        self.barrier()
        return handle.value

    def config(self):
        """The address of an ncclConfig_t, or 0."""
        return 0

    def until_done(self, communicator):
        pass

    def before_joining(self):
        pass

    def split(self, old, color, key):
        handle = ctypes.c_void_p()
        self.nccl("ncclCommSplit", old, color, key, ctypes.byref(handle), self.config())
        self.until_done(handle.value)
        return handle.value

    def barrier(self):
        """Without NCCL and without CUDA. Each rank has a number of its own in the shared memory."""
        self.barriers += 1
        self.shared[100 + self.number] = self.barriers
        while min(self.shared[100 : 100 + self.ranks]) < self.barriers:
            time.sleep(0.001)

    def all_reduce(self, source, target, communicator, stream=0):
        self.nccl("ncclAllReduce", self.at(source), self.at(target), 1, U64, SUM, communicator, stream)

    def send(self, source, peer, communicator, stream=0):
        self.nccl("ncclSend", self.at(source), 1, U64, peer, communicator, stream)

    def receive(self, target, peer, communicator, stream=0):
        self.nccl("ncclRecv", self.at(target), 1, U64, peer, communicator, stream)

    def waits(self):
        """The last rank, while it is told to start nothing."""
        while self.args.never and self.number == self.ranks - 1 and os.path.exists(self.args.never):
            open(self.args.never + ".stands", "w").close()
            time.sleep(0.005)


def total(ranks, step):
    """What all ranks add up to where each brings the step and its own number."""
    return ranks * step + sum(range(ranks))


class Late(Rank):
    def step(self, step):
        if self.number == self.ranks - 1:
            time.sleep(0.06)
        self.put(0, step + self.number)
        self.all_reduce(0, 1, self.world)
        self.synchronise()
        self.expect("late", 1, total(self.ranks, step))


class Ahead(Rank):
    AHEAD = 20

    def step(self, step):
        if step % self.AHEAD == 1:
            for later in range(step, step + self.AHEAD):
                place = 2 * (later % self.AHEAD)
                self.put(place, later + self.number)
                self.all_reduce(place, place + 1, self.world)
                if self.number == later % self.ranks:
                    time.sleep(0.002)
            self.synchronise()
        self.expect("ahead", 2 * (step % self.AHEAD) + 1, total(self.ranks, step))


class Ring(Rank):
    def step(self, step):
        after, before = (self.number + 1) % self.ranks, (self.number - 1) % self.ranks
        self.put(0, step * 100 + self.number)
        calls = [lambda: self.send(0, after, self.world), lambda: self.receive(1, before, self.world)]
        for call in calls if self.number % 2 == 0 else reversed(calls):
            call()
            time.sleep(0.001 * (self.number % 3))
        self.synchronise()
        self.expect("ring", 1, step * 100 + before)


class Groups(Rank):
    def step(self, step):
        after, before = (self.number + 1) % self.ranks, (self.number - 1) % self.ranks
        self.put(0, step + self.number)
        self.nccl("ncclGroupStart")
        self.send(0, after, self.world)
        self.receive(1, before, self.world)
        self.nccl("ncclGroupStart")
        self.all_reduce(0, 2, self.world)
        for peer in range(self.ranks):
            self.send(0, peer, self.world)
            self.receive(8 + peer, peer, self.world)
        self.nccl("ncclGroupEnd")
        self.all_reduce(0, 3, self.world)
        self.nccl("ncclGroupEnd")
        if self.number == step % self.ranks:
            time.sleep(0.01)
        self.all_reduce(0, 4, self.world)
        self.synchronise()
        everything = total(self.ranks, step)
        self.expect("groups: ring", 1, step + before)
        self.expect("groups: collectives", 2, everything, everything, everything)
        self.expect("groups: all to all", 8, *(step + peer for peer in range(self.ranks)))


class Crossing(Rank):
    def __init__(self, *args):
        super().__init__(*args)
        self.other = self.communicator(1)

    def step(self, step):
        self.put(0, step + self.number)
        calls = [lambda: self.all_reduce(0, 1, self.world, 1), lambda: self.all_reduce(0, 2, self.other, 2)]
        for call in calls if self.number % 2 == 0 else reversed(calls):
            call()
            time.sleep(0.002 * self.number)
        self.synchronise(1)
        self.synchronise(2)
        self.expect("crossing", 1, *[total(self.ranks, step)] * 2)


class Split(Rank):
    def __init__(self, *args):
        super().__init__(*args)
        half = self.ranks // 2
        # In the order of their keys, which is another one.
        self.half = self.split(self.world, self.number // half, -self.number)
        self.across = self.split(self.world, self.number % half, self.number)
        if self.split(self.world, 0 if self.number == 0 else NO_COLOR, 0):
            self.sizes = self.size(self.world), self.size(self.half), self.size(self.across)
        else:
            self.sizes = self.ranks, half, self.ranks // half
        if self.sizes != (self.ranks, half, self.ranks // half):
            fail(3, f"the new communicators have {self.sizes} ranks")

    def size(self, communicator):
        count = ctypes.c_int()
        self.nccl("ncclCommCount", communicator, ctypes.byref(count))
        return count.value

    def step(self, step):
        self.put(0, step)
        for layer in range(3):
            self.all_reduce(0, 1, self.half)
            if (self.number + layer) % 3 == 0:
                time.sleep(0.003)
            self.all_reduce(1, 2, self.across)
        self.all_reduce(2, 3, self.world)
        self.synchronise()
        self.expect("split", 1, step * self.sizes[1], step * self.ranks, step * self.ranks * self.ranks)


class Barrier(Rank):
    def __init__(self, *args):
        super().__init__(*args)
        self.half = self.split(self.world, self.number // (self.ranks // 2), self.number)

    def step(self, step):
        self.put(0, step + self.number)
        if self.number % 2 == 1:
            self.barrier()
        self.all_reduce(0, 1, self.half)
        if self.number % 2 == 0:
            self.barrier()
        self.synchronise()
        half = self.ranks // 2
        first = self.number // half * half
        self.expect("barrier", 1, sum(step + other for other in range(first, first + half)))


class Kinds(Rank):
    def step(self, step):
        ranks, me = self.ranks, self.number
        if step % 30 == 1:
            self.other = self.split(self.world, 0, me)
        other = self.other
        self.put(0, *(step + me + to for to in range(ranks)))
        self.put(40, step + me)
        self.nccl("ncclBroadcast", self.at(0), self.at(20), 1, U64, 1, other, 0)
        self.nccl("ncclBcast", self.at(40), 1, U64, 2, other, 0)
        self.nccl("ncclAllGather", self.at(0), self.at(8), 1, U64, other, 0)
        self.nccl("ncclReduceScatter", self.at(0), self.at(21), 1, U64, SUM, other, 0)
        self.synchronise()
        self.expect("broadcast", 20, step + 1)
        self.expect("broadcast in place", 40, step + 2)
        self.expect("all-gather", 8, *(step + rank for rank in range(ranks)))
        self.expect("reduce-scatter", 21, total(ranks, step) + ranks * me)
        if step % 30 == 0:
            self.nccl("ncclCommDestroy", other)
        # There is room for a thousand.
        time.sleep(0.005)


class Joins(Rank):
    other = None

    def before_joining(self):
        super().waits()

    def waits(self):
        pass

    def step(self, step):
        if step % 20 == 1:
            if self.other:
                self.nccl("ncclCommDestroy", self.other)
            self.other = self.communicator(1)
        self.put(0, step + self.number)
        self.all_reduce(0, 1, self.other)
        self.synchronise()
        self.expect("joins", 1, total(self.ranks, step))
        time.sleep(0.005)


class Churn(Rank):
    def step(self, step):
        other = self.split(self.world, step % 2 if self.number % 2 else 0, self.number)
        self.put(0, step + self.number)
        self.all_reduce(0, 1, self.world)
        self.all_reduce(0, 2, other)
        self.synchronise()
        self.expect("churn", 1, total(self.ranks, step))
        self.nccl("ncclCommDestroy", other)
        if step > 1100:
            time.sleep(0.05)


class Background(Rank):
    def __init__(self, *args):
        # size_t size; unsigned magic, version; int blocking; and more.
        self.configuration = (ctypes.c_int * 32)(*[128, 0, 0, 0, 0])
        super().__init__(*args)
        self.half = self.split(self.world, self.number // (self.ranks // 2), self.number)

    def config(self):
        return ctypes.addressof(self.configuration)

    def until_done(self, communicator):
        state = ctypes.c_int(IN_PROGRESS)
        while state.value == IN_PROGRESS:
            self.nccl("ncclCommGetAsyncError", communicator, ctypes.byref(state))
            time.sleep(0.001)

    def step(self, step):
        self.put(0, step + self.number)
        self.all_reduce(0, 1, self.world)
        self.until_done(self.world)
        self.nccl("ncclGroupStart")
        self.all_reduce(0, 2, self.half)
        self.nccl("ncclGroupEnd")
        if self.number == step % self.ranks:
            time.sleep(0.01)
        self.until_done(self.half)
        if step % 20 == 0:
            self.nccl("ncclCommDestroy", self.half)
            self.half = self.split(self.world, self.number // (self.ranks // 2), self.number)
        self.synchronise()
        half = self.ranks // 2
        first = self.number // half * half
        self.expect("background", 1, total(self.ranks, step), sum(step + other for other in range(first, first + half)))


def scribble():
    """The table is all of the mapping that the interposer has made."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:rekindle-nccl-" in line)
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    numbers = random.Random(start)
    while True:
        place = numbers.choice([start + 4, start + 24, numbers.randrange(start + 4, end - 4096)])
        length = numbers.choice([4, 8, 40, 4000])
        data = numbers.choice([numbers.randbytes(length), b"\xff" * length])
        ctypes.memmove(place, data, length)
        # Reachable again, so that other numbers are looked at.
        ctypes.memmove(start + 4, bytes(4), 4)
        time.sleep(0.0001)


MODES = {
    mode.__name__.lower(): mode
    for mode in (Late, Ahead, Ring, Groups, Crossing, Split, Barrier, Kinds, Joins, Churn, Background)
}


def wait_for_ranks(pids):
    for _ in pids:
        pid, status = os.wait()
        if status != 0:
            fail(6, f"rank {pids.index(pid) + 1} ended with status {status}")


def launch(ranks):
    """Answers the number of a rank in each child, and never in the launcher."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            return rank
        pids.append(pid)
    ended, status = os.wait()
    for pid in pids:
        if pid != ended:
            os.kill(pid, signal.SIGKILL)
    fail(6, f"rank {pids.index(ended)} ended with status {status}")


def launch_orphans(ranks):
    """Answers the number of a rank in each of them, and never in this process."""
    if os.fork() == 0:
        for rank in range(ranks):
            if os.fork() == 0:
                return rank
        os._exit(0)
    os.wait()
    while True:
        signal.pause()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("ranks", type=int)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--linked")
    parser.add_argument("--never")
    parser.add_argument("--survive", action="store_true")
    parser.add_argument("--second")
    parser.add_argument("--scribble", action="store_true")
    parser.add_argument("--static")
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--orphans", action="store_true")
    parser.add_argument("--heavy")
    args = parser.parse_args()

    # Shared with the children.
    shared = (ctypes.c_uint64 * (mmap.PAGESIZE // WORD)).from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    number, pids, forks = 0, [], not args.launch and not args.orphans
    if args.launch:
        number = launch(args.ranks)
    elif args.orphans:
        number = launch_orphans(args.ranks)
    for rank in range(1, args.ranks if forks else 1):
        pid = os.fork()
        if pid == 0:
            number = rank
            break
        pids.append(pid)
    if number == 0 and not args.survive and forks:
        threading.Thread(target=wait_for_ranks, args=(pids,), daemon=True).start()
    rank = MODES[args.mode](number, args.ranks, shared, args)
    if number == 0 and args.scribble:
        threading.Thread(target=scribble, daemon=True).start()
    with open(args.out if number == 0 else f"{args.out}.{number}", "a", buffering=1) as out:
        step, ballast = 0, None
        while True:
            step += 1
            if args.heavy and number == args.ranks - 1 and ballast is None and os.path.exists(args.heavy):
                ballast = b"x" * (1 << 30)
            rank.waits()
            rank.step(step)
            out.write(f"{step}\n")
            if args.mode != "churn":
                # Without it each rank takes all of a processor from the tests beside this one.
                time.sleep(0.002)


main()
