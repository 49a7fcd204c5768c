#!/usr/bin/env python3
"""Prints what a job can see and do of its world, as one JSON object, and waits for FOLDER/finish.

    look.py FOLDER STORE
"""

import json
import os
import resource
import sys
import time

FOLDER, STORE = sys.argv[1], sys.argv[2]


def status(field):
    with open("/proc/self/status") as file:
        return next(line.split(":", 1)[1].split() for line in file if line.startswith(field + ":"))


def answer(call):
    """None where it worked, else the error's name."""
    try:
        call()
    except OSError as error:
        return error.strerror
    return None


def descriptors():
    handle = os.open("/proc/self/fd", os.O_RDONLY)
    found = {}
    for name in os.listdir(handle):
        try:
            found[int(name)] = os.readlink(name, dir_fd=handle)
        except FileNotFoundError:
            pass
    found.pop(handle, None)
    return {str(number): target for number, target in found.items() if "/fd" not in target}


umask = os.umask(0)
os.umask(umask)
parent = os.getppid()
print(json.dumps({
    "pid": os.getpid(),
    "parent": parent,
    "session": os.getsid(0),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "umask": umask,
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "stack": resource.getrlimit(resource.RLIMIT_STACK),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "uids": status("Uid"),
    "gids": status("Gid"),
    "groups": status("Groups"),
    "capabilities": [status(field)[0] for field in ("CapEff", "CapPrm", "CapInh", "CapAmb")],
    "no-new-privileges": status("NoNewPrivs")[0],
    "blocked": status("SigBlk")[0],
    "ignored": status("SigIgn")[0],
    "descriptors": descriptors(),
    "stdin": sys.stdin.read(),
    "kill parent": answer(lambda: os.kill(parent, 0)),
    "kill init": answer(lambda: os.kill(1, 0)),
    "memory of parent": answer(lambda: open("/proc/%d/mem" % parent, "rb").close()),
    "files of parent": answer(lambda: os.listdir("/proc/%d/fd" % parent)),
    "files of init": answer(lambda: os.listdir("/proc/1/fd")),
    "root of parent": answer(lambda: os.listdir("/proc/%d/root" % parent)),
    "store": answer(lambda: os.listdir(STORE)),
    "store's parent": answer(lambda: os.listdir(os.path.dirname(STORE))),
    "become root": answer(lambda: os.setuid(0)),
}), flush=True)
while not os.path.exists(os.path.join(FOLDER, "finish")):
    time.sleep(0.02)
