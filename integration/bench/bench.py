"""The measurements of bench.sh. Only the standard library."""

import argparse
import fcntl
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

from bench_store import store
from host import supervisor_ticks
from supervised import ROOT, Failed, Job, known_keys

# Delivered with the interposer: prints its rows as JSON, [{"name": ..., "value": ...}, ...].
MEMCPY = ROOT / "integration/bench-memcpy.sh"


class GapJob(Job):
    """gap_job.py under `rekindle run`, so many processes with so many MiB each."""

    def __init__(self, args, work, mib, processes):
        self.gaps, self.newest = work / "gaps", None
        command = [sys.executable, ROOT / "integration/jobs/gap_job.py", mib, self.gaps, processes]
        keys = known_keys(args.rekindle)
        settings = {"store.keep-last": 1, "snapshot.staging": "ram"}
        # With a staging area the freeze does not see the store: the memory is left to the job and its images.
        store = Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=args.store)) if "snapshot.staging" in keys else None
        super().__init__(
            args.rekindle, work, f"bench{os.getpid()}-{processes}", command, store=store,
            settings={key: value for key, value in settings.items() if key in keys},
        )  # fmt: skip
        self.start()
        try:
            self.wait_for("start", lambda: self.text().count("ready") == processes)
            # gap_job.py writes "ready" with its memory full, and rekindle publishes the pid when it has started.
            self.wait_for("state", self.running)
        except Failed:
            self.end()
            raise
        self.pid = self.state()["pid"]

    def text(self):
        """The whole lines that the processes wrote."""
        text = self.gaps.read_text() if self.gaps.exists() else ""
        return text[: text.rfind("\n") + 1]

    def gap_of(self, act):
        """The longest time that a process stood still during `act`."""
        before = self.text().count("\n")
        act()
        time.sleep(0.3)
        found = [float(line) for line in self.text().splitlines()[before:]]
        if not found:
            raise Failed(f"{self.name}: no process saw itself stand still")
        return max(found)

    def plain(self, folder):
        """criu dump --leave-running, inside of the job's namespaces as rekindle does it."""
        images = folder / "plain"
        images.mkdir()
        # The job's root, rekindle's reaper, is pid 1000 in its namespaces.
        dump = [os.environ["REKINDLE_CRIU"], "dump", "-t", "1000", "-D", images, "-o", "log", "--leave-running"]
        dump += ["--manage-cgroups=ignore", "--link-remap", "--file-locks"]
        enter = ["nsenter", "-t", str(self.pid), "-p", "-m", "--"]
        try:
            done = subprocess.run([*enter, *dump], stderr=subprocess.DEVNULL, timeout=300, check=False)
            if done.returncode != 0:
                errors = [line for line in (images / "log").read_text().splitlines() if "Error" in line]
                raise Failed(f"criu dump failed with {done.returncode}: {' / '.join(errors[-3:])}")
        finally:
            shutil.rmtree(images)

    def take(self):
        self.newest, _ = self.snapshot(300)

    def settle(self):
        """Waits until the newest image is in the store, so that nothing works in the background."""
        self.wait_for("image in the store", lambda: self.newest is None or self.stored(self.newest), 300)

    def end(self):
        super().end()
        shutil.rmtree(self.store, ignore_errors=True)


def freeze(args, work, mib, processes):
    name = f"{mib} MiB job" if processes == 1 else f"tree of {processes} with {mib} MiB each"
    job = GapJob(args, work, mib, processes)
    ours, plain = [], []
    try:
        for n in range(args.runs):
            # In turn, so that neither always comes second; with a pause, so that neither pays for the other's cleaning.
            sides = [(plain, lambda: job.plain(work)), (ours, job.take)]
            for gaps, act in sides if n % 2 else reversed(sides):
                gaps.append(job.gap_of(act))
                job.settle()
                time.sleep(2)
    finally:
        job.end()
        job.gaps.unlink(missing_ok=True)
    a, b = statistics.median(ours), statistics.median(plain)
    ratio = statistics.median(x / y for x, y in zip(ours, plain))
    figure = f"{a * 1000:.0f} ms, {ratio:.2f}x (wanted: at most 0.33x, aim 0.20x); the first {ours[0] * 1000:.0f} ms"
    return [(f"freeze, {name}, criu dump --leave-running", f"{b * 1000:.0f} ms"), (f"freeze, {name}, rekindle", figure)]


