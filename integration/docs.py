#!/usr/bin/env python3
"""Checks the documents against themselves and against the program: links, headings, commands and options.

    docs.py --rekindle FILE             links, and that each command and option in the documents exists
    docs.py --rekindle FILE --tutorial  also runs the tutorial, as root and with CRIU (REKINDLE_CRIU)
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("crates/*/README.md"), *ROOT.glob("integration/**/README.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose_and_code(text):
    """The lines of a page outside and inside of code blocks."""
    prose, code, fenced = [], [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line.strip())
        else:
            prose.append(line)
    return prose, code


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    prose, _ = prose_and_code(page.read_text())
    found = set()
    for heading in (line.lstrip("#").strip() for line in prose if re.match(r"#+ ", line)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def broken_links():
    for page in PAGES:
        prose, _ = prose_and_code(page.read_text())
        for target in (target for line in prose for target in LINK.findall(line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page.relative_to(ROOT)}: {target} does not exist"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{page.relative_to(ROOT)}: {target}: there is no such heading"


def help_of(rekindle, words, known={}):
    """The help of a command; None if there is none."""
    if words not in known:
        run = subprocess.run([rekindle, *words, "--help"], capture_output=True, text=True, check=False)
        known[words] = run.stdout if run.returncode == 0 else None
    return known[words]


def commands_of(lines):
    """The command lines of rekindle: of a pipe the part that is its own, without what belongs to the job."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    for line in joined:
        line = re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ").removeprefix("# "))
        line = re.sub(r"^(sudo |[A-Z_]+=\S+ |timeout \S+ |srun |exec )+", "", line)
        # Of alternatives the first.
        line = re.sub(r"(\\\|[a-z-]+)+", "", line)
        if re.match(r"rekindle \S", line):
            yield re.split(r"\s[|;&<>]|\s--(\s|$)", line, maxsplit=1)[0]


def own_part(words, text):
    """The words of `rekindle run` before the job's command, by the help: an option may have a value."""
    own, is_value = words[:1], False
    for word in words[1:]:
        if not word.startswith("-") and not is_value:
            break
        own.append(word)
        is_value = word.startswith("-") and re.search(rf"{re.escape(word)} <", text) is not None
    return own


def wrong_commands(rekindle):
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        prose, code = prose_and_code(page.read_text())
        spans = [span for line in prose for span in re.findall(r"`(rekindle [^`]+)`", line)]
        for line in commands_of([*code, *spans]):
            words = line.split()[1:]
            commands = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
            if not commands:
                continue
            text = help_of(rekindle, tuple(commands)) if len(commands) == 2 and commands[0] in ("config", "cuda") else help_of(rekindle, (commands[0],))
            if text is None:
                yield f"{page.relative_to(ROOT)}: `{line}`: there is no such command"
                continue
            if commands[0] == "run":
                line = " ".join(["rekindle", *own_part(words, text)])
            for option in re.findall(r"(?<=\s)(--[a-z][a-z-]*|-[a-zA-Z])(?=[\s=]|$)", line):
                if not re.search(rf"(^|[\s,]){re.escape(option)}\b", text):
                    yield f"{page.relative_to(ROOT)}: `{line}`: there is no option {option}"


class Tutorial:
    """Runs the commands of docs/tutorial.md, in order."""

    def __init__(self, rekindle, folder):
        self.folder = Path(folder)
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "rekindle").symlink_to(rekindle)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "REKINDLE_STORE_DIRECTORY": str(self.folder / "store"),
        }
        self.supervisor = None
        self.log = self.folder / "first-terminal"

    def run(self, command):
        if command.startswith("rekindle run "):
            self.end()
            with open(self.log, "ab") as log:
                self.supervisor = subprocess.Popen(
                    shlex.split(command), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            return ""
        if command.startswith("kill -9 "):
            status = self.run("rekindle status")
            (pid,) = re.findall(r"^ *count +\S+ +(\d+) ", status, re.M)
            command = f"kill -9 {pid}"
        run = subprocess.run(command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if run.returncode != 0:
            raise SystemExit(f"docs: tutorial: `{command}` ends with {run.returncode}: {run.stderr}")
        return run.stdout

    def says(self, words, count=1):
        end = time.monotonic() + 60
        while self.log.read_text(errors="replace").count(words) < count:
            if time.monotonic() > end or self.supervisor.poll() is not None:
                raise SystemExit(f"docs: tutorial: the first terminal does not say {words!r}:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.05)

    def end(self):
        if self.supervisor and self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGTERM)
        if self.supervisor:
            self.supervisor.wait(60)


def run_tutorial(rekindle):
    text = (ROOT / "docs/tutorial.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    _, code = prose_and_code(text)
    commands = [line.removeprefix("$ ") for line in code if line.startswith("$ ")]
    assert len(commands) > 8, commands
    with tempfile.TemporaryDirectory(prefix="rekindle-tutorial-", dir="/tmp") as folder:
        tutorial = Tutorial(rekindle, folder)
        # The tutorial waits for people; a job that counts faster does not.
        (Path(folder) / "count.py").write_text(program.replace("sleep(1)", "sleep(0.1)"))
        # Of the job, so far; the first run begins with none.
        restores = 0
        try:
            for command in commands:
                tutorial.run(command.replace("--interval 10s", "--interval 2s").replace("/tmp/tutorial", f"{folder}/store"))
                if command.startswith("rekindle run ") and restores == 0:
                    tutorial.says("was stored in")
                elif command.startswith(("rekindle run ", "rekindle rewind ", "kill ")):
                    restores += 1
                    tutorial.says("was restored from image", restores)
        finally:
            tutorial.end()
    print(f"docs: the tutorial's {len(commands)} commands work")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True, type=lambda path: Path(path).resolve())
    parser.add_argument("--tutorial", action="store_true")
    args = parser.parse_args()
    wrong = [*broken_links(), *wrong_commands(args.rekindle)]
    for line in wrong:
        print(f"docs: {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"docs: {len(PAGES)} pages, all links, commands and options exist")
    if args.tutorial:
        run_tutorial(args.rekindle)


main()
