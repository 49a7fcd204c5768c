#!/usr/bin/env python3
"""Makes a site of the documents with mdBook, and checks every link in it.

    scripts/site.py [--mdbook FILE] [--out DIR]      by default .deps/cargo/bin/mdbook (scripts/deps.sh book), dist/site

The pages are those of the repository, unchanged: README.md, docs/ and what they link to. docs/README.md is the table of
contents. Nothing is fetched.
"""

import argparse
import html.parser
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
BOOK = """[book]
title = "rekindle"
description = "Keeps long GPU jobs alive"
language = "en"
src = "src"

[output.html]
no-section-label = true
"""


def title(page):
    return next(line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("# "))


def is_outside(target):
    return re.match(r"[a-z]+:", target) is not None


def place(page):
    """Where a page is in the book: mdBook does not change links to README.md, which becomes index.html."""
    return str(page.relative_to(ROOT)).replace("README.md", "index.md")


def linked(page):
    """The files of the repository that a page links to, and the folders."""
    for _, target in LINK.findall(page.read_text()):
        path = target.partition("#")[0]
        if path and not is_outside(target):
            yield (page.parent / path).resolve()


def contents(pages):
    """The table of contents: the lists of docs/README.md under their headings, then the pages that it does not name."""
    lines = ["# Summary", "", f"[rekindle]({place(ROOT / 'README.md')})"]
    listed = {ROOT / "README.md", ROOT / "docs/README.md"}
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if line.startswith("## "):
            lines += ["", f"# {line[3:]}", ""]
        elif entry := re.match(r"- \[[^\]]*\]\(([^)]+\.md)\)", line):
            page = (ROOT / "docs" / entry[1]).resolve()
            listed.add(page)
            lines.append(f"- [{title(page)}]({place(page)})")
    lines += ["", "# More", "", f"- [All pages]({place(ROOT / 'docs/README.md')})"]
    lines += [f"- [{title(page)}]({place(page)})" for page in pages if page not in listed]
    return "\n".join(lines) + "\n"


def of_the_site(page, link):
    """A link as it is in the book, which has no page for a folder."""
    text, target = link[1], link[2]
    if is_outside(target):
        return link[0]
    if (page.parent / target).is_dir():
        return text
    return f"[{text}]({target.replace('README.md', 'index.md')})"


def gather(source):
    """Puts the pages and the files that they link to into a folder, and answers the pages."""
    pages, files, open_ = [], set(), [ROOT / "README.md", ROOT / "docs/README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    while open_:
        page = open_.pop(0)
        if page in pages:
            continue
        pages.append(page)
        for path in linked(page):
            if path.suffix == ".md" and path.is_file():
                open_.append(path)
            elif path.is_file():
                files.add(path)
    for page in pages:
        copy = source / place(page)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(LINK.sub(lambda link: of_the_site(page, link), page.read_text()))
    for file in files:
        copy = source / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return pages


class Links(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, _, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id":
                self.anchors.add(value)


def broken(site):
    parsed = {page: Links(page.read_text()) for page in site.rglob("*.html")}
    for page, found in parsed.items():
        if page.name in ("print.html", "404.html"):
            # All pages in one, where links lead to pages of their own; and one whose links are for the root of a server.
            continue
        for link in found.links:
            path, _, anchor = link.partition("#")
            if is_outside(link) or link.startswith("//"):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            if not target.is_file():
                yield f"{page.relative_to(site)}: {link} does not exist"
            elif anchor and target in parsed and unquote(anchor) not in parsed[target].anchors:
                yield f"{page.relative_to(site)}: {link}: there is no such heading"


def main():
    parser = argparse.ArgumentParser(description="Makes a site of the documents with mdBook, and checks every link in it.")
    parser.add_argument("--mdbook", type=Path, default=ROOT / ".deps/cargo/bin/mdbook")
    parser.add_argument("--out", type=Path, default=ROOT / "dist/site")
    args = parser.parse_args()
    if not args.mdbook.is_file():
        sys.exit(f"site: there is no {args.mdbook}: scripts/deps.sh book builds it")
    with tempfile.TemporaryDirectory() as work:
        book = Path(work)
        pages = gather(book / "src")
        (book / "src/SUMMARY.md").write_text(contents(pages))
        (book / "book.toml").write_text(BOOK)
        subprocess.run([args.mdbook, "build", "--dest-dir", book / "site", book], check=True)
        wrong = list(broken(book / "site"))
        for line in wrong:
            print(f"site: {line}", file=sys.stderr)
        if wrong:
            sys.exit(1)
        shutil.rmtree(args.out, ignore_errors=True)
        shutil.copytree(book / "site", args.out)
    print(f"site: {len(pages)} pages in {args.out}, all links lead somewhere")


main()
