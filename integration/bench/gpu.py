"""The jobs of gpu.sh. Only the standard library; each job runs in a folder and a store of its own."""

import argparse
import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from supervised import PHASES, ROOT, Failed, Job, seconds


def row(table, name, manifest, back):
    took = seconds(manifest)
    table.append([name, *(f"{took[p]:.2f}" for p in PHASES), f"{manifest['freeze_us'] / 1e6:.2f}",
                  f"{manifest['bytes'] / 2**30:.2f}", f"{back:.2f}"])


def snapshot(job):
    image, _ = job.snapshot()
    manifest = job.manifest(image)
    if manifest is None:
        raise Failed(f"{job.name}: image {image} has no manifest")
    return manifest


def compiled(work, source):
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    program = work / source.stem
    subprocess.run([nvcc, "-o", program, source], check=True)
    return program


def counter(args, work, table):
    program = compiled(work, ROOT / "examples/counter.cu")
    port = 10017
    job = Job(args.rekindle, work, "counter", [program, port]).start()

    def ask(limit=60):
        end = time.monotonic() + limit
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(0.5)
            while time.monotonic() < end:
                s.sendto(b"x", ("127.0.0.1", port))
                try:
                    return int(s.recv(64))
                except (TimeoutError, ConnectionRefusedError):
                    time.sleep(0.1)
        raise Failed("counter: no answer")

    try:
        job.wait_for("start", lambda: job.state().get("state") == "running")
        first = ask()
        if first != 101:
            raise Failed(f"counter: {first} instead of 101")
        manifest = snapshot(job)
        back = job.kill_job()
        second = ask()
        if second != 102:
            raise Failed(f"counter: {second} instead of 102 after the restart")
        row(table, "counter.cu", manifest, back)
    finally:
        job.end()


def watch(args, work, table):
    """A GPU that works is no hang, one that does not is; a fault of the GPU is told and got over."""
    idle = 4
    program = compiled(work, ROOT / "integration/jobs/gpu_watch.cu")
    settings = {"watch.no-cpu-for": f"{idle}s", "watch.action": "notify"}
    job = Job(args.rekindle, work, "watch", [program, work / "faulted", 2 * idle], settings=settings).start()

    def events(kind):
        path = job.store / job.name / "log/events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    output = lambda: read(job.store / job.name / "log/stdout.log").decode()
    try:
        job.wait_for("its work on the GPU", lambda: "works" in output())
        manifest = snapshot(job)
        job.wait_for("its end", lambda: "waits" in output())
        if events("hung"):
            raise Failed(f"watch: taken for hung while the GPU worked: {events('hung')}")
        job.wait_for("hang", lambda: events("hung"))
        job.wait_for("fault", lambda: events("gpu-fault"))
        code = job.wait()
    finally:
        job.end()
    ends = [event["cause"] for event in events("ended")]
    if code != 0 or [end["kind"] for end in ends] != ["gpu-fault", "completed"] or "went on" not in output():
        raise Failed(f"watch: exit code {code}, ends {ends}, output {output()!r}")
    for event in events("gpu-fault"):
        print(f"watch: Xid {event['xid']} of {event['gpu']}: {event['words']}")
    print(f"watch: hung {[(e['what'], e['idle_us']) for e in events('hung')]}, ends {ends}", flush=True)
    row(table, "gpu_watch.cu", manifest, 0.0)


def sample(args, work, table):
    subprocess.run([ROOT / "examples/checkpoint-sample.sh", "--rekindle", args.rekindle], check=True, timeout=180)


def read(path):
    return path.read_bytes() if path.exists() else b""


def compare(args, work, table, name, command, kills, snapshots_at, lost=False, user=None):
    """The command with `--out DIR`, alone and under rekindle with kills, or the loss of the machine in their place; what
    it wrote must be the same. With a `user` it runs as that account under rekindle, and after the kills the supervisor is
    killed too."""
    reference = work / f"{name}-reference"
    began = time.monotonic()
    with open(work / f"{name}-reference.log", "w") as log:
        subprocess.run([*command, "--out", reference], check=True, stdin=subprocess.DEVNULL, stdout=log, timeout=600)
    alone = time.monotonic() - began
    out = work / f"{name}-out"
    settings = {}
    if user:
        settings["job.user"] = user
        work.chmod(0o711)
        out.mkdir()
        shutil.chown(out, user)
    job = Job(args.rekindle, work, name, [*command, "--out", out], settings=settings).start()
    lines = lambda: read(out / "metrics.jsonl").count(b"\n")
    try:
        manifest, back = None, 0.0
        for n in range(kills):
            job.wait_for("progress", lambda: lines() >= snapshots_at * (n + 1))
            manifest = snapshot(job)
            at = lines()
            job.wait_for("progress after the image", lambda: lines() > at)
            back = lose_machine(job, manifest) if lost else job.kill_job()
        if user:
            check_user(job, user)
            job.kill_supervisor()
            job.start()
            job.wait_for("restart", lambda: job.running() and job.state()["supervisor"] == job.process.pid)
            check_user(job, user)
        code = job.wait()
        if code != 0:
            raise Failed(f"{name}: exit code {code}")
    finally:
        job.end()
    for file in ["metrics.jsonl", "weights.bin"]:
        if read(reference / file) != read(out / file) or not read(out / file):
            raise Failed(f"{name}: {file} differs from the uninterrupted run")
    print(f"{name}: the same bits after {kills} kills ({alone:.0f} s alone)", flush=True)
    row(table, name, manifest, back)


