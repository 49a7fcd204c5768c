"""What a campaign does to a job, and when. Only the standard library."""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable


def kill(pid):
    """kill -9; answers whether there was such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, TypeError):
        return False
    return True


def parents():
    """The parent of each process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            found[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    return found


def below(root):
    """The processes below a process."""
    table, found = parents(), []
    for pid in table:
        above = pid
        while above and above != root:
            above = table.get(above, 0)
        if above and pid != root:
            found.append(pid)
    return found


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def root_of_job(job):
    return job.state().get("pid")


def kill_root(job):
    return kill(root_of_job(job))


def kill_child(job):
    root = root_of_job(job)
    return any([kill(pid) for pid in below(root)]) if root else False


def kill_tree(job):
    """The job's own processes, in one go."""
    root = root_of_job(job)
    return any([kill(pid) for pid in [root, *below(root)]]) if root else False


def kill_reaper(job):
    """The first process of the job's PID namespace: the kernel ends the others."""
    root = root_of_job(job)
    reaper = parents().get(root) if root else None
    return kill(reaper) if reaper and reaper != job.process.pid else False


def kill_criu(job):
    """Whatever CRIU of this supervisor there is, within a second."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if any([kill(pid) for pid in below(job.process.pid) if name_of(pid) == "criu"]):
            return True
    return False


def kill_supervisor(job):
    job.kill_supervisor()
    return True


def kill_both(job):
    kill_tree(job)
    job.kill_supervisor()
    return True


def lose_memory(job):
    """The supervisor dies, and somebody unmounts what it had in memory."""
    job.lose_machine()
    return True


def crash_machine(job):
    """Nothing is left but the disk."""
    kill_tree(job)
    job.lose_machine()
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pass
    return True


def fill(job):
    """Takes the last byte of the store's disk; answers the file that has it."""
    ballast = job.store / "ballast"
    free = shutil.disk_usage(job.store).free
    subprocess.run(["fallocate", "-l", str(max(free - (64 << 10), 1)), ballast], check=False, stderr=subprocess.DEVNULL)
    with open(ballast, "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return ballast


def fill_disk(job):
    """The store's disk is full for some seconds."""
    ballast = fill(job)
    time.sleep(2.5)
    ballast.unlink()
    return True


def fill_disk_and_kill(job):
    """The job dies while the disk is full."""
    ballast = fill(job)
    time.sleep(1)
    kill_tree(job)
    time.sleep(1.5)
    ballast.unlink()
    return True


@dataclass(frozen=True)
class Fault:
    """`weight` is how often it comes; `memory` whether images in memory are lost by it."""

    name: str
    does: Callable
    weight: int = 1
    memory: bool = False
    # When it can come; at any moment without.
    moments: tuple = ()


FAULTS = [
    Fault("job", kill_root, 4),
    Fault("child", kill_child, 3),
    Fault("tree", kill_tree, 2),
    Fault("reaper", kill_reaper, 1),
    Fault("criu", kill_criu, 3, moments=("snapshot", "restart")),
    Fault("supervisor", kill_supervisor, 3),
    Fault("job and supervisor", kill_both, 2),
    Fault("memory", lose_memory, 1, memory=True),
    Fault("machine", crash_machine, 2, memory=True),
    Fault("full disk", fill_disk, 1, moments=("any",)),
    Fault("job, disk full", fill_disk_and_kill, 1, moments=("any",)),
]
# Something is under way in at least half of them.
MOMENTS = ["any", "snapshot", "persist", "restart"]


def wait_for_moment(job, moment, random):
    """Sleeps into a moment; the job works."""
    if moment == "any":
        time.sleep(random.uniform(0, 1.5))
    elif moment == "snapshot":
        time.sleep(random.uniform(0, 0.5))
        job.process.send_signal(signal.SIGUSR1)
        time.sleep(random.uniform(0, 0.12))
    elif moment == "persist":
        job.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 3
        while not job.state().get("persisting") and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.2))
    elif moment == "restart":
        kill_root(job)
        time.sleep(random.uniform(0, 0.4))
