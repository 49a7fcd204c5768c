#!/usr/bin/env python3
"""A Redis server with a client that remembers what it wrote.

    redis_job.py PROGRAM FOLDER aof|rdb

Prints "n 1", "n 2" and so on, and ends with 7 where the server has another value than was written. Once FOLDER/finish is
there, it starts the server anew from its files, compares all values, prints "done" and ends with 0.
"""

import os
import socket
import subprocess
import sys
import time

PROGRAM, FOLDER, KIND = sys.argv[1:]
SOCKET = os.path.join(FOLDER, "redis.sock")


def wrong(*words):
    print("WRONG", *words, flush=True)
    os._exit(7)


def start():
    command = [PROGRAM, "--port", "0", "--unixsocket", SOCKET, "--dir", FOLDER, "--daemonize", "no"]
    command += ["--appendonly", "yes" if KIND == "aof" else "no"]
    command += ["--save", "" if KIND == "aof" else "1 1"]
    with open(os.path.join(FOLDER, "server.log"), "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def connect():
    end = time.monotonic() + 60
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(SOCKET)
            return client.makefile("rwb")
        except OSError as error:
            client.close()
            if time.monotonic() > end:
                wrong("no answer:", error)
            time.sleep(0.1)


def ask(client, *words):
    client.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    client.flush()
    answer = client.readline()
    if answer.startswith(b"$") and answer != b"$-1\r\n":
        return client.read(int(answer[1:]) + 2)[:-2]
    return answer.strip()


def compare(client, known):
    for key, value in known.items():
        found = ask(client, b"GET", key)
        if found != value:
            wrong(key, "is", found, "and was", value)


server, client, known, n = start(), connect(), {}, 0
while True:
    n += 1
    for at in range(200):
        key, value = b"key%d" % (n * 7 % 50 * 200 + at), b"%d" % n
        known[key] = value
        ask(client, b"SET", key, value)
    compare(client, known)
    print("n", n, flush=True)
    if os.path.exists(os.path.join(FOLDER, "finish")):
        break
    time.sleep(0.1)
ask(client, b"SAVE" if KIND == "rdb" else b"PING")
server.terminate()
if server.wait(60) != 0:
    wrong("the server ended with", server.returncode)
server, client = start(), connect()
time.sleep(0.5)
compare(client, known)
server.terminate()
server.wait(60)
print("done", flush=True)
