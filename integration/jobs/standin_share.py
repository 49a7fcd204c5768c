#!/usr/bin/env python3
"""Ranks that share memory of the stand-in libcuda, as NCCL's do over NVLink.

    standin_share.py OUT RANKS [--churn] [--no-peers] [--collective MS] [--do FILE]

Rank 0 is this process and writes OUT; rank N is a child of it and writes OUT.N. Each has a piece of memory, which all others
map. Each step a rank writes its number and what follows from it into the memory of all others, waits until theirs are in
its own, and compares. With --churn it also takes a new piece from its neighbour in each step, uses it and lets it go, in
different orders. With --collective each step has a collective of all, for which the last rank is late by so many
milliseconds, while another thread of each rank calls the driver all the time. The line of the file --do, "RANK WORD", has a rank do something else once, and add what came of it to
FILE.done:
  ipc        maps memory of rank 0 by CUDA IPC, and keeps it; "close" lets it go
  give-up    frees its own memory, which others have mapped, but goes on with theirs
  multicast  uses multicast
  hold       holds a lock of the driver's for 6 s, on a thread of its own
  fork       has a child that calls the driver in vain, and executes another program
  post       sends a file to each other rank; "take" receives those of the others
  crowd      leaves one descriptor free
  room       gives them back
Ends with 3 when memory is not what it was, with 4 when a name is not, with 5 when a call fails, with 6 when a rank ends
badly.
"""

import argparse
import array
import ctypes
import hashlib
import mmap
import os
import resource
import socket
import sys
import threading
import time

PIECE = 2 << 20
SLOT = 4096
DESCRIPTOR = 1


def preload():
    """The stand-in comes after the interposer, so that the interposer's next ioctl is the stand-in's."""
    library = os.path.join(os.environ["STANDIN_CUDA_DIR"], "libcuda.so.1")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if library not in preloaded:
        os.environ["LD_PRELOAD"] = f"{preloaded}:{library}"
        os.execv(sys.executable, [sys.executable, *sys.argv])


class IpcHandle(ctypes.Structure):
    _fields_ = [("word", ctypes.c_int * 16)]