def check_user(job, user):
    """That each process of the job is the user's, with no right beside."""
    wanted = pwd.getpwnam(user)
    status = Path(f"/proc/{job.state()['pid']}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1:] for line in status}
    if found["Uid"] != [str(wanted.pw_uid)] * 4 or found["Gid"] != [str(wanted.pw_gid)] * 4:
        raise Failed(f"{job.name}: the job is {found['Uid']} and {found['Gid']}, not {user}")
    for capabilities in ["CapEff", "CapPrm", "CapInh", "CapAmb"]:
        if int(found[capabilities][0], 16):
            raise Failed(f"{job.name}: the job has {capabilities} {found[capabilities][0]}")


def lose_machine(job, manifest):
    """Brings it back from the packs of the store; answers the seconds from the same command until it runs."""
    job.wait_for("image in the store", lambda: job.stored(manifest["id"]))
    job.lose_machine()
    began = time.monotonic()
    job.start()
    job.wait_for("restart", lambda: job.running() and job.state()["supervisor"] == job.process.pid)
    return time.monotonic() - began


def torch(args, work, table):
    if importlib.util.find_spec("torch") is None:
        print("SKIP torch: not installed")
        return
    script = [sys.executable, ROOT / "examples/train_torch.py", "--epochs", "60", "--seconds", "25"]
    compare(args, work, table, "torch-1GiB", [*script, "--gib", "1"], 2, 10)
    compare(args, work, table, f"torch-{args.gib}GiB", [*script, "--gib", str(args.gib)], 1, 10)


def user(args, work, table):
    """A job of an account without rights: killed, and its supervisor too."""
    if importlib.util.find_spec("torch") is None:
        print("SKIP user: torch is not installed")
        return
    script = [sys.executable, ROOT / "examples/train_torch.py", "--epochs", "60", "--seconds", "25", "--gib", "2"]
    compare(args, work, table, "torch-2GiB-nobody", script, 2, 10, user="nobody")


def packs(args, work, table):
    """From the packs of the store to the driver, with nothing in memory."""
    if importlib.util.find_spec("torch") is None:
        print("SKIP packs: torch is not installed")
        return
    script = [sys.executable, ROOT / "examples/train_torch.py", "--epochs", "60", "--seconds", "25", "--gib", str(args.gib)]
    compare(args, work, table, f"torch-{args.gib}GiB-packs", script, 1, 10, lost=True)


def jax(args, work, table):
    if importlib.util.find_spec("jax") is None:
        print("SKIP jax: not installed")
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    compare(args, work, table, "jax", [sys.executable, ROOT / "integration/jobs/jax_job.py"], 1, 10)


def forks(args, work, table):
    """Children by fork that have the devices of a CUDA process, and one that only asks NVML."""
    if importlib.util.find_spec("torch") is None:
        print("SKIP forks: torch is not installed")
        return
    compare(args, work, table, "forks", [sys.executable, ROOT / "integration/jobs/fork_job.py"], 2, 10)
    said = "NVML is used without CUDA by process" in (work / "forks.log").read_text(errors="replace")
    answers = read(work / "forks-out/nvml.txt").decode().split("\n")
    runs = [answer for answer, before in zip(answers, [None, *answers]) if answer != before]
    # What its library makes of /dev/null, and whether it comes round by itself.
    print("forks: NVML says", ", ".join(runs), "; rekindle", "says so" if said else "says nothing", flush=True)
    # Where the driver takes such a process for one of its own, it gives NVML back too.
    if any(run.startswith("error") for run in runs) and not said:
        raise Failed("forks: no word of the process whose NVML fails")


HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code:
        sys.exit(f"CUDA error {code}")
context, free, total, memory = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(free.value - (256 << 20))))
print("full", flush=True)
sys.stdin.read()
"""


class Hog:
    """Somebody who takes all but 256 MiB of a GPU."""

    def __init__(self, gpu):
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
        self.process = subprocess.Popen([sys.executable, "-c", HOG], env=environment, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        if self.process.stdout.readline() != "full\n":
            self.end()
            raise Failed("migrate: the GPU could not be filled")

    def end(self):
        self.process.kill()
        self.process.wait(30)


def on(manifest):
    """The GPUs that the job of an image had memory on."""
    return {gpu for gpus in manifest["tree"].get("cuda_memory", {}).values() for gpu in gpus}


def migrate(args, work, table):
    """From GPU 0 to GPU 1 because the first is full, there after a kill too, and back by --device-map; the bits of a run
    that stayed where it was."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    if listed.count("(UUID:") < 2 or importlib.util.find_spec("torch") is None:
        print("SKIP migrate: it takes two GPUs, and torch")
        return
    command = [sys.executable, ROOT / "examples/train_torch.py", "--epochs", "48", "--seconds", "12", "--gib", "1"]
    reference, out = work / "migrate-reference", work / "migrate-out"
    subprocess.run([*command, "--out", reference], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   timeout=120)
    job = Job(args.rekindle, work, "migrate", [*command, "--out", out]).start()
    lines = lambda: read(out / "metrics.jsonl").count(b"\n")

    def taken(since):
        """A snapshot after some progress; where the job was, and how it came there."""
        job.wait_for("progress", lambda: lines() >= since, 60)
        manifest = snapshot(job)
        events = (job.store / job.name / "log/events.jsonl").read_text().splitlines()
        last = [event for event in map(json.loads, events) if event["event"] == "started"][-1]
        return manifest, on(manifest), last.get("moved", [])

    @contextlib.contextmanager
    def begin_again(*flags):
        """The supervisor ends with the job; the same command goes on."""
        job.process.kill()
        job.process.wait(30)
        at = job.command.index("--")
        job.command[job.command.index("--interval") + 2 : at] = flags
        began = time.monotonic()
        yield
        job.start()
        job.wait_for("restart", lambda: job.running() and job.state()["supervisor"] == job.process.pid, 60)
        print(f"migrate: back after {time.monotonic() - began:.2f} s {' '.join(flags)}", flush=True)

    def expect(what, found, wanted):
        if found != wanted:
            raise Failed(f"migrate: {what}: {found} instead of {wanted}")

    hog = None
    try:
        manifest, first, _ = taken(5)
        if len(first) != 1:
            raise Failed(f"migrate: the image says that the job used {first}")
        with begin_again():
            hog = Hog(*first)
        manifest, second, moved = taken(10)
        expect("moved", [(one["old"], one["new"]) for one in moved], [(*first, *second)])
        print(f"migrate: {moved}", flush=True)
        hog.end()
        back = job.kill_job(60)
        _, there, moved = taken(15)
        expect("after a kill", (there, moved), (second, []))
        with begin_again("--device-map", f"{next(iter(second))}={next(iter(first))}"):
            pass
        _, home, moved = taken(20)
        expect("by map", (home, [one["why"] for one in moved]), (first, ["asked for"]))
        expect("exit code", job.wait(120), 0)
    finally:
        if hog:
            hog.end()
        job.end()
    for file in ["metrics.jsonl", "weights.bin"]:
        if read(reference / file) != read(out / file) or not read(out / file):
            raise Failed(f"migrate: {file} differs from the run that stayed")
    print("migrate: the same bits after two moves", flush=True)
    row(table, "torch, to GPU 1 and back", manifest, back)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--logs")
    parser.add_argument("--only")
    args = parser.parse_args()
    args.gib = int(args.gib) if args.gib == int(args.gib) else args.gib
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    print(subprocess.run(query, capture_output=True, text=True).stdout.strip(), flush=True)
    table, failures = [], []
    work = Path(tempfile.mkdtemp(prefix="rekindle-gpu."))
    try:
        for test in [counter, watch, sample, torch, user, packs, jax, forks, migrate]:
            if args.only and args.only != test.__name__:
                continue
            print(f"== {test.__name__}", flush=True)
            try:
                test(args, work, table)
            except (Failed, subprocess.SubprocessError, OSError, KeyError) as error:
                failures.append(f"{test.__name__}: {error}")
                print(f"FAILED {failures[-1]}", flush=True)
    finally:
        if args.logs:
            for log in [*work.glob("*.log"), *work.glob("store/*/log/criu-*.log")]:
                shutil.copy(log, Path(args.logs) / f"{log.parent.parent.name}-{log.name}")
        shutil.rmtree(work, ignore_errors=True)
    print("\nseconds; image in GiB; back: from kill -9 until it runs again, back-off of 1 s included")
    head = ["job", *PHASES, "freeze", "image", "back"]
    widths = [max(len(str(r[i])) for r in [head, *table]) for i in range(len(head))]
    for line in [head, *table]:
        print("  ".join(str(c).ljust(w) for c, w in zip(line, widths)).rstrip())
    for failure in failures:
        print("FAILED", failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
