"""Fills memory that does not compress, then looks at the clock without pause and writes down every gap: how long the
process stood still, as the process itself sees it.

    gap_job.py MIB FILE       one line a gap of more than 5 ms: its length in seconds
"""

import os
import sys
import time

mib, path = int(sys.argv[1]), sys.argv[2]
memory = [bytearray(os.urandom(1 << 20)) for _ in range(mib)]
with open(path, "a", buffering=1) as out:
    print("ready", file=out)
    last = time.monotonic()
    while True:
        # Short enough to be precise, long enough to leave the processor to others.
        time.sleep(0.0005)
        now = time.monotonic()
        if now - last > 0.005:
            print(f"{now - last:.6f}", file=out)
        last = now