def pipe_room():
    """MiB that a pipe may hold here, of the 32 that rekindle asks for; `rekindle doctor` says what more takes."""
    read, write = os.pipe()
    room = 32 << 20
    try:
        while room > 1 << 16:
            try:
                return fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, room) / 2**20
            except PermissionError:
                room //= 2
        return room / 2**20
    finally:
        os.close(read)
        os.close(write)


def memcpy():
    """The rows of the interposer's own measurements."""
    if shutil.which("cargo") is None:
        return [("interposer", "not measured: there is no cargo to build what measures it")]
    done = subprocess.run([MEMCPY], stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    found = json.loads(done.stdout)
    return [(f"interposer: {name}", json.dumps(value)) for name, value in found.items()]


def overhead(args, work):
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def once(command):
        began = time.monotonic()
        subprocess.run(command, **quiet)
        return time.monotonic() - began

    ours = [args.rekindle, "run", "--store", work / "true", "--name", "true", "--fresh", "--", "true"]
    once(ours)
    pairs = [(once(["true"]), once(ours)) for _ in range(4 * args.runs)]
    plain, with_us = (statistics.median(side) for side in zip(*pairs))
    extra = statistics.median(b - a for a, b in pairs)
    return [
        ("true", f"{plain * 1000:.1f} ms"),
        ("rekindle run -- true", f"{with_us * 1000:.1f} ms, {extra * 1000:.1f} ms more (wanted: at most 50)"),
    ]


def filtered(args, work):
    """What the filter against io_uring costs: a job of nothing but the shortest system calls, and one that walks a tree."""
    jobs = {
        "3 million reads and writes of a byte": ["dd", "if=/dev/zero", "of=/dev/null", "bs=1", "count=1500000"],
        "du of /usr": ["sh", "-c", "for n in 1 2 3 4 5; do du -s /usr; done"],
    }
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def once(name, command, allowed):
        began = time.monotonic()
        run = [args.rekindle, "run", "--store", work / "filtered", "--name", name, "--fresh", "--", *command]
        subprocess.run(run, env=dict(os.environ, REKINDLE_JOB_ALLOW=allowed), **quiet)
        return time.monotonic() - began

    rows = []
    for number, (what, command) in enumerate(jobs.items()):
        pairs = [[once(f"filtered{number}", command, allowed) for allowed in ("io-uring", "")] for _ in range(2 * args.runs)]
        # The first warms the caches.
        plain, filtered = (statistics.median(side) for side in zip(*pairs[1:]))
        ratio = statistics.median(b / a for a, b in pairs[1:])
        rows.append((f"without io_uring: {what}", f"{filtered * 1000:.0f} ms against {plain * 1000:.0f}, {ratio:.3f}x"))
    return rows


def idle(args, work):
    command = [args.rekindle, "run", "--store", work / "idle", "--name", "idle", "--", "sleep", "100000"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        before = supervisor_ticks(process.pid)
        time.sleep(args.idle)
        used = (supervisor_ticks(process.pid) - before) * 1000 / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{process.pid}/status").read_text()
        rss = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    finally:
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
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--tree", default="16x256")
    parser.add_argument("--workers", default="64x100")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--store", default="/var/tmp")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle", type=int, default=60)
    parser.add_argument("--store-size", type=int, default=8192)
    parser.add_argument("--only", choices=["freeze", "workers", "memcpy", "overhead", "filter", "idle", "store"])
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def tree(size):
        processes, mib = map(int, size.split("x"))
        return freeze(args, work, mib, processes)

    work = Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=args.dir))
    try:
        sections = {
            "freeze": lambda: freeze(args, work, args.mib, 1) + tree(args.tree),
            "workers": lambda: tree(args.workers),
            "memcpy": memcpy,
            "overhead": lambda: overhead(args, work),
            "filter": lambda: filtered(args, work),
            "idle": lambda: idle(args, work),
            "store": lambda: store(args),
        }
        rows = [row for name, section in sections.items() if args.only in (None, name) for row in section()]
    except Failed as error:
        sys.exit(f"bench: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    width = max(len(name) for name, _ in rows)
    print(
        f"median of {args.runs}; images in {args.dir}; {os.cpu_count()} processors, kernel {os.uname().release}, "
        f"pipes of {pipe_room():.2g} MiB"
    )
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


main()
