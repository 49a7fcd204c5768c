#!/usr/bin/env python3
"""lines.py: counts the lines of the product by crate, and prints a table.

A line of the product has code: comments, blank lines, tests (files and folders of that name, and items under `#[cfg(test)]`) and
simulators are left out. Of each crate also the files, the median and the largest of their lines, and how many have fewer than 50.
"""

import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "src", *sorted((ROOT / "crates").iterdir()), *sorted((ROOT / "native").iterdir())]
# The stand-ins and helpers of tests are a crate of their own.
LEFT_OUT = {"tests", "testing", "simulator", "samples"}
# What may hide a brace or the beginning of a comment: literals, and comments themselves.
HIDDEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)"(?:.*?)"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL,
)


def without_hidden(text):
    """The text without comments, and with empty literals."""
    def shown(found):
        hidden = found[0]
        # The lines of a literal are code.
        return "" if hidden.startswith("/") else '""' + "\n;" * hidden.count("\n")
    return HIDDEN.sub(shown, text)


def end_of_item(text, at):
    """Where the item ends that begins here: behind its braces, or at its semicolon."""
    depth = 0
    for place in range(at, len(text)):
        character = text[place]
        if character in "{([":
            depth += 1
        elif character in "})]":
            depth -= 1
            if depth == 0 and character == "}":
                return place + 1
        elif character == ";" and depth == 0:
            return place + 1
    return len(text)


def code(text):
    """The lines of code of a file."""
    text = without_hidden(text)
    while (found := re.search(r"#\[cfg\((?:test|all\(test\b[^)]*\))\)\]", text)):
        text = text[: found.start()] + text[end_of_item(text, found.end()) :]
    return sum(1 for line in text.splitlines() if line.strip())


def is_product(path, folder):
    names = [*path.relative_to(folder).parts[:-1], path.stem]
    return not LEFT_OUT.intersection(names) and folder.name not in LEFT_OUT


def main():
    rows, every = [], []
    for folder in FOLDERS:
        if folder.is_dir():
            counts = [code(path.read_text()) for path in sorted(folder.rglob("*.rs")) if is_product(path, folder)]
            counts = [count for count in counts if count]
            if counts:
                every += counts
                rows.append((str(folder.relative_to(ROOT)), counts))
    rows.append(("all", every))
    print(f"{'':16}{'lines':>8}{'files':>7}{'median':>8}{'largest':>9}{'below 50':>10}")
    for name, counts in rows:
        small = sum(1 for count in counts if count < 50)
        print(f"{name:16}{sum(counts):8}{len(counts):7}{statistics.median(counts):8.0f}{max(counts):9}{small:10}")


if __name__ == "__main__":
    main()
