"""The workload matrix of gpu-matrix.sh. Only the standard library; the frameworks are in the jobs."""

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_table
from matrix_lines import LINES, SELF_TEST, WARM_UP
from matrix_trial import STOPPING, WARM, Lost, Refused, Trial
from supervised import PHASES, ROOT, Failed, known_keys

ERRORS = (Failed, subprocess.SubprocessError, OSError, KeyError, ValueError, threading.BrokenBarrierError)
HEAD = ["line", "workload", "result", "same bits", *PHASES, "freeze", "GiB", "back", "what is seen"]


class Outcome:
    """What became of a line: works, refused, lost, failed or SKIP."""

    def __init__(self, result, note="", same=None, trial=None):
        self.result, self.note, self.same = result, note, same
        self.took, self.back = (trial.took, trial.back) if trial else (None, None)

    def expected(self, line):
        if self.result == "SKIP":
            return True
        words = self.result != "refused" or line.words in self.note
        return self.result == line.expected and words and self.same is not False

    def row(self, line):
        same = {None: "", True: "yes", False: "no"}[self.same]
        took = self.took or {}
        figures = [f"{took[name]:.2f}" if took else "" for name in [*PHASES, "freeze"]]
        size = f"{took['bytes'] / 2**30:.2f}" if took else ""
        back = f"{self.back:.2f}" if self.back else ""
        note = " ".join(self.note.split()).replace("|", "/")
        return [line.name, line.what, self.result, same, *figures, size, back, note if len(note) <= 500 else f"{note[:500]} ..."]


class Slots:
    """How many GPUs' worth of lines run at the same time, and which GPU has the fewest."""

    def __init__(self, gpus, jobs):
        self.gpus, self.free = dict.fromkeys(gpus, 0), jobs
        self.all, self.changed = jobs, threading.Condition()

    def take(self, count):
        """`count` different GPUs, once so many slots are free."""
        weight = min(count, self.all)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= weight or STOPPING.is_set())
            self.free -= weight
            taken = sorted(sorted(self.gpus, key=self.gpus.get)[:count])
            for gpu in taken:
                self.gpus[gpu] += 1
            return taken

    def give(self, taken, count):
        with self.changed:
            self.free += min(count, self.all)
            for gpu in taken:
                self.gpus[gpu] -= 1
            self.changed.notify_all()


