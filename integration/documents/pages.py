"""Reads the documents: their pages, blocks of code, and the command lines in them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *ROOT.glob("crates/*/README.md"), *ROOT.glob("integration/**/README.md")])
# What a block of code may be. `console`: commands after "$ ", and what
# they print; without a command, what the terminal of `rekindle run` prints next. `sh`: a command a line.
LANGUAGES = ["console", "sh", "text", "toml", "json", "python", "yaml", "rust"]
# What a span of prose begins with if it is a command line and no name of a file or a metric.
SPAN = re.compile(r"`((?:sudo )?(?:\S+/)?(?:(?:python -m rekindle|rekindle|cargo) [a-z-]|(?:pip|dpkg|tar|podman|helm|kubectl) )[^`]+|(?:integration|scripts|examples)/\S+\.sh [^`]+)`")


@dataclass
class Block:
    """A block of code, or a line of prose if it has no language."""

    language: str
    number: int
    lines: list = field(default_factory=list)


@dataclass
class Command:
    """A command line of a page. `shown` is what the page shows below it."""

    page: Path
    number: int
    text: str
    kind: str
    shown: list = field(default_factory=list)

    @property
    def where(self):
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks(page):
    """The page in order; raises ValueError for code whose kind is not said."""
    found, block, blank, listed = [], None, True, False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        where = f"{page.relative_to(ROOT)}:{number}"
        if line.startswith("```"):
            if block is None:
                language = line[3:].strip().split(",")[0]
                if language not in LANGUAGES:
                    raise ValueError(f"{where}: a block of code needs its kind after ```: {', '.join(LANGUAGES)}")
                block = Block(language, number + 1)
            else:
                found.append(block)
                block = None
        elif block is not None:
            block.lines.append(line)
        else:
            if blank and line.startswith("    ") and not listed:
                raise ValueError(f"{where}: code is between ``` lines here, with its kind, and not indented")
            if line.strip() and not line.startswith(" "):
                listed = re.match(r"([-*]|\d+\.) ", line) is not None
            blank = not line.strip()
            found.append(Block("", number, [line]))
    if block is not None:
        raise ValueError(f"{page.relative_to(ROOT)}:{block.number}: the block of code has no end")
    return found


def prose(page):
    return [block.lines[0] for block in blocks(page) if not block.language]


def lines_of(block):
    """The lines of a block with their numbers; those that end with a backslash are joined with the next."""
    joined, begun = "", 0
    for number, line in enumerate(block.lines, block.number):
        begun = begun or number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip() + " "
            continue
        yield begun, joined
        joined, begun = "", 0


def without_comment(line):
    # The tests are root.
    return re.sub(r"(^|\s)#\s.*$", "", line).strip().removeprefix("sudo ")


def commands(page):
    """The command lines of a page, in order. A `console` block without any shows what the first terminal says: its command is empty."""
    for block in blocks(page):
        if block.language == "sh":
            for number, line in lines_of(block):
                if without_comment(line):
                    yield Command(page, number, without_comment(line), "sh")
        elif block.language == "console":
            command = None
            for number, line in lines_of(block):
                if line.startswith("$ "):
                    if command:
                        yield command
                    command = Command(page, number, without_comment(line[2:]), "console")
                else:
                    # What the command in the first terminal says later.
                    command = command or Command(page, number, "", "console")
                    command.shown.append(line)
            if command:
                yield command
        elif not block.language:
            for text in SPAN.findall(block.lines[0]):
                yield Command(page, block.number, text.replace("\\|", "|").removeprefix("sudo "), "span")
