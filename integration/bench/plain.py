"""What a user does by hand today: cuda-checkpoint's four actions (`rekindle cuda` has the same) around `criu dump
--leave-running` to a disk, and after a crash `criu restore`, restore, unlock. Only the standard library."""

import os
import shutil
import signal
import subprocess
import time

from supervised import Failed

# The options that rekindle gives to CRIU too (crates/criu/src/rpc.rs): the same job, the same work.
OPTIONS = [
    "--no-default-config", "--ext-unix-sk", "--file-locks", "--link-remap", "--manage-cgroups=ignore",
    "--network-lock", "skip", "--tcp-established", "-v2",
]  # fmt: skip
GHOST_LIMIT = 1 << 30


class Plain:
    """A command that leads its own session, with its images in one folder."""

    def __init__(self, rekindle, criu, work, name, command, environment=None):
        self.rekindle, self.criu, self.name = rekindle, criu, name
        self.images, self.log = work / f"{name}.images", work / f"{name}.log"
        self.environment = dict(os.environ, **(environment or {}))
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
        self.pid = self.process.pid

    def ended(self):
        """Why it cannot go on, if it ended; the first life only: the second is no child that Popen knows."""
        code = self.process.poll()
        return None if code is None else f"{self.name}: the job ended with {code}: {self.log.read_text()[-300:]}"

    def timed(self, what, command, limit):
        began = time.monotonic()
        done = subprocess.run(
            [str(part) for part in command], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=limit, text=True,
        )
        took = time.monotonic() - began
        if done.returncode != 0:
            raise Failed(f"{self.name}: {what} failed with {done.returncode}: {self.reason(what, done)}")
        return took

    def reason(self, what, done):
        log = self.images / f"{what}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if "Error" in line]
        return " / ".join(errors[-3:]) or (done.stderr + done.stdout).strip()[-300:]

    def cuda(self, action, limit):
        return self.timed(action, [self.rekindle, "cuda", action, "--pid", self.pid], limit)

    def snapshot(self, limit=180):
        """The five phases, in seconds, and their sum."""
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir()
        dump = [self.criu, "dump", "-t", self.pid, "-D", self.images, "-o", "criu-dump.log", "--leave-running"]
        dump += [*OPTIONS, "--ghost-limit", GHOST_LIMIT]
        took = {}
        for action in "lock", "checkpoint":
            took[action] = self.cuda(action, limit)
        took["dump"] = self.timed("criu-dump", dump, limit)
        for action in "restore", "unlock":
            took[action] = self.cuda(action, limit)
        took["freeze"] = sum(took.values())
        return took

    def crash(self):
        """kill -9; answers when, by the clock on the wall."""
        when = time.time()
        self.process.send_signal(signal.SIGKILL)
        # The pid is free only then, and the restore needs it.
        self.process.wait(120)
        return when

    def restore(self, limit=180):
        """Brings it back from the image, as a child of this process."""
        restore = [self.criu, "restore", "-D", self.images, "-o", "criu-restore.log", "--restore-detached"]
        self.timed("criu-restore", [*restore, "--restore-sibling", *OPTIONS], limit)
        for action in "restore", "unlock":
            self.cuda(action, limit)

    def end(self):
        """Kills it, whichever life it is in, and removes its images."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        else:
            # The restored one has the same pid. It is a child of ours: the number can belong to nobody else.
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG) is None:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitid(os.P_PID, self.pid, os.WEXITED)
            except ChildProcessError:
                pass
        shutil.rmtree(self.images, ignore_errors=True)
