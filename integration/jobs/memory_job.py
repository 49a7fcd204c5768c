"""A job with much memory that it seldom touches.

    memory_job.py FOLDER MIB

Each page of MIB holds its number. Prints "n 1", "n 2" and so on, and touches one page each time. With FOLDER/finish it looks at
every page, prints "done" and ends with 0; with 3 when one is wrong.
"""

import os
import sys
import time

PAGE = 4096
folder, count = sys.argv[1], int(sys.argv[2]) << 20 >> 12
memory = bytearray(count * PAGE)
for page in range(count):
    memory[page * PAGE : page * PAGE + 8] = (page + 1).to_bytes(8, "little")
    memory[page * PAGE + PAGE - 8 : page * PAGE + PAGE] = (page + 7).to_bytes(8, "little")


def check(page):
    start = memory[page * PAGE : page * PAGE + 8]
    end = memory[page * PAGE + PAGE - 8 : page * PAGE + PAGE]
    if int.from_bytes(start, "little") != page + 1 or int.from_bytes(end, "little") != page + 7:
        print("wrong", page, flush=True)
        sys.exit(3)


number = 0
while not os.path.exists(folder + "/finish"):
    number += 1
    check(0)
    print("n", number, flush=True)
    time.sleep(0.01)
for page in range(count):
    check(page)
print("done", flush=True)
