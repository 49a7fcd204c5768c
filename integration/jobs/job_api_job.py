#!/usr/bin/env python3
"""A job that uses the job API.

    job_api_job.py KIND FOLDER

Prints "n 1", "n 2" and so on, and what it learns. Once FOLDER/finish is there it prints "done" and ends with 0. What it is
to ask for is the name of a file in FOLDER, which it removes:

    snapshot    prints "snapshot ANSWER"
    hold        prints "holds BOOL", and "let go" once FOLDER/hold-on is gone

KIND says what it has open all the time:

    module      nothing: the module rekindle, as a program would use it
    connected, unconnected    a datagram socket, by which it asks for the state at each count
    unread      one with an answer in it that it did not read, for as long as FOLDER/wait is there
    in-flight   threads that ask without a pause, more than is answered; some are blocked in the middle of it
    dies        a child that holds, and is killed; it is reaped once FOLDER/reap is there
    stale       one that waits for an answer that never comes
"""

import json
import os
import socket
import sys
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../python"))
import rekindle

KIND, FOLDER = sys.argv[1], sys.argv[2]
SOCKET = os.environ["REKINDLE_SOCKET"]


def path(name):
    return os.path.join(FOLDER, name)


def there(name):
    return os.path.exists(path(name))


def told(name):
    if there(name):
        os.unlink(path(name))
        return True


def say(*words):
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def request(name, **fields):
    return json.dumps(dict(fields, version=1, request=name)).encode()


def bound():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind("\0word-job-" + os.urandom(16).hex())
    sock.settimeout(10)
    return sock


def flood():
    sock = bound()
    sock.settimeout(None)
    while True:
        try:
            sock.sendto(request("state"), SOCKET)
        except OSError:
            time.sleep(0.01)


def listen():
    bound().recv(1)


def held_by_child():
    # No hold of the module: it is not released when this is killed.
    rekindle.ask("hold", seconds=60, holder="child")
    say("child holds")
    time.sleep(1000)


sock = None
if KIND in ("connected", "unconnected", "unread"):
    sock = bound()
if KIND in ("connected", "unread"):
    sock.connect(SOCKET)
if KIND == "unread":
    sock.send(request("state", id="old"))
if KIND == "in-flight":
    for _ in range(4):
        threading.Thread(target=flood, daemon=True).start()
if KIND == "stale":
    threading.Thread(target=listen, daemon=True).start()

rekindle.on_restored(lambda state: say("restored", state["restores"], state["host"], state["pid"], state["from"]))
life, n = None, 0
while not there("finish"):
    n += 1
    say("n", n)
    if KIND == "unread":
        if not there("wait") and sock:
            answer = json.loads(sock.recv(65536))
            sock.send(request("state", id="new"))
            say("unread", answer["id"], json.loads(sock.recv(65536))["id"])
            sock = None
    elif sock:
        # As a program may that knows nothing of restores: what is lost is asked for again.
        while True:
            try:
                sock.sendto(request("state"), SOCKET) if KIND == "unconnected" else sock.send(request("state"))
                answer = json.loads(sock.recv(65536))
            except OSError as error:
                say("again", error)
                continue
            if "ok" in answer:
                break
            time.sleep(0.02)
        if answer["ok"]["state"]["life"] != life:
            life = answer["ok"]["state"]["life"]
            say("life", life)
    rekindle.check(0.1)
    if told("snapshot"):
        say("snapshot", rekindle.snapshot())
    if told("hold"):
        with rekindle.hold() as holds:
            say("holds", holds)
            while there("hold-on"):
                time.sleep(0.01)
        say("let go")
    if KIND == "dies" and told("child"):
        child = os.fork()
        if child == 0:
            held_by_child()
        while not told("kill"):
            time.sleep(0.01)
        os.kill(child, 9)
        while not told("reap"):
            time.sleep(0.01)
        os.waitpid(child, 0)
    time.sleep(0.02)
say("done")
