"""One line of the matrix: a job under `rekindle run`, killed and compared with an uninterrupted run of the same command.
Only the standard library."""

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from supervised import PHASES, Failed, Job, seconds, wait_for

# Set when all of it has to end.
STOPPING = threading.Event()
# All ranks read the number of the last step before they come to it.
AHEAD = 4
# A job has warmed up by then: what it compiles, its workers, its connections.
WARM = 3
# What a second uninterrupted run has, beyond the limit of the line.
SECOND_RUN_S = 60


class Refused(Failed):
    """A snapshot that failed; the text is what rekindle says. The job may run on."""


class Lost(Failed):
    """A job that did not live through a snapshot."""


class Watched(Job):
    # How many restarts there may be; None: any number.
    restarts = None

    def ended(self):
        if STOPPING.is_set():
            return "the run is stopped"
        state = self.state()
        if self.restarts is not None and state.get("restarts", 0) > self.restarts:
            return f"it was restarted ({(state.get('last_end') or {}).get('words')})"
        return super().ended()


class Record:
    """The files steps.N that a job leaves in its folder."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks = folder, ranks

    def of(self, rank):
        """The whole lines of a rank."""
        path = self.folder / f"steps.{rank}"
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def count(self):
        """How many steps all ranks have done."""
        return min(len(self.of(rank)) for rank in range(self.ranks))

    def differ(self, other):
        """Which lines are not those of another run that did as many steps or more; None when all are the same."""
        for rank in range(self.ranks):
            ours, theirs = self.of(rank), other.of(rank)
            for number, line in enumerate(ours, 1):
                if line.split(" ")[0] != str(number):
                    return f"line {number} of rank {rank} is that of step {line.split(' ')[0]}"
                if number > len(theirs) or line != theirs[number - 1]:
                    return f"rank {rank} has other bits than the uninterrupted run from step {number} on"
        return None


class Alone:
    """The command without rekindle, in a PID namespace of its own, so that nothing is left of it when it is killed."""

    def __init__(self, command, environment, folder, log, ranks):
        self.lines = Record(folder, ranks)
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command], env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.log = log

    def ended(self):
        code = self.process.poll()
        if STOPPING.is_set():
            return "the run is stopped"
        return None if code is None else f"the uninterrupted run ended with {code}: {last_words(self.log)}"

    def until(self, count, limit):
        """Lets it do so many steps."""
        enough = lambda: self.lines.count() >= count
        wait_for(f"step {count} of the uninterrupted run", enough, limit, lambda: None if enough() else self.ended())

    def end(self):
        self.process.kill()
        self.process.wait(30)


def nvidia_smi(query):
    """The rows of a query, each a list."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[cell.strip() for cell in row.split(",")] for row in said.splitlines()]


