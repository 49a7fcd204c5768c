"""Ring of machines: each sends numbered records to the next, and checks each byte that it gets.

    ring.py STEPS

Ends after so many steps, or soon after the file RING_END (a path in the environment) exists. The first machine looks for it,
and tells the others with the records which step is the last: all have done as many.

Prints "STEP" now and then, and "done SUM" at the end: the sum of all that was received. In no state of the job is a record
missing, doubled or changed; else it exits with 9.
"""

import hashlib
import itertools
import os
import socket
import struct
import sys
import time

STEPS = int(sys.argv[1])
RANK = int(os.environ["REKINDLE_GROUP_RANK"])
SIZE = int(os.environ["REKINDLE_GROUP_SIZE"])
END = os.environ.get("RING_END")
LAST = struct.Struct("<Q")
RECORD = 32 << 10
PORT = 5555


def record(rank, step):
    return hashlib.blake2b(struct.pack("<QQ", rank, step), digest_size=64).digest() * (RECORD // 64)


def exact(sock):
    data, length = bytearray(), LAST.size + RECORD
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            sys.exit("the connection was closed")
        data += piece
    return LAST.unpack_from(data)[0], bytes(data[LAST.size :])


def connect(name):
    while True:
        try:
            return socket.create_connection((name, PORT), timeout=2)
        except OSError:
            time.sleep(0.1)


listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((os.environ["REKINDLE_GROUP_OWN"], PORT))
listener.listen()
# Names of the group are in /etc/hosts.
GROUP = os.environ["REKINDLE_JOB"].rsplit(".", 1)[0]
to = connect(f"{GROUP}-{(RANK + 1) % SIZE}")
to.settimeout(None)
come, _ = listener.accept()
before = (RANK - 1) % SIZE
total = hashlib.blake2b(digest_size=16)
last, has_to_end = STEPS, False
for step in itertools.count():
    if RANK == 0 and END and not has_to_end and os.path.exists(END):
        # By then all know it.
        last, has_to_end = min(last, step + 2 * SIZE), True
    if step >= last:
        break
    to.sendall(LAST.pack(last) + record(RANK, step))
    told, got = exact(come)
    last = min(last, told)
    if got != record(before, step):
        print("WRONG", step, flush=True)
        sys.exit(9)
    total.update(got)
    if step % 200 == 0:
        print(step, flush=True)
    time.sleep(0.0005)
print("done", total.hexdigest(), flush=True)
