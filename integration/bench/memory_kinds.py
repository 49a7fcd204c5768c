#!/usr/bin/env python3
"""What a checkpoint makes of each kind of CUDA memory, each in a process of its own.

    memory_kinds.py driver [FILTER]
        The driver alone: lock, checkpoint, restore and unlock by its own calls.
    memory_kinds.py rekindle [FILTER] --rekindle PROGRAM [--memory copied,kept]
        A job under rekindle: a snapshot, kill -9, a restore. Once for each setting of gpu.memory.

The content of the memory is compared before and after. FILTER is a regular expression; without it: all kinds. Prints a
line for each kind, with details:

    works      the process runs on with the same content
    refused    it was not checkpointed, and can run on
    lost       it died, cannot run on, began anew, or its memory has another content
    hangs      no answer for too long
    unusable   such memory cannot be made here, or the process does not start

Needs a GPU and an NVIDIA driver, 570 or newer. `rekindle` also needs root, and CRIU (REKINDLE_CRIU). Only the standard
library. It loses processes on purpose, and some hang in the driver: run it where no other job uses the GPU.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_ushort, c_void_p
from pathlib import Path
from typing import NamedTuple

from supervised import ROOT, Failed, Job

SCRIPT = Path(__file__).resolve()
LIBRARY = "libcuda.so.1"
MIB = 1 << 20
SIZE = 4 * MIB
# Seconds: for the driver's four calls together, and then for the process.
CALLS_LIMIT = 45
ANSWER_LIMIT = 20
# Seconds of a job: until it runs, until it has an image or is back, and for two steps.
START_LIMIT = 40
REKINDLE_LIMIT = 60
STEPS_LIMIT = 25
SETTINGS = {
    "log.level": "info",
    "snapshot.rehearse": "off",
    "store.compression": "none",
    "restart.min-uptime": "0s",
}
MEMORY_SETTINGS = ["copied", "kept"]
# In the environment of a job: its name, by which its process is found.
JOB_VARIABLE = "MEMORY_KINDS_JOB"
NVML_FIRST = "nvml then cuMemAlloc"

# CUmemLocationType
DEVICE, HOST, NUMA, NUMA_CURRENT = 1, 2, 3, 4
# CUmemAllocationHandleType
FD, FABRIC = 1, 8
# CUmemAllocationType
PINNED, MANAGED = 1, 2
# CUmemAccess_flags
READ, READ_WRITE = 1, 3
# Flags of arrays
SURFACE, SPARSE, DEFERRED = 0x2, 0x40, 0x80
# CU_AD_FORMAT_FLOAT
FLOAT = 0x20
# CU_STREAM_NON_BLOCKING
NON_BLOCKING = 1
# CU_EVENT_DISABLE_TIMING and CU_EVENT_INTERPROCESS
INTERPROCESS_EVENT = 6
# CU_MEMHOSTREGISTER_READ_ONLY
READ_ONLY = 8
MAP_HUGETLB = 0x40000


class Unusable(Exception):
    """Memory of this kind cannot be made here."""


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", c_int), ("id", c_int)]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", Location), ("flags", c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps"""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("max_size", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 54),
    ]


