"""What the test of the documents does not run here, with the reason. An entry that no document uses is a failure."""

import re
from dataclasses import dataclass

from documents.pages import ROOT


@dataclass(frozen=True)
class Elsewhere:
    """Command lines that begin like `pattern` are not run here.

    `by` names a file that runs them, and `words` what it has for that. `code` is what rekindle itself ends with where it can
    only judge the words: not 2, which is wrong usage.
    """

    pattern: str
    why: str
    by: str = ""
    words: str = ""
    code: int | None = None


TABLE = [
    Elsewhere(r"cargo (build|test|fmt|clippy)", "builds and tests take minutes", "integration/run.sh", "cargo test --quiet --workspace"),
    Elsewhere(r"cargo --config profile", "builds for minutes"),
    Elsewhere(r"cargo run --package rekindle-cuda", "needs a GPU"),
    Elsewhere(r"cargo install", "builds for minutes", "integration/run.sh", "cargo install --quiet --debug"),
    Elsewhere(r"nice target/(debug|release)/deps/rekindle(_group)?-HASH", "simulates for hours"),
    Elsewhere(r"examples/demo\.sh", "runs by itself", "integration/run.sh", "examples/demo.sh"),
    Elsewhere(r"examples/crash-loop\.sh", "runs by itself", "integration/run.sh", "examples/crash-loop.sh"),
    Elsewhere(r"integration/run\.sh|\.ci/run", "this test is a part of it"),
    Elsewhere(r"integration/campaign/campaign\.sh", "runs by itself, with fewer kills", "integration/run.sh", "integration/campaign/campaign.sh"),
    Elsewhere(r"integration/(gpu|gpu-matrix|bench-gpu)\.sh", "needs a GPU"),
    Elsewhere(r"integration/bench\.sh", "measures for minutes"),
    Elsewhere(r"integration/fuzz\.sh", "needs a nightly compiler, and runs for minutes"),
    Elsewhere(r"integration/install\.sh", "needs the root folder of a distribution", "integration/distributions.sh", "integration/install.sh"),
    Elsewhere(r"integration/distributions\.sh", "makes root folders of distributions from a mirror, for minutes"),
    Elsewhere(r"scripts/deps\.sh", "installs packages", "integration/run.sh", "scripts/deps.sh"),
    Elsewhere(r"scripts/install-criu\.sh", "installs packages", "scripts/deps.sh", "scripts/install-criu.sh"),
    Elsewhere(r"scripts/release\.sh", "makes a release"),
    Elsewhere(r"dpkg -i", "installs", "integration/install.sh", "dpkg -i"),
    Elsewhere(r"tar -xzf", "installs", "integration/install.sh", "tar -xzf"),
    Elsewhere(r"pip install \./", "installs", "integration/install.sh", "pip install"),
    Elsewhere(r"pip install --target", "is said not to work"),
    Elsewhere(r"venv/bin/python -m rekindle", "needs a wheel", "integration/install.sh", "-m rekindle"),
    Elsewhere(r"rekindle run .*-- jupyter server", "needs Jupyter", code=127),
    Elsewhere(r'"\$\(command -v rekindle\)" run', "is for a user who is not root", "integration/tests/core/user.rs", "job.user"),
    Elsewhere(r"(srun .*)?rekindle run .*--(group|nodes)", "needs several machines", "integration/tests/group/lab.rs", "--nodes"),
    Elsewhere(r"podman (build|run|stop|exec)", "needs a container manager"),
    Elsewhere(r"kubectl ", "needs a cluster"),
    Elsewhere(r"helm (install|uninstall)", "needs a cluster; the chart is rendered", "integration/run.sh", "integration/deploy.py"),
    Elsewhere(r"\(umask 077; mkdir -p /etc/rekindle;", "writes to /etc"),
    Elsewhere(r"systemctl ", "needs a systemd", "integration/systemd.sh", "systemctl"),
    Elsewhere(r"rekindle cuda \S+ --pid", "needs a GPU", code=69),
]


def begins_like(entry, command):
    return re.match(rf"([A-Z_]+=\S+ )*({entry.pattern})", command) is not None


def wrong_table(commands):
    """What is wrong with the table itself."""
    for entry in TABLE:
        if not any(begins_like(entry, command) for command in commands):
            yield f"the table has an entry that no document uses: {entry.pattern}"
        if entry.by and entry.words not in (ROOT / entry.by).read_text():
            yield f"the table says that {entry.by} runs {entry.words}, and it does not"


def entry_for(command):
    return next((entry for entry in TABLE if begins_like(entry, command)), None)


def wrong_script(command):
    """A script that is not run here exists at least, and it or what it calls knows its options."""
    script = re.match(r"(?:examples|integration|scripts|\.ci)/[\w./-]+", command)
    if script is None:
        return
    file = ROOT / script[0]
    if not file.is_file() or not file.stat().st_mode & 0o111:
        yield f"{script[0]} is no program"
        return
    text = file.read_text()
    for called in set(re.findall(r"[\w/-]+\.py", text)):
        for place in (ROOT / called, file.parent / called, ROOT / "integration" / called, ROOT / "integration/bench" / called):
            text += place.read_text() if place.is_file() else ""
    for option in re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", command):
        if option not in text:
            yield f"{script[0]} has no option {option}"
