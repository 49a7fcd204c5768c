"""GPU memory that stays on the GPU (gpu.memory = "kept") against the driver's copies. Needs a GPU and PyTorch.

    bench_kept.py --rekindle FILE --criu FILE [--sizes 1,8,32] [--only NAME,...] [--ways copied,kept,plain]
                  [--still SHARE] [--full-every N] [--no-store] [--logs DIR] [--stand-in FILE]

Trials, each of which goes on when another one fails:
  table     per size and way: snapshots, then kill -9; the same steps must have the same bits in both ways
  cross     images of each way restored with the other setting, from memory
  machine   the image of the kept way from the store, with nothing left in memory
  allocate  a program that allocates and frees 20, 64 and 256 MiB all the time, under both settings
  uncached  training without PyTorch's cache of memory, so that each tensor is an allocation, by turns under both settings
  disk      the table's job with images on the disk, and dd of as much on the same disk
  ranks     two ranks on two GPUs, NCCL
  notice    what programs can notice: CUDA IPC, peer access, pools, graphs, attributes
  leak      kill -9 of everything with memory kept; nvidia-smi before and after
  suspend   a job that is suspended; nvidia-smi meanwhile
  grows     the largest size without PyTorch's cache, so that the job allocates while its memory is still copied
--ways      of the table: copied and kept by default; plain is cuda-checkpoint's four actions around criu dump
--still     the share of the memory that the job of the table never changes
--full-every  gpu.full-copy-every; with more than 1 only what has changed is copied
--no-store  one snapshot of each way in the table, which is not stored
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from host import free_on
from matrix_lines import ranked
from plain import Plain
from steps import Steps
from supervised import ROOT, Failed, Job, known_keys, seconds, wait_for

PHASES = ["prepare", "lock", "checkpoint", "dump", "restore", "copy", "unlock"]
TRIALS = ["table", "cross", "machine", "allocate", "uncached", "disk", "ranks", "notice", "leak", "suspend", "grows"]
# Of the log, with the word for the table.
TOLD = {
    "copied GPU memory that stayed": "out",
    "copied from room on the GPU": "room",
    "filled GPU memory": "in",
    "GPU memory was filled while CRIU worked": "ahead",
    "released GPU memory": "release",
    "mapped GPU memory again": "map",
}

SCALE = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}

ALLOCATE = """
import ctypes, sys, time
import torch
torch.cuda.init(); torch.zeros(1, device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")
for mib in (2, 20, 64, 256, 1024):
    times = []
    for _ in range(200 if mib < 1024 else 40):
        pointer = ctypes.c_size_t()
        began = time.perf_counter()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)) == 0
        between = time.perf_counter()
        assert cuda.cuMemFree_v2(pointer) == 0
        times.append((between - began, time.perf_counter() - between))
    times.sort(key=sum)
    a, f = times[len(times) // 2]
    print(f"cuMemAlloc {mib} MiB: {a * 1e6:.0f} us, cuMemFree: {f * 1e6:.0f} us", flush=True)
"""

NOTICE = """
import ctypes, sys, time
import torch
def probe(name, work):
    try:
        print(f"{name}: {work()}", flush=True)
    except BaseException as error:
        print(f"{name}: FAILED {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
cuda = ctypes.CDLL("libcuda.so.1")
x = torch.arange(16 << 20, device="cuda", dtype=torch.int64)  # 128 MiB
def base():
    start, size = ctypes.c_size_t(), ctypes.c_size_t()
    code = cuda.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_size_t(x.data_ptr() + 4096))
    return code, start.value == x.data_ptr(), size.value
probe("address range", base)
def attribute(which):
    value = ctypes.c_uint64()
    return cuda.cuPointerGetAttribute(ctypes.byref(value), which, ctypes.c_size_t(x.data_ptr())), hex(value.value)
for which, name in ((1, "context"), (2, "memory type"), (9, "device"), (10, "legacy IPC"), (13, "mapped"), (14, "handle types"), (15, "GPU direct RDMA")):
    probe("attribute " + name, lambda: attribute(which))
probe("IPC handle", lambda: cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), ctypes.c_size_t(x.data_ptr())))
probe("torch share", lambda: len(x.untyped_storage()._share_cuda_()))
def graph():
    y = torch.zeros(8 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3): z = (y + 1).sum()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        z = (y + 1).sum()
        big = torch.ones(64 << 20, device="cuda") * 2
    y.fill_(2); g.replay(); torch.cuda.synchronize()
    return z.item(), big.sum().item()