def last_words(log):
    lines = [line.strip() for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


class Trial:
    """A job of a line, in a folder of its own, until `end` on the monotonic clock."""

    def __init__(self, context, line, gpus, folder, end):
        self.context, self.line, self.end, self.folder = context, line, end, folder
        self.gpus, self.alone, self.job = gpus, None, None
        folder.mkdir(parents=True)
        # Different from that of any other job on this machine: areas are found by it.
        self.name = f"matrix{os.getpid()}-{folder.name}"
        self.out = folder / "out"
        self.lines = Record(self.out, line.ranks)
        self.took, self.back, self.notes = None, None, []

    def say(self, text):
        self.context.say(f"{self.folder.name}: {text}")

    def left(self, limit=600.0):
        return max(0.1, min(limit, self.end - time.monotonic()))

    def environment(self, kind):
        """Of the job, or of the reference; caches are its own, so that neither finds what the other compiled."""
        cache = self.folder / f"{kind}-cache"
        cache.mkdir(exist_ok=True)
        own = {name: str(cache / name.lower()) for name in self.context.CACHES}
        driver = self.context.driver(cache, self.line) if self.context.stand_in else {}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {**self.context.ENVIRONMENT, **own, **gpus, **driver, **self.line.environment(self.context.keys)}

    def command(self, out, port):
        return [str(part) for part in [*self.line.command(port), "--out", out]]

    def reference(self, number=0):
        """Starts an uninterrupted run; the second is for those whose bits differ."""
        kind = f"reference{number or ''}"
        environment = {**os.environ, **self.environment(kind)}
        command = self.command(self.folder / kind, self.line.port + 10 + 10 * number)
        return Alone(command, environment, self.folder / kind, self.folder / f"{kind}.log", self.line.ranks)

    def start(self, options=()):
        self.job = Watched(
            self.context.rekindle, self.folder, self.name, self.command(self.out, self.line.port), options=options,
            settings={"restart.backoff": "0s", **self.line.settings}, environment=self.environment("job"),
        )  # fmt: skip
        self.job.start()

    def progress(self, more, what):
        """Waits for so many further steps."""
        begun = self.lines.count()
        self.job.wait_for(what, lambda: self.lines.count() >= begun + more, self.left())

    def snapshot(self):
        before = self.job.state()
        self.job.restarts = before["restarts"]
        try:
            image, freeze = self.job.snapshot(self.left())
        except Failed as error:
            now = self.job.state()
            text = str(error).replace(f"{self.name}: ", "")
            if self.job.process.poll() is not None or now.get("restarts", 0) > before.get("restarts", 0):
                raise Lost(f"the job died of the snapshot: {text}") from None
            if now.get("last_failure") and now.get("last_failure") != before.get("last_failure"):
                raise Refused(text) from None
            raise
        finally:
            self.job.restarts = None
        self.context.images.add(image)
        manifest = self.job.manifest(image, self.left(20))
        if manifest is None:
            raise Failed(f"image {image} has no manifest")
        phases = seconds(manifest)
        self.took = {name: phases.get(name, 0.0) for name in PHASES} | {"freeze": freeze, "bytes": manifest["bytes"]}
        self.say(f"image of {manifest['bytes'] / 2**30:.2f} GiB after {freeze:.2f} s")

    def processes(self):
        """The job's processes: the pid of each, and the number that it has of itself."""
        space = os.readlink(f"/proc/{self.job.state()['pid']}/ns/pid")
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns/pid") != space:
                    continue
                status = (process / "status").read_text()
            except OSError:
                # It has ended meanwhile.
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
            found[int(process.name)] = int(numbers[-1])
        return found

    def rank(self, number):
        """The pid of a rank."""
        inner = int((self.out / f"pid.{number}").read_text())
        for pid, own in self.processes().items():
            if own == inner:
                return pid
        raise Failed(f"there is no process {inner} in the job")

    def on_gpus(self):
        """The numbers of the GPUs that the job's processes are on, as nvidia-smi has them."""
        ours = self.processes()
        names = dict(reversed(row) for row in nvidia_smi("--query-gpu=index,uuid"))
        rows = nvidia_smi("--query-compute-apps=pid,gpu_uuid")
        return sorted({names[uuid] for pid, uuid in rows if int(pid) in ours})

    def lose_supervisor(self):
        """kill -9 of rekindle, which takes the job with it; its images stay in memory."""
        self.job.process.kill()
        self.job.process.wait(30)

    def again(self, options):
        """The same command once more, which goes on from the newest image."""
        began = time.monotonic()
        self.start(options)
        running = lambda: self.job.running() and self.job.state()["supervisor"] == self.job.process.pid
        self.job.wait_for("restart", running, self.left())
        self.back = time.monotonic() - began
        self.say(f"runs {self.back:.2f} s after the same command with {' '.join(options)}")
        self.progress(2, "step after the restart")

    def kill(self, rank=None):
        took = self.job.kill_job(self.left(), self.rank(rank) if rank else None)
        self.say(f"back {took:.2f} s after kill -9" + (f" of rank {rank}" if rank else ""))
        # From the first kill, which is of the same process in every line.
        self.back = self.back or took
        self.progress(2, "step after the restart")

    def finish(self):
        """Lets the job end, and compares. Answers whether the bits are the same, or why that cannot be said."""
        last = self.lines.count() + AHEAD
        new = self.out / "last.new"
        new.write_text(str(last))
        new.rename(self.out / "last")
        try:
            code = self.job.wait(self.left())
        except subprocess.TimeoutExpired:
            raise Failed(f"it did not end after step {last}, it is at {self.lines.count()}") from None
        if code != 0:
            raise Failed(f"exit code {code}: {self.job.last_words()}")
        count = self.lines.count()
        self.alone.until(count, self.left())
        difference = self.lines.differ(self.alone.lines)
        if difference is None:
            return True
        # Is that rekindle's doing, or the program's own?
        self.say(f"{difference}; a second uninterrupted run")
        self.end = min(self.end + SECOND_RUN_S, self.context.deadline)
        again = self.reference(1)
        try:
            again.until(count, self.left())
        finally:
            again.end()
        if again.lines.differ(self.alone.lines) is None:
            raise Failed(difference)
        return False

    def close(self):
        """Ends what runs, and takes away what it left."""
        try:
            if self.job is not None:
                self.job.end()
        finally:
            if self.alone is not None:
                self.alone.end()
            self.keep_logs()
            shutil.rmtree(self.folder, ignore_errors=True)

    def keep_logs(self):
        if not self.context.logs:
            return
        folder = self.context.logs / self.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        journal = f"store/{self.name}/log"
        found = [*self.folder.glob("*.log"), *self.folder.glob(f"{journal}/*")]
        for path in [path for path in found if path.is_file()]:
            shutil.copy(path, folder / path.name)
