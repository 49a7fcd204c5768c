#!/usr/bin/env python3
"""A job that counts beside a child, and ends with 3 once it has heard of the child's death.

    dead_child.py told|never FOLDER

It looks for that once FOLDER/look is there. Ends with 0 once FOLDER/finish is there.
"""

import os
import sys
import time

LOOKS, FOLDER = sys.argv[1], sys.argv[2]

child = os.fork()
while child == 0:
    time.sleep(0.1)

n = 0
while not os.path.exists(os.path.join(FOLDER, "finish")):
    n += 1
    os.write(1, f"n {n}\n".encode())
    if LOOKS == "told" and os.path.exists(os.path.join(FOLDER, "look")):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            os.write(1, b"the child is dead\n")
            os._exit(3)
    time.sleep(0.02)
os.write(1, b"done\n")