class Cuda:
    """The driver's functions: those of even ranks by dlsym, those of odd ones by cuGetProcAddress, as NCCL finds them."""

    def __init__(self, by_address):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.by_address = by_address
        self.found = {}
        self("cuInit", 0)
        context = ctypes.c_void_p()
        self("cuCtxCreate_v2", ctypes.byref(context), 0, 0)

    def function(self, name):
        if name not in self.found:
            function = getattr(self.library, name)
            address = ctypes.c_void_p()
            status = ctypes.c_int()
            args = ctypes.byref(address), 12000, ctypes.c_uint64(0), ctypes.byref(status)
            if self.by_address and self.library.cuGetProcAddress_v2(name.encode(), *args) == 0:
                function = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
            self.found[name] = function
        return self.found[name]

    def code(self, name, *args):
        # Numbers of all sizes as what fits all.
        return self.function(name)(*(ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args))

    def __call__(self, name, *args):
        code = self.code(name, *args)
        if code != 0:
            print(f"{name} failed with {code}", file=sys.stderr, flush=True)
            os._exit(5)

    def create(self, size=PIECE):
        handle = ctypes.c_uint64()
        self("cuMemCreate", ctypes.byref(handle), size, None, 0)
        return handle.value

    def export(self, handle):
        descriptor = ctypes.c_int(-1)
        self("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, DESCRIPTOR, 0)
        return descriptor.value

    def bring(self, descriptor):
        """None where the memory behind it was taken to host memory meanwhile."""
        handle = ctypes.c_uint64()
        code = self.code("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, DESCRIPTOR)
        os.close(descriptor)
        if code not in (0, 1):
            print(f"import failed with {code}", file=sys.stderr, flush=True)
            os._exit(5)
        return handle.value if code == 0 else None

    def map(self, handle, size=PIECE):
        address = ctypes.c_size_t()
        self("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        half = size // 2
        # In two mappings, and access for two GPUs at once and one by one.
        self("cuMemMap", address.value, half, 0, handle, 0)
        self("cuMemMap", address.value + half, half, half, handle, 0)
        access = (ctypes.c_int * 6)(1, 0, 3, 1, 1, 3)
        self("cuMemSetAccess", address.value, size, access, 2)
        self("cuMemSetAccess", address.value, half, access, 1)
        return address.value

    def write(self, address, data):
        self("cuMemcpyHtoD_v2", address, data, len(data))

    def read(self, address, size):
        data = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", data, address, size)
        return data.raw

    def number(self, address):
        return int.from_bytes(self.read(address, 8), "little")


def send(channel, descriptor, word=b"m"):
    channel.sendmsg([word], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    os.close(descriptor)


def receive(channel):
    _, control, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4))
    if not control:
        # The other rank is gone: whoever waits for it says so.
        time.sleep(60)
        os._exit(6)
    return array.array("i", control[0][2])[0]


def payload(rank, step):
    return hashlib.sha256(f"{rank} {step}".encode()).digest() * 8


class Rank:
    def __init__(self, number, channels, args):
        self.number, self.channels, self.args = number, channels, args
        self.cuda = Cuda(number % 2 == 1)
        self.own = self.cuda.create()
        self.memory = self.cuda.map(self.own)
        self.cuda.write(self.memory, bytes(PIECE))
        self.names, self.peers = {}, {}
        self.kept, self.crowd = [], []
        for peer in self.others():
            send(channels[peer], self.cuda.export(self.own))
        for peer in self.others():
            self.names[peer] = self.cuda.bring(receive(channels[peer]))
            self.peers[peer] = self.cuda.map(self.names[peer])
        # The last one is kept by its mapping only.
        self.given_up = max(self.others(), default=None)
        if self.given_up is not None and number % 2 == 0:
            self.cuda("cuMemRelease", self.names[self.given_up])

    def others(self):
        return [] if self.args.no_peers else sorted(self.channels)

    def step(self, step):
        parity = step % 2
        for peer, address in self.peers.items():
            place = address + SLOT * (1 + self.number)
            self.cuda.write(place + 512 * (1 + parity), payload(self.number, step))
            self.cuda.write(place, step.to_bytes(8, "little"))
        for peer in self.peers:
            place = self.memory + SLOT * (1 + peer)
            began = time.monotonic()
            while self.cuda.number(place) < step:
                time.sleep(0.002)
                if time.monotonic() - began > 60:
                    print(f"rank {self.number}: nothing comes from {peer}", file=sys.stderr, flush=True)
                    os._exit(3)
            seen = self.cuda.number(place)
            if seen not in (step, step + 1) or self.cuda.read(place + 512 * (1 + parity), 256) != payload(peer, step):
                print(f"rank {self.number}: {peer} wrote {seen} at step {step}", file=sys.stderr, flush=True)
                os._exit(3)
        if step % 8 == self.number % 8 and not self.crowd:
            self.names_are_what_they_were()

    def names_are_what_they_were(self):
        handle, properties = ctypes.c_uint64(), (ctypes.c_uint32 * 8)()
        for peer, name in self.names.items():
            self.cuda("cuMemRetainAllocationHandle", ctypes.byref(handle), self.peers[peer] + PIECE // 2)
            if handle.value != name:
                print(f"the memory of {peer} is {handle.value:x} and was {name:x}", file=sys.stderr, flush=True)
                os._exit(4)
            self.cuda("cuMemGetAllocationPropertiesFromHandle", properties, name)
            self.cuda("cuMemRelease", name)
        new = [self.cuda.create() for _ in range(3)]
        held = {name for peer, name in self.names.items() if not (peer == self.given_up and self.number % 2 == 0)}
        if held & set(new):
            print("a new handle has the number of an old one", file=sys.stderr, flush=True)
            os._exit(4)
        for handle in new:
            self.cuda("cuMemRelease", handle)

    def churn(self, step):
        """A new piece for the next rank, and one from the rank before."""
        ranks = len(self.channels) + 1
        to, before = self.channels[(self.number + 1) % ranks], self.channels[(self.number - 1) % ranks]
        handle = self.cuda.create()
        address = self.cuda.map(handle)
        self.cuda.write(address, payload(self.number, step))
        send(to, self.cuda.export(handle))
        theirs = self.cuda.bring(receive(before))
        if theirs is not None:
            place = self.cuda.map(theirs)
            if step % 2:
                self.cuda("cuMemRelease", theirs)
            if self.cuda.read(place, 256) != payload((self.number - 1) % ranks, step):
                print("a new piece is not what it was", file=sys.stderr, flush=True)
                os._exit(3)
            if step % 3:
                self.cuda("cuMemUnmap", place, PIECE)
            else:
                self.cuda("cuMemUnmap", place, PIECE // 2)
                self.cuda("cuMemUnmap", place + PIECE // 2, PIECE // 2)
            if not step % 2:
                self.cuda("cuMemRelease", theirs)
            self.cuda("cuMemAddressFree", place, PIECE)
        # Not before the other one is through.
        to_tell, told = before, to
        to_tell.send(b"d")
        told.recv(1)
        self.cuda("cuMemUnmap", address, PIECE)
        self.cuda("cuMemRelease", handle)
        self.cuda("cuMemAddressFree", address, PIECE)

    def collective(self, begun):
        ranks = len(self.channels) + 1
        if self.number == ranks - 1:
            time.sleep(self.args.collective / 1000)
        self.cuda("standin_collective", ctypes.byref(begun), ranks)

    def look_on(self):
        while True:
            self.cuda.number(self.memory)
            time.sleep(0.001)

    def do(self, word):
        cuda = self.cuda
        if word == "ipc":
            path = f"{self.args.out}.ipc"
            handle = IpcHandle.from_buffer_copy(open(path, "rb").read())
            address = ctypes.c_size_t()
            cuda("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(0))
            self.kept.append(address.value)
        elif word == "offer":
            handle = IpcHandle()
            cuda("cuIpcGetMemHandle", ctypes.byref(handle), self.memory)
            open(f"{self.args.out}.ipc", "wb").write(bytes(handle))
        elif word == "close":
            cuda("cuIpcCloseMemHandle", self.kept.pop())
        elif word == "give-up":
            cuda("cuMemRelease", self.own)
        elif word == "multicast":
            cuda("cuMulticastAddDevice", self.own, 0)
        elif word == "hold":
            threading.Thread(target=cuda.function("standin_hold"), args=(6000,)).start()
            time.sleep(0.1)
        elif word == "fork":
            child = os.fork()
            if child == 0:
                handle = ctypes.c_uint64()
                code = cuda.code("cuMemCreate", ctypes.byref(handle), PIECE, None, 0)
                code |= cuda.code("cuMemRelease", self.own) << 8
                code |= cuda.code("cuMemUnmap", self.memory, PIECE) << 16
                if code != 0x030303:
                    os._exit(7)
                os.execvp("true", ["true"])
            return f"child ended with {os.waitpid(child, 0)[1]}"
        elif word == "post":
            for channel in self.channels.values():
                file = os.memfd_create("post")
                os.write(file, b"from %d" % self.number)
                send(channel, file)
        elif word == "take":
            for peer, channel in self.channels.items():
                file = receive(channel)
                if os.pread(file, 100, 0) != b"from %d" % peer:
                    os._exit(7)
                os.close(file)
        elif word == "crowd":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            try:
                while True:
                    self.crowd.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                # What this rank itself opens each round.
                os.close(self.crowd.pop())
        elif word == "room":
            while self.crowd:
                os.close(self.crowd.pop())
        return "done"

    def look_for_work(self):
        try:
            number, word = open(self.args.do).read().split()
        except (OSError, ValueError):
            return
        if int(number) == self.number:
            os.unlink(self.args.do)
            answer = self.do(word)
            with open(f"{self.args.do}.done", "a") as done:
                done.write(f"{number} {word}: {answer}\n")


def wait_for_ranks(pids):
    for _ in pids:
        pid, status = os.wait()
        # A child of a rank's own is not of these.
        if status != 0:
            print(f"rank {pids.index(pid) + 1} ended with status {status}", file=sys.stderr, flush=True)
            os._exit(6)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--collective", type=int)
    parser.add_argument("--do")
    args = parser.parse_args()
    preload()

    pairs = {(a, b): socket.socketpair() for a in range(args.ranks) for b in range(a + 1, args.ranks)}
    # Shared with the children.
    begun = ctypes.c_uint64.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    number, pids = 0, []
    for rank in range(1, args.ranks):
        pid = os.fork()
        if pid == 0:
            number = rank
            break
        pids.append(pid)
    channels = {}
    for (a, b), ends in pairs.items():
        if number in (a, b):
            channels[a + b - number] = ends[number == b]
    for ends in pairs.values():
        for end in ends:
            if end not in channels.values():
                end.close()
    if number == 0 and pids:
        threading.Thread(target=wait_for_ranks, args=(pids,), daemon=True).start()
    rank = Rank(number, channels, args)
    if args.collective is not None:
        threading.Thread(target=rank.look_on, daemon=True).start()
    out = args.out if number == 0 else f"{args.out}.{number}"
    step = 0
    with open(out, "a", buffering=1) as out:
        while True:
            step += 1
            rank.step(step)
            if args.collective is not None:
                rank.collective(begun)
            if args.churn:
                rank.churn(step)
            if args.do and os.path.exists(args.do):
                rank.look_for_work()
            out.write(f"{step}\n")
            time.sleep(0.008)


main()
