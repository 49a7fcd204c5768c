"""A scratch world: a folder with a store, a job for the first terminal, and a second terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

# For one command, and for one line in the first terminal. Nothing here takes a tenth of it.
LIMIT = 30
# Counts faster than the tutorial's: that one waits for people.
JOB = """\
import sys
import time
total = 0
for step in range(1, 1_000_000):
    total += step
    print(f"step {step}, total {total}", flush=True)
    print(f"step {step} is done", file=sys.stderr, flush=True)
    time.sleep(0.05)
"""


class Failed(Exception):
    """A command of a document does not do what the document says."""


def shape(line):
    """A line without its figures: times, sizes, ids, numbers and the width of columns."""
    line = re.sub(r"\d{6}-\d{8}T\d{6}Z", "ID", line)
    line = re.sub(r"\d{4}-\d\d-\d\d[ T][\d:.]+(Z|[+-]\d\d:\d\d)", "WHEN", line)
    line = re.sub(r"\b\d+(\.\d+)? ?(B|KiB|MiB|GiB)\b", "SIZE", line)
    line = re.sub(r"\b\d+(\.\d+)? ?(us|µs|ms|s|m|h)( \d+(\.\d+)?(ms|s|m))?\b", "TIME", line)
    # A page shows the first image, and the clock is faster here.
    line = re.sub(r", (taken|rehearsed|restored)\b", ", KNOWN", line)
    # How many warnings a machine deserves is its own affair.
    line = re.sub(r"; \d+ warnings?", "", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "NUMBER", line)).strip()


def missing(shown, said):
    """The first line that a page shows and that was not said, in that order; None if all were."""
    rest = iter([shape(line) for line in said])
    for line in (line for line in shown if line.strip() and line.strip() != "..."):
        # The job may be in the middle of a line when rekindle says something.
        if not any(found.endswith(shape(line)) for found in rest):
            return line
    return None


class World:
    """Runs commands as a page says, in its order."""

    def __init__(self, rekindle, folder):
        self.folder = Path(folder)
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "rekindle").symlink_to(rekindle)
        (tools / "python").symlink_to(sys.executable)
        self.tools, self.store = tools, self.folder / "store"
        self.cwd = self.folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("REKINDLE_") or name == "REKINDLE_CRIU"},
            "PATH": f"{tools}:{os.environ['PATH']}",
            "REKINDLE_STORE_DIRECTORY": str(self.store),
        }
        self.log = self.folder / "first-terminal"
        self.log.touch()
        self.first, self.read = None, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        # A job that was stopped before its image was stored has it in memory, which nobody else would free.
        self.cwd = self.folder
        names = self.once("rekindle list --json | jq -r '.[].job'").stdout.split()
        for name in names:
            self.once(f"rekindle rm --yes --force {name}")

    def once(self, command):
        """Runs a command in the second terminal; what it exports and where it goes holds for the next one."""
        script = f'{command}\ncode=$?; pwd >"$LEFT"; env -0 >>"$LEFT"; exit $code'
        left = self.folder / "left"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.cwd, env={**self.environment, "LEFT": str(left)}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if left.exists():
            place, _, variables = left.read_text().partition("\n")
            self.cwd = Path(place)
            self.environment = dict(item.split("=", 1) for item in variables.split("\0") if item and not item.startswith("LEFT="))
            left.unlink()
        return done

    def do(self, command):
        done = self.once(command)
        if done.returncode != 0:
            raise Failed(f"it ends with {done.returncode}: {done.stderr.strip()}")
        return self.as_shown(done.stdout)

    def start(self, command):
        """Runs a command in the first terminal."""
        self.end()
        self.read = dict.fromkeys(("supervisor", "job"), len(self.lines()))
        with open(self.log, "ab") as log:
            self.first = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self):
        return self.as_shown(self.log.read_text(errors="replace")).splitlines()

    def as_shown(self, text):
        """With the folders of the page."""
        return text.replace(str(self.folder / "tutorial"), "/tmp/tutorial")

    def as_typed(self, command):
        """With the folders of this world, and where this machine has its CRIU."""
        command = command.replace("$PWD/target/release", str(self.tools)).replace("$PWD/.deps/criu/criu", os.environ.get("REKINDLE_CRIU", "criu"))
        return command.replace("/tmp/tutorial", str(self.folder / "tutorial"))

    def says(self, wanted):
        """Waits until the first terminal says a line of this shape, or like this pattern, after what its writer was waited for before.

        The supervisor and the job write at the same time: which line of one stands before which of the other is chance.
        """
        end = time.monotonic() + LIMIT
        while True:
            over = self.first.poll() is not None
            lines = self.lines()
            for at, line in enumerate(lines):
                found = shape(line)
                # Half a line of the job may stand before one of the supervisor.
                writer = "supervisor" if "WHEN" in found else "job"
                found = found[max(found.find("WHEN"), 0) :]
                if at >= self.read[writer] and (wanted.search(line) if isinstance(wanted, re.Pattern) else found == wanted):
                    self.read[writer] = at + 1
                    return
            if over or time.monotonic() > end:
                raise Failed(f"the first terminal does not say {wanted!r}; it says:\n" + "\n".join(lines[min(self.read.values()) :][-60:]))
            time.sleep(0.02)

    def shows(self, shown):
        """The first terminal shows these lines. A line may tell its reader to kill the job, after `<-`."""
        for line in shown:
            line, _, note = line.partition(" <- ")
            if line.strip() and line.strip() != "...":
                self.says(shape(line))
            if note.startswith("kill -9"):
                self.waits(lambda status: status["last_image"])
                os.kill(self.status()["pid"], signal.SIGKILL)

    def status(self, job=""):
        found = json.loads(self.do(f"rekindle status --json {job}"))
        return found if job else found[0]

    def waits(self, condition, job=""):
        end = time.monotonic() + LIMIT
        while not condition(status := self.status(job)):
            if time.monotonic() > end:
                raise Failed(f"it does not come to that: {status}")
            time.sleep(0.05)

    def end(self):
        """Ends what runs in the first terminal, and returns its exit code."""
        if self.first is None:
            return None
        if self.first.poll() is None:
            self.first.send_signal(signal.SIGTERM)
        try:
            return self.first.wait(LIMIT)
        finally:
            if self.first.poll() is None:
                self.first.kill()
                self.first.wait()
            self.first = None

    def on_terminal(self, command, keys):
        """Runs a command on a terminal of its own; presses `keys` when it has said something."""
        leader, follower = pty.openpty()
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.cwd, env={**self.environment, "TERM": "xterm"}, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
        os.close(follower)
        said, pressed, end = b"", False, time.monotonic() + LIMIT
        try:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise Failed(f"it does not end on {keys!r}: {said!r}")
                if select.select([leader], [], [], 0.1)[0]:
                    said += os.read(leader, 65536)
                elif said and not pressed:
                    pressed = True
                    os.write(leader, keys)
        except OSError:
            # The terminal's other end is closed: the program has ended.
            process.wait(LIMIT)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(leader)
        if process.returncode != 0:
            raise Failed(f"it ends with {process.returncode}: {said!r}")
