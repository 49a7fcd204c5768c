#!/usr/bin/env python3
"""A job for the stand-in libcuda whose memory can stay on the GPU.

    standin_kept.py OUT [--mib N,N,...] [--still N] [--own N] [--host KIND] [--nvml] [--ranks N] [--churn] [--turns]
                    [--collective MS] [--do FILE]

Has an allocation of each of these sizes, with a pattern, and one small one; with --own one of N MiB that it makes with
cuMemCreate itself, with --still one of N MiB that it never changes, only compares. With --ranks as many processes do so, with the outputs
OUT, OUT.1 and so on; the first one has --do. Each round it writes the round to the first and
the last word of each, changes one more place that the round determines, compares all of one allocation with what it must
be, and appends the round to the file OUT. With --churn each round also frees an allocation and makes it anew.
With --collective each round then has a collective of all ranks, for which the last rank is late by so many milliseconds.
With --turns each round writes one of two contents to all of each allocation instead, in turn. The line of the file --do has it do something else once, and add what came of it to FILE.done:
  fork     tells how many descriptors of memory it has, and a child of it
  free     frees the last allocation
  first    frees the first allocation
  more     allocates another one of 16 MiB
  close    closes the descriptors with high numbers that memory has, and opens files of its own under these numbers
  ipc      asks for a handle of the first allocation by CUDA IPC
  export   exports the host memory of --host as a descriptor
  release  releases the handle of that memory, whose mapping stays
  sparse, deferred, pool    makes a sparse array, one whose memory comes later, or takes memory from a pool of host memory;
           no-array and no-pool remove it
With --host it also has 4 MiB of host memory, of a NUMA node ("numa") or anywhere ("host"), which it changes and compares with
the processor. With --nvml it initialises NVML before CUDA, and a thread of its own asks NVML for the temperature all the time.
Ends with 3 when memory is not what it was, with 5 when a call fails.
"""

import argparse
import ctypes
import mmap
import os
import random
import sys
import threading
import time

MIB = 1 << 20
LIBC = ctypes.CDLL(None)


