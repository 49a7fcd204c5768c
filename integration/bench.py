"""The measurements of bench.sh. Only the standard library."""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def wait_for(what, condition, limit=120):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"bench: no {what} within {limit} s")
        time.sleep(0.02)


class Job:
    """gap_job.py under `rekindle run`."""

    def __init__(self, args, work):
        self.store, self.gaps = work / "store", work / "gaps"
        command = [args.rekindle, "run", "--store", self.store, "--name", "bench", "--interval", "off", "--"]
        command += [sys.executable, ROOT / "integration/jobs/gap_job.py", str(args.mib), self.gaps]
        environment = dict(os.environ, REKINDLE_STORE_KEEP_LAST="1")
        self.log = work / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)
        wait_for("start", lambda: self.lines() >= 1 or self.process.poll() is not None)
        if self.process.poll() is not None:
            sys.exit(f"bench: rekindle ended with {self.process.returncode}: {self.log.read_text()}")
        self.pid = json.loads((self.store / "bench/state.json").read_text())["pid"]

    def lines(self):
        return self.gaps.read_text().count("\n") if self.gaps.exists() else 0

    def gap_of(self, act):
        """The longest time the job stood still during `act`."""
        before = self.lines()
        act()
        time.sleep(0.3)
        found = [float(x) for x in self.gaps.read_text().split()[before:]]
        return max(found, default=0.0)

    def snapshot(self):
        folder = self.store / "bench/images"
        last = max((p.name for p in folder.glob("0*")), default="")
        self.process.send_signal(signal.SIGUSR1)
        wait_for("image", lambda: max((p.name for p in folder.glob("0*")), default="") > last)

    def plain(self, work):
        images = work / "plain"
        images.mkdir()
        # The job's root is pid 1000 in its namespaces.
        enter = ["nsenter", "-t", str(self.pid), "-p", "-m", "--", os.environ["REKINDLE_CRIU"], "dump", "-t", "1000"]
        enter += ["-D", images, "--leave-running", "--manage-cgroups=ignore", "--link-remap", "--file-locks", "-o", "log"]
        subprocess.run(enter, check=True, stderr=subprocess.DEVNULL)
        shutil.rmtree(images)

    def end(self):
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        self.process.wait(60)


def freeze(args, work):
    job = Job(args, work)
    ours, plain = [], []
    for n in range(args.runs):
        # In turn, so that neither always comes second; with a pause, so that neither pays for the other's cleaning up.
        sides = [(plain, lambda: job.plain(work)), (ours, job.snapshot)]
        for gaps, act in sides if n % 2 else reversed(sides):
            gaps.append(job.gap_of(act))
            time.sleep(2)
    job.end()
    a, b = statistics.median(ours), statistics.median(plain)
    ratio = statistics.median(x / y for x, y in zip(ours, plain))
    return [
        (f"freeze, {args.mib} MiB job, criu dump --leave-running", f"{b * 1000:.0f} ms"),
        (f"freeze, {args.mib} MiB job, rekindle", f"{a * 1000:.0f} ms, {ratio:.2f}x (wanted: at most 1.1x)"),
    ]


def overhead(args, work):
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def once(command):
        began = time.monotonic()
        subprocess.run(command, **quiet)
        return time.monotonic() - began

    ours = [args.rekindle, "run", "--store", work / "true", "--name", "true", "--", "true"]
    once(ours)
    pairs = [(once(["true"]), once(ours)) for _ in range(4 * args.runs)]
    plain, with_us = (statistics.median(side) for side in zip(*pairs))
    extra = statistics.median(b - a for a, b in pairs)
    return [
        ("true", f"{plain * 1000:.1f} ms"),
        ("rekindle run -- true", f"{with_us * 1000:.1f} ms, {extra * 1000:.1f} ms more (wanted: at most 50)"),
    ]


def idle(args, work):
    command = [args.rekindle, "run", "--store", work / "idle", "--name", "idle", "--", "sleep", "100000"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(2)

    def ticks():
        return sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(args.idle)
    used = (ticks() - before) * 1000 / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    process.wait(30)
    return [
        ("idle supervisor, memory", f"{rss / 1024:.1f} MiB RSS (wanted: under 20)"),
        (f"idle supervisor, processor over {args.idle} s", f"{used:.0f} ms"),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", default=ROOT / "target/release/rekindle")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle", type=int, default=60)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=args.dir))
    try:
        rows = freeze(args, work) + overhead(args, work) + idle(args, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    width = max(len(name) for name, _ in rows)
    print(f"median of {args.runs}; images in {args.dir}; {os.cpu_count()} processors, kernel {os.uname().release}")
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


main()