probe("graph", graph)
def pool():
    runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
    pointer = ctypes.c_void_p()
    code = runtime.cudaMallocAsync(ctypes.byref(pointer), ctypes.c_size_t(64 << 20), None)
    return code, runtime.cudaFreeAsync(pointer, None)
probe("cudaMallocAsync", pool)
runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
def allocated():
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0
    return pointer
def free_async():
    before = torch.cuda.mem_get_info()[0]
    code = runtime.cudaFreeAsync(allocated(), None)
    torch.cuda.synchronize()
    return code, (before - torch.cuda.mem_get_info()[0]) >> 20
probe("cudaFreeAsync of cudaMalloc's, MiB missing", free_async)
def free_captured(mode):
    pointer, stream, g = allocated(), ctypes.c_void_p(), ctypes.c_void_p()
    runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
    began = runtime.cudaStreamBeginCapture(stream, mode)
    freed = runtime.cudaFree(pointer)
    ended = runtime.cudaStreamEndCapture(stream, ctypes.byref(g))
    runtime.cudaGetLastError(); runtime.cudaStreamDestroy(stream)
    return began, freed, ended, runtime.cudaFree(pointer) if freed else 0
for mode, name in enumerate(("global", "thread local", "relaxed")):
    probe("cudaFree in a capture, " + name, lambda: free_captured(mode))
def peer():
    if torch.cuda.device_count() < 2: return "one GPU"
    y = x.to("cuda:1"); z = torch.arange(16 << 20, device="cuda:1", dtype=torch.int64)
    return torch.cuda.can_device_access_peer(0, 1), bool((y == z).all()), bool((x.to("cuda:1") == z).all())
probe("peer copy", peer)
def kernel_peer():
    if torch.cuda.device_count() < 2: return "one GPU"
    runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
    torch.cuda.set_device(1); code = runtime.cudaDeviceEnablePeerAccess(0, 0); torch.cuda.set_device(0)
    y = torch.empty(16 << 20, device="cuda:1", dtype=torch.int64)
    with torch.cuda.device(1):
        two = cuda.cuMemcpyDtoD_v2(ctypes.c_size_t(y.data_ptr()), ctypes.c_size_t(x.data_ptr()), ctypes.c_size_t(128 << 20))
        torch.cuda.synchronize()
    return code, two, bool((y == torch.arange(16 << 20, device="cuda:1", dtype=torch.int64)).all())
probe("peer access", kernel_peer)
probe("memory info", lambda: [round(v / 2**20) for v in torch.cuda.mem_get_info()])
def child():
    import os
    pid = os.fork()
    if pid == 0:
        found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) >= 512]
        os._exit(min(len(found), 200))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
probe("high descriptors in a child", child)
def empty():
    global x
    del x; torch.cuda.empty_cache()
    return [round(v / 2**20) for v in torch.cuda.mem_get_info()]
