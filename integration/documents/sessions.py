"""Pages that a reader types from the top to the bottom: their commands run in that order, and say what the page shows."""

import re
import time

from documents.table import entry_for
from documents.world import JOB, LIMIT, Failed, missing


def is_session(commands):
    return any(command.kind == "console" and command.text.startswith("rekindle run ") for command in commands)


def typed(command, world):
    """A command in the scratch world: its folders, a faster clock, and the pid of the job that runs."""
    command = world.as_typed(command).replace("--interval 10s", "--interval 1s")
    if command.startswith("kill -9 "):
        command = f"kill -9 {world.status()['pid']}"
    return command


def until_shown(command, shown, world):
    """Runs a command; one that only looks is run again until it shows what the page shows, since the job goes on meanwhile."""
    end = time.monotonic() + LIMIT
    while True:
        said = world.do(command)
        lost = missing(shown, said.splitlines())
        if lost is None:
            return
        if not re.match(r"rekindle (status|list|logs|show|doctor)\b", command) or time.monotonic() > end:
            raise Failed(f"it does not say {lost!r}, but:\n{said}")
        time.sleep(0.1)


def run_session(page, commands, world):
    """Returns how many commands were run; raises Failed."""
    done = 0
    for name in set(re.findall(r"python3 (\w+\.py)", page.read_text())):
        (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S) or [JOB]
        (world.folder / "tutorial").mkdir(exist_ok=True)
        for folder in (world.folder, world.folder / "tutorial"):
            (folder / name).write_text(program.replace("sleep(1)", "sleep(0.05)"))
    for command in commands:
        if command.kind not in ("console", "sh") or entry_for(command.text):
            continue
        try:
            text = typed(command.text, world)
            if not text:
                world.shows(command.shown)
            elif text.startswith("rekindle run "):
                world.start(text)
                world.shows(command.shown)
            else:
                until_shown(text, command.shown, world)
        except Failed as why:
            raise Failed(f"{command.where}: `{command.text}`: {why}") from None
        done += 1
    return done