class ArrayDescription(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR"""

    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class ExternalHandle(ctypes.Union):
    """The handle in CUDA_EXTERNAL_MEMORY_HANDLE_DESC."""

    _fields_ = [("fd", c_int), ("win32", c_void_p * 2)]


class ExternalMemory(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_HANDLE_DESC"""

    _fields_ = [
        ("type", c_int),
        ("handle", ExternalHandle),
        ("size", c_uint64),
        ("flags", c_uint),
        ("reserved", c_uint * 16),
    ]


class ExternalBuffer(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_BUFFER_DESC"""

    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("flags", c_uint), ("reserved", c_uint * 16)]


class Buffer(NamedTuple):
    """Memory whose content is compared. `host` is its address for the processor, or 0."""

    device: int
    size: int
    host: int


# Of a process that makes memory: the driver's library, what is compared, and what Python must not free.
cuda = None
buffers = []
kept = []


def load_driver():
    global cuda
    cuda = ctypes.CDLL(LIBRARY)


def error_name(code):
    text = ctypes.c_char_p()
    return text.value.decode() if cuda.cuGetErrorName(code, byref(text)) == 0 else str(code)


def call(name, *arguments):
    """One call of the driver that must succeed."""
    function = getattr(cuda, name, None)
    if function is None:
        raise Unusable(f"no {name}")
    code = function(*arguments)
    if code:
        raise Unusable(f"{name}: {code} {error_name(code)}")


def compare_later(device, size, host=0):
    """Notes memory whose content is compared. Addresses are numbers, or c_uint64."""
    device = getattr(device, "value", device)
    host = getattr(host, "value", host)
    buffers.append(Buffer(device, size, host))


def begin():
    load_driver()
    device, context = c_int(), c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", byref(device), 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    call("cuCtxSetCurrent", context)


def new_stream():
    stream = c_void_p()
    call("cuStreamCreate", byref(stream), NON_BLOCKING)
    return stream


# cuMemAlloc


def allocated():
    address = c_uint64()
    call("cuMemAlloc_v2", byref(address), c_size_t(SIZE))
    compare_later(address, SIZE)
    return address


def allocated_with_ipc_handle():
    address = c_uint64()
    call("cuMemAlloc_v2", byref(address), c_size_t(SIZE))
    handle = (c_ubyte * 64)()
    call("cuIpcGetMemHandle", handle, address)
    compare_later(address, SIZE)


def allocated_with_dmabuf():
    address = c_uint64()
    call("cuMemAlloc_v2", byref(address), c_size_t(SIZE))
    fd = c_int(-1)
    # 1: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD. The descriptor stays open.
    call("cuMemGetHandleForAddressRange", byref(fd), address, c_size_t(SIZE), 1, c_uint64(0))
    compare_later(address, SIZE)


def ipc_event():
    event = c_void_p()
    call("cuEventCreate", byref(event), INTERPROCESS_EVENT)
    handle = (c_ubyte * 64)()
    call("cuIpcGetEventHandle", handle, event)


# Contexts


def second_context():
    context = c_void_p()
    call("cuCtxCreate_v2", byref(context), 0, 0)
    allocated()


def green_context():
    all_units, group, rest = (c_ubyte * 1024)(), (c_ubyte * 4096)(), (c_ubyte * 1024)()
    # 1: CU_DEV_RESOURCE_TYPE_SM
    call("cuDeviceGetDevResource", 0, all_units, 1)
    groups = c_uint(1)
    call("cuDevSmResourceSplitByCount", group, byref(groups), all_units, rest, 0, 16)
    description, green, context, stream = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    call("cuDevResourceGenerateDesc", byref(description), group, 1)
    # 1: CU_GREEN_CTX_DEFAULT_STREAM
    call("cuGreenCtxCreate", byref(green), description, 0, 1)
    call("cuCtxFromGreenCtx", byref(context), green)
    call("cuGreenCtxStreamCreate", byref(stream), green, NON_BLOCKING, 0)
    call("cuCtxSetCurrent", context)
    allocated()


# Arrays; their content is not compared


def array(flags=0):
    made = c_void_p()
    description = ArrayDescription(width=1024, height=1024, depth=0, format=FLOAT, channels=1, flags=flags)
    call("cuArray3DCreate_v2", byref(made), byref(description))
    return made


def destroyed_sparse_array():
    call("cuArrayDestroy", array(SPARSE))
    allocated()


def mipmapped_array(flags):
    made = c_void_p()
    description = ArrayDescription(width=1024, height=1024, depth=0, format=FLOAT, channels=1, flags=flags)
    call("cuMipmappedArrayCreate", byref(made), byref(description), 2)


# cuMemCreate


def create(location, handles=0, size=SIZE, type=PINNED, **properties):
    """A handle without a mapping, and its size."""
    wanted = Properties(type=type, handles=handles, location=Location(type=location, id=0), **properties)
    unit = c_size_t()
    call("cuMemGetAllocationGranularity", byref(unit), byref(wanted), 0)
    size = (size + unit.value - 1) // unit.value * unit.value
    handle = c_uint64()
    call("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64(0))
    return handle, size


def reserved(size):
    address = c_uint64()
    call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    return address


def map_at(address, handle, size, *locations, flags=READ_WRITE, offset=0):
    """Maps a handle, with access from the locations."""
    call("cuMemMap", address, c_size_t(size), c_size_t(offset), handle, c_uint64(0))
    for location in locations:
        access = Access(location=Location(type=location, id=0), flags=flags)
        call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))


def mapped(handle, size, *locations, flags=READ_WRITE):
    address = reserved(size)
    map_at(address, handle, size, *locations, flags=flags)
    return address


def exported(handle):
    """A descriptor, which stays open."""
    fd = c_int(-1)
    call("cuMemExportToShareableHandle", byref(fd), handle, FD, c_uint64(0))
    return fd


def created(location, export=False, mapped_for=None, compared=True, **properties):
    """Mapped for the GPU, and for the processor if it is the host's. `mapped_for` says otherwise."""
    handle, size = create(location, **properties)
    if export:
        exported(handle)
    if mapped_for is None:
        processor = NUMA if location == NUMA_CURRENT else location
        mapped_for = [DEVICE] if location == DEVICE else [DEVICE, processor]
    address = mapped(handle, size, *mapped_for)
    if compared:
        compare_later(address, size, address if mapped_for != [DEVICE] else 0)


def created_twice_mapped():
    handle, size = create(DEVICE)
    address = mapped(handle, size, DEVICE)
    compare_later(address, size)
    mapped(handle, size, DEVICE)


def created_partly_mapped():
    handle, _ = create(DEVICE, size=8 * MIB)
    address = reserved(32 * MIB)
    map_at(address, handle, 2 * MIB, DEVICE, offset=4 * MIB)
    compare_later(address, 2 * MIB)


def created_handle_released():
    handle, size = create(DEVICE)
    address = mapped(handle, size, DEVICE)
    call("cuMemRelease", handle)
    compare_later(address, size)


def created_read_only():
    handle, size = create(DEVICE)
    mapped(handle, size, DEVICE, flags=READ)


def created_and_released(location):
    """There is none any more at the checkpoint."""
    handle, size = create(location)
    address = mapped(handle, size, DEVICE, location)
    call("cuMemUnmap", address, c_size_t(size))
    call("cuMemRelease", handle)
    allocated()


def imported_by_itself(location):
    handle, size = create(location, handles=FD)
    fd, again = exported(handle), c_uint64()
    call("cuMemImportFromShareableHandle", byref(again), c_void_p(fd.value), FD)
    os.close(fd.value)
    compare_later(mapped(again, size, DEVICE), size)


def external_memory():
    handle, size = create(DEVICE, handles=FD)
    fd = exported(handle)
    # 1: CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
    description = ExternalMemory(type=1, handle=ExternalHandle(fd=fd.value), size=size)
    memory = c_void_p()
    call("cuImportExternalMemory", byref(memory), byref(description))
    part = ExternalBuffer(offset=0, size=size)
    address = c_uint64()
    call("cuExternalMemoryGetMappedBuffer", byref(address), memory, byref(part))
    compare_later(address, size)


# Pools, and memory nodes of graphs


def create_pool(location, handles=0, type=PINNED):
    pool = c_void_p()
    properties = PoolProperties(type=type, handles=handles, location=Location(type=location, id=0))
    call("cuMemPoolCreate", byref(pool), byref(properties))
    return pool


def let_gpu_access(pool):
    access = Access(location=Location(type=DEVICE, id=0), flags=READ_WRITE)
    call("cuMemPoolSetAccess", pool, byref(access), c_size_t(1))


def export_pool(pool, address):
    """A descriptor, which stays open, and what stands for memory of the pool."""
    fd, pointer = c_int(-1), (c_ubyte * 64)()
    call("cuMemPoolExportToShareableHandle", byref(fd), pool, FD, c_uint64(0))
    call("cuMemPoolExportPointer", pointer, address)
    return fd, pointer


def from_pool(location, handles=0, export=False, import_again=False, type=PINNED):
    stream, address = new_stream(), c_uint64()
    pool = create_pool(location, handles, type)
    if location != DEVICE:
        let_gpu_access(pool)
    call("cuMemAllocFromPoolAsync", byref(address), c_size_t(SIZE), pool, stream)
    call("cuStreamSynchronize", stream)
    if export or import_again:
        fd, pointer = export_pool(pool, address)
    if import_again:
        again, other_address = c_void_p(), c_uint64()
        call("cuMemPoolImportFromShareableHandle", byref(again), c_void_p(fd.value), FD, c_uint64(0))
        call("cuMemPoolImportPointer", byref(other_address), again, pointer)
    compare_later(address, SIZE, address if location != DEVICE else 0)


def from_current_pool():
    stream, address = new_stream(), c_uint64()
    call("cuMemAllocAsync", byref(address), c_size_t(SIZE), stream)
    call("cuStreamSynchronize", stream)
    compare_later(address, SIZE)


def from_default_pool(location, type=PINNED):
    """The driver's own pool of a location."""
    stream, pool, address = new_stream(), c_void_p(), c_uint64()
    call("cuMemGetDefaultMemPool", byref(pool), byref(Location(type=location, id=0)), type)
    if location != DEVICE:
        let_gpu_access(pool)
    call("cuMemAllocFromPoolAsync", byref(address), c_size_t(SIZE), pool, stream)
    call("cuStreamSynchronize", stream)
    compare_later(address, SIZE, address if location != DEVICE else 0)


def empty_pool(location):
    create_pool(location)


def used_empty_pool(location):
    """It has given memory, and has it back."""
    pool = create_pool(location)
    stream, address = new_stream(), c_uint64()
    call("cuMemAllocFromPoolAsync", byref(address), c_size_t(SIZE), pool, stream)
    call("cuMemFreeAsync", address, stream)
    call("cuStreamSynchronize", stream)


def memory_node():
    stream, graph, executable, address = new_stream(), c_void_p(), c_void_p(), c_uint64()
    # 2: CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuStreamBeginCapture_v2", stream, 2)
    call("cuMemAllocAsync", byref(address), c_size_t(SIZE), stream)
    call("cuStreamEndCapture", stream, byref(graph))
    call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    compare_later(address, SIZE)


# Memory that the GPU and the processor share


def managed(flags):
    address = c_uint64()
    call("cuMemAllocManaged", byref(address), c_size_t(SIZE), c_uint(flags))
    compare_later(address, SIZE, address)


def host_allocated(flags):
    host, device = c_void_p(), c_uint64()
    call("cuMemHostAlloc", byref(host), c_size_t(SIZE), c_uint(flags))
    call("cuMemHostGetDevicePointer_v2", byref(device), host, 0)
    compare_later(device, SIZE, host)


def file_memory(folder):
    """A shared mapping of a file without a name."""
    file = open(f"{folder}/memory-kinds-{os.getpid()}", "w+b")  # noqa: SIM115
    file.truncate(SIZE)
    kept.append(file)
    memory = mmap.mmap(file.fileno(), SIZE)
    os.unlink(file.name)
    return memory


def host_memory(kind):
    if kind == "private":
        return mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if kind == "shared":
        return mmap.mmap(-1, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    if kind == "huge":
        return mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    return file_memory("/dev/shm" if kind == "shm" else "/tmp")


def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def host_registered(flags, kind):
    memory = host_memory(kind)
    memory[:SIZE] = b"\1" * SIZE
    kept.append(memory)
    host, device = address_of(memory), c_uint64()
    call("cuMemHostRegister_v2", c_void_p(host), c_size_t(SIZE), c_uint(flags))
    call("cuMemHostGetDevicePointer_v2", byref(device), c_void_p(host), 0)
    if not flags & READ_ONLY:
        compare_later(device, SIZE, host)


def by_page_faults():
    """Memory of the system, which the GPU reads without any call (HMM)."""
    possible = c_int()
    # 88: CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
    call("cuDeviceGetAttribute", byref(possible), 88, 0)
    if not possible.value:
        raise Unusable("pageableMemoryAccess 0")
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:16] = b"x" * 16
    kept.append(memory)
    compare_later(address_of(memory), SIZE, address_of(memory))


def all_kinds():
    """What makes each kind of memory, by its name."""
    of = functools.partial
    kinds = {
        "cuMemAlloc": allocated,
        NVML_FIRST: allocated,
        "cuMemAlloc ipc handle": allocated_with_ipc_handle,
        "cuMemAlloc dmabuf": allocated_with_dmabuf,
        "ipc event": ipc_event,
        "second context": second_context,
        "green context": green_context,
        "array": array,
        "array surface": of(array, SURFACE),
        "array sparse": of(array, SPARSE),
        "array deferred": of(array, DEFERRED),
        "gone array sparse": destroyed_sparse_array,
        "mipmap": of(mipmapped_array, 0),
        "mipmap sparse": of(mipmapped_array, SPARSE),
        "mipmap deferred": of(mipmapped_array, DEFERRED),
        "two maps": created_twice_mapped,
        "part mapped": created_partly_mapped,
        "handle released": created_handle_released,
        "read only map": created_read_only,
        "unmapped device": of(create, DEVICE),
        "unmapped numa": of(create, NUMA),
        "unmapped host": of(create, HOST),
        "unmapped numa fd": of(create, NUMA, handles=FD),
        "import self device": of(imported_by_itself, DEVICE),
        "import self numa": of(imported_by_itself, NUMA),
        "external memory own": external_memory,
        "create numa cpu only": of(created, NUMA, mapped_for=[NUMA], compared=False),
        "create device managed": of(created, DEVICE, type=MANAGED),
        "create device compressed": of(created, DEVICE, compression=1),
        "create device rdma": of(created, DEVICE, rdma=1),
        # CU_MEM_CREATE_USAGE_TILE_POOL and CU_MEM_CREATE_USAGE_HW_DECOMPRESS
        "create device tile pool": of(created, DEVICE, usage=1),
        "create device hw decompress": of(created, DEVICE, usage=2),
        "pool default": from_current_pool,
        "pool managed": of(from_pool, DEVICE, type=MANAGED),
        "pool host managed": of(from_pool, HOST, type=MANAGED),
        "pool device import self": of(from_pool, DEVICE, handles=FD, import_again=True),
        "default pool managed": of(from_default_pool, DEVICE, MANAGED),
        "graph alloc": memory_node,
        # CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST and CU_MEM_ATTACH_SINGLE
        "managed global": of(managed, 1),
        "managed host": of(managed, 2),
        "managed single": of(managed, 4),
        "hmm": by_page_faults,
    }
    for place, name in [(DEVICE, "device"), (HOST, "host"), (NUMA, "numa"), (NUMA_CURRENT, "numa current")]:
        kinds[f"create {name}"] = of(created, place)
        kinds[f"create {name} fd"] = of(created, place, handles=FD)
        kinds[f"create {name} fd exported"] = of(created, place, handles=FD, export=True)
        kinds[f"create {name} fabric"] = of(created, place, handles=FABRIC)
        kinds[f"create {name} fd+fabric"] = of(created, place, handles=FD | FABRIC)
        kinds[f"create {name} gpu only"] = of(created, place, mapped_for=[DEVICE])
        kinds[f"pool {name}"] = of(from_pool, place)
        kinds[f"pool {name} fd"] = of(from_pool, place, handles=FD)
        kinds[f"pool {name} fd exported"] = of(from_pool, place, handles=FD, export=True)
    for place, name in [(DEVICE, "device"), (HOST, "host"), (NUMA, "numa")]:
        kinds[f"default pool {name}"] = of(from_default_pool, place)
    for place, name in [(HOST, "host"), (NUMA, "numa")]:
        kinds[f"empty pool {name}"] = of(empty_pool, place)
        kinds[f"used empty pool {name}"] = of(used_empty_pool, place)
        kinds[f"gone create {name}"] = of(created_and_released, place)
    # Flags are sums of: 1 portable, 2 device map, 4 write combined (allocated) or IO memory (registered), 8 read only.
    for flags in (0, 1, 2, 4, 7):
        kinds[f"cuMemHostAlloc {flags}"] = of(host_allocated, flags)
    for flags in (0, 1, 2, 3, 4, 8):
        kinds[f"cuMemHostRegister {flags} private"] = of(host_registered, flags, "private")
    for memory in ("shared", "shm", "file", "huge"):
        for flags in (2, 8):
            kinds[f"cuMemHostRegister {flags} {memory}"] = of(host_registered, flags, memory)
    return kinds


# The content


def fill(value):
    """Writes a value everywhere, on the GPU; answers what went wrong."""
    for buffer in buffers:
        code = cuda.cuMemsetD32_v2(c_uint64(buffer.device), c_uint(value), c_size_t(buffer.size // 4))
        if code:
            return f"fill {code} {error_name(code)}"
    code = cuda.cuCtxSynchronize()
    return f"sync {code} {error_name(code)}" if code else ""


def difference(value):
    """What is not this value, as the GPU and the processor see it."""
    for buffer in buffers:
        wanted = value.to_bytes(4, "little") * (buffer.size // 4)
        copy = ctypes.create_string_buffer(buffer.size)
        code = cuda.cuMemcpy(c_uint64(ctypes.addressof(copy)), c_uint64(buffer.device), c_size_t(buffer.size))
        if code:
            return f"read {code} {error_name(code)}"
        if copy.raw != wanted:
            return "WRONG CONTENT (gpu)"
        if buffer.host and bytes((c_ubyte * buffer.size).from_address(buffer.host)) != wanted:
            return "WRONG CONTENT (cpu)"
    return ""


def make(kind, value):
    """Makes the memory and fills it."""
    if kind == NVML_FIRST:
        ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()
    begin()
    all_kinds()[kind]()
    wrong = fill(value) or difference(value)
    if wrong:
        raise Unusable(wrong)


def mappings():
    """Where the kernel says that the compared memory is."""
    found = []
    for buffer in buffers:
        for line in Path("/proc/self/maps").read_text().splitlines():
            words = line.split()
            begin, end = (int(part, 16) for part in words[0].split("-"))
            if begin <= (buffer.host or buffer.device) < end:
                found.append(f"[{end - begin:#x} {words[1]} {words[3]} {words[5] if len(words) > 5 else 'anon'}]")
    return " ".join(found)


# What runs in processes of their own


def child(kind):
    """Makes the memory, waits for a line, and says whether all is as it was and still works."""
    first, second = 0x1234567, 0x89ABCDE
    try:
        make(kind, first)
    except (Unusable, OSError) as why:
        print("UNUSABLE", why, flush=True)
        return
    print("READY", mappings(), flush=True)
    sys.stdin.readline()
    wrong = difference(first) or fill(second) or difference(second)
    if not wrong:
        code = cuda.cuMemAlloc_v2(byref(c_uint64()), c_size_t(2 * MIB))
        wrong = f"alloc {code}" if code else ""
    print(wrong or "OK", flush=True)


def loop(kind):
    """The job for rekindle: reads and writes the memory again and again."""
    value = 1
    try:
        make(kind, value)
    except (Unusable, OSError) as why:
        print("UNUSABLE", why, flush=True)
        time.sleep(2)
        os._exit(77)
    print("READY", flush=True)
    while True:
        wrong = difference(value)
        value += 1
        wrong = wrong or fill(value)
        if wrong:
            print("WRONG", wrong, flush=True)
            os._exit(3)
        for buffer in buffers:
            if buffer.host:
                c_uint32.from_address(buffer.host).value = value
        print("tick", value, flush=True)
        time.sleep(0.2)


def act(pid):
    """Lock, checkpoint, restore, unlock. Prints all that is known after each step, because the next one may hang."""
    load_driver()
    known = {}

    def step(name, function, arguments):
        began = time.monotonic()
        known[name] = getattr(cuda, function)(pid, arguments)
        known[f"{name}_s"] = round(time.monotonic() - began, 2)
        print(json.dumps(known), flush=True)
        return known[name] == 0

    # CUcheckpointLockArgs: it begins with the limit in milliseconds.
    if not step("lock", "cuCheckpointProcessLock", (c_uint32 * 16)(5000)):
        return
    if step("checkpoint", "cuCheckpointProcessCheckpoint", None):
        known.update(devices(pid))
        if not step("restore", "cuCheckpointProcessRestore", None):
            state = c_int(-1)
            known["state"] = [cuda.cuCheckpointProcessGetState(pid, byref(state)), state.value]
            print(json.dumps(known), flush=True)
            return
    step("unlock", "cuCheckpointProcessUnlock", None)


def devices(pid):
    """What a process still has of the driver's devices."""
    open_files = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            open_files.append(os.readlink(path))
    open_files = [file for file in open_files if "nvidia" in file]
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "fds": len(open_files),
        "maps": len([line for line in lines if "/dev/nvidia" in line]),
        "files": sorted(set(open_files))[:4],
    }


# The driver alone


def by_driver(kind):
    """What became of one kind, and details."""
    command = [sys.executable, "-B", SCRIPT, "child", kind]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline().strip()
        if not line.startswith("READY"):
            return "unusable", line.removeprefix("UNUSABLE ") or "it says nothing"
        known, hangs = steps_of(process.pid)
        answer = answer_of(process) if known.get("unlock") == 0 else ""
        return verdict(known, hangs, answer), details(known, hangs, answer, line.removeprefix("READY").strip())
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ANSWER_LIMIT)


def steps_of(pid):
    """What `act` knows in the end, and whether it hangs."""
    hangs = False
    try:
        command = [sys.executable, "-B", SCRIPT, "act", str(pid)]
        output = subprocess.run(command, check=False, capture_output=True, timeout=CALLS_LIMIT).stdout
    except subprocess.TimeoutExpired as why:
        output = why.stdout or b""
        hangs = True
    lines = output.decode().splitlines()
    return json.loads(lines[-1]) if lines else {}, hangs


def answer_of(process):
    try:
        answer, _ = process.communicate("go\n", timeout=ANSWER_LIMIT)
    except subprocess.TimeoutExpired:
        return "no answer"
    return answer.strip() or f"died {process.returncode}"


def verdict(known, hangs, answer):
    if hangs or answer == "no answer":
        return "hangs"
    if not known:
        return "unusable"
    if known["lock"] != 0:
        return "refused"
    if answer == "OK":
        return "works" if known["checkpoint"] == 0 else "refused"
    return "lost"


def details(known, hangs, answer, places):
    said = [f"{step} {known[step]}" for step in ("lock", "checkpoint", "restore", "unlock") if step in known]
    said = said or ["no call has returned"]
    if hangs:
        said.append("then no answer")
    if known.get("fds") or known.get("maps"):
        said.append(f"still open {known['fds']}/{known['maps']} {known['files']}")
    if "state" in known:
        said.append(f"state {known['state']}")
    if answer:
        said.append(f"the process: {answer}")
    if places:
        said.append(f"memory at {places}")
    return ", ".join(said)


# Under rekindle


def by_rekindle(rekindle, folder, kind, memory):
    """What became of one kind, and details."""
    # Of its own: the same kind with the other setting, or of another run of this script, may be there at the same time.
    name = f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{memory}-{os.getpid()}"
    command = [sys.executable, "-B", SCRIPT, "loop", kind]
    settings = SETTINGS | {"gpu.memory": memory}
    with tempfile.TemporaryDirectory(prefix="rekindle-kinds-", dir=folder, ignore_cleanup_errors=True) as work:
        job = Job(
            rekindle,
            Path(work),
            name,
            command,
            settings=settings,
            environment={JOB_VARIABLE: name},
            options=["--grace", "1s"],
        )
        job.start()
        try:
            return trial(job)
        except Failed as why:
            return "lost", str(why)
        finally:
            job.end()


def trial(job):
    try:
        job.wait_for("start", lambda: first_word(job), START_LIMIT)
    except Failed as why:
        return "unusable", str(why)
    if first_word(job) != "READY":
        return "unusable", first_word(job).removeprefix("UNUSABLE ")
    try:
        _, freeze = job.snapshot(REKINDLE_LIMIT)
    except Failed as why:
        return without_image(job, why)
    wrong = next_steps(job)
    if wrong:
        return "lost", f"after the snapshot: {wrong}"
    position = len(said(job))
    kill(job)
    wrong = next_steps(job)
    if wrong:
        return "lost", f"after kill -9: {wrong}"
    if "was restored from image" not in said(job)[position:]:
        return "lost", "after kill -9: not restored from an image"
    return "works", f"frozen for {freeze:.2f} s"


def without_image(job, why):
    if job.ended():
        return "lost", str(why)
    if not job.state().get("last_failure"):
        return "hangs", str(why)
    reason = job.state()["last_failure"]
    wrong = next_steps(job)
    return ("lost", f"{reason}; then {wrong}") if wrong else ("refused", reason)


def first_word(job):
    found = re.search(r"READY|UNUSABLE.*|WRONG.*|exit code.*", said(job))
    return found[0] if found else ""


def said(job):
    return job.log.read_text(errors="replace")


def next_steps(job):
    """Waits for two more steps of the job; answers what went wrong, or nothing."""
    position = len(said(job))

    def wrong():
        if said(job).count("READY") > 1:
            return "it began anew"
        found = re.search(r"WRONG.*|exit code.*", said(job)[position:])
        return found[0] if found else ""

    try:
        job.wait_for("two steps", lambda: wrong() or said(job)[position:].count("tick ") >= 2, STEPS_LIMIT)
    except Failed as why:
        return str(why)
    return wrong()


def kill(job):
    """kill -9 of the job's process, and waits until it is back."""
    before = job.state().get("restarts", 0)
    victims = list(processes_of(job.name))
    if not victims:
        raise Failed(f"{job.name}: its process is not there")
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait_for("restart", lambda: job.state().get("restarts", 0) > before and job.running(), REKINDLE_LIMIT)


def processes_of(name):
    """The processes of exactly one job. rekindle has its environment too, but another command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_python = os.path.basename(command[0]).startswith(b"python")
        if f"{JOB_VARIABLE}={name}".encode() in environment and is_python and b"loop" in command:
            yield int(folder.name)


# The command line


def report(result, kind, detail, memory=""):
    print(f"{result:9} {kind:32} {memory:6} {' '.join(detail.split())[:1000]}", flush=True)


def driver_mode(arguments, kinds):
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for kind, (result, detail) in zip(kinds, pool.map(by_driver, kinds)):
            report(result, kind, detail)


def rekindle_mode(arguments, kinds):
    rekindle = arguments.rekindle.resolve()
    trials = [(kind, memory) for kind in kinds for memory in arguments.memory]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda trial: by_rekindle(rekindle, arguments.dir, *trial), trials)
        for (kind, memory), (result, detail) in zip(trials, results):
            report(result, kind, detail, memory)


def expression(text):
    try:
        return re.compile(text)
    except re.error as why:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {why}") from None


def memory_settings(text):
    names = text.split(",")
    for name in names:
        if name not in MEMORY_SETTINGS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MEMORY_SETTINGS)}")
    return names


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    driver = modes.add_parser("driver", help="each kind with the driver's calls alone")
    rekindle = modes.add_parser("rekindle", help="each kind as a job under rekindle")
    for mode in (driver, rekindle):
        mode.add_argument("filter", nargs="?", type=expression, default=expression(""), metavar="FILTER")
        mode.add_argument("--jobs", type=int, default=8, help="how many are tried at the same time (8)")
    rekindle.add_argument("--rekindle", type=Path, default=ROOT / "target/release/rekindle", metavar="PROGRAM")
    rekindle.add_argument(
        "--memory", type=memory_settings, default=MEMORY_SETTINGS, help="settings of gpu.memory (copied,kept)"
    )
    rekindle.add_argument("--dir", default="/var/tmp", help="a folder for stores (/var/tmp)")
    # Without help: for this script's own processes.
    for name, function, kind_of_value in [("child", child, str), ("loop", loop, str), ("act", act, int)]:
        mode = modes.add_parser(name)
        mode.add_argument("value", type=kind_of_value)
        mode.set_defaults(function=function)
    return parser.parse_args()


def missing(arguments):
    """What is not there that this mode needs, or nothing."""
    try:
        load_driver()
    except OSError as why:
        return f"no NVIDIA driver: {why}"
    if arguments.mode == "rekindle":
        if os.geteuid() != 0:
            return "this needs root"
        if not os.access(arguments.rekindle, os.X_OK):
            return f"{arguments.rekindle} is no program"
    return ""


def main():
    arguments = parsed()
    if arguments.mode in ("child", "loop", "act"):
        arguments.function(arguments.value)
        # Without what libraries do at an end: it may wait for the driver.
        os._exit(0)
    why = missing(arguments)
    if why:
        sys.exit(f"{SCRIPT.name}: {why}")
    kinds = [kind for kind in all_kinds() if arguments.filter.search(kind)]
    if not kinds:
        sys.exit(f"{SCRIPT.name}: no kind has a name like {arguments.filter.pattern!r}")
    if arguments.mode == "driver":
        driver_mode(arguments, kinds)
    else:
        rekindle_mode(arguments, kinds)


if __name__ == "__main__":
    main()
