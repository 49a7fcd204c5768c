"""Kills jobs and what keeps them, at random moments, and looks whether anything is lost. See campaign.sh."""

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from faults import FAULTS, MOMENTS, below, wait_for_moment  # noqa: E402
from supervised import Failed, Job, wait_for  # noqa: E402

# After a fault the job works again within this time. It takes about a second on an idle machine.
BACK_S = 90
SETTINGS = {
    "snapshot.interval": "1s",
    "restart.backoff": "100ms",
    # Deaths sooner than this after a restore speak against an image, and the fourth has another one tried; an image is
    # proven once the job has lived so long after it.
    "restart.min-uptime": "1s",
    "restart.max-restarts": "1000000",
    "retention.keep-last": "3",
    "store.min-free": "16MiB",
    # Restores are tried beside the jobs, too.
    "snapshot.rehearse": "2s",
    # A way to the store that takes some tenths of a second.
    "store.persist-rate": "64MiB",
}
# A job has failed: the others end, too.
STOPPING = threading.Event()
# No more time for further faults.
ENOUGH = threading.Event()


class Disk:
    """A small file system for the store: one that can be filled without harm to anything else."""

    def __init__(self, folder, size):
        self.folder, self.mounted = folder, False
        folder.mkdir()
        image = folder.with_suffix(".ext4")
        with open(image, "wb") as file:
            file.truncate(size)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", image], check=False, capture_output=True)
        if made.returncode == 0:
            self.mounted = subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode == 0
        if not self.mounted:
            image.unlink()
            options = ["-o", f"size={size}", "-t", "tmpfs", "tmpfs"]
            self.mounted = subprocess.run(["mount", *options, folder], check=False, capture_output=True).returncode == 0

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "--lazy", self.folder], check=False)


