"""A job of gpu_ranks.py under rekindle: how it is started, killed and watched. Only the standard library."""

import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import bench_table
from matrix_trial import Record
from supervised import PHASES, ROOT, Failed, Job, seconds, wait_for

JOBS = ROOT / "integration/jobs"
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "2",
}  # fmt: skip
# Script and mode.
KINDS = {
    "ddp": ("matrix_torch.py", "ddp-nccl"),
    "fsdp2": ("matrix_torch.py", "fsdp"),
    "graph": ("matrix_nccl.py", "graph"),
    "pipeline": ("matrix_nccl.py", "pipeline"),
    "late": ("matrix_nccl.py", "late"),
    "ahead": ("matrix_nccl.py", "ahead"),
    "uneven": ("matrix_nccl.py", "uneven"),
    "registered": ("matrix_nccl.py", "registered"),
    "alone": ("matrix_nccl.py", "alone"),
}
VICTIMS = ["launcher", "rank 0", "rank 1", "supervisor"]
# Out of the range that the kernel gives to clients; another run of this script may have left something.
PORTS = itertools.count(10100 + os.getpid() % 400 * 50)
# To try this script where there is no GPU, with `--kinds ddp`.
DEVICE = ["--device", "cpu"] if os.environ.get("RANKS_ON_CPU") else []
BEGAN = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - BEGAN:6.1f}] {text}", flush=True)


def ranks(kind):
    return 1 if kind == "alone" else 2


def command(kind, out, pause):
    script, mode = KINDS[kind]
    job = [JOBS / script, mode, "--out", out, "--pause", pause]
    if kind == "alone":
        return [str(part) for part in [sys.executable, *job]]
    port = next(PORTS)
    if DEVICE:
        return [str(part) for part in [sys.executable, *job, "--port", port, *DEVICE]]
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 1, "--nproc_per_node", 2, "--master_addr", "127.0.0.1"]
    return [str(part) for part in [*run, "--master_port", port, *job, "--port", port]]


class Xids:
    """The driver's faults in the kernel's log since the last look. A thread reads them as they come, because the driver's notes
    about killed processes soon fill the log."""

    def __init__(self):
        self.lines, self.seen = [], 0
        log = os.open("/dev/kmsg", os.O_RDONLY)
        os.lseek(log, 0, os.SEEK_END)
        threading.Thread(target=self.read, args=(log,), daemon=True).start()

    def read(self, log):
        while True:
            # What was overwritten before it was read.
            with contextlib.suppress(BrokenPipeError):
                line = os.read(log, 8192).decode(errors="replace").partition(";")[2].splitlines()[0]
                if "NVRM: Xid" in line:
                    self.lines.append(line)

    def new(self):
        lines = self.lines[self.seen :]
        self.seen += len(lines)
        return lines


def numbers(lines):
    found = [match[1] for match in (re.search(r"\): (\d+),", line) for line in lines) if match]
    return " ".join(f"{number}x{found.count(number)}" for number in sorted(set(found), key=int)) or "none"


def in_namespace(pid):
    """The processes in a pid's PID namespace: pid and own number."""
    space, found = os.readlink(f"/proc/{pid}/ns/pid"), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns/pid") == space:
                status = (process / "status").read_text()
                line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                found[int(process.name)] = int(line.split()[-1])
    return found


def victim_pid(victim, space_of, out):
    processes = in_namespace(space_of)
    if victim == "launcher":
        for pid in sorted(processes):
            if any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in (b"torch.distributed.run", b"jobs/matrix_")):
                return pid
    else:
        inner = int((out / f"pid.{victim.split()[1]}").read_text())
        for pid, own in processes.items():
            if own == inner:
                return pid
    raise Failed(f"there is no {victim}")


ERRORS = (Failed, OSError, KeyError, ValueError, subprocess.SubprocessError)


