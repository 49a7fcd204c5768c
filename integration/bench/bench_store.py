"""The section "store" of bench.py: packs against dd on the same disk, and against other tools that deduplicate.

What is compared is measured in turn in one run, and the ratio is that of the pairs: disks and neighbours vary by more than
what is looked for.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from supervised import ROOT

EXAMPLE = ROOT / "target/release/examples/bench-store"
KINDS = {"noise": "incompressible", "weights": "float32 weights", "heap": "heap of an interpreter"}
# As many as the configuration has by default on this machine.
THREADS = "auto"


def ours(*words):
    done = subprocess.run([EXAMPLE, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def timed(command, **more):
    began = time.monotonic()
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, **more)
    return time.monotonic() - began


def dd(source, target, *words):
    return timed(["dd", f"if={source}", f"of={target}", "bs=4M", "status=none", *words])


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fill(folder, kind, mib, seed=1):
    """Files of 1 GiB at most, as many as it takes."""
    folder.mkdir()
    for n in range(-(-mib // 1024)):
        ours("make", kind, folder / f"part{n}", min(1024, mib - n * 1024), seed * 1000 + n)


class Pairs:
    """Rates of two that were measured in turn."""

    def __init__(self, size):
        self.size, self.seconds = size, []

    def add(self, a, b):
        self.seconds.append((a, b))

    def row(self, wanted):
        mine, other = (statistics.median(side) for side in zip(*self.seconds))
        ratio = statistics.median(b / a for a, b in self.seconds)
        rates = [self.size / seconds / 1e9 for seconds in (mine, other)]
        return f"{rates[0]:.2f} GB/s, dd {rates[1]:.2f}: {ratio * 100:.0f} % ({wanted})"


def against_dd(args, fast, disk):
    """`fast` and `disk` are folders in memory and on the disk to be measured."""
    source, size = fast / "source", args.store_size << 20
    fill(source, "noise", args.store_size)
    changed = fast / "changed"
    write, read, check = Pairs(size), Pairs(size), Pairs(size)
    part_time, part_bytes, peak = [], [], 0
    for n in range(args.runs):
        store, plain = disk / "store", disk / "plain"
        plain.mkdir()

        def copy():
            names = sorted(path.name for path in source.iterdir() if path.name != "manifest.json")
            return sum(dd(source / name, plain / name, "oflag=direct", "conv=fsync") for name in names)

        def again():
            return sum(dd(path, "/dev/null", "iflag=direct") for path in sorted(plain.iterdir()))

        def out():
            # The pages of the folder are given back before the next one.
            into = fast / "into"
            into.mkdir()
            took = ours("unpack", store, 1, into)["seconds"]
            shutil.rmtree(into)
            return took

        # In turn, so that neither always comes second.
        if n % 2:
            first = ours("persist", store, 1, source, "auto", THREADS)
            other = copy()
        else:
            other = copy()
            first = ours("persist", store, 1, source, "auto", THREADS)
        write.add(first["seconds"], other)
        peak = max(peak, first["peak_kib"])
        read.add(out(), again())
        check.add(ours("verify", store, THREADS)["seconds"], again())
        # In place of the source, because memory has no room for both.
        source.rename(changed)
        for path in changed.glob("part*"):
            ours("change", path, 10, 1000 * n + int(path.name.removeprefix("part")))
        second = ours("persist", store, 2, changed, "auto", THREADS)
        changed.rename(source)
        peak = max(peak, second["peak_kib"])
        part_time.append(second["seconds"] / first["seconds"])
        part_bytes.append(second["stored"] / first["stored"])
        shutil.rmtree(store)
        shutil.rmtree(plain)
    shutil.rmtree(source)
    share = [statistics.median(values) * 100 for values in (part_bytes, part_time)]
    return [
        (f"store, {args.store_size} MiB {KINDS['noise']}, persist", write.row("wanted: at least 85 %")),
        ("store, persist with 10 % changed", f"{share[0]:.0f} % of the bytes, {share[1]:.0f} % of the time (wanted: at most 20 and 30)"),
        ("store, unpack into memory", read.row("wanted: at least 85 %")),
        ("store, verify all content", check.row("wanted: at least 85 %")),
        ("store, persist, most memory", f"{peak / 1024:.0f} MiB RSS (wanted: under 512)"),
    ]  # fmt: skip


def listing(args, fast, disk):
    """How long it takes to list a job's images beside as many index entries as 100,000 images of it would have: 40 chunks
    (10 MiB) that are new in each."""
    source, store = fast / "source", disk / "store"
    fill(source, "noise", 64)
    ours("persist", store, 1, source, "auto", THREADS)
    alone = timed_list(args, store)
    entries = ours("entries", store, 3910)["entries"]
    beside = timed_list(args, store)
    shutil.rmtree(store)
    shutil.rmtree(source)
    return [("store, rekindle list, beside {:,} index entries".format(entries), f"{beside * 1000:.0f} ms, beside none {alone * 1000:.0f} (wanted: under 100)")]


def timed_list(args, store):
    return statistics.median(timed([args.rekindle, "--store", store, "list", "bench"]) for _ in range(args.runs))


def restic(disk, source):
    repo = disk / "restic"
    environment = dict(os.environ, RESTIC_PASSWORD="x", RESTIC_REPOSITORY=str(repo), RESTIC_CACHE_DIR=str(disk / "cache"))
    subprocess.run(["restic", "init", "--quiet"], env=environment, check=True)
    return repo, timed(["restic", "backup", "--quiet", source], env=environment)


def rustic(disk, source):
    repo = disk / "rustic"
    common = ["rustic", "-r", str(repo), "--password", "x", "--no-progress", "--no-cache", "--log-level", "error"]
    subprocess.run([*common, "init"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return repo, timed([*common, "backup", str(source)])


def against_others(args, fast, disk):
    rows = []
    mib = max(64, args.store_size // 4)
    tools = {"restic": restic, "rustic": rustic}
    missing = [name for name in tools if shutil.which(name) is None]
    for kind, name in KINDS.items():
        source = fast / kind
        fill(source, kind, mib)
        mine, others = [], {tool: [] for tool in tools if tool not in missing}
        for _ in range(args.runs):
            for tool in others:
                repo, took = tools[tool](disk, source)
                others[tool].append((took, size_of(repo)))
                shutil.rmtree(repo)
                shutil.rmtree(disk / "cache", ignore_errors=True)
            took = ours("persist", disk / "store", 1, source, "auto", THREADS)["seconds"]
            mine.append((took, size_of(disk / "store")))
            shutil.rmtree(disk / "store")
            (source / "manifest.json").unlink()
        shutil.rmtree(source)
        seconds, size = (statistics.median(side) for side in zip(*mine))
        rows.append((f"store, {mib} MiB {name}", f"{seconds:.2f} s, {size / (mib << 20) * 100:.1f} % of its size"))
        for tool, found in others.items():
            times, sizes = (statistics.median(side) for side in zip(*found))
            faster = statistics.median(b / a for (a, _), (b, _) in zip(mine, found))
            figure = f"{times:.2f} s, {sizes / (mib << 20) * 100:.1f} %: ours takes 1/{faster:.1f} of the time"
            more = (size / sizes - 1) * 100
            rows.append((f"store, the same, {tool} backup", f"{figure} and {more:+.1f} % of the space (wanted: 1/3, at most +5)"))
    return rows + [(f"store, {tool} backup", "SKIP: it is not in PATH") for tool in missing]


def store(args):
    """The rows. Needs memory for the content and for what is unpacked, and three times the content on the disk."""
    if shutil.which("cargo") is None:
        return [("store", "not measured: there is no cargo to build what measures it")]
    subprocess.run(["cargo", "build", "--quiet", "--release", "--example", "bench-store"], cwd=ROOT, check=True)
    fast = Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=args.dir))
    disk = Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=args.store))
    try:
        return against_dd(args, fast, disk) + listing(args, fast, disk) + against_others(args, fast, disk)
    finally:
        shutil.rmtree(fast, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
