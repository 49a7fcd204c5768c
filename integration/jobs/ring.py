"""Ring of machines: each sends numbered records to the next, and checks each byte that it gets.

    ring.py STEPS

Prints "STEP" now and then, and "done SUM" at the end: the sum of all that was received. In no state of the job is a record
missing, doubled or changed; else it exits with 9.
"""

import hashlib
import os
import socket
import struct
import sys
import time

STEPS = int(sys.argv[1])
RANK = int(os.environ["REKINDLE_GROUP_RANK"])
SIZE = int(os.environ["REKINDLE_GROUP_SIZE"])
RECORD = 32 << 10
PORT = 5555


def record(rank, step):
    return hashlib.blake2b(struct.pack("<QQ", rank, step), digest_size=64).digest() * (RECORD // 64)


def exact(sock):
    data = bytearray()
    while len(data) < RECORD:
        piece = sock.recv(RECORD - len(data))
        if not piece:
            sys.exit("the connection was closed")
        data += piece
    return bytes(data)


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
for step in range(STEPS):
    to.sendall(record(RANK, step))
    got = exact(come)
    if got != record(before, step):
        print("WRONG", step, flush=True)
        sys.exit(9)
    total.update(got)
    if step % 200 == 0:
        print(step, flush=True)
    time.sleep(0.0005)
print("done", total.hexdigest(), flush=True)
