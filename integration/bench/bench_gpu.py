"""The trials of bench-gpu.sh. Only the standard library; PyTorch is in the jobs."""

import argparse
import datetime
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

import bench_ranks
import bench_table as table
import turns
from host import available, free_on, supervisor_ticks
from plain import Plain
from steps import Steps
from supervised import ROOT, Failed, Job, known_keys, seconds, wait_for

GIB = 1 << 30
# Host memory of the training process beside its device memory, of its image, and of the system.
HOST_GIB = 10
# Torn or late results show within so many steps; more of them cost time only.
STEPS = 3
# Beyond this size, one plain snapshot must do, and PyTorch's own ways of saving are left out: each takes a minute.
MEDIUM_GIB = 16
LARGE_GIB = 20
# Short steps show the most of what lies between the driver and the program.
STEP_GIB = 0.25


class Bench:
    def __init__(self, args, work):
        self.args, self.work, self.keys = args, work, known_keys(args.rekindle)
        self.deadline = time.monotonic() + args.minutes * 60
        self.trials, self.saves, self.notes, self.failures, self.ranks = [], [], [], [], []
        self.pinned, self.results = None, {}
        self.turns = []

    def left(self, limit):
        """`limit`, or the time that is left."""
        return max(1.0, min(limit, self.deadline - time.monotonic()))

    def environment(self, name):
        """What the job needs to find its CUDA driver."""
        if not self.args.stand_in:
            return {}
        folder = self.work / f"{name}.driver"
        folder.mkdir()
        shutil.copy(self.args.stand_in, folder / "libcuda.so.1")
        return {"LD_LIBRARY_PATH": str(folder), "STANDIN_CUDA_DIR": str(folder)}

    def command(self, steps, gib, pause=None):
        name = "standin_job.py" if self.args.stand_in else "bench_torch.py"
        amount = ["--mib", int(gib * 1024), "--times"] if self.args.stand_in else ["--gib", gib]
        command = [sys.executable, ROOT / "integration/jobs" / name, steps.path, *amount]
        # Who takes turns is compared to less than a per cent.
        resident = [] if self.args.stand_in else ["--resident"]
        return [*command, "--pause", pause, *resident] if pause else command

    def name(self, how, gib):
        # Different from that of any other job on this machine: areas are found by it.
        return f"bench{os.getpid()}-{how}-{table.size(gib)}"

    def fits(self, how, gib):
        """Why there is no room for a trial, or None."""
        disk, memory = free_on(self.work) / GIB, available() / GIB
        if how == "plain" and disk < gib + HOST_GIB / 2:
            return f"its image does not fit on the disk ({disk:.0f} GiB are free)"
        # Without the interposer: the driver's copy in the process, its dump in RAM, and the image before.
        wanted = HOST_GIB + (3 * gib if how == "off" else gib)
        if memory < wanted:
            return f"host memory is too small ({memory:.0f} GiB are free, {wanted:.0f} wanted)"
        if how == "on" and "snapshot.interposer" not in self.keys and not self.args.stand_in:
            return "this rekindle has no interposer"
        return None

    def stores(self, gib):
        """Whether there is room for the store: it holds an image and the one before."""
        return free_on(self.work) / GIB > 2 * (gib + HOST_GIB / 2)

    def settings(self, how, gib):
        wanted = {
            "restart.backoff": "0s", "restart.min-uptime": "0s", "store.keep-last": 1, "snapshot.staging": "ram",
            "snapshot.interposer": "auto" if how == "on" else "off",
            # Where the disk has no room for two images, the first must not get there before the trial is over.
            "store.persist-rate": "unlimited" if self.stores(gib) else "1MiB",
        }  # fmt: skip
        return {key: value for key, value in wanted.items() if key in self.keys}

    def steps_on(self, steps, more, ended):
        """Waits until the job has done so many more steps."""
        begun = steps.last()
        wait_for("next step", lambda: steps.last() >= begun + more, self.left(120), ended)

    def back(self, steps, when, ended):
        """Waits for the first step after a crash; answers the seconds since then."""
        wait_for("step after the crash", lambda: steps.first_after(when) is not None, self.left(120), ended)
        return steps.first_after(when) - when

    def compare(self, steps, gib):
        step = steps.differs(self.results.setdefault(gib, {}))
        if step is not None:
            raise Failed(f"step {step} of {steps.path.name} has other bits than in another trial of this size")

    def plain(self, gib, trial):
        name = self.name("plain", gib)
        steps = Steps(self.work / f"{name}.steps")
        job = Plain(
            self.args.rekindle, self.args.criu, self.work, name, self.command(steps, gib), self.environment(name)
        )
        try:
            self.steps_on(steps, STEPS, job.ended)
            trial["bytes"] = steps.bytes()
            for _ in range(self.args.rounds if gib <= MEDIUM_GIB else 1):
                trial["snapshots"].append(job.snapshot(self.left(120)))
                self.steps_on(steps, STEPS, job.ended)
            when = job.crash()
            job.restore(self.left(120))
            trial["crash"] = self.back(steps, when, lambda: None)
            self.steps_on(steps, STEPS, lambda: None)
            self.compare(steps, gib)
        finally:
            job.end()

    def rekindle(self, how, gib, trial):
        name = self.name(how, gib)
        steps = Steps(self.work / f"{name}.steps")
        stored = self.stores(gib)
        job = Job(
            self.args.rekindle, self.work, name, self.command(steps, gib),
            settings=self.settings(how, gib), environment=self.environment(name),
        )  # fmt: skip
        try:
            job.start()
            self.steps_on(steps, STEPS, job.ended)
            trial["bytes"] = steps.bytes()
            waited = self.ready(job)
            print(f"   staging area made ready: {waited:.1f} s after the first steps", flush=True)
            # The next one would wait until this one is in the store.
            for _ in range(self.args.rounds if stored else 1):
                trial["snapshots"].append(self.snapshot(job, stored))
                self.steps_on(steps, STEPS, job.ended)
            crashes = []
            for _ in range(self.args.rounds if gib <= MEDIUM_GIB else 1):
                pid, when = job.state()["pid"], time.time()
                os.kill(pid, signal.SIGKILL)
                crashes.append(self.back(steps, when, job.ended))
                self.steps_on(steps, STEPS, job.ended)
            trial["crash"] = statistics.median(crashes)
            self.compare(steps, gib)
        finally:
            job.end()
            shutil.rmtree(job.store, ignore_errors=True)

    def snapshot(self, job, stored):
        image, freeze = job.snapshot(self.left(120))
        took = {"freeze": freeze}
        manifest = job.manifest(image, self.left(10))
        if manifest is None:
            self.notes.append(f"{job.name}: no manifest of image {image}, so no phases")
        else:
            took.update((name, value) for name, value in seconds(manifest).items() if name in table.PHASES)
        if stored:
            # What is measured next must not share the disk with it.
            job.wait_for(f"image {image} in the store", lambda: job.stored(image), self.left(90))
        return took

    def ready(self, job):
        """Waits until the job's staging area grows no more: its pages are made ready in the background."""
        def used():
            return sum((s := os.statvfs(area)).f_frsize * (s.f_blocks - s.f_bfree) for area in job.areas())

        began = time.monotonic()
        since, last = began, used()
        while time.monotonic() - since < 1.5 and time.monotonic() - began < self.left(60):
            time.sleep(0.1)
            now = used()
            if now != last:
                since, last = time.monotonic(), now
        return since - began

    def compare_steps(self):
        """Step times of jobs under rekindle and of the same without, in turn on the same GPU: as they were started, and
        after the driver has taken out their memory and put it back, which leaves some processes slower or faster than
        before, whoever asked for it."""
        gib = STEP_GIB if not self.args.stand_in else min(self.args.sizes)
        runners = [
            turns.Runner(self.work / f"bench{os.getpid()}-{kind}-{number}.steps", kind)
            for number in range(self.args.pairs) for kind in ("with", "without")
        ]  # fmt: skip
        try:
            for runner in runners:
                # All at once: a start of PyTorch takes a while.
                runner.pause.unlink()
                self.enter(runner, gib)
            for runner in runners:
                self.steps_on(runner.steps, 2 * STEPS, runner.job.ended)
            for runner in runners:
                runner.pause.touch()
            for history in "fresh", "checkpointed":
                if history == "checkpointed":
                    for runner in runners:
                        self.pass_through_driver(runner)
                self.turns.append(self.turn_by_turn(runners, history))
        finally:
            for runner in runners:
                if runner.job:
                    runner.job.end()

    def enter(self, runner, gib):
        """Starts the job of one kind."""
        name, command = runner.pause.stem, self.command(runner.steps, gib, runner.pause)
        if runner.kind == "without":
            runner.job = Plain(self.args.rekindle, self.args.criu, self.work, name, command, self.environment(name))
            return
        runner.job = Job(
            self.args.rekindle, self.work, name, command,
            settings=self.settings("on", gib), environment=self.environment(name),
        ).start()  # fmt: skip

    def pass_through_driver(self, runner):
        if runner.kind == "with":
            image, _ = runner.job.snapshot(self.left(120))
            # What is measured next must not share processors and disk with it.
            runner.job.wait_for("image in the store", lambda: runner.job.stored(image), self.left(90))
        else:
            for action in "lock", "checkpoint", "restore", "unlock":
                runner.job.cuda(action, self.left(60))

    def turn_by_turn(self, runners, history):
        supervisors = [runner.job.process.pid for runner in runners if runner.kind == "with"]
        ticks, began = sum(map(supervisor_ticks, supervisors)), time.monotonic()
        turns.take(runners, self.args.turns, self.args.turn_seconds)
        used = (sum(map(supervisor_ticks, supervisors)) - ticks) / os.sysconf("SC_CLK_TCK")
        busy = used / len(supervisors) / (time.monotonic() - began)
        lengths = {kind: [r.lengths() for r in runners if r.kind == kind] for kind in ("with", "without")}
        if not all(map(all, lengths.values())):
            raise Failed("no steps while they took turns")
        return {"history": history, "busy": busy, **lengths}

    def save(self, gib):
        """torch.save, async_save and the pinned copies."""
        folder = self.work / "saved"
        folder.mkdir()
        script = [sys.executable, str(ROOT / "integration/jobs/save_torch.py"), str(folder), "--gib", str(gib)]
        try:
            done = subprocess.run(
                script, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.left(180), check=False
            )
            for line in done.stdout.splitlines()[-1:]:
                found = json.loads(line)
                self.saves.append({"gib": gib, **found})
                self.pinned = {way: max(found[way], (self.pinned or {}).get(way, 0)) for way in ("out", "in")}
            if done.returncode != 0:
                raise Failed(f"save_torch.py failed with {done.returncode}: {done.stderr.strip()[-300:]}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def trial(self, how, gib):
        trial = {"gib": gib, "how": how, "snapshots": [], "crash": None, "bytes": None, "why": "not finished"}
        self.trials.append(trial)
        why = self.fits(how, gib) or self.late(gib)
        if why:
            trial["why"] = why
        elif how == "plain":
            self.plain(gib, trial)
        else:
            self.rekindle(how, gib, trial)

    def late(self, gib):
        """Why a trial is not begun, or None: a start of PyTorch, and some copies of its memory."""
        wanted = 5 if self.args.stand_in else 30 + gib
        return "no time was left" if self.deadline - time.monotonic() < wanted else None

    def plan(self):
        """What is done, the most wanted first, because the time may be over before the end."""
        sizes = self.args.sizes
        work = [(f"{how} {table.size(gib)} GiB", self.trial, (how, gib)) for gib in sizes for how in ("on", "plain")]
        if not self.args.stand_in:
            saves = [(f"save {table.size(gib)} GiB", self.save, (gib,)) for gib in sizes if gib <= LARGE_GIB]
            # The first has the rate of the machine, which everything is compared with.
            work = [*saves[:1], *work, *saves[1:]]
        work += [(f"off {table.size(gib)} GiB", self.trial, ("off", gib)) for gib in sizes]
        steps = [("steps", self.compare_steps, ())]
        ranks = [(f"ddp, {kind}", bench_ranks.measure, (self, kind, self.args.gib)) for kind in bench_ranks.KINDS]
        # It wants another GPU, and more time than what is left of the others'.
        everything = work + steps + (ranks if self.args.stand_in else [])
        return {"all": everything, "table": work, "steps": steps, "ddp": ranks}[self.args.only]

    def run(self):
        for title, act, arguments in self.plan():
            print(f"== {title}, {self.deadline - time.monotonic():.0f} s left", flush=True)
            began = time.monotonic()
            if act == self.save and self.late(*arguments):
                self.notes.append(f"{title}: no time was left")
                continue
            try:
                act(*arguments)
            except (Failed, subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
                self.failures.append(f"{title}: {error}")
                print(f"FAILED {title}: {error}", flush=True)
            print(f"   {time.monotonic() - began:.1f} s", flush=True)


def describe(bench, args):
    """The lines above the table."""
    if args.stand_in:
        yield "SELF-TEST with the stand-in driver: the table shows that the script works, its figures say nothing."
        if "snapshot.interposer" not in bench.keys:
            yield "This rekindle has no interposer: the rows for it were measured without one."
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]

    def said(command):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

    gpu = "no GPU" if args.stand_in else said(query).strip().replace(", ", ", driver ")
    criu = said([args.criu, "--version"]).split("\n")[0].replace("Version:", "CRIU")
    yield f"{gpu}, {os.cpu_count()} processors, {criu}, kernel {os.uname().release}, " + (
        f"{datetime.date.today()}, store and plain images on {args.dir}. Seconds; later: median of the snapshots after "
        "the first; crash to step: from kill -9 to the end of the next training step, without a back-off, median of rekindle's."
    )
    for found in bench.turns:
        yield from describe_steps(found)
    rates = table.between(bench.trials)
    if rates:
        small, large, out, back = rates
        yield (
            f"From the difference between {table.size(small)} and {table.size(large)} GiB, in which fixed costs "
            f"cancel: {out:.1f} GB/s out, {back:.1f} GB/s in."
        )
    yield from bench.notes
    yield from (f"FAILED {failure}" for failure in bench.failures)


def describe_steps(found):
    """What was found of one history, and how far two like groups of processes differ: what the method can tell."""
    ours, alone = found["with"], found["without"]
    more, width = turns.compare(ours, alone)
    count = sum(map(len, ours))
    yield (
        f"Between snapshots, {len(ours)} jobs of each kind in turn, {found['history']}, {count} steps: "
        f"{statistics.mean(map(statistics.median, ours)) * 1000:.3f} ms a step under rekindle, "
        f"{statistics.mean(map(statistics.median, alone)) * 1000:.3f} ms without, {more * 100:+.2f} % "
        f"(95 %: +-{width * 100:.2f}); a supervisor used {found['busy'] * 100:.2f} % of a processor."
    )
    for kind, group in ("under rekindle", ours), ("without", alone):
        medians = " ".join(f"{statistics.median(lengths) * 1000:.3f}" for lengths in group)
        yield f"   {kind}, each process: {medians}"


def touch(bench, gib):
    """Has so much host memory touched once, by another process: where it is not there, that one dies."""
    script = [sys.executable, "-B", str(ROOT / "integration/bench/host.py"), str(int(gib * GIB))]
    try:
        done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
        said = f"host memory, touched once before: {done.stdout.strip() or f'failed with {done.returncode}'}"
    except subprocess.TimeoutExpired:
        said = "host memory could not be touched within 120 s"
    print(said, flush=True)
    bench.notes.append(said)


def keep_logs(work, logs):
    logs.mkdir(parents=True, exist_ok=True)
    for log in [*work.glob("*.log"), *work.glob("store/*/log/criu-*.log"), *work.glob("*.images/*.log")]:
        shutil.copy(log, logs / f"{log.parent.name}-{log.name}")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True)
    parser.add_argument("--criu", required=True)
    parser.add_argument("--sizes", default="1,16,64,96")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--only", choices=["all", "table", "steps", "ddp"], default="all")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--stand-in")
    args = parser.parse_args()
    args.sizes = [int(part) if part.isdigit() else float(part) for part in args.sizes.split(",")]
    if args.rounds < 1 or min(args.sizes) <= 0:
        parser.error("--rounds must be at least 1 and every size more than 0")
    args.pairs, args.turns, args.turn_seconds = (1, 2, 0.3) if args.stand_in else (6, 12, 0.3)
    return args


def main():
    args = arguments()
    # Stopped from outside, it cleans up and prints what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="rekindle-bench-gpu.", dir=args.dir))
    bench = Bench(args, work)
    try:
        if not args.stand_in:
            ranks = 4 * (args.gib + bench_ranks.HOST_GIB)
            touch(bench, ranks if args.only == "ddp" else max(args.sizes) + HOST_GIB)
        bench.run()
    finally:
        if args.logs:
            keep_logs(work, args.logs)
        shutil.rmtree(work, ignore_errors=True)
        for line in describe(bench, args):
            print(f"\n{line}")
        if bench.trials:
            print("\n" + table.markdown(table.HEAD, table.rows(bench.trials, bench.saves, bench.pinned)), flush=True)
        if bench.ranks:
            print("\n" + table.markdown(bench_ranks.HEAD, bench_ranks.rows(bench.ranks)), flush=True)
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