class Supervised:
    """A job under rekindle. It imports what it needs and then waits for `open`, so that the next one can begin to load while
    another uses the GPUs."""

    def __init__(self, args, kind, memory, work, interval, pause, settings=None):
        self.args, self.kind, self.memory = args, kind, memory
        self.name = f"{kind}-{memory}-{os.getpid()}"
        self.folder = work / self.name
        self.folder.mkdir()
        self.out = self.folder / "out"
        self.lines = Record(self.out, ranks(kind))
        self.job = Job(
            args.rekindle, self.folder, self.name, command(kind, self.out, pause), interval=interval,
            settings={"gpu.memory": memory, **(settings or {})},
            environment={**ENVIRONMENT, "MATRIX_GATE": str(self.folder / "gate")},
        )  # fmt: skip
        self.took, self.back, self.failed, self.kills, self.xids = [], [], [], [], []
        self.result, self.found, self.again, self.ending = "works", {}, "", None

    def begin(self):
        self.job.start()
        return self

    def open(self):
        (self.folder / "gate").touch()
        self.job.wait_for("first steps", lambda: self.lines.count() >= 3, 120)

    def start(self):
        self.begin().open()

    def steps(self, more, limit=60):
        begun = self.lines.count()
        self.job.wait_for("steps", lambda: self.lines.count() >= begun + more, limit)

    def snapshot(self):
        before = self.job.state()
        image, freeze = self.job.snapshot(60)
        manifest = self.job.manifest(image, 30)
        now = self.job.state()
        if now.get("restarts") != before.get("restarts"):
            raise Failed("the job was restarted by a snapshot")
        phases = seconds(manifest)
        self.took.append({name: phases.get(name, 0.0) for name in PHASES} | {"freeze": freeze})

    def kill(self, victim, limit=60):
        before = self.job.state()
        began, at = time.monotonic(), time.time()
        if victim == "supervisor":
            self.job.process.kill()
            self.job.process.wait(30)
            self.job.start()
            again = lambda: self.job.running() and self.job.state()["supervisor"] == self.job.process.pid
        else:
            os.kill(victim_pid(victim, before["pid"], self.out), signal.SIGKILL)
            again = lambda: self.job.running() and self.job.state().get("restarts", 0) > before["restarts"]
        self.job.wait_for("restart", again, limit)
        runs = time.monotonic() - began
        count = self.lines.count()
        self.job.wait_for("step after the restart", lambda: self.lines.count() > count, limit)
        took = time.monotonic() - began
        lives = self.job.state().get("restarts", 0) - before["restarts"] if victim != "supervisor" else 1
        self.back.append((victim, took, lives))
        self.kills.append((victim, at, took))
        if lives != 1 or took > 4:
            self.failed.append(f"{victim}: {took:.1f} s ({runs:.1f} until it ran), {lives} lives")

    def events(self):
        """Each with the seconds since the epoch."""
        path, found = self.job.store / self.name / "log/events.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError, KeyError):
                event = json.loads(line)
                stamp = re.sub(r"(\.\d{6})\d*", r"\1", event["time"].replace("Z", "+00:00"))
                found.append((datetime.datetime.fromisoformat(stamp).timestamp(), event))
        return found

    def parts(self):
        """For each victim where the time until the next step went: medians and most of the seconds after the kill at which
        it was noticed, all of the job was gone, the restore began, the job ran, and it had done a step."""
        events, found = self.events(), {}
        for victim, at, took in self.kills:
            after = [(time - at, event) for time, event in events if 0 <= time - at <= took + 0.5]
            first = lambda *names, after=after: next((time for time, event in after if event["event"] in names), None)
            row = [first("process-died", "ended", "supervised"), first("ended", "supervised"), first("restore-began"), first("started"), took]
            found.setdefault(victim, []).append(row)
        middles = lambda rows: [statistics.median([c for c in column if c is not None] or [0]) for column in zip(*rows)]
        return {victim: (middles(rows), max(row[-1] for row in rows), len(rows)) for victim, rows in found.items()}

    def attempts(self):
        """Snapshots that failed, and attempts to lock that were made again."""
        failed = sum(event["event"] == "snapshot-failed" for _, event in self.events())
        again = self.job.log.read_text(errors="replace").count("the attempt to lock failed")
        return f"{failed} failed, {again} locked again"

    def last_steps(self):
        last = self.lines.count() + 6
        new = self.out / "last.new"
        new.write_text(str(last))
        new.rename(self.out / "last")
        wait_for("last step", lambda: self.lines.count() >= last, 60)

    def finish(self):
        """Its last image may still be stored."""
        code = self.job.wait(60)
        if code != 0:
            raise Failed(f"exit code {code}: {self.job.last_words()}")

    def keep(self):
        if self.args.logs:
            to = self.args.logs / self.name
            to.mkdir(parents=True, exist_ok=True)
            for path in [self.job.log, *self.folder.glob(f"store/{self.name}/log/*")]:
                if path.is_file():
                    (to / path.name).write_bytes(path.read_bytes()[-400_000:])

    def fails(self, why):
        self.result = f"{type(why).__name__}: {why}".replace(self.name, "")[:400]
        say(f"{self.kind} {self.memory}: {self.result}")

    def finish_and_close(self):
        try:
            if not self.result.startswith("Failed"):
                self.finish()
        except ERRORS as why:
            self.fails(why)
        finally:
            self.found, self.again = self.parts(), self.attempts()
            self.close()

    def end(self):
        if self.ending is not None:
            self.ending.join()
        else:
            self.close()

    def kept(self):
        return Record(self.folder.parent / f"kept-{self.name}", ranks(self.kind))

    def row(self):
        took = bench_table.middle(self.took) if self.took else {}
        backs = [back for _, back, _ in self.back]
        times = [f"{took.get(phase, 0):.2f}" for phase in [*PHASES, "freeze"]]
        most = f"{max((one['freeze'] for one in self.took), default=0):.2f}"
        back = f"{statistics.median(backs):.2f}/{max(backs):.2f}" if backs else ""
        return [self.kind, self.memory, self.result, f"Xid {numbers(self.xids)}", *times, most, self.again,
                f"{len(self.took)} snapshots", f"{len(backs)} kills", back, "; ".join(self.failed)]  # fmt: skip

    def close(self):
        try:
            self.job.end()
        finally:
            self.keep()
            if self.out.exists():
                self.out.rename(self.folder.parent / f"kept-{self.name}")
            shutil.rmtree(self.folder, ignore_errors=True)