class Trial:
    """One job and what is done to it."""

    def __init__(self, args, number, folder, tally):
        self.only = args.only
        self.number, self.folder, self.tally = number, folder, tally
        self.random = random.Random(args.seed * 1000 + number)
        folder.mkdir(parents=True)
        self.out = folder / "job"
        self.out.mkdir()
        self.disk = Disk(folder / "store", (12 if args.gpu else 2) << 30)
        command = [args.python, "-B", Path(__file__).with_name("job.py"), self.out, *(["--gpu"] if args.gpu else [])]
        environment = {"REKINDLE_LOG_LEVEL": "debug"} if args.debug else {}
        settings = {**SETTINGS, "store.persist-rate": "1GiB"} if args.gpu else SETTINGS
        self.job = Job(
            args.rekindle, folder, f"campaign{os.getpid()}-{number}", command, "1s", store=folder / "store",
            settings=settings, environment={**environment, "REKINDLE_RETRY_AFTER": "1s"},
        )  # fmt: skip
        self.events_read = 0
        self.lost_s = []
        self.floor = ""

    def say(self, text):
        print(f"{time.strftime('%H:%M:%S')} job {self.number}: {text}", flush=True)

    def events(self):
        """Those that came since the last look."""
        path = self.job.store / self.job.name / "log" / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        new, self.events_read = lines[self.events_read :], len(lines)
        found = []
        for line in new:
            try:
                found.append(json.loads(line))
            except ValueError:
                # A full disk, or a kill, leaves a part of one.
                pass
        return found

    def newest(self):
        """The newest image that is good, by what `rekindle list` says."""
        command = [self.job.rekindle, "list", self.job.name, "--json", "--store", self.job.store]
        listed = subprocess.run(command, env=self.job.environment, capture_output=True, timeout=60)
        if listed.returncode != 0:
            raise Failed(f"list ends with {listed.returncode}: {listed.stderr.decode().strip()}")
        images = [image for image in json.loads(listed.stdout) if image["state"] == "good"]
        stored = [image["id"] for image in images if "store" in image["places"]]
        return max((image["id"] for image in images), default=""), max(stored, default="")

    def steps(self):
        """How many lines there are, and the number in the last whole one."""
        try:
            text = (self.out / "chain").read_bytes()
        except OSError:
            return 0
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        return int(lines[-1].split()[0]) if lines else 0

    def works(self, what):
        """Waits until the job makes steps."""
        self.revive()
        end = time.monotonic() + BACK_S
        before = self.steps()
        while True:
            # A restore takes steps back, after which fewer is more than before.
            time.sleep(0.05)
            now = self.steps()
            if now > before and self.job.running():
                break
            before = now
            self.revive()
            if time.monotonic() > end:
                raise Failed(f"the job does not work {BACK_S} s after {what}: {self.job.last_words()}")
            if STOPPING.is_set():
                raise Failed("the campaign is called off")

    def revive(self):
        """Starts the supervisor again where it was killed; that it ended by itself is a failure."""
        code = self.job.process.poll()
        if code is None:
            return
        if code != -9:
            raise Failed(f"rekindle ended with {code}: {self.job.last_words()}")
        self.job.start()

    def looked(self, floor):
        """What the events say of what came of a fault: nothing older than `floor` was restored."""
        for event in self.events():
            kind = event["event"]
            if kind == "image-bad":
                raise Failed(f"image {event['image']} was marked bad: {event['why']}")
            if kind == "started":
                self.tally["restores" if event["image"] else "begins"] += 1
                if event["image"] is None and floor:
                    raise Failed("the job began anew")
                if floor and event["image"] < floor:
                    raise Failed(f"{event['image']} was restored, and {floor} was there")
            if kind == "rehearsal-failed":
                raise Failed(f"image {event['image']} could not be restored in a rehearsal: {event['why']}")
            if kind == "rehearsed":
                self.tally["rehearsals"] += 1
            if kind == "snapshot-taken":
                self.tally["snapshots"] += 1
        if list(self.out.glob("wrong")):
            raise Failed("the job says: " + (self.out / "wrong").read_text().strip())
        if self.tally["begins"] > 1:
            raise Failed("the job began more than once")

    def fault(self):
        """One fault at one moment. Answers whether there was something to kill."""
        moment = self.random.choice(MOMENTS)
        only = self.only or [fault.name for fault in FAULTS]
        weights = [fault.weight if fault.name in only else 0 for fault in FAULTS]
        fault = self.random.choices(FAULTS, weights)[0]
        if fault.moments and moment not in fault.moments:
            moment = self.random.choice(fault.moments)
        before = self.steps()
        # A job whose child was killed may have ended after the look that followed.
        self.looked(self.floor)
        # What is good and in the store is there whatever happens; what is in memory, where that is not lost.
        newest, stored = self.newest()
        wait_for_moment(self.job, moment, self.random)
        began = time.monotonic()
        found = fault.does(self.job)
        self.floor = stored if fault.memory else newest
        if self.job.process.poll() is not None:
            # Nobody writes now: it is known what there is.
            newest, after = self.newest()
            if after < stored:
                raise Failed(f"image {stored} was in the store, and {after} is the newest now")
            self.floor = max(newest, after)
        self.works(fault.name)
        self.looked(self.floor)
        took = time.monotonic() - began
        self.tally["longest_s"] = max(self.tally["longest_s"], round(took, 1))
        self.tally[fault.name] += found
        self.tally["under way"] += found and moment != "any"
        self.tally["steps lost"] += max(0, before - self.steps())
        self.say(f"{fault.name}, {moment}: {'works again after' if found else 'nothing to kill, works after'} {took:.1f} s")
        return found

    def run(self, kills):
        self.job.start()
        wait_for("image in the store", self.job.images, 120, self.job.ended)
        self.works("its start")
        self.looked("")
        done = 0
        while done < kills and not STOPPING.is_set() and not ENOUGH.is_set():
            done += self.fault()
            # Longer than restart.min-uptime: who kills a job again and again before that is told apart from no bad image.
            time.sleep(self.random.uniform(1.2, 2.5))
        self.finish()

    def finish(self):
        # What came of the last fault is compared with what there was then, not with an image taken since.
        self.looked(self.floor)
        newest, _ = self.newest()
        (self.out / "finish").touch()
        self.revive()
        code = self.job.wait(BACK_S)
        self.looked(newest)
        if code != 0:
            raise Failed(f"the job ends with {code}: {self.job.last_words()}")
        last, count = b"", 0
        for line in (self.out / "chain").read_text().splitlines():
            count += 1
            last = hashlib.sha256(last + count.to_bytes(8, "little")).digest()
            if line != f"{count} {last.hex()}":
                raise Failed(f"line {count} of the chain is: {line}")
        self.tally["steps"] += count
        base = sqlite3.connect(self.out / "data.db")
        answer = base.execute("pragma integrity_check").fetchall()
        base.close()
        if answer != [("ok",)]:
            raise Failed(f"the database: {answer}")
        verified = subprocess.run(
            [self.job.rekindle, "verify", self.job.name, "--store", self.job.store], env=self.job.environment,
            capture_output=True, timeout=600,
        )  # fmt: skip
        if verified.returncode != 0:
            raise Failed(f"verify ends with {verified.returncode}: {verified.stdout.decode()}{verified.stderr.decode()}")
        self.nothing_left()

    def nothing_left(self):
        """No process of the job, no mount, no socket; a moment is given to what is still ending."""
        marks = [str(self.out).encode(), self.job.name.encode()]

        def left():
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    try:
                        if any(mark in (entry / "cmdline").read_bytes() for mark in marks):
                            return f"process {entry.name}"
                    except OSError:
                        pass
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if self.job.name in line]
            return f"mount {mounts[0]}" if mounts else next(map(str, self.job.areas()), "")

        try:
            wait_for("nothing left", lambda: not left(), 10)
        except Failed:
            raise Failed(f"left behind: {left()}") from None

    def end(self):
        """Takes away what a failed trial left."""
        if self.job.process and self.job.process.poll() is None:
            below_it = below(self.job.process.pid)
            self.job.kill_supervisor()
            for pid in below_it:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    pass
        self.job.forget_memory()
        self.disk.close()


