"""A kernel in Triton, in integers and in floating point, the same bits every time.

    matrix_triton.py --out DIR
"""

import torch
import triton
import triton.language as tl
from matrix_steps import Steps, digest, options

SIZE, BLOCK = 8 << 20, 1024
# As in matrix_kernels.py.
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


@triton.jit
def stir(numbers, floats, size, multiplier, increment, block: tl.constexpr):
    where = tl.program_id(0) * block + tl.arange(0, block)
    inside = where < size
    number = tl.load(numbers + where, mask=inside) * multiplier + increment
    tl.store(numbers + where, number, mask=inside)
    value = tl.load(floats + where, mask=inside)
    tl.store(floats + where, tl.sin(value * 1.7 + 0.3), mask=inside)


def main():
    args = options()
    numbers = torch.arange(SIZE, dtype=torch.int64, device="cuda")
    floats = torch.linspace(-1, 1, SIZE, device="cuda")
    steps = Steps(args)
    while True:
        stir[(triton.cdiv(SIZE, BLOCK),)](numbers, floats, SIZE, MULTIPLIER, INCREMENT, block=BLOCK)
        if steps.done(f"{numbers.sum().item() % 2**64:016x}", digest(floats.cpu().numpy().tobytes())):
            break


main()
