"""Command lines that stand alone on a page: each runs once, with a job in the state that it is for."""

import json
import re

from documents.table import entry_for
from documents.world import JOB, Failed, missing

# What a page writes for something that the reader puts in.
# The job here is `train`, whatever a page calls its own.
WORDS = {
    r"(?<=rewind JOB )TAG\b": "good",
    r"\bJOB\b|(?<=rekindle show )count|(?<=rekindle stop )lab": "train",
    r"\b(?:IMAGE|ID)\b": "{image}",
    r"\b\d{6}-\d{8}T\d{6}Z\b": "{image}",
    r"\b(?:TAG|T)\b": "best",
    r"--pid N\b": "--pid {pid}",
    r"\bN\b": "1",
    r"\bCOMMAND --help": "status --help",
    r"-- COMMAND$": "-- python3 train.py",
    r"\bSHELL\b": "bash",
    r"\bTIME\b": "1h",
    r"\bOLD=NEW\b": "0=0",
    r"--out FILE\b": "--out page.html",
    r"\bFILE\b": "{folder}/example.toml",
    r"\bSTORE\b": "{store}",
    r"\$\(ClusterId\)-\$\(ProcId\)": "1-0",
    r"/run/rekindle/\w+-[0-9a-f]{8}\.sock": "{control}",
}
# The state that a command is for; any other: a job that runs.
STATES = {"restore": "stopped", "rm": "stopped", "repair": "stopped", "prune": "stopped", "run": "stopped", "resume": "suspended"}
# Commands that end only at a signal, and what they say before.
ENDLESS = {
    r"rekindle run .*--json": r'"event":"started"',
    r"rekindle run (?!.*(--detach|-- true$))": r"job (\S+ starts|was restored)",
    r"rekindle restore (?!.*--detach)": r"the job was restored",
    r"rekindle logs .*-f ": r"step \d",
    r"rekindle status .*--watch": r"train +running",
}
# Commands for a terminal, and the keys that end them.
KEYS = {"rm": b"y\n"}
ONLY_OPTIONS = re.compile(r"rekindle run( --[a-z-]+( [\w=]+)?)+")


def forms(text):
    """The command lines that a synopsis means: alternatives, and with and without what is in brackets."""
    if not text.startswith("rekindle "):
        return [text]
    every = []
    for words in (re.sub(r"\[[^\[\]]*(\[[^\[\]]*\])?[^\[\]]*\]", "", text), re.sub(r"[\[\]]", "", text)):
        lines = [""]
        for word in re.sub(r"(?<=\S)\.\.\.", "", words).split():
            word = "COMMAND" if word == "..." and "--" in words.split() else word
            choices = [""] if word == "..." else word.split("|")
            if choices[-1].startswith("-N"):
                choices[-1] = "-1"
            lines = [f"{line} {choice}".strip() for line in lines for choice in choices]
        every += lines
    # Of a `run` a page may show only options.
    every = [f"{line} -- COMMAND" if ONLY_OPTIONS.fullmatch(line) else line for line in every]
    return list(dict.fromkeys(every))


class Singles:
    """Runs them, one after another, in one world."""

    def __init__(self, world):
        self.world = world
        (world.folder / "train.py").write_text(JOB)
        (world.folder / "example.toml").write_text('version = 1\n\n[snapshot]\ninterval = "10m"\n')
        (world.folder / "replica").mkdir()
        world.environment["REKINDLE_REPLICA_URL"] = f"file://{world.folder}/replica"

    def state(self, wanted):
        """Brings the job `train` there: `running` or `suspended`."""
        there = self.world.once("rekindle status --json train")
        state = json.loads(there.stdout)["state"] if there.returncode == 0 else "none"
        if state not in ("running", "suspended"):
            self.world.do("rekindle run --detach --name train --interval 1h -- python3 train.py")
        if wanted == "suspended":
            self.world.do("rekindle suspend train")
        elif state == "suspended":
            self.world.do("rekindle resume train")
        if wanted == "running":
            self.images()

    def images(self):
        """Two images that the job can go back to, and one with a tag that no page gives."""
        images = json.loads(self.world.do("rekindle list --json train"))
        if not any("good" in image["tags"] for image in images):
            self.world.do("rekindle snapshot train --tag good")
        for _ in range(2 - sum(image["nth_newest"] is not None for image in images)):
            self.world.do("rekindle snapshot train --stored")

    def end(self):
        """Stops every job."""
        for job in json.loads(self.world.do("rekindle status --json")):
            if job["source"] != "record":
                self.world.do(f"rekindle stop {job['job']}")

    def typed(self, text):
        text = self.world.as_typed(text)
        known = {"store": self.world.store, "folder": self.world.folder}
        for pattern, value in WORDS.items():
            if not re.search(pattern, text):
                continue
            for name in re.findall(r"\{(\w+)\}", value):
                if name == "image":
                    known[name] = self.world.do("rekindle list --json train | jq -r '.[0].id'").strip()
                elif name not in known:
                    known[name] = self.world.status("train")[name]
            text = re.sub(pattern, lambda _: value.format(**known), text)
        return text

    def run(self, text, shown):
        command = text.split()[1] if text.startswith("rekindle ") else ""
        entry, wanted = entry_for(text), STATES.get(command, "running")
        self.state("running")
        text = self.typed(text)
        if wanted == "stopped":
            self.end()
        else:
            self.state(wanted)
        endless = next((said for pattern, said in ENDLESS.items() if re.match(pattern, text)), None)
        if entry is not None:
            code = self.world.once(text).returncode
            if code != entry.code:
                raise Failed(f"it ends with {code}, not with {entry.code}")
        elif command in KEYS:
            self.world.on_terminal(text, KEYS[command])
        elif endless is not None:
            self.world.start(text)
            self.world.says(re.compile(endless))
            code = self.world.end()
            # Its own way to end at the signal, or the signal's.
            if code not in (0, 143, -15):
                raise Failed(f"it ends with {code}: " + "\n".join(self.world.lines()[-5:]))
        else:
            environment, place = self.world.environment, self.world.cwd
            try:
                said = self.world.do(text)
            finally:
                # What it exports is not for the next one.
                self.world.environment, self.world.cwd = environment, place
            lost = missing(shown, said.splitlines())
            if lost is not None:
                raise Failed(f"it does not say {lost!r}, but:\n{said}")