class Matrix:
    # NVLink SHARP cannot be checkpointed (docs/limits.md). The tree is not for byte code.
    ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    # Folders that a job compiles into.
    CACHES = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME"]

    def __init__(self, args, work):
        self.rekindle, self.stand_in, self.logs = args.rekindle, args.stand_in, args.logs
        self.args, self.work, self.keys = args, work, known_keys(args.rekindle)
        self.began, self.printing = time.monotonic(), threading.Lock()
        self.deadline = self.began + args.minutes * 60
        self.gpus = ["0", "1"] if args.stand_in else gpus()
        self.slots, self.outcomes, self.warmed, self.images = Slots(self.gpus, args.jobs), {}, {}, set()
        known = SELF_TEST if args.stand_in else LINES
        self.lines = [line for line in known if not args.only or line.name in args.only]

    def say(self, text):
        with self.printing:
            print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def driver(self, folder, line):
        """What a job needs to find the stand-in driver."""
        shutil.copy(self.stand_in, folder / "libcuda.so.1")
        for name, text in line.faults.items():
            (folder / name).write_text(text)
        return {"LD_LIBRARY_PATH": str(folder), "STANDIN_CUDA_DIR": str(folder)}

    def warm(self, name):
        """Tries a package, which brings it into memory; answers why there is no use of it, or None."""
        environment = {**os.environ, **self.ENVIRONMENT}
        try:
            done = subprocess.run(
                [sys.executable, "-c", WARM_UP[name]], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=150, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.say(f"{name} did not start within 150 s")
            return None
        if done.returncode == 0:
            self.say(f"{name} {done.stdout.strip()}")
            return None
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        self.say(f"{name}: {why}")
        # Whatever else is wrong, the line shows it.
        return f"{name} is not installed" if "ModuleNotFoundError" in why else None

    def touch(self):
        """Has host memory used once, by another process: where it is not there, that one dies."""
        if self.args.touch:
            script = [sys.executable, "-B", str(ROOT / "integration/bench/host.py"), str(int(self.args.touch * 2**30))]
            try:
                done = subprocess.run(script, capture_output=True, text=True, timeout=150, check=False)
            except subprocess.TimeoutExpired:
                self.say("host memory could not be used once within 150 s")
            else:
                self.say(f"host memory, used once: {done.stdout.strip() or f'failed with {done.returncode}'}")

    def missing(self, line):
        """Why a line is not run, or None."""
        if len(self.gpus) < line.gpus:
            return f"it needs {line.gpus} GPUs, here is {len(self.gpus)}"
        if line.how == "migrate" and "--device-map" not in self.help():
            return "this rekindle cannot restore onto other GPUs (`run --device-map`)"
        ready = (self.warmed[name].result() for name in ["memory", *line.needs])
        return next((why for why in ready if why), None)

    def help(self):
        return subprocess.run([self.rekindle, "run", "--help"], capture_output=True, text=True, timeout=30).stdout

    def run(self):
        needed = {name for line in self.lines for name in line.needs}
        with ThreadPoolExecutor(len(WARM_UP) + 1) as pool:
            self.warmed = {name: pool.submit(self.warm, name) for name in WARM_UP if name in needed}
            self.warmed["memory"] = pool.submit(self.touch)
            threads = []
            # Those with most processes first: they take longest.
            for line in sorted(self.lines, key=lambda line: -line.gpus):
                taken = self.slots.take(line.gpus)
                thread = threading.Thread(target=self.one, args=(line, taken))
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()

    def one(self, line, taken):
        try:
            why = self.missing(line)
            if why is None and STOPPING.is_set() or time.monotonic() > self.deadline:
                why = "no time was left"
            outcome = Outcome("SKIP", why) if why else self.trial(line, taken)
        except ERRORS as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self.slots.give(taken, line.gpus)
        self.outcomes[line.name] = outcome
        verdict = "" if outcome.expected(line) else " (NOT EXPECTED)"
        self.say(f"{line.name}: {outcome.result}{verdict} {outcome.note}".rstrip())

    def trial(self, line, taken):
        end = min(time.monotonic() + (self.args.limit or line.limit), self.deadline)
        if line.how == "two":
            return self.two(line, taken, end)
        trial = Trial(self, line, taken[:1] if line.how == "migrate" else taken, self.work / line.name, end)
        return self.guarded(trial, {"usual": usual, "migrate": migrate}[line.how])

    def guarded(self, trial, run):
        """The outcome of a trial, whatever happens; nothing is left of it."""
        try:
            return run(trial)
        except Lost as why:
            return Outcome("lost", str(why), trial=trial)
        except ERRORS as why:
            text = str(why).replace(f"{trial.name}: ", "")
            return Outcome("failed", text if isinstance(why, Failed) else f"{type(why).__name__}: {text}", trial=trial)
        finally:
            trial.close()

    def two(self, line, taken, end):
        """Two jobs, each on a GPU of its own where the line has two, with snapshots and kills at the same moments. The slower
        one counts."""
        together = threading.Barrier(2)

        def each(number):
            gpu = taken[number % len(taken)]
            trial = Trial(self, line, [gpu], self.work / f"{line.name}-{number}", end)
            meet = lambda: together.wait(trial.left())
            outcome = self.guarded(trial, lambda trial: usual(trial, meet))
            if outcome.result != "works":
                together.abort()
            return outcome

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(each, range(2)))
        worse = [outcome for outcome in found if outcome.result != "works" or not outcome.same]
        # A barrier that broke says nothing: the other one knows why.
        worse.sort(key=lambda outcome: "BrokenBarrier" in outcome.note)
        return worse[0] if worse else max(found, key=lambda outcome: outcome.took["freeze"])


