"""Two ranks over NCCL on two GPUs, and what a snapshot or a killed process does to others on the same GPUs. Needs root, CRIU
(REKINDLE_CRIU) and a release build. Only the standard library; the frameworks are in the jobs.

    gpu_ranks.py alone      each kind alone: a snapshot and a kill of each process in turn, same bits
    gpu_ranks.py shared     two jobs that share both GPUs, with kills of one, the other, and both
    gpu_ranks.py plain      the same two without rekindle: the same kills, started again by hand
    gpu_ranks.py preempt    one GPU: how long a program waits for a kernel of a job, before and after a snapshot
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import bench_table
from gpu import compiled
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
# Of two jobs, turn by turn.
VICTIMS_OF_TWO = [("launcher", "rank 1"), ("rank 0", None), (None, "rank 1"), ("rank 1", "rank 0")]
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
    """The driver's faults in the kernel's log since the last look."""

    def __init__(self):
        self.seen = len(self.all())

    def all(self):
        said = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
        return [line for line in said.splitlines() if "NVRM: Xid" in line]

    def new(self):
        lines = self.all()[self.seen :]
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


class ByHand:
    """A command without rekindle, started again from the beginning when it ended."""

    def __init__(self, kind, work, pause):
        self.kind, self.pause, self.lives, self.process = kind, pause, [], None
        self.work = Path(tempfile.mkdtemp(prefix=f"plain-{kind}.", dir=work))

    def start(self):
        out = self.work / f"life{len(self.lives)}"
        self.lives.append(Record(out, ranks(self.kind)))
        log = open(self.work / f"life{len(self.lives) - 1}.log", "w")
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command(self.kind, out, self.pause)],
            env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return self

    def count(self):
        return self.lives[-1].count()

    def root(self):
        return int(subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()[0])

    def kill(self, victim):
        os.kill(victim_pid(victim, self.root(), self.lives[-1].folder), signal.SIGKILL)

    def end(self):
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait(60)


def plain(args, work, xids):
    """Kills of one, and of both within seconds; a job that ended or stands still is started again."""
    jobs, table = [ByHand(kind, work, 0.1) for kind in args.kinds or ["graph", "late"]], []
    try:
        for job in jobs:
            job.start()
        for job in jobs:
            wait_for(f"steps of {job.kind}", lambda job=job: job.count() > 5, 120)
        say("both run")
        for turn in range(args.kills):
            table.append([turn, *plain_turn(args, jobs, VICTIMS_OF_TWO[turn % len(VICTIMS_OF_TWO)])])
            lines = xids.new()
            table[-1].append(f"Xid {numbers(lines)}")
            say(" | ".join(map(str, ["plain", *table[-1]])))
    finally:
        for job in jobs:
            job.end()
    return table


def plain_turn(args, jobs, victims):
    """A note for each job."""
    before = [job.count() for job in jobs]
    for job, victim in zip(jobs, victims):
        if victim:
            job.kill(victim)
            time.sleep(args.between)
    time.sleep(args.after)
    notes = []
    for job, victim, count in zip(jobs, victims, before):
        went_on = job.process.poll() is None and job.count() > count + 3
        notes.append(f"{job.kind}: {victim or 'not killed'}, {'runs on' if went_on else 'has ended or stands still'}")
        if not went_on:
            job.end()
            job.start()
    for job in jobs:
        try:
            ended = lambda job=job: f"{job.kind} ended" if job.process.poll() is not None else None
            wait_for("steps", lambda job=job: job.count() > 5, 60, ended)
        except Failed as why:
            notes.append(f"started again: {why}")
            job.end()
            job.start()
    return notes


class Supervised:
    def __init__(self, args, kind, memory, work, interval, pause, settings=None):
        self.args, self.kind, self.memory = args, kind, memory
        self.name = f"{kind}-{memory}-{os.getpid()}"
        self.folder = work / self.name
        self.folder.mkdir()
        self.out = self.folder / "out"
        self.lines = Record(self.out, ranks(kind))
        self.job = Job(
            args.rekindle, self.folder, self.name, command(kind, self.out, pause), interval=interval,
            settings={"gpu.memory": memory, **(settings or {})}, environment=ENVIRONMENT,
        )  # fmt: skip
        self.took, self.back, self.failed = [], [], []

    def start(self):
        self.job.start()
        self.job.wait_for("first steps", lambda: self.lines.count() >= 3, 120)

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
        began = time.monotonic()
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
        if lives != 1 or took > 4:
            self.failed.append(f"{victim}: {took:.1f} s ({runs:.1f} until it ran), {lives} lives")

    def finish(self):
        last = self.lines.count() + 6
        new = self.out / "last.new"
        new.write_text(str(last))
        new.rename(self.out / "last")
        code = self.job.wait(60)
        if code != 0:
            raise Failed(f"exit code {code}: {self.job.last_words()}")
        return self.lines.count()

    def keep(self):
        if self.args.logs:
            to = self.args.logs / self.name
            to.mkdir(parents=True, exist_ok=True)
            for path in [self.job.log, *self.folder.glob(f"store/{self.name}/log/*")]:
                if path.is_file():
                    (to / path.name).write_bytes(path.read_bytes()[-400_000:])

    def close(self):
        try:
            self.job.end()
        finally:
            self.keep()
            if self.out.exists():
                self.out.rename(self.folder.parent / f"kept-{self.name}")
            shutil.rmtree(self.folder, ignore_errors=True)


def reference(kind, count, work):
    """As many steps without rekindle."""
    out = work / f"reference-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "last").write_text(str(count))
    with open(work / f"reference-{kind}.log", "w") as log:
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command(kind, out, 0)],
            env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return process, Record(out, ranks(kind))


def shared(args, work, xids):
    """Two jobs with an interval, the same kills as `plain`."""
    kinds = args.kinds or ["graph", "late"]
    memories = ["copied", "kept"]
    jobs = [Supervised(args, kind, memory, work, "6s", 0.1, args.settings) for kind, memory in zip(kinds, memories)]
    table = []
    try:
        for job in jobs:
            job.start()
        for job in jobs:
            job.job.wait_for("an image", lambda job=job: job.job.state().get("last_image"), 60)
        say("both run and have images")
        for turn in range(args.kills):
            victims = VICTIMS_OF_TWO[turn % len(VICTIMS_OF_TWO)]
            before = [job.job.state().get("restarts", 0) for job in jobs]
            for job, victim in zip(jobs, victims):
                if victim:
                    try:
                        os.kill(victim_pid(victim, job.job.state()["pid"], job.out), signal.SIGKILL)
                    except (Failed, OSError) as why:
                        say(f"{job.kind}: {victim} could not be killed: {why}")
                    time.sleep(args.between)
            began, back = time.monotonic(), {}
            # Both run, and go on doing so.
            while time.monotonic() < began + args.after:
                time.sleep(0.2)
            note = []
            for job, victim, restarts in zip(jobs, victims, before):
                count, state = job.lines.count(), job.job.state()
                try:
                    job.job.wait_for("step", lambda job=job, count=count: job.lines.count() > count + 3 and job.job.running(), 90)
                    waited = time.monotonic() - began - args.after
                    lives = job.job.state().get("restarts", 0) - restarts
                    note.append(f"{job.kind}: {victim or 'not killed'}, {lives} lives" + (f", another {waited:.1f} s" if waited > 4 else ""))
                except Failed as why:
                    note.append(f"{job.kind}: {victim or 'not killed'}: {why}")
            said = numbers(lines := xids.new())
            table.append([turn, *note, f"Xid {said}"])
            say(f"shared {turn}: {'; '.join(note)}; Xid {said}")
            for line in lines[:6]:
                say(f"    {line[-150:]}")
    finally:
        for job in jobs:
            job.close()
    return table


def alone(args, work, xids):
    table, kept = [], []
    for memory, kind in itertools.product(args.memory, args.kinds or KINDS):
        if time.monotonic() - BEGAN > args.seconds:
            table.append([kind, memory, "no time was left"])
            continue
        job, result = Supervised(args, kind, memory, work, "off", 0.1), "works"
        choice = random.Random(7)
        try:
            job.start()
            say(f"{kind} {memory}: runs")
            job.snapshot()
            victims = ["rank 0", "supervisor"] if kind == "alone" else VICTIMS
            for victim in [*victims] * args.kills:
                job.steps(1)
                time.sleep(choice.random() * 0.3)
                job.kill(victim)
                say(f"{kind} {memory}: {victim}: step {job.back[-1][1]:.1f} s after, {job.back[-1][2]} lives; freeze before {job.took[-1]['freeze']:.2f}")
                job.snapshot()
            job.finish()
        except Stopped:
            raise
        except (Failed, OSError, KeyError, ValueError, subprocess.SubprocessError) as why:
            result = f"{type(why).__name__}: {why}".replace(job.name, "")[:400]
        finally:
            job.close()
        said = numbers(lines := xids.new())
        took = bench_table.middle(job.took) if job.took else {}
        backs = [back for _, back, _ in job.back]
        row = [kind, memory, result, f"Xid {said}", *(f"{took.get(p, 0):.2f}" for p in [*PHASES, "freeze"]),
               f"{max((t['freeze'] for t in job.took), default=0):.2f}", f"{len(backs)}",
               f"{statistics.median(backs):.2f}/{max(backs):.2f}" if backs else "", "; ".join(job.failed)]
        table.append(row)
        kept.append((row, kind, Record(work / f"kept-{job.name}", ranks(kind))))
        say(" | ".join(row))
        for line in lines[:6]:
            say(f"    {line[-150:]}")
    compare(kept, work)
    return table


def compare(kept, work):
    """With one uninterrupted run of each kind, all at the same time."""
    most = {}
    for _, kind, lines in kept:
        most[kind] = max(most.get(kind, 0), *(len(lines.of(rank)) for rank in range(lines.ranks)))
    references = {kind: reference(kind, count + 6, work) for kind, count in most.items() if count}
    for process, _ in references.values():
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
    for row, kind, lines in kept:
        same = "no lines" if kind not in references else lines.differ(references[kind][1]) or f"same bits, {lines.count()} steps"
        row.insert(3, same)


def preempt(args, work, xids):
    """The job has one kernel that runs long, beside a program of small ones."""
    program, table = compiled(work, JOBS / "spin.cu"), []

    class Spin:
        def __init__(self, folder, output):
            self.folder, self.output, self.number = folder, output, 0
            folder.mkdir()

        def lines(self):
            return self.output.read_text().splitlines() if self.output.exists() else []

        def ask(self, request, limit=20):
            known, new = len(self.lines()), self.folder / "new"
            new.write_text(request)
            new.rename(self.folder / str(self.number))
            self.number += 1
            wait_for(f"answer to {request}", lambda: len(self.lines()) > known, limit)
            return self.lines()[-1]

    other = Spin(work / "other", work / "other.log")
    with open(work / "other.log", "w") as log:
        process = subprocess.Popen([program, work / "other"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for("the other program", lambda: "ready" in other.lines(), 60)
        other.ask("work")
        for memory in args.memory:
            job = Job(args.rekindle, work, f"spin-{memory}", [program, work / memory], settings={"gpu.memory": memory})
            spin = Spin(work / memory, job.store / job.name / "log/stdout.log")

            def row(when, ms, spin=spin, memory=memory):
                other.ask("longest")
                spun = spin.ask(f"spin {ms}")
                table.append([memory, when, f"{ms} ms", spun, other.ask("longest"), f"Xid {numbers(xids.new())}"])
                say(" | ".join(table[-1]))

            try:
                job.start()
                job.wait_for("ready", lambda spin=spin: "ready" in spin.lines(), 60)
                row("before", 1000)
                row("before", 6000)
                job.snapshot(60)
                row("after a snapshot", 1000)
                job.snapshot(60)
                job.kill_job(60)
                row("restored", 1000)
                table.append([memory, "restored", spin.ask("assert")])
            finally:
                job.end()
    finally:
        process.kill()
        process.wait(30)
    return table


class Stopped(Failed):
    """From outside."""


def stop(*_):
    raise Stopped("the run is stopped")


def main():
    signal.signal(signal.SIGTERM, stop)
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["alone", "shared", "plain", "preempt"])
    parser.add_argument("--rekindle", default=str(ROOT / "target/release/rekindle"))
    parser.add_argument("--kinds", type=lambda names: names.split(","))
    parser.add_argument("--memory", type=lambda names: names.split(","), default=["copied", "kept"])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--between", type=float, default=1.0, help="seconds between the kills of the two")
    parser.add_argument("--after", type=float, default=10.0, help="seconds to watch after the kills")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--dir", default="/var/tmp")
    args = parser.parse_args()
    work, xids = Path(tempfile.mkdtemp(prefix="rekindle-ranks.", dir=args.dir)), Xids()
    try:
        table = {"plain": plain, "shared": shared, "alone": alone, "preempt": preempt}[args.what](args, work, xids)
    finally:
        if args.logs:
            for log in [*work.glob("*.log"), *work.glob("*/*.log")]:
                args.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, args.logs / f"{log.parent.name}-{log.name}")
        shutil.rmtree(work, ignore_errors=True)
    print()
    for row in table:
        print(" | ".join(map(str, row)))


if __name__ == "__main__":
    main()
