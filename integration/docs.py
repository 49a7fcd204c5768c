#!/usr/bin/env python3
"""Checks the documents against themselves and against the program: links, headings, commands and options.

    docs.py --rekindle FILE           links, and that each command and option in the documents exists
    docs.py --rekindle FILE --run     also runs every command line, as root and with CRIU (REKINDLE_CRIU), jq and nc

What is run, for those who write: in a block of the kind `console` the lines after "$ ", and below them what they print; in a block
of the kind `sh` every line; in prose what is in `backticks` and begins with rekindle, cargo or another program. Words such as JOB,
IMAGE, [--optional] and a|b mean what they mean to a reader (documents/singles.py). What cannot run here is in
documents/table.py, with the reason. Figures of what is printed may differ; its form may not.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from documents.links import broken_links
from documents.pages import PAGES, commands
from documents.sessions import is_session, run_session
from documents.singles import Singles, forms
from documents.table import entry_for, wrong_script, wrong_table
from documents.world import Failed, World


def help_of(rekindle, words, known={}):
    """The help of a command; None if there is none."""
    if words not in known:
        run = subprocess.run([rekindle, *words, "--help"], capture_output=True, text=True, check=False)
        known[words] = run.stdout if run.returncode == 0 else None
    return known[words]


def own_part(words, text):
    """The words of `rekindle run` before the job's command, by the help: an option may have a value."""
    own, is_value = words[:1], False
    for word in words[1:]:
        if word == "--" or not word.startswith("-") and not is_value:
            break
        own.append(word)
        is_value = word.startswith("-") and re.search(rf"{re.escape(word)} <", text) is not None
    return own


def wrong_options(rekindle, command):
    """Words of a command line that rekindle does not know, of those too that are not run."""
    found = re.search(r"(?:^|\s)rekindle ((?!-).*)", command)
    if not found or entry_for(command) and not command.startswith("rekindle "):
        return
    for line in forms(f"rekindle {re.split(r' [|;&<>] | [|;&<>]{2} ', found[1])[0]}"):
        words = line.split()[1:]
        path = tuple(words[: 2 if words[0] in ("config", "cuda") else 1])
        if path[0] == "COMMAND":
            continue
        text = help_of(rekindle, path)
        if text is None:
            yield "there is no such command"
            return
        own = own_part(words, text) if words[0] == "run" else words
        for option in re.findall(r"(?<=\s)(--[a-z][a-z-]*|-[a-zA-Z])(?=[\s=]|$)", " ".join(["", *own])):
            if not re.search(rf"(^|[\s,]){re.escape(option)}\b", text):
                yield f"there is no option {option}"


def is_mention(rekindle, command):
    """`rekindle show` alone names a command that needs more words."""
    words = command.split()[1:]
    if command == "rekindle run":
        return True
    return len(words) == 1 and not words[0].startswith("-") and re.search(r"^Usage: .* <", help_of(rekindle, tuple(words)) or "", re.M) is not None


def run_all(rekindle, pages):
    began, seen, wrong = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory(prefix="rekindle-docs-", dir="/tmp") as folder:
        single = {}
        for page, found in pages.items():
            session = is_session(found)
            if session:
                place = Path(folder, page.stem)
                place.mkdir()
                with World(rekindle, place) as world:
                    try:
                        seen += run_session(page, found, world)
                    except Failed as why:
                        wrong.append(str(why))
            for command in found:
                if command.text and not (session and command.kind != "span") and not (command.kind == "span" and is_mention(rekindle, command.text)):
                    for text in forms(command.text):
                        if not entry_for(text) or entry_for(text).code is not None:
                            single.setdefault(text, command)
        place = Path(folder, "single")
        place.mkdir()
        with World(rekindle, place) as world:
            singles = Singles(world)
            try:
                for text, command in single.items():
                    try:
                        singles.run(text, command.shown)
                        seen += 1
                    except (Failed, subprocess.TimeoutExpired) as why:
                        wrong.append(f"{command.where}: `{text}`: {why}")
            finally:
                singles.end()
    return seen, time.monotonic() - began, wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True, type=lambda path: Path(path).resolve())
    parser.add_argument("--run", action="store_true")
    args = parser.parse_args()
    try:
        # What was changed long ago need not work today.
        pages = {page: list(commands(page)) for page in PAGES if page.name != "CHANGELOG.md"}
        wrong = list(broken_links())
    except ValueError as why:
        sys.exit(f"docs: {why}")
    every = [command for found in pages.values() for command in found]
    for command in every:
        wrong += [f"{command.where}: `{command.text}`: {why}" for why in [*wrong_options(args.rekindle, command.text), *wrong_script(command.text)]]
    wrong += wrong_table([form for command in every for form in forms(command.text)])
    if args.run and not wrong:
        if os.geteuid() != 0:
            sys.exit("docs: --run needs root")
        seen, took, wrong = run_all(args.rekindle, pages)
    for line in wrong:
        print(f"docs: {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"docs: {len(PAGES)} pages, all links, commands and options exist")
    if args.run:
        print(f"docs: {seen} command lines were run, in {took:.0f} s, and say what the pages show")


main()
