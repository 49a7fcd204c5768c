"""The table of bench_gpu.py: from what was measured to markdown. No clock, no process, no file.

A trial is a dictionary: `gib`, `how` (a key of HOW), `snapshots` (each the seconds of the phases and `freeze`; a phase
that nobody told is absent), `crash` (seconds to the next step, or None), `bytes` of device memory, and `why` in place
of all that where there is nothing to show.
"""

import statistics

PHASES = ["lock", "checkpoint", "dump", "restore", "unlock"]
HOW = {"plain": "plain recipe", "off": "rekindle, no interposer", "on": "rekindle"}
HEAD = ["GiB", "", *PHASES, "freeze", "of plain", "GB/s out", "GB/s in", "crash to step", "of plain"]


def size(gib):
    return str(int(gib)) if gib == int(gib) else f"{gib:g}"


def cell(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def fraction(value, whole):
    """What part of `whole` it is, as 1/8.1."""
    return "" if not value or not whole else f"1/{whole / value:.1f}"


def middle(snapshots):
    """The medians, phase by phase, and that of the sums."""
    names = [name for name in [*PHASES, "freeze"] if all(name in one for one in snapshots)]
    return {name: statistics.median(one[name] for one in snapshots) for name in names}


def rate(trial, seconds):
    """GB (10^9 bytes) of device memory a second."""
    return trial["bytes"] / seconds / 1e9 if trial.get("bytes") and seconds else None


def later(trial):
    """What counts for a trial: the snapshots after the first, or the first where it is alone."""
    return middle(trial["snapshots"][1:] or trial["snapshots"])


def plain_of(trials, gib):
    return next((t for t in trials if t["how"] == "plain" and t["gib"] == gib and t.get("snapshots")), None)


def lines_of(trial, plain):
    """The rows of one trial; `plain` is the plain recipe's of the same size, or None."""
    start = [size(trial["gib"]), HOW[trial["how"]]]
    if not trial.get("snapshots"):
        return [[*start[:1], f"{start[1]}: {trial['why']}", *[""] * (len(HEAD) - 2)]]
    against = later(plain)["freeze"] if plain and plain is not trial else None
    crash = plain.get("crash") if plain and plain is not trial else None

    def row(what, took, end):
        rates = [cell(rate(trial, took.get(phase)), 1) for phase in ("checkpoint", "restore")]
        took_cells = [cell(took.get(name)) for name in [*PHASES, "freeze"]]
        return [start[0], what, *took_cells, fraction(took["freeze"], against), *rates, *end]

    end = [cell(trial.get("crash")), fraction(trial.get("crash"), crash)]
    usual = later(trial)
    if len(trial["snapshots"]) == 1 or trial["how"] == "plain":
        return [row(start[1], middle(trial["snapshots"]), end)]
    first = trial["snapshots"][0]
    more = first["freeze"] / usual["freeze"]
    return [row(f"{start[1]}, first ({more:.2f}x)", first, ["", ""]), row(f"{start[1]}, later", usual, end)]


def rows(trials, saves, pinned):
    """All rows: by size the trials and what PyTorch does by itself (`saves`: gib, torch_save, async_save), and last the
    machine's own rate (`pinned`: out and in, GB/s)."""
    found = []
    for gib in sorted({t["gib"] for t in [*trials, *saves]}):
        here = [t for how in HOW for t in trials if t["gib"] == gib and t["how"] == how]
        plain = plain_of(trials, gib)
        against = later(plain)["freeze"] if plain else None
        for trial in here:
            found += lines_of(trial, plain)
        for save in (s for s in saves if s["gib"] == gib):
            for key, what in [("torch_save", "torch.save"), ("async_save", "dcp.async_save, blocking")]:
                blank = [""] * len(PHASES)
                took = save.get(key)
                if took is not None:
                    found.append([size(gib), what, *blank, cell(took), fraction(took, against), *[""] * 4])
    if pinned:
        blank = [""] * (len(PHASES) + 2)
        rates = [cell(pinned[way], 1) for way in ("out", "in")]
        found.append(["", "pinned copies, the machine's own", *blank, *rates, "", ""])
    return found


def markdown(head, body, left=(1,)):
    """A table as text, its columns padded: those of `left` to the left, figures to the right."""
    table = [head, *body]
    widths = [max(3, *(len(line[n]) for line in table)) for n in range(len(head))]

    def text(line):
        cells = [c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(zip(line, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = "|".join("-" * (w + 2) if n in left else "-" * (w + 1) + ":" for n, w in enumerate(widths))
    return "\n".join([text(head), f"|{rule}|", *map(text, body)])


def between(trials):
    """GB/s out and in from the difference of two sizes, in which the fixed costs cancel: (small, large, out, in)."""
    full = [t for t in trials if t["how"] == "on" and t.get("bytes") and t.get("snapshots")]
    full = sorted((t for t in full if "checkpoint" in later(t) and "restore" in later(t)), key=lambda t: t["gib"])
    if len(full) < 2:
        return None
    small, large = full[0], full[-1]
    more = (large["bytes"] - small["bytes"]) / 1e9
    spent = [later(large)[phase] - later(small)[phase] for phase in ("checkpoint", "restore")]
    if min(spent) <= 0:
        return None
    return small["gib"], large["gib"], more / spent[0], more / spent[1]