probe("memory info after empty_cache", empty)
print("over", flush=True)
while True: time.sleep(0.1)
"""


class Bench:
    def __init__(self, args, work):
        self.args, self.work = args, work
        self.lines, self.failures, self.results = [], [], {}
        if "gpu.memory" not in known_keys(args.rekindle):
            raise SystemExit("this rekindle has no gpu.memory")

    def say(self, line):
        self.lines.append(line)
        print(line, flush=True)

    def stores(self, gib):
        """Whether the disk has room for two images of this size."""
        return not self.args.no_store and free_on(self.work) / 2**30 > 2 * (gib + 3)

    def settings(self, memory, gib):
        return {
            "criu.path": self.args.criu, "restart.backoff": "0s", "restart.min-uptime": "0s", "store.keep-last": 1,
            "store.min-free": "0", "snapshot.staging": "ram", "log.level": "debug", "gpu.memory": memory,
            "gpu.full-copy-every": self.args.full_every,
            # Where the disk has no room for two images, the first must not get there before the trial is over.
            "store.persist-rate": "unlimited" if self.stores(gib) else "1MiB",
        }  # fmt: skip

    def environment(self, name):
        if not self.args.stand_in:
            return {}
        folder = self.work / f"{name}.driver"
        folder.mkdir(exist_ok=True)
        shutil.copy(self.args.stand_in, folder / "libcuda.so.1")
        # Behind the interposer, so that the interposer's next ioctl is the stand-in's.
        preload = {"LD_PRELOAD": str(folder / "libcuda.so.1")}
        return {"LD_LIBRARY_PATH": str(folder), "STANDIN_CUDA_DIR": str(folder), **preload}

    def job(self, name, memory, command, environment=None, gib=1, settings=None):
        name = f"kept{os.getpid()}-{name}"
        environment = {**self.environment(name), **(environment or {})}
        settings = {**self.settings(memory, gib), **(settings or {})}
        return Job(self.args.rekindle, self.work, name, command, settings=settings, environment=environment)

    def trained(self, name, memory, gib):
        steps = Steps(self.work / f"{name}-{memory}.steps")
        if self.args.stand_in:
            command = [sys.executable, ROOT / "integration/jobs/standin_job.py", steps.path, "--mib", int(gib * 1024), "--times"]
        else:
            command = [sys.executable, ROOT / "integration/jobs/bench_torch.py", steps.path, "--gib", gib]
            command += ["--still", self.args.still]
        return command, steps

    def training(self, name, memory, gib, environment=None, settings=None):
        command, steps = self.trained(name, memory, gib)
        return self.job(f"{name}-{memory}", memory, command, environment, gib, settings), steps

    def steps_on(self, steps, more, job, limit=180):
        begun = steps.last()
        wait_for("next step", lambda: steps.last() >= begun + more, limit, job.ended)

    def parts(self, job, mark):
        """How long each part of the restore took, from the log since `mark`."""
        log = job.log.read_text(errors="replace")[mark:]
        found = re.findall(r'\brestore part="(\w+)" took=([0-9.]+)(ns|µs|ms|s)\b', log)
        return ", ".join(f"{name} {float(took) * SCALE[unit]:.2f}" for name, took, unit in found)

    def told(self, job, mark):
        """The figures of the log since `mark`."""
        found = {}
        for line in job.log.read_text(errors="replace")[mark:].splitlines():
            for words, name in TOLD.items():
                if words in line:
                    took = re.search(r"took=([0-9.]+)(ns|µs|ms|s)\b", line)
                    size = re.search(r"bytes=([0-9]+)", line)
                    found[name] = float(took[1]) * SCALE[took[2]] if took else None
                    if size:
                        found[name + " bytes"] = int(size[1])
                    same = re.search(r"same=([1-9][0-9]*)", line)
                    if same:
                        found["same GiB"] = round(int(same[1]) / 2**30, 2)
        return found

    def snapshot(self, job, title):
        mark = len(job.log.read_text(errors="replace")) if job.log.exists() else 0
        image, freeze = job.snapshot(300)
        manifest = job.manifest(image) or {"phases": []}
        took = seconds(manifest)
        kept = sum(piece["bytes"] for piece in (manifest.get("kept") or {}).get("pieces", []))
        pieces = len((manifest.get("kept") or {}).get("pieces", []))
        landed = sum(one["bytes"] for one in manifest.get("landing", []))
        told = self.told(job, mark)
        phases = ", ".join(f"{name} {took[name]:.2f}" for name in PHASES if name in took)
        rate = f", {told['out bytes'] / told['out'] / 1e9:.1f} GB/s out" if told.get("out") else ""
        self.say(
            f"{title}: freeze {freeze:.2f} s ({phases}); {kept / 2**30:.2f} GiB in {pieces} pieces stayed, "
            f"{landed / 2**30:.2f} GiB were landed; {json.dumps(told)}{rate}"
        )
        return image, kept

    def crash(self, job, steps, title):
        mark = len(job.log.read_text(errors="replace"))
        when = time.time()
        os.kill(job.state()["pid"], signal.SIGKILL)
        wait_for("step after the crash", lambda: steps.first_after(when) is not None, 300, job.ended)
        back = steps.first_after(when) - when
        told = self.told(job, mark)
        rate = f", {told['in bytes'] / told['in'] / 1e9:.1f} GB/s in" if told.get("in") else ""
        self.say(f"{title}: crash to step {back:.2f} s ({self.parts(job, mark)}); {json.dumps(told)}{rate}")

    def compare(self, steps, gib):
        step = steps.differs(self.results.setdefault(gib, {}))
        if step is not None:
            raise Failed(f"step {step} of {steps.path.name} has other bits than in another trial of this size")

    def expect_kept(self, kept, gib):
        if not self.args.stand_in and kept < gib * 0.9 * 2**30:
            self.failures.append(f"{gib} GiB: only {kept / 2**30:.2f} GiB stayed on the GPU")

    def table(self):
        for gib in self.args.sizes:
            for memory in self.args.ways.split(","):
                row = self.plain if memory == "plain" else self.row
                self.guard(f"{memory} {gib} GiB", lambda: row(memory, gib))

    def row(self, memory, gib):
        job, steps = self.training(f"table{gib}", memory, gib)
        stored = self.stores(gib)
        try:
            job.start()
            self.steps_on(steps, 3, job)
            # Without a store there is room for one image in memory.
            for number in range(1, 4 if stored else 2):
                image, kept = self.snapshot(job, f"{memory} {gib} GiB, snapshot {number}")
                if memory == "kept":
                    self.expect_kept(kept, gib)
                self.steps_on(steps, 3, job)
                if stored:
                    job.wait_for("image in the store", lambda: job.stored(image), 300)
            for number in (1, 2):
                self.crash(job, steps, f"{memory} {gib} GiB, kill {number}")
                self.steps_on(steps, 3, job)
            if stored:
                self.snapshot(job, f"{memory} {gib} GiB, after the kills")
                self.steps_on(steps, 3, job)
            self.compare(steps, gib)
            lengths = sorted(length for _, _, length, _ in steps.all())
            self.say(f"{memory} {gib} GiB: median step {lengths[len(lengths) // 2] * 1000:.2f} ms, {len(lengths)} steps, same bits")
        finally:
            job.end()
            shutil.rmtree(job.store, ignore_errors=True)

    def plain(self, memory, gib):
        """Without rekindle. One snapshot: each takes as long."""
        command, steps = self.trained(f"table{gib}", memory, gib)
        name = f"kept{os.getpid()}-plain{gib}"
        job = Plain(self.args.rekindle, self.args.criu, self.work, name, command, self.environment(name))
        try:
            self.steps_on(steps, 3, job)
            took = job.snapshot(300)
            phases = ", ".join(f"{phase} {took[phase]:.2f}" for phase in PHASES if phase in took)
            self.say(f"plain {gib} GiB: freeze {took['freeze']:.2f} s ({phases})")
            self.steps_on(steps, 3, job)
            when = job.crash()
            job.restore(300)
            wait_for("step after the crash", lambda: steps.first_after(when) is not None, 300, lambda: None)
            self.say(f"plain {gib} GiB: crash to step {steps.first_after(when) - when:.2f} s")
            self.compare(steps, gib)
        finally:
            job.end()

    def cross(self):
        gib = self.args.sizes[0]
        for memory, other in (("kept", "copied"), ("copied", "kept")):
            job, steps = self.training("cross", memory, gib)
            try:
                job.start()
                self.steps_on(steps, 3, job)
                self.snapshot(job, f"cross, {memory}")
                job.kill_supervisor()
                job.environment["REKINDLE_GPU_MEMORY"] = other
                when = time.time()
                job.start()
                wait_for("step after the restart", lambda: steps.first_after(when) is not None, 300, job.ended)
                self.say(f"an image of {memory} restored with {other}: {steps.first_after(when) - when:.2f} s")
                self.steps_on(steps, 3, job)
                self.snapshot(job, f"cross, {memory} then {other}")
                self.steps_on(steps, 3, job)
                self.crash(job, steps, f"cross, {memory} then {other}")
                self.steps_on(steps, 3, job)
                self.compare(steps, gib)
            finally:
                job.end()
                shutil.rmtree(job.store, ignore_errors=True)

    def machine(self):
        gib = self.args.sizes[0]
        job, steps = self.training("machine", "kept", gib)
        try:
            job.start()
            self.steps_on(steps, 3, job)
            image, _ = self.snapshot(job, "machine")
            job.wait_for("image in the store", lambda: job.stored(image), 300)
            job.lose_machine()
            when = time.time()
            job.start()
            wait_for("step after the restart", lambda: steps.first_after(when) is not None, 300, job.ended)
            self.say(f"from the store: {steps.first_after(when) - when:.2f} s")
            self.steps_on(steps, 3, job)
            self.compare(steps, gib)
        finally:
            job.end()
            shutil.rmtree(job.store, ignore_errors=True)

    def allocate(self):
        for memory in ("copied", "kept"):
            job = self.job(f"allocate-{memory}", memory, [sys.executable, "-c", ALLOCATE]).start()
            try:
                job.wait(120)
                for line in self.printed(job):
                    self.say(f"allocate, {memory}: {line}")
            finally:
                job.end()

    def uncached(self):
        """By turns, so that what changes on the machine meanwhile changes both."""
        lengths = {"copied": [], "kept": []}
        for turn in range(1, 4):
            for memory in lengths:
                job, steps = self.training(f"uncached{turn}", memory, 0.25, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
                try:
                    job.start()
                    self.steps_on(steps, 40, job)
                    # The first ones prepare the libraries.
                    lengths[memory] += [length for _, _, length, _ in steps.all()][5:]
                    if turn == 1 and memory == "kept":
                        self.snapshot(job, "uncached")
                    self.compare(steps, "uncached")
                finally:
                    job.end()
        median = {memory: sorted(all)[len(all) // 2] for memory, all in lengths.items()}
        self.say(
            f"uncached: median step {median['copied'] * 1000:.2f} ms copied, {median['kept'] * 1000:.2f} ms kept, "
            f"{(median['kept'] / median['copied'] - 1) * 100:+.1f} %, {len(lengths['kept'])} steps each"
        )

    def disk(self):
        gib = self.args.sizes[0]
        file = self.work / "dd"
        for _ in range(2):
            began = time.monotonic()
            dd = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={int(gib * 256)}", "conv=fsync"]
            subprocess.run(dd, stderr=subprocess.DEVNULL, check=True, timeout=120)
            self.say(f"dd to this disk, with fsync: {gib * 1.074 / (time.monotonic() - began):.2f} GB/s")
        file.unlink()
        for memory in ("copied", "kept"):
            settings = {"snapshot.staging": "store"}
            job, steps = self.training("disk", memory, gib, settings=settings)
            try:
                job.start()
                self.steps_on(steps, 3, job)
                for number in (1, 2):
                    self.snapshot(job, f"disk, {memory} {gib} GiB, snapshot {number}")
                    self.steps_on(steps, 3, job)
                self.crash(job, steps, f"disk, {memory}")
                self.steps_on(steps, 3, job)
                self.compare(steps, gib)
            finally:
                job.end()
                shutil.rmtree(job.store, ignore_errors=True)

    def printed(self, job):
        words = ("cuMem", "Error", "error", ":")
        lines = job.log.read_text(errors="replace").splitlines()
        return [line for line in lines if not line.startswith("20") and any(word in line for word in words)]

    def notice(self):
        for memory in ("copied", "kept"):
            job = self.job(f"notice-{memory}", memory, [sys.executable, "-c", NOTICE]).start()
            try:
                job.wait_for("end of the questions", lambda: "over" in self.printed_all(job), 120)
                for line in self.printed(job):
                    self.say(f"notice, {memory}: {line}")
                self.snapshot(job, f"notice, {memory}")
            finally:
                job.end()

    def printed_all(self, job):
        return job.log.read_text(errors="replace").splitlines()

    def ranks(self):
        gib = self.args.sizes[0]
        for memory in ("copied", "kept"):
            self.guard(f"ranks {memory}", lambda: self.two_ranks(memory, gib))

    def two_ranks(self, memory, gib):
        steps = Steps(self.work / f"ranks-{memory}.steps")
        command = [
            sys.executable, ROOT / "integration/jobs/bench_torch.py", steps.path, "--gib", gib, "--ranks", 2,
            "--backend", "nccl", "--port", 10170,
        ]  # fmt: skip
        environment = {**ranked(known_keys(self.args.rekindle)), "NCCL_NVLS_ENABLE": "0"}
        job = self.job(f"ranks-{memory}", memory, command, environment).start()
        try:
            self.steps_on(steps, 3, job)
            for number in (1, 2, 3):
                self.snapshot(job, f"two ranks, {memory}, {gib} GiB each, snapshot {number}")
                self.steps_on(steps, 3, job)
            self.crash(job, steps, f"two ranks, {memory}")
            self.steps_on(steps, 3, job)
            self.snapshot(job, f"two ranks, {memory}, after the kill")
            self.steps_on(steps, 3, job)
            self.compare(steps, "ranks")
        finally:
            job.end()
            shutil.rmtree(job.store, ignore_errors=True)

    def used(self):
        if self.args.stand_in:
            return "no GPU"
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.split("\n")

    def leak(self):
        before = self.used()
        for victim in ("supervisor", "copier", "job"):
            job, steps = self.training(f"leak-{victim}", "kept", self.args.sizes[0])
            try:
                job.start()
                self.steps_on(steps, 3, job)
                self.snapshot(job, f"leak, {victim}")
                self.say(f"with kept memory after a snapshot: {self.used()}")
                if victim == "supervisor":
                    job.kill_supervisor()
                elif victim == "copier":
                    children = Path(f"/proc/{job.process.pid}/task").glob("*/children")
                    pids = [int(pid) for child in children for pid in child.read_text().split()]
                    copiers = [pid for pid in pids if b"copy-gpu-memory" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                    self.say(f"killed the process that copies: {copiers}")
                    for pid in copiers:
                        os.kill(pid, signal.SIGKILL)
                    self.steps_on(steps, 3, job)
                    self.snapshot(job, "leak, the next snapshot without it")
                    self.crash(job, steps, "leak, and a kill")
                else:
                    self.crash(job, steps, "leak, a kill")
                if victim != "supervisor":
                    self.steps_on(steps, 3, job)
            finally:
                job.end()
                shutil.rmtree(job.store, ignore_errors=True)
            time.sleep(2)
            self.say(f"before: {before}; after the {victim} was killed and all has ended: {self.used()}")

    def suspend(self):
        before = self.used()
        for memory in ("copied", "kept"):
            job, steps = self.training("suspend", memory, self.args.sizes[0])
            try:
                job.start()
                self.steps_on(steps, 3, job)
                self.snapshot(job, f"suspend, {memory}")
                self.ask(job, "suspend")
                self.say(f"suspended, {memory}: {self.used()}, before the job {before}")
                when = time.time()
                self.ask(job, "resume")
                wait_for("step after the suspension", lambda: steps.first_after(when) is not None, 300, job.ended)
                self.say(f"resumed, {memory}: {steps.first_after(when) - when:.2f} s to a step")
                self.snapshot(job, f"suspend, {memory}, afterwards")
                self.steps_on(steps, 3, job)
                self.crash(job, steps, f"suspend, {memory}, a kill")
                self.steps_on(steps, 3, job)
                self.compare(steps, "suspend")
            finally:
                job.end()
                shutil.rmtree(job.store, ignore_errors=True)

    def ask(self, job, command):
        asked = [job.rekindle, command, job.name, "--store", job.store]
        done = subprocess.run(asked, env=job.environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise Failed(f"{command}: {done.returncode}: {done.stderr}")

    def grows(self):
        gib = self.args.sizes[-1]
        for memory in ("copied", "kept"):
            job, steps = self.training("grows", memory, gib, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
            try:
                job.start()
                self.steps_on(steps, 3, job)
                for number in (1, 2):
                    self.snapshot(job, f"grows, {memory} {gib} GiB, snapshot {number}")
                    self.steps_on(steps, 20, job)
                self.crash(job, steps, f"grows, {memory}")
                self.steps_on(steps, 20, job)
                self.compare(steps, "grows")
            finally:
                job.end()
                shutil.rmtree(job.store, ignore_errors=True)

    def guard(self, title, work):
        began = time.monotonic()
        print(f"== {title}", flush=True)
        try:
            work()
        except (Failed, subprocess.SubprocessError, OSError, KeyError, ValueError, TypeError) as error:
            self.failures.append(f"{title}: {error}")
            print(f"FAILED {title}: {error}", flush=True)
        print(f"   {time.monotonic() - began:.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True)
    parser.add_argument("--criu", required=True)
    parser.add_argument("--sizes", default="1,8,32")
    parser.add_argument("--only", default=",".join(TRIALS))
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--ways", default="copied,kept")
    parser.add_argument("--still", type=float, default=0)
    parser.add_argument("--full-every", type=int, default=1)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--stand-in")
    args = parser.parse_args()
    args.sizes = [int(part) if part.isdigit() else float(part) for part in args.sizes.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="rekindle-bench-kept.", dir=args.dir))
    bench = Bench(args, work)
    try:
        for name in args.only.split(","):
            act = getattr(bench, name)
            act() if name in ("table", "ranks") else bench.guard(name, act)
    finally:
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            for log in [*work.glob("*.log"), *work.glob("store/*/log/criu-*.log")]:
                shutil.copy(log, args.logs / f"{log.parent.name}-{log.name}")
        shutil.rmtree(work, ignore_errors=True)
        print("\n".join(["", *bench.lines, *(f"FAILED {failure}" for failure in bench.failures)]), flush=True)
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
