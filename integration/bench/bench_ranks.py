"""The freeze of two ranks on two GPUs against that of one rank of the same script. Only the standard library."""

import shutil
import sys

import bench_table as table
from host import available
from matrix_lines import ranked
from steps import Steps
from supervised import ROOT, Failed, Job

# In the order of the table: what the row says, ranks, backend of torch.distributed.
KINDS = {
    "one": ("one rank, one GPU (gloo)", 1, "gloo"),
    "gloo": ("two ranks, two GPUs, gloo", 2, "gloo"),
    "nccl": ("two ranks, two GPUs, NCCL", 2, "nccl"),
}
HEAD = ["GiB a rank", "", *table.PHASES, "freeze", "of one rank", "first freeze"]
GIB = 1 << 30
# Each rank has that much in host memory, and in its image, beside its device memory.
HOST_GIB = 5
# Out of the range that the kernel gives to clients, and none of the matrix's.
PORT = 10060


def command(bench, steps, gib, kind):
    _, ranks, backend = KINDS[kind]
    if bench.args.stand_in:
        job = ROOT / "integration/jobs/standin_ranks.py"
        return [sys.executable, job, steps.path, ranks, "--", "--mib", int(gib * 1024), "--times"]
    job = ROOT / "integration/jobs/bench_torch.py"
    port = PORT + 10 * list(KINDS).index(kind)
    return [sys.executable, job, steps.path, "--gib", gib, "--ranks", ranks, "--backend", backend, "--port", port]


def fits(bench, gib, ranks):
    """Why there is no room for a trial, or None."""
    # With the interposer each image is the GPU memory once, and there are two.
    wanted, free = ranks * (2 * gib + 2 * HOST_GIB), available() / GIB
    if free < wanted and not bench.args.stand_in:
        return f"host memory is too small ({free:.0f} GiB are free, {wanted:.0f} wanted)"
    return None


def measure(bench, kind, gib):
    what, ranks, _ = KINDS[kind]
    trial = {"gib": gib, "kind": kind, "snapshots": [], "why": "not finished"}
    bench.ranks.append(trial)
    why = fits(bench, gib, ranks)
    if why:
        trial["why"] = why
        return
    name = bench.name(f"ddp-{kind}", gib)
    steps = Steps(bench.work / f"{name}.steps")
    stored = bench.stores(ranks * gib)
    job = Job(
        bench.args.rekindle, bench.work, name, command(bench, steps, gib, kind),
        settings=bench.settings("on", ranks * gib),
        environment={**bench.environment(name), **ranked(bench.keys), "NCCL_NVLS_ENABLE": "0"},
    )  # fmt: skip
    try:
        job.start()
        bench.steps_on(steps, 3, job.ended)
        print(f"   staging area made ready: {bench.ready(job):.1f} s after the first steps", flush=True)
        # The next one would wait until this one is in the store.
        for _ in range(bench.args.rounds if stored else 1):
            took = bench.snapshot(job, stored)
            trial["snapshots"].append(took)
            print("   " + ", ".join(f"{phase} {took[phase]:.2f}" for phase in took), flush=True)
            bench.steps_on(steps, 3, job.ended)
        if job.state()["restarts"]:
            raise Failed(f"{what}: the job was restarted: {job.last_words()}")
    finally:
        job.end()
        shutil.rmtree(job.store, ignore_errors=True)


def rows(trials):
    """A row for each trial: medians of the snapshots after the first, against those of one rank of that size."""
    found = []
    for trial in trials:
        start = [table.size(trial["gib"]), KINDS[trial["kind"]][0]]
        if not trial["snapshots"]:
            found.append([start[0], f"{start[1]}: {trial['why']}", *[""] * (len(HEAD) - 2)])
            continue
        usual, one = table.later(trial), alone(trials, trial["gib"])
        ratio = f"{usual['freeze'] / one:.2f}x" if one and trial["kind"] != "one" else ""
        cells = [table.cell(usual.get(name)) for name in [*table.PHASES, "freeze"]]
        found.append([*start, *cells, ratio, table.cell(trial["snapshots"][0]["freeze"])])
    return found


def alone(trials, gib):
    """The freeze of one rank, or None."""
    of_one = [t for t in trials if (t["kind"], t["gib"]) == ("one", gib) and t["snapshots"]]
    return table.later(of_one[0])["freeze"] if of_one else None
