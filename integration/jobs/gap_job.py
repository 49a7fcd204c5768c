"""Fills memory that does not compress, then looks at the clock without pause and writes down every gap: how long the
process stood still, as the process itself sees it.

    gap_job.py MIB FILE [PROCESSES]   a line "ready" for each process, then one a gap: its length in seconds

With PROCESSES, so many do that, each with MIB of its own, the first being the parent of the others. The more there are,
the less often each looks, so that together they leave the processors to whoever freezes them.
"""

import os
import sys
import time

mib, path = int(sys.argv[1]), sys.argv[2]
processes = int(sys.argv[3]) if len(sys.argv) > 3 else 1
for _ in range(processes - 1):
    if os.fork() == 0:
        break
memory = [bytearray(os.urandom(1 << 20)) for _ in range(mib)]
# Short enough to be precise, long enough to leave the processor to others.
tick = 0.0005 * processes
with open(path, "a", buffering=1) as out:
    print("ready", file=out)
    last = time.monotonic()
    while True:
        time.sleep(tick)
        now = time.monotonic()
        if now - last > 10 * tick:
            print(f"{now - last:.6f}", file=out)
        last = now
