"""Programs that bring kernels of their own to the GPU, in integers and in floating point, the same bits every time.

    matrix_kernels.py cupy|numba|managed --out DIR

managed: CuPy with all its memory from cudaMallocManaged, which the driver does not checkpoint.
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

from matrix_steps import Steps, digest, options

SIZE, SIDE = 8 << 20, 1024
# A generator of full period modulo 2^64 (the one of Knuth's MMIX), on a wrapping integer for each thread.
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


def cupy_step(managed):
    import cupy

    if managed:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    numbers = cupy.arange(SIZE, dtype=cupy.uint64)
    factor = cupy.sin(cupy.arange(SIDE * SIDE, dtype=cupy.float32)).reshape(SIDE, SIDE) / 16
    state = [cupy.eye(SIDE, dtype=cupy.float32)]
    stir = cupy.ElementwiseKernel("uint64 x", "uint64 y", f"y = x * {MULTIPLIER}ull + {INCREMENT}ull", "stir")

    def step():
        stir(numbers, numbers)
        state[0] = cupy.tanh(state[0] @ factor + 0.1)
        return f"{int(numbers.sum()):016x}", digest(state[0].get().tobytes())

    return step


def numba_step():
    import numpy as np

    # numba-cuda 0.30 asks for it by a name that numpy 2.5 does not have any more.
    np.row_stack = np.vstack
    from numba import cuda

    @cuda.jit
    def stir(numbers, floats):
        where = cuda.grid(1)
        if where < numbers.size:
            numbers[where] = numbers[where] * np.uint64(MULTIPLIER) + np.uint64(INCREMENT)
            floats[where] = floats[where] * np.float32(0.75) + np.float32(0.5)

    numbers = cuda.to_device(np.arange(SIZE, dtype=np.uint64))
    floats = cuda.to_device(np.linspace(-1, 1, SIZE, dtype=np.float32))

    def step():
        stir[(SIZE + 255) // 256, 256](numbers, floats)
        return digest(numbers.copy_to_host().tobytes()), digest(floats.copy_to_host().tobytes())

    return step


def main():
    args = options("cupy", "managed", "numba")
    step = numba_step() if args.mode == "numba" else cupy_step(managed=args.mode == "managed")
    steps = Steps(args)
    while not steps.done(*step()):
        pass


main()
