"""Two ranks over NCCL on two GPUs, and what a snapshot or a killed process does to others on the same GPUs. Needs root, CRIU
(REKINDLE_CRIU) and a release build. Only the standard library; the frameworks are in the jobs.

    gpu_ranks.py alone      each kind alone: a snapshot and a kill of each process in turn, same bits, where the time goes
    gpu_ranks.py shared     two jobs that share both GPUs, with kills of one, the other, and both
    gpu_ranks.py plain      the same two without rekindle: the same kills, started again by hand
    gpu_ranks.py preempt    one GPU: how long a program waits for a kernel of a job, before and after a snapshot
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from gpu import compiled
from matrix_trial import Record
from ranks_job import (
    BEGAN, ENVIRONMENT, ERRORS, JOBS, KINDS, VICTIMS, Supervised, Xids, command, numbers, ranks, say, victim_pid,
)  # fmt: skip
from supervised import ROOT, Failed, Job, wait_for

# Of two jobs, turn by turn.
VICTIMS_OF_TWO = [("launcher", "rank 1"), ("rank 0", None), (None, "rank 1"), ("rank 1", "rank 0")]


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


# A job that is killed again and again. The pause between restarts is for jobs that die soon.
OFTEN = {"restart.max-restarts": 1000, "restart.backoff": "0s", "log.level": "debug"}


def alone(args, work, xids):
    """One job after the other; the next one loads its libraries meanwhile."""
    plan = args.plan or [(kind, memory, args.kills) for memory, kind in itertools.product(args.memory, args.kinds or KINDS)]
    left = lambda: args.seconds - (time.monotonic() - BEGAN)
    begin = lambda kind, memory, _: Supervised(args, kind, memory, work, "off", 0.1, OFTEN | args.settings).begin()
    jobs, waiting = [], [begin(*plan[0])]
    try:
        for number, (*_, kills) in enumerate(plan):
            if not waiting:
                break
            jobs.append(waiting.pop())
            if number + 1 < len(plan) and left() > 40:
                waiting.append(begin(*plan[number + 1]))
            one_alone(jobs[-1], kills, args.snapshot_every, left, xids)
    finally:
        for job in [*jobs, *waiting]:
            job.end()
    table = [job.row() for job in jobs] + [[kind, memory, "no time was left"] for kind, memory, _ in plan[len(jobs) :]]
    parts = [[job.kind, job.memory, victim, *(f"{part:.2f}" for part in middle), f"most {most:.2f}", f"{n} kills"]
             for job in jobs for victim, (middle, most, n) in job.found.items()]  # fmt: skip
    compare(args, [(row, job.kind, job.kept()) for row, job in zip(table, jobs)], work)
    return [*table, [], ["kind", "memory", "killed", "noticed", "gone", "restore begins", "runs", "step"], *parts]


def one_alone(job, kills, every, left, xids):
    """Kills of each process in turn, with snapshots between. The job ends in the background."""
    choice, name = random.Random(7), f"{job.kind} {job.memory}"
    victims = ["rank 0", "supervisor"] if job.kind == "alone" else VICTIMS
    # In each turn another one is the last before a snapshot.
    order = [victims[(turn + number) % len(victims)] for turn in range(kills) for number in range(len(victims))]
    try:
        job.open()
        say(f"{name}: runs")
        job.snapshot()
        for number, victim in enumerate(order, 1):
            if left() < 12:
                job.result = "works, stopped early"
                break
            job.steps(1)
            time.sleep(choice.random() * 0.3)
            job.kill(victim)
            if number % every == 0:
                job.snapshot()
            say(f"{name}: {victim}: step {job.back[-1][1]:.1f} s after, {job.back[-1][2]} lives; freeze {job.took[-1]['freeze']:.2f}")
        job.last_steps()
    except Stopped:
        raise
    except ERRORS as why:
        job.fails(why)
        job.job.end()
    job.xids = xids.new()
    for line in job.xids[:6]:
        say(f"{name}:    {line[-150:]}")
    job.ending = threading.Thread(target=job.finish_and_close)
    job.ending.start()


def compare(args, kept, work):
    """With one uninterrupted run of each kind, all at the same time, or with that of an earlier run of this script."""
    most, known, running = {}, {}, {}
    for _, kind, lines in kept:
        most[kind] = max(most.get(kind, 0), *(len(lines.of(rank)) for rank in range(lines.ranks)))
    for kind, count in most.items():
        before = Record(args.reference / f"reference-{kind}", ranks(kind)) if args.reference else None
        if before and before.count() >= count:
            known[kind] = before
        elif count:
            running[kind], known[kind] = reference(kind, max(count + 6, args.reference_steps), work)
    for process in running.values():
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
    for row, kind, lines in kept:
        same = "no lines" if kind not in known else lines.differ(known[kind]) or f"same bits, {lines.count()} steps"
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


def planned(text):
    parts = [row.split(":") for row in text.split(",")]
    return [(kind, memory, int(kills)) for kind, memory, kills in parts]


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
    parser.add_argument("--snapshot-every", type=int, default=1, help="kills between two snapshots; an image is good for four")
    parser.add_argument("--between", type=float, default=1.0, help="seconds between the kills of the two")
    parser.add_argument("--after", type=float, default=10.0, help="seconds to watch after the kills")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--plan", type=planned, help="KIND:MEMORY:KILLS,..., in this order, in place of --kinds, --memory and --kills")
    parser.add_argument("--reference", type=Path, help="uninterrupted runs of before: a folder of reference-KIND")
    parser.add_argument("--reference-steps", type=int, default=0, help="how many steps uninterrupted runs do at least")
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
            for steps in [*work.glob("reference-*/steps.*"), *work.glob("kept-*/steps.*")]:
                (args.logs / steps.parent.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(steps, args.logs / steps.parent.name)
        shutil.rmtree(work, ignore_errors=True)
    print()
    for row in table:
        print(" | ".join(map(str, row)))


if __name__ == "__main__":
    main()
