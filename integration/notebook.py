#!/usr/bin/env python3
"""A Jupyter kernel under rekindle: killed with kill -9, it has its variables again, and its client goes on.

    notebook.py --rekindle FILE      (with .deps/notebook/bin/python: scripts/deps.sh notebook; as root, with REKINDLE_CRIU)

The kernel's description is that of docs/notebooks.md.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60


def described(rekindle):
    """The kernel of the page, with this rekindle and this Python."""
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/notebooks.md").read_text(), re.S)
    kernel = json.loads(text)
    programs = {"rekindle": str(rekindle), "python3": sys.executable}
    kernel["argv"] = [programs.get(word, word) for word in kernel["argv"]]
    return kernel


class Notebook:
    def __init__(self, rekindle, folder):
        (folder / "kernels/kept").mkdir(parents=True)
        (folder / "kernels/kept/kernel.json").write_text(json.dumps(described(rekindle)))
        self.rekindle, self.environment = rekindle, {**os.environ, "REKINDLE_STORE_DIRECTORY": str(folder / "store"), "HOME": str(folder)}
        self.log = folder / "log"
        self.kernel = KernelManager(kernel_name="kept", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder / "kernels")]))
        # A restart of the kernel writes to it, too.
        self.output = open(self.log, "ab")  # noqa: SIM115
        self.kernel.start_kernel(env=self.environment, stdout=self.output, stderr=self.output)
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)

    def cell(self, code, limit=LIMIT, interrupted=False):
        """The value of a cell or the name of its error. One that is to be interrupted prints first: outside of cells the kernel
        ignores that."""
        said = []

        def hear(message):
            content = message["content"]
            said.append(content.get("ename") or content.get("data", {}).get("text/plain") or "")
            if interrupted and content.get("text"):
                self.kernel.interrupt_kernel()

        self.client.execute_interactive(code, output_hook=hear, timeout=limit)
        return "".join(said)

    def cell_again(self, code):
        """Runs a cell as a user does after a restore: once more if it does not answer, since it was lost in a dead connection."""
        for _ in range(4):
            try:
                return self.cell(code, limit=5)
            except TimeoutError:
                continue
        return self.cell(code)

    def said(self, *words):
        done = subprocess.run([self.rekindle, *words], env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.log.read_text()}"
        return done.stdout

    def status(self):
        return json.loads(self.said("status", "--json"))[0]

    def end(self):
        self.client.stop_channels()
        if self.kernel.is_alive():
            self.kernel.shutdown_kernel()
        self.output.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True, type=lambda path: Path(path).resolve())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rekindle-notebook-", dir="/tmp") as folder:
        notebook = Notebook(args.rekindle, Path(folder))
        try:
            assert notebook.cell("x = 41") == ""
            assert notebook.cell("x += 1; x") == "42"
            job = notebook.status()["job"]
            notebook.said("snapshot", "--stored", job)
            assert notebook.cell("y = 1; y") == "1"
            os.kill(notebook.status()["pid"], signal.SIGKILL)
            end = time.monotonic() + LIMIT
            while notebook.status()["restarts"] != 1 or notebook.status()["state"] != "running":
                assert time.monotonic() < end, notebook.log.read_text()
                time.sleep(0.1)
            assert notebook.cell_again("x") == "42", "the variables of the image are there, and the client goes on"
            assert notebook.cell("y") == "NameError", "what came after the image is gone"
            heard = notebook.cell("import time; print('begun', flush=True); time.sleep(50)", interrupted=True)
            assert heard == "KeyboardInterrupt", "a cell is interrupted, and the job is not stopped"
            assert notebook.cell("x") == "42"
            notebook.kernel.restart_kernel()
            notebook.client.wait_for_ready(timeout=LIMIT)
            assert notebook.cell("x") == "NameError", "a restart by the user begins anew"
            assert notebook.status()["job"] == job
        finally:
            notebook.end()
    print("notebook: the kernel's variables came through kill -9")


main()
