"""A command under `rekindle run`, as gpu.py, bench.py and bench_gpu.py use it. Only the standard library."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Where rekindle mounts the staging area of a job, `<job>-<hash>`.
AREAS = Path("/run/rekindle")
PHASES = ["lock", "checkpoint", "dump", "restore", "unlock"]


class Failed(Exception):
    """A trial that did not go as it should; the text says which and how."""


def wait_for(what, condition, limit=120, alive=lambda: None):
    """Waits until `condition` holds. `alive` answers why to give up, if there is a reason."""
    end = time.monotonic() + limit
    while not condition():
        why = alive()
        if why:
            raise Failed(f"{why} before {what}")
        if time.monotonic() > end:
            raise Failed(f"no {what} within {limit:.0f} s")
        time.sleep(0.02)


def known_keys(rekindle):
    """The keys of the configuration that this rekindle has."""
    shown = subprocess.run([rekindle, "config", "show", "--json"], capture_output=True, check=True, timeout=30)
    return {entry["key"] for entry in json.loads(shown.stdout)}


def variable(key):
    """The environment variable of a key: restart.min-uptime is REKINDLE_RESTART_MIN_UPTIME."""
    return "REKINDLE_" + key.upper().replace(".", "_").replace("-", "_")


class Job:
    """One command, one store, one log. `settings` are keys of the configuration, `environment` is the job's, `options`
    are of `rekindle run`."""

    def __init__(
        self, rekindle, work, name, command, interval="off", store=None, settings=None, environment=None, options=()
    ):  # fmt: skip
        self.rekindle, self.name = rekindle, name
        self.store = Path(store or work / "store")
        self.log = work / f"{name}.log"
        self.command = [rekindle, "run", "--store", self.store, "--name", name, "--interval", interval, *options, "--"]
        self.command += command
        self.environment = dict(os.environ, **(environment or {}))
        self.environment.update((variable(key), str(value)) for key, value in (settings or {}).items())
        self.process = None

    def start(self):
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [str(part) for part in self.command], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
        return self

    def images(self):
        """The folders of the stored images, the oldest first."""
        folder = self.store / self.name / "images"
        return sorted(folder.glob("0*")) if folder.is_dir() else []

    def state(self):
        """What state.json says; nothing while there is none."""
        try:
            return json.loads((self.store / self.name / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def running(self):
        return self.state().get("state") == "running"

    def ended(self):
        code = self.process.poll()
        return None if code is None else f"{self.name}: rekindle ended with {code}: {self.last_words()}"

    def last_words(self):
        lines = self.log.read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])

    def wait_for(self, what, condition, limit=180):
        try:
            wait_for(what, condition, limit, self.ended)
        except Failed as error:
            raise Failed(f"{self.name}: {error}") from None

    def snapshot(self, limit=180):
        """Asks for one and waits until the job runs on; answers its id and the seconds that the job stood still."""
        before = self.state()
        self.process.send_signal(signal.SIGUSR1)

        def done():
            now = self.state()
            why = now.get("last_failure")
            if why and why != before.get("last_failure"):
                raise Failed(f"{self.name}: {why}")
            return now.get("last_image") != before.get("last_image") and now.get("state") == "running"

        self.wait_for("image", done, limit)
        now = self.state()
        return now["last_image"], now["last_freeze_us"] / 1e6

    def manifest(self, image, limit=30):
        """The manifest of an image, from the store or, while it is not there, from the staging area; None without."""
        end = time.monotonic() + limit
        while True:
            for found in [*self.shown(image), *self.staged()]:
                if found.get("id") == image:
                    return found
            if time.monotonic() > end:
                return None
            time.sleep(0.2)

    def shown(self, image):
        command = [self.rekindle, "show", f"{self.name}/{image}", "--json", "--store", self.store]
        shown = subprocess.run(command, env=self.environment, capture_output=True, timeout=60)
        return manifests([shown.stdout]) if shown.returncode == 0 else []

    def staged(self):
        return manifests(path.read_bytes() for area in self.areas() for path in area.glob("**/manifest.json"))

    def areas(self):
        """The folders of the job's staging area: one, or none."""
        name = re.compile(re.escape(self.name) + "-[0-9a-f]+")
        return [area for area in AREAS.glob("*") if name.fullmatch(area.name)]

    def stored(self, image):
        """Whether an image is in the store."""
        return any(folder.name == image for folder in self.images())

    def kill_job(self, limit=180, victim=None):
        """kill -9 of the job's own process, or of another of its; waits until it is back. Answers the seconds that took."""
        before = self.state()
        began = time.monotonic()
        os.kill(victim or before["pid"], signal.SIGKILL)
        self.wait_for("restart", lambda: self.state().get("restarts", 0) > before["restarts"] and self.running(), limit)
        return time.monotonic() - began

    def wait(self, limit=600):
        return self.process.wait(limit)

    def kill_supervisor(self):
        """kill -9: the kernel takes the job down with it."""
        self.process.kill()
        self.process.wait(30)

    def lose_machine(self):
        """What the end of a machine takes: the supervisor, the job, and all that was in memory."""
        self.kill_supervisor()
        self.forget_memory()

    def forget_memory(self):
        for area in self.areas():
            subprocess.run(["umount", "--lazy", area], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(area, ignore_errors=True)

    def end(self):
        """Stops the job and the supervisor, with no last snapshot, and takes away what it left in memory."""
        if self.process is not None and self.process.poll() is None:
            # Twice: at once.
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill_supervisor()
        # It may be kept on purpose, for a `run` that goes on from it; here there is none.
        self.forget_memory()


def manifests(texts):
    """Those of the texts that are manifests, with or without the envelope that they have in an image's folder."""
    found = []
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        found.append(value.get("manifest", value))
    return found


def seconds(manifest):
    """The seconds of each phase of a manifest."""
    return {phase["phase"]: phase["took_us"] / 1e6 for phase in manifest["phases"]}