def preload():
    """The stand-in comes after the interposer, so that the interposer's next ioctl is the stand-in's."""
    library = os.path.join(os.environ["STANDIN_CUDA_DIR"], "libcuda.so.1")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if library not in preloaded:
        os.environ["LD_PRELOAD"] = f"{preloaded}:{library}"
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Allocation:
    room = ctypes.create_string_buffer(0)

    def __init__(self, cuda, number, size):
        self.cuda, self.size = cuda, size
        self.content = bytearray(random.Random(number).randbytes(1 << 20) * (-(-size // MIB)))[:size]
        self.address = self.make()
        self.put(0, bytes(self.content))

    def make(self):
        pointer = ctypes.c_size_t()
        self.cuda("cuMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(self.size))
        return pointer.value

    def put(self, at, data):
        self.content[at : at + len(data)] = data
        self.cuda("cuMemcpyHtoD", ctypes.c_size_t(self.address + at), data, ctypes.c_size_t(len(data)))

    def check(self):
        # One for all: new pages cost more than all the rest.
        data = Allocation.room
        if len(data) < self.size:
            data = Allocation.room = ctypes.create_string_buffer(self.size)
        self.cuda("cuMemcpyDtoH", data, ctypes.c_size_t(self.address), ctypes.c_size_t(self.size))
        content = (ctypes.c_char * self.size).from_buffer(self.content)
        if LIBC.memcmp(data, content, ctypes.c_size_t(self.size)) != 0:
            read, known = data.raw[: self.size], content.raw
            differ = [at for at in range(0, self.size, 4096) if read[at : at + 4096] != known[at : at + 4096]]
            print(f"{len(differ)} pages of {self.size} bytes differ, from {differ[0]} on", file=sys.stderr, flush=True)
            sys.exit(3)

    def free(self):
        self.cuda("cuMemFree", ctypes.c_size_t(self.address))


class Own(Allocation):
    """As PyTorch's expandable segments."""

    def make(self):
        self.handle, address = ctypes.c_uint64(), ctypes.c_size_t()
        self.ctypes_size = ctypes.c_size_t(self.size)
        nothing = ctypes.c_size_t(0)
        properties, access = (ctypes.c_uint32 * 8)(1, 0, 1), (ctypes.c_int * 3)(1, 0, 3)
        self.cuda("cuMemAddressReserve", ctypes.byref(address), self.ctypes_size, nothing, nothing, nothing)
        self.cuda("cuMemCreate", ctypes.byref(self.handle), self.ctypes_size, properties, nothing)
        self.cuda("cuMemMap", address, self.ctypes_size, nothing, self.handle, nothing)
        self.cuda("cuMemSetAccess", address, self.ctypes_size, access, ctypes.c_size_t(1))
        return address.value

    def free(self):
        address = ctypes.c_size_t(self.address)
        self.cuda("cuMemUnmap", address, self.ctypes_size)
        self.cuda("cuMemRelease", self.handle)
        self.cuda("cuMemAddressFree", address, self.ctypes_size)


class Host(Own):
    """Used by the processor, as NCCL uses it."""

    LOCATIONS = {"host": 2, "numa": 3}

    def __init__(self, cuda, number, size, kind):
        self.location = self.LOCATIONS[kind]
        super().__init__(cuda, number, size)

    def make(self):
        self.handle, address = ctypes.c_uint64(), ctypes.c_size_t()
        self.ctypes_size = ctypes.c_size_t(self.size)
        nothing = ctypes.c_size_t(0)
        properties = (ctypes.c_uint32 * 8)(1, 1, self.location)
        self.cuda("cuMemAddressReserve", ctypes.byref(address), self.ctypes_size, nothing, nothing, nothing)
        self.cuda("cuMemCreate", ctypes.byref(self.handle), self.ctypes_size, properties, nothing)
        self.cuda("cuMemMap", address, self.ctypes_size, nothing, self.handle, nothing)
        for location in (1, self.location):
            access = (ctypes.c_int * 3)(location, 0, 3)
            self.cuda("cuMemSetAccess", address, self.ctypes_size, access, ctypes.c_size_t(1))
        return address.value

    def put(self, at, data):
        self.content[at : at + len(data)] = data
        ctypes.memmove(self.address + at, data, len(data))

    def check(self):
        if ctypes.string_at(self.address, self.size) != bytes(self.content):
            print("the host memory differs", file=sys.stderr, flush=True)
            sys.exit(3)


def ask_nvml(library, device):
    temperature = ctypes.c_uint()
    while True:
        if library.nvmlDeviceGetTemperature(device, 0, ctypes.byref(temperature)) != 0:
            os._exit(5)


class Cuda:
    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self("cuCtxCreate", ctypes.byref(ctypes.c_void_p()), 0, 0)

    def code(self, name, *args):
        name = {name: name + "_v2" for name in ("cuMemAlloc", "cuMemFree", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuCtxCreate")}.get(
            name, name
        )
        return getattr(self.library, name)(*args)

    def __call__(self, name, *args):
        code = self.code(name, *args)
        if code != 0:
            print(f"{name} failed with {code}", file=sys.stderr, flush=True)
            sys.exit(5)


def descriptors():
    """Those of memory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "standin-memory" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
        except OSError:
            pass
    return found


def do(word, cuda, all):
    if word == "fork":
        told, to_tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(to_tell, b"%d" % len(descriptors()))
            os._exit(0)
        os.close(to_tell)
        os.waitpid(child, 0)
        with os.fdopen(told, "rb") as told:
            return f"{len(descriptors())} here, {told.read().decode()} in the child"
    if word == "free":
        all.pop().free()
    elif word == "first":
        all.pop(0).free()
    elif word == "close":
        # The stand-in's own have low numbers.
        for fd in [fd for fd in map(int, descriptors()) if fd > 100]:
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, fd)
            os.close(null)
    elif word == "export":
        file = ctypes.c_int()
        cuda("cuMemExportToShareableHandle", ctypes.byref(file), all[-1].handle, 1, ctypes.c_size_t(0))
        os.close(file.value)
    elif word == "release":
        cuda("cuMemRelease", all[-1].handle)
    elif word in ("sparse", "deferred"):
        cuda.object = ctypes.c_uint64()
        descriptor = (ctypes.c_uint32 * 10)(8, 0, 8, 0, 0, 0, 1, 1, 0x40 if word == "sparse" else 0x80)
        cuda("cuArray3DCreate_v2", ctypes.byref(cuda.object), descriptor)
    elif word == "pool":
        cuda.object, address = ctypes.c_uint64(), ctypes.c_uint64()
        cuda("cuMemPoolCreate", ctypes.byref(cuda.object), (ctypes.c_uint32 * 22)(1, 0, 3))
        cuda("cuMemAllocFromPoolAsync", ctypes.byref(address), ctypes.c_size_t(4096), cuda.object, None)
    elif word == "no-array":
        cuda("cuArrayDestroy", cuda.object)
    elif word == "no-pool":
        cuda("cuMemPoolDestroy", cuda.object)
    elif word == "more":
        all.append(Allocation(cuda, 99, 16 * MIB))
    elif word == "ipc":
        return str(cuda.code("cuIpcGetMemHandle", ctypes.create_string_buffer(64), ctypes.c_size_t(all[0].address)))
    return "done"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--mib", default="16,33,20")
    parser.add_argument("--still", type=int)
    parser.add_argument("--own", type=int)
    parser.add_argument("--host", choices=Host.LOCATIONS)
    parser.add_argument("--nvml", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--collective", type=int)
    parser.add_argument("--do")
    args = parser.parse_args()
    preload()
    # Shared with the children.
    begun, is_late = ctypes.c_uint64.from_buffer(mmap.mmap(-1, mmap.PAGESIZE)), False
    for rank in range(1, args.ranks):
        if os.fork() == 0:
            args.out, args.do, is_late = f"{args.out}.{rank}", None, rank == args.ranks - 1
            break

    if args.nvml:
        nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_size_t()
        if nvml.nvmlInit_v2() or nvml.standin_nvml_first() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
            sys.exit(5)
        threading.Thread(target=ask_nvml, args=(nvml, device), daemon=True).start()
    cuda = Cuda()
    sizes = [int(size) * MIB for size in args.mib.split(",")]
    all = [Allocation(cuda, number, size) for number, size in enumerate([*sizes, 4096])]
    if args.own:
        all.append(Own(cuda, len(all), args.own * MIB))
    if args.host:
        all.append(Host(cuda, len(all), 4 * MIB, args.host))
    still = [Allocation(cuda, 98, args.still * MIB)] if args.still else []
    turns = [random.Random(turn).randbytes(MIB) * max(int(size) for size in args.mib.split(",")) for turn in (5, 6)]
    chance = random.Random(1)
    step = 0
    with open(args.out, "a", buffering=1) as out:
        while True:
            step += 1
            word = step.to_bytes(8, "little")
            for one in all if args.turns else []:
                one.put(0, turns[step % 2][: one.size])
                one.check()
            for one in [] if args.turns else all:
                one.put(0, word)
                one.put(one.size - 8, word)
            one = all[step % len(all)]
            if not args.turns:
                one.put(chance.randrange(one.size - 8), word)
            one.check()
            for one in still:
                one.check()
            if args.churn:
                at = step % len(all)
                size = all[at].size
                all[at].free()
                all[at] = type(all[at])(cuda, step, size)
            if args.collective is not None:
                time.sleep(args.collective / 1000 if is_late else 0)
                cuda("standin_collective", ctypes.byref(begun), ctypes.c_uint64(args.ranks))
            if args.do and os.path.exists(args.do):
                word = open(args.do).read().strip()
                os.unlink(args.do)
                with open(f"{args.do}.done", "a") as done:
                    done.write(f"{word}: {do(word, cuda, all)}\n")
            out.write(f"{step}\n")
            time.sleep(0.03)


main()