def threads_below(pid):
    """A line for each thread of the process and of those below it: what it waits for in the kernel."""
    for process in [pid, *below(pid)]:
        for thread in sorted(Path(f"/proc/{process}/task").glob("*")):
            try:
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                name, call = (thread / "comm").read_text().strip(), (thread / "syscall").read_text().strip()
                yield f"{process} {thread.name} {name} {state} {(thread / 'wchan').read_text()} {call}"
                yield "    " + " < ".join(line.split()[-1] for line in (thread / "stack").read_text().splitlines())
            except OSError as error:
                yield f"{process} {thread.name}: {error}"


def logs_of(trial, into):
    """Keeps the log of a trial that failed, and what its processes were doing then."""
    into.mkdir(parents=True, exist_ok=True)
    (into / f"job{trial.number}.threads.txt").write_text("\n".join(threads_below(trial.job.process.pid)) + "\n")
    shutil.copy(trial.job.log, into / f"job{trial.number}.log")
    log = trial.job.store / trial.job.name / "log"
    for name in ["events.jsonl", "rekindle.log"]:
        if (log / name).exists():
            shutil.copy(log / name, into / f"job{trial.number}.{name}")


def main():
    parser = argparse.ArgumentParser(prog="campaign.sh")
    parser.add_argument("--rekindle", required=True)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", action="append", choices=[fault.name for fault in FAULTS], help="this fault; several times for several")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--logs")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--python", default="/usr/bin/python3")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="rekindle-campaign-", dir=args.dir))
    work.chmod(0o755)
    print(f"seed {args.seed}: the same faults, as far as the clock allows", flush=True)
    began, failures, tally = time.monotonic(), [], collections.Counter()
    lock = threading.Lock()

    def one(number):
        own = collections.Counter()
        trial = Trial(args, number, work / str(number), own)
        try:
            trial.run(args.kills // args.jobs + (number < args.kills % args.jobs))
        except Exception as error:
            trial.say(f"FAILED: {error}")
            failures.append(f"job {number}: {type(error).__name__}: {error}")
            logs_of(trial, Path(args.logs or work.with_suffix(".logs")))
            STOPPING.set()
        finally:
            trial.end()
            with lock:
                longest = max(tally["longest_s"], own.pop("longest_s", 0))
                tally.update(own)
                tally["longest_s"] = longest

    threads = [threading.Thread(target=one, args=(number,)) for number in range(args.jobs)]
    for thread in threads:
        thread.start()
    if args.minutes:
        timer = threading.Timer(args.minutes * 60, ENOUGH.set)
        timer.daemon = True
        timer.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(work, ignore_errors=True)
    kills = sum(tally[fault.name] for fault in FAULTS)
    print(f"\n{kills} faults in {time.monotonic() - began:.0f} s, seed {args.seed}")
    for fault in FAULTS:
        print(f"  {tally[fault.name]:6} {fault.name}")
    for name in ["under way", "snapshots", "rehearsals", "restores", "begins", "steps", "steps lost", "longest_s"]:
        print(f"  {tally[name]:6} {name}")
    for failure in failures:
        print(failure)
    if kills < args.kills and not failures:
        print(f"only {kills} of {args.kills}")
    sys.stdout.flush()
    # A timer may still run.
    os._exit(1 if failures or kills < args.kills else 0)


if __name__ == "__main__":
    main()
