#!/usr/bin/env python3
"""zdtm.py --suite FOLDER [--rekindle PROGRAM] [NAME...]: CRIU's own suite under rekindle.

FOLDER is test/zdtm/static of CRIU's sources, built there with make. Each program is started under `rekindle run`, a
snapshot is taken, the job is killed and restored, and then the program is asked for its verdict. Prints a line for each:

    passed     it says PASS after the restore
    expected   refused, as the suite expects of CRIU (`crfail` in its .desc)
    refused    the snapshot or the restore failed, with the reason
    told       it was restored, and says that something is not as it was; so does rekindle
    wrong      it was restored, and says that something is not as it was; rekindle does not
    unusable   it does not start here, or tests an option of CRIU that rekindle does not use

Without names: all programs that run without namespaces of their own (flavor `h`), and by themselves (not `noauto`).

Needs root and REKINDLE_CRIU. Ends with 1 if one was wrong.
"""

import argparse
import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from supervised import Failed, Job, ROOT, wait_for

LIMIT = 60
SETTINGS = {
    "log.level": "info",
    "snapshot.freeze-limit": "60s",
    "snapshot.rehearse": "off",
    "store.min-free": "1MiB",
    "restart.backoff": "100ms",
    "restart.min-uptime": "1ms",
    "restart.restore-timeout": "60s",
    "restart.max-restarts": "1",
}
# Programs of filters for system calls, which see those that rekindle gives a job.
UNFILTERED = {"job.allow": "io-uring amx"}
# Starts the program as the suite does, and ends when the program does.
JOB = """
import os, select, subprocess, sys
name = sys.argv[1]
subprocess.run(["make", "-s", name + ".pid"], check=True, stdout=subprocess.DEVNULL)
with open(name + ".pid") as file:
    program = os.pidfd_open(int(file.read()))
print("up", flush=True)
select.select([program], [], [])
"""


def processes():
    """Each process: its pid, the pid in its innermost namespace, and its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = next(x for x in (folder / "status").read_text().splitlines() if x.startswith("NSpid"))
            yield int(folder.name), int(line.split()[-1]), (folder / "cmdline").read_bytes().split(b"\0")


def program(name):
    """The pid of the program that says the verdict, as we see it."""
    inner = int((Path.cwd() / f"{name}.pid").read_text())
    found = [pid for pid, own, line in processes() if own == inner and line[0].decode().endswith(f"/{name}")]
    if not found:
        raise Failed("the program is not there")
    return found[0]


def description(name):
    """What the suite says about a program: a dictionary of Python, with expressions in it."""
    path = Path(f"{name}.desc")
    return eval(path.read_text()) if path.exists() else {}


def is_for_us(name):
    told = description(name)
    return "h" in told.get("flavor", "h").split() and "noauto" not in told.get("flags", "").split()


def clean(name):
    for path in Path.cwd().glob(f"{name}.*"):
        if any(part in path.name for part in (".pid", ".out", ".test", ".dir")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def written(name, suffix=".out.inprogress"):
    """What a program has written: before its verdict, the file has another name."""
    path = Path(f"{name}{suffix}")
    return path.read_text(errors="replace") if path.exists() else ""


def verdict(name):
    text = written(name, ".out")
    return "PASS" in text.split(), " ".join(text.split()[-30:])


def trial(rekindle, work, name):
    """What became of one program, and why."""
    options = [description(name).get(key, "") for key in ("opts", "dopts", "ropts")]
    if any("--tcp-close" in words or "--skip-in-flight" in words for words in options):
        return "unusable", "it wants connections closed that rekindle keeps: " + " ".join(options)
    clean(name)
    settings = SETTINGS | (UNFILTERED if name.startswith("seccomp") else {})
    # A name of its own: what the job leaves in memory is found by it.
    job = Job(rekindle, work, f"zdtm{os.getpid()}", [sys.executable, "-c", JOB, name], settings=settings)
    job.start()
    try:
        try:
            job.wait_for("start", lambda: job.running() and Path(f"{name}.pid").exists(), LIMIT)
            pid = program(name)
        except Failed as why:
            return "unusable", f"{why}: {verdict(name)[1]}"
        words = verdict(name)[1] or written(name)
        if job.state().get("restarts") or "FAIL:" in words.split():
            return "unusable", words
        try:
            job.snapshot(LIMIT)
        except Failed as why:
            return "refused", str(why)
        start = [part.encode() for part in (sys.executable, "-c", JOB, name)]
        root = next(pid for pid, _, line in processes() if line[:4] == start)
        with contextlib.suppress(ProcessLookupError):
            os.kill(root, signal.SIGKILL)
        said = lambda: job.log.read_text(errors="replace")  # noqa: E731
        try:
            job.wait_for("restore", lambda: "the job was restored from image" in said(), LIMIT)
        except Failed as why:
            lines = [line for line in said().splitlines() if " was not restored" in line or "cannot be" in line]
            return "refused", lines[-1] if lines else str(why)
        try:
            pid = program(name)
            os.kill(pid, signal.SIGTERM)
            wait_for("verdict", lambda: Path(f"{name}.out").exists() and (verdict(name)[0] or not is_there(pid)), LIMIT)
        except Failed as why:
            return told(said()), f"{why}: {verdict(name)[1]}"
        passed, words = verdict(name)
        return ("passed", "") if passed else (told(said()), words)
    finally:
        job.process.send_signal(signal.SIGINT)
        try:
            job.process.wait(10)
        except subprocess.TimeoutExpired:
            job.kill_supervisor()
        job.forget_memory()
        for pid, _, line in list(processes()):
            if line[0].decode(errors="replace").endswith(f"/{name}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        clean(name)


def told(log):
    """Whether rekindle has said that something differs, apart from when the processes were started."""
    return "told" if re.search(r"process .*: was .*, is ", log) else "wrong"


def is_there(pid):
    try:
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--rekindle", type=Path, default=ROOT / "target/debug/rekindle")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    rekindle = str(arguments.rekindle.resolve())
    os.chdir(arguments.suite)
    built = [path.name for path in Path.cwd().iterdir() if path.is_file() and os.access(path, os.X_OK) and not path.suffix]
    built = [name for name in built if Path(name).read_bytes()[:4] == b"\x7fELF"]
    counts = collections.Counter()
    for name in arguments.names or sorted(filter(is_for_us, built)):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rekindle-zdtm-") as folder:
            result, why = trial(rekindle, Path(folder), name)
        if result == "refused" and "crfail" in description(name).get("flags", "").split():
            result = "expected"
        counts[result] += 1
        print(f"{result:9} {name:32} {time.monotonic() - began:5.1f} s  {' '.join(why.split())[:1000]}", flush=True)
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