def gpus():
    """The GPUs that may be used, by the numbers or names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    return [str(number) for number in range(listed.count("(UUID:"))]


def shared_memory():
    return set(os.listdir("/dev/shm"))


def forget_shared_memory(before, images):
    """Removes the semaphores and memory with a name that jobs left when they were killed, and that nobody has mapped, and
    the second names that these had for images which went with their store."""
    left = {name for name in shared_memory() - before if name.startswith(("sem.mp-", "torch_", "nccl-"))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        left -= {name for name in left if f"/dev/shm/{name}" in text}
    links = {name for name in shared_memory() if name.startswith(tuple(f".rekindle-link-{image}-" for image in images))}
    for name in left | links:
        Path("/dev/shm", name).unlink(missing_ok=True)


def begin(trial):
    trial.alone = trial.reference()
    trial.start()
    trial.job.wait_for("first steps", lambda: trial.lines.count() >= WARM, trial.left())
    trial.say("works")


def usual(trial, meet=lambda: None):
    """A snapshot, steps, a kill, steps, and once more: the second image is one of a restored job. Of several ranks, one
    alone is killed then."""
    begin(trial)
    try:
        for victim in None, 1 if trial.line.ranks > 1 else None:
            meet()
            trial.snapshot()
            trial.progress(1, "step after the snapshot")
            meet()
            trial.kill(victim)
    except Refused as why:
        return refused(trial, str(why))
    return ended(trial, "works", "")


def refused(trial, why):
    """The job must be none the worse for it."""
    trial.say(f"refused: {why}")
    restarts = trial.job.state().get("restarts")
    trial.progress(WARM, "step after a refused snapshot")
    if trial.job.state().get("restarts") != restarts:
        raise Lost(f"the job died of a snapshot that failed: {why}")
    # Figures of an image that came before say nothing about this.
    trial.took = trial.back = None
    return ended(trial, "refused", why)


def ended(trial, result, note):
    same = trial.finish()
    if not same:
        note = f"{note} two uninterrupted runs differ from each other".strip()
    return Outcome(result, note, same, trial)


def migrate(trial):
    """From its GPU to another, where it stays when it is killed there."""
    begin(trial)
    old, new = trial.gpus[0], next(gpu for gpu in trial.context.gpus if gpu not in trial.gpus)
    expect_on(trial, old)
    trial.snapshot()
    trial.progress(1, "step after the snapshot")
    trial.lose_supervisor()
    trial.again(["--device-map", f"{old}={new}"])
    expect_on(trial, new)
    try:
        trial.snapshot()
        trial.progress(1, "step after the snapshot")
        trial.kill()
    except Refused as why:
        return refused(trial, f"on the other GPU: {why}")
    expect_on(trial, new)
    return ended(trial, "works", "back: from the same command with --device-map until it runs")


def expect_on(trial, gpu):
    if trial.on_gpus() != [gpu]:
        raise Failed(f"it is on GPU {trial.on_gpus() or 'none'} instead of {gpu}")


def describe(matrix):
    """The lines above the table."""
    if matrix.stand_in:
        yield "SELF-TEST with the stand-in driver: the table shows that the script works, its figures say nothing."
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = "no GPU" if matrix.stand_in else subprocess.run(query, capture_output=True, text=True, check=False).stdout
    found = ", ".join(sorted(set(said.strip().splitlines()))).replace(", ", ", driver ")
    yield (
        f"{len(matrix.gpus)} x {found}, {os.cpu_count()} processors, kernel {os.uname().release}, {datetime.date.today()}, "
        f"{matrix.args.jobs} at the same time. Seconds; phases and image of the second snapshot, which is one of a restored "
        "job; back: from kill -9 of the job's first process until it runs again, without a back-off."
    )


def text(rows):
    """For a terminal: what is seen on a line of its own."""
    narrow = [[row[0], *row[2:-1]] for row in [HEAD, *rows]]
    widths = [max(len(row[n]) for row in narrow) for n in range(len(narrow[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in narrow]
    return "\n".join([*lines, *(f"{row[0]}: {row[-1]}" for row in rows if row[-1])])


def markdown(rows):
    """For docs/workloads.md."""
    table = bench_table.markdown(HEAD[:-1], [row[:-1] for row in rows], left=range(4))
    return "\n".join([table, "", *(f"- {row[0]}: {row[-1]}" for row in rows if row[-1])])


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True)
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--touch", type=float, default=0)
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--stand-in")
    args = parser.parse_args()
    names = {line.name for line in (SELF_TEST if args.stand_in else LINES)}
    unknown = sorted(set(args.only or []) - names)
    if unknown or args.jobs < 1:
        parser.error(f"unknown lines: {', '.join(unknown)}; there are {', '.join(sorted(names))}" if unknown else "--jobs")
    return args


def stop(*_):
    STOPPING.set()


def main():
    args = arguments()
    # Stopped from outside, all lines end, clean up, and what is known is printed.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    work = Path(tempfile.mkdtemp(prefix="rekindle-matrix.", dir=args.dir))
    matrix, before = Matrix(args, work), shared_memory()
    try:
        matrix.run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        forget_shared_memory(before, matrix.images)
    rows = [matrix.outcomes[line.name].row(line) for line in matrix.lines]
    for line in describe(matrix):
        print(f"\n{line}")
    print("\n" + (markdown(rows) if args.markdown else text(rows)))
    wrong = [line.name for line in matrix.lines if not matrix.outcomes[line.name].expected(line)]
    skipped = [line.name for line in matrix.lines if matrix.outcomes[line.name].result == "SKIP"]
    right = len(rows) - len(wrong) - len(skipped)
    print(f"\n{right} as expected, {len(skipped)} skipped, {len(wrong)} not{': ' if wrong else ''}{', '.join(wrong)}")
    sys.exit(1 if wrong or STOPPING.is_set() else 0)


if __name__ == "__main__":
    main()
