"""Calls NCCL in one of the ways in which programs find its functions, with the stand-ins.

    nccl_ways.py WAY LIBRARY [OTHER]

WAY: name    by dlsym in LIBRARY
     global  by dlsym in all libraries, with LIBRARY among them
     symbol  by symbol, by way of LIBRARY, which is that of linked_to_libnccl.rs
Makes a communicator of one rank, reduces three times, broadcasts in place twice, and receives from itself in a group what it
sends. With OTHER, which is linked to another NCCL, it then makes a communicator there. Prints "ok", and ends when its standard
input ends.
"""

import ctypes
import sys

way, library, *others = sys.argv[1:]
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4096)) == 0
nccl = ctypes.CDLL(library, ctypes.RTLD_GLOBAL if way == "global" else ctypes.RTLD_LOCAL)
nccl = ctypes.CDLL(None) if way == "global" else nccl


def call(name, *args):
    function = getattr(nccl, ("linked_" if way == "symbol" else "") + name)
    code = function(*(ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args))
    assert code == 0, f"{name} failed with {code}"


handle = ctypes.c_void_p()
call("ncclCommInitAll", ctypes.byref(handle), 1, 0)
for _ in range(3):
    call("ncclAllReduce", memory.value, memory.value + 8, 1, 5, 0, handle.value, 0)
for _ in range(2):
    call("ncclBcast", memory.value, 1, 5, 0, handle.value, 0)
call("ncclGroupStart")
call("ncclSend", memory.value, 1, 5, 0, handle.value, 0)
call("ncclRecv", memory.value + 16, 1, 5, 0, handle.value, 0)
call("ncclGroupEnd")
assert cuda.cuStreamSynchronize(None) == 0


def count():
    """NCCL's own function, which no interposer replaces, takes only communicators of the same NCCL."""
    number = ctypes.c_int()
    call("ncclCommCount", handle.value, ctypes.byref(number))
    assert number.value == 1


count()
for other in others:
    nccl, first = ctypes.CDLL(other), (nccl, handle.value)
    call("ncclCommInitAll", ctypes.byref(handle), 1, 0)
    count()
    call("ncclAllReduce", memory.value, memory.value + 8, 1, 5, 0, handle.value, 0)
    nccl, handle.value = first
    count()
    call("ncclAllReduce", memory.value, memory.value + 8, 1, 5, 0, handle.value, 0)
    assert cuda.cuStreamSynchronize(None) == 0
print("ok", flush=True)
sys.stdin.read()
