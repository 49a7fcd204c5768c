"""A job of gpu-matrix.sh --self-test that needs no GPU: two processes with 8 MiB each, a pipe between them, and with
`standin` a context of the stand-in driver in each, where a counter is.

    matrix_host.py host|standin --out DIR
"""

import ctypes
import os
import random
import sys

from matrix_steps import Steps, digest, options

SIZE = 8 << 20


class Counter:
    """A number in the memory of the stand-in's device."""

    def __init__(self):
        self.cuda, context, self.address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(8)))
        self.number = ctypes.c_uint64(0)
        self.check(self.cuda.cuMemcpyHtoD_v2(self.address, ctypes.byref(self.number), ctypes.c_size_t(8)))

    def check(self, code):
        if code != 0:
            sys.exit(f"the stand-in answers {code}")

    def next(self):
        self.check(self.cuda.standin_increment(self.address))
        self.check(self.cuda.cuMemcpyDtoH_v2(ctypes.byref(self.number), self.address, ctypes.c_size_t(8)))
        return self.number.value


def main():
    args = options("host", "standin")
    there, back = os.pipe(), os.pipe()
    child = os.fork()
    rank = 0 if child else 1
    mine, other = (there[1], back[0]) if child else (back[1], there[0])
    for end in {*there, *back} - {mine, other}:
        os.close(end)
    chance = random.Random(rank)
    memory = bytearray(chance.randbytes(SIZE))
    counter = Counter() if args.mode == "standin" else None
    steps = Steps(args, rank)
    while True:
        memory[chance.randrange(SIZE)] ^= 1
        os.write(mine, bytes.fromhex(digest(memory)))
        heard = os.read(other, 8)
        if not heard:
            sys.exit("the other one is gone")
        if steps.done(digest(memory), heard.hex(), counter.next() if counter else "-"):
            break
    if child and os.waitpid(child, 0)[1] != 0:
        sys.exit("the other one ended badly")


main()
