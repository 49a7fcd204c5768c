#!/usr/bin/env python3
"""A launcher that does not use CUDA and hears late of the deaths of its children.

    launcher_job.py OUT CHILDREN [--plain] [--reap] [--notice SECONDS] [--at-once]
                                 [--more FILE] [--fatal FILE]

Child 0 writes OUT, child N writes OUT.N. They use the stand-in libcuda (standin_job.py), or with --plain count without it. The
launcher looks after its children every SECONDS, 30 by default, and ends with 6 if one has died. With --reap it waits for each as
soon as it dies, and still ends no sooner. With --at-once it ends as soon as one dies. With --more it starts another child, the last, when FILE is there.
With --fatal one more child removes FILE as soon as it is there, and kills itself.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standin_job.py")
PLAIN = """
import sys, time
n = 0
with open(sys.argv[1], "a", buffering=1) as out:
    while True:
        n += 1
        out.write(f"{n}\\n")
        time.sleep(0.01)
"""
FATAL = """
import os, signal, sys
while True:
    try:
        os.unlink(sys.argv[1])
    except FileNotFoundError:
        continue
    os.kill(os.getpid(), signal.SIGKILL)
"""


def give_up(children):
    if any(child.poll() is not None for child in children):
        # As a shell that does a little before it ends. The interpreter's own end would take longer.
        time.sleep(0.03)
        os._exit(6)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("children", type=int)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--reap", action="store_true")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--more")
    parser.add_argument("--fatal")
    parser.add_argument("--notice", type=float, default=30)
    args = parser.parse_args()

    program = [sys.executable, "-c", PLAIN] if args.plain else [sys.executable, JOB]
    names = [args.out if n == 0 else f"{args.out}.{n}" for n in range(args.children)]
    children = [subprocess.Popen([*program, name]) for name in names]
    if args.fatal:
        children.append(subprocess.Popen([sys.executable, "-c", FATAL, args.fatal]))
    if args.reap:
        signal.signal(signal.SIGCHLD, lambda *_: [child.poll() for child in children])
    if args.at_once:
        signal.signal(signal.SIGCHLD, lambda *_: give_up(children))
    while True:
        until = time.monotonic() + args.notice
        while time.monotonic() < until:
            time.sleep(0.05)
            if args.more and os.path.exists(args.more):
                children.append(subprocess.Popen([*program, f"{args.out}.{len(children)}"]))
                args.more = None
        if any(child.poll() is not None for child in children):
            sys.exit(6)


main()
