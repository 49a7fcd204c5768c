"""Links of the documents: what they name exists."""

import re

from documents.pages import PAGES, ROOT, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in (line.lstrip("#").strip() for line in prose(page) if re.match(r"#+ ", line)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def broken_links():
    for page in PAGES:
        for target in (target for line in prose(page) for target in LINK.findall(line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page.relative_to(ROOT)}: {target} does not exist"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{page.relative_to(ROOT)}: {target}: there is no such heading"
