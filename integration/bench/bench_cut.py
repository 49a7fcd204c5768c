"""How long ranks take to come to one point and be locked, by what they do, for one or more builds of rekindle in one run.

    bench_cut.py --rekindle FILE [--rekindle FILE] [--ranks N,N] [--snapshots N] [--kinds A,B] [--gib N,N] [--kill]
                 [--torchrun] [--own-gpu] [--no-store] [--dir DIR] [--logs DIR]

--ranks, --gib  each kind is tried with each of them; each rank has that much GPU memory
--kill          also kill -9 of a rank at the end, and how long it takes until the next step
--torchrun      the ranks are started by torchrun, not by the job, which kills the others as soon as a rank has ended
--own-gpu       each rank sees only its own GPU (CUDA_VISIBLE_DEVICES)
--no-store      one snapshot of each, which is not stored: the restart is from memory
--dir           where the stores are; each snapshot waits until the one before is stored

Only the standard library; the jobs (integration/jobs/cut_job.py) need PyTorch and a GPU a rank.
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from supervised import ROOT, Failed, Job, known_keys, seconds, wait_for

KINDS = ["late", "ahead", "pipeline", "groups", "ddp", "fsdp", "graph"]
PHASES = ["lock", "checkpoint", "dump", "restore", "unlock"]


def last_step(path):
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return int(lines[-1].split()[0]) if lines else 0


def goes_on(job, steps, more):
    start = last_step(steps)
    job.wait_for(f"step {start + more}", lambda: last_step(steps) >= start + more, 120)


def kill_a_rank(job, steps):
    """kill -9 of the last rank; answers the seconds until a step that had not been made."""
    root = job.state()["pid"]
    ranks = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    began = time.monotonic()
    job.kill_job(120, victim=int(ranks[-1]))
    # The file of the steps was put back with the job.
    after = last_step(steps)
    wait_for("a step after the restart", lambda: last_step(steps) > after, 60)
    return time.monotonic() - began


def trial(args, work, rekindle, which, kind, ranks, gib, port):
    name = f"{which}-{kind}-{ranks}x{gib:g}"
    steps = work / f"{name}.steps"
    command = [sys.executable, ROOT / "integration/jobs/cut_job.py", kind, "--out", steps, "--ranks", ranks]
    if args.torchrun:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", port]
        command[1:1] = launcher
    options = ["--port", port, "--gib", gib, *(["--own-gpu"] if args.own_gpu else [])]
    settings = {
        "snapshot.rehearse": "off", "log.level": "debug", "snapshot.staging": "ram",
        "store.keep-last": 1, "restart.min-uptime": "2s", "store.persist-rate": "1MiB" if args.no_store else "unlimited",
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if key in known_keys(rekindle)}
    environment = {"NCCL_NVLS_ENABLE": "0", "REKINDLE_LOCK_TIMEOUT": "20s", **args.environment}
    job = Job(
        rekindle, work, f"cut{os.getpid()}-{name}", [*command, *options], settings=settings, environment=environment
    )
    found = {"kind": kind, "which": which, "ranks": ranks, "gib": gib, "snapshots": [], "why": "", "back": None}
    try:
        job.start()
        job.wait_for("the first steps", lambda: last_step(steps) >= 5, 180)
        for _ in range(1 if args.no_store else args.snapshots):
            # At any moment of a step.
            time.sleep(0.2 + 0.013 * len(found["snapshots"]))
            image, freeze = job.snapshot(90)
            manifest = job.manifest(image)
            found["snapshots"].append({**(seconds(manifest) if manifest else {}), "freeze": freeze})
            goes_on(job, steps, 3)
            if not args.no_store:
                job.wait_for(f"image {image} in the store", lambda: job.stored(image), 120)
        if job.state()["restarts"]:
            found["why"] = f"the job was restarted: {job.last_words()}"
        if args.kill:
            found["back"] = kill_a_rank(job, steps)
    except Failed as error:
        found["why"] = str(error)
    finally:
        if args.no_store:
            # It would wait for an image that is stored at 1 MiB/s.
            job.kill_supervisor()
        job.end()
        if args.logs:
            shutil.copy(job.log, args.logs / f"{name}.log")
        shutil.rmtree(job.store, ignore_errors=True)
    return found


def row(found):
    cells = [found["kind"], str(found["ranks"]), f"{found['gib']:g}", found["which"], str(len(found["snapshots"]))]
    for phase in [*PHASES, "freeze"]:
        values = [snapshot[phase] for snapshot in found["snapshots"] if phase in snapshot]
        cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "")
    cells.append(f"{found['back']:.1f}" if found["back"] else "")
    return [*cells, found["why"][:200]]


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", action="append", required=True, type=Path)
    parser.add_argument("--ranks", type=numbers(int), default=[2])
    parser.add_argument("--snapshots", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--gib", type=numbers(float), default=[0.5])
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--own-gpu", action="store_true")
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    args.environment = {}
    # The jobs are ended then, and the table is printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + args.minutes * 60
    rows = []
    wanted = list(itertools.product(args.kinds.split(","), args.gib, args.ranks, enumerate(args.rekindle)))
    try:
        with tempfile.TemporaryDirectory(prefix="rekindle-cut-", dir=args.dir) as work:
            for at, (kind, gib, ranks, (which, rekindle)) in enumerate(wanted):
                if time.monotonic() > end:
                    rows.append([kind, str(ranks), f"{gib:g}", str(which), "", *[""] * (len(PHASES) + 2), "no time left"])
                    continue
                found = trial(args, Path(work), rekindle, f"build{which}", kind, ranks, gib, 10200 + 2 * at)
                rows.append(row(found))
                print(" | ".join(rows[-1]), flush=True)
    finally:
        head = ["kind", "ranks", "GiB a rank", "build", "snapshots", *PHASES, "freeze", "kill to step", "note"]
        print("\nSeconds, median and (largest):\n")
        print(" | ".join(head))
        for cells in rows:
            print(" | ".join(cells))


main()
