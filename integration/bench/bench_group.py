"""A training over several machines: each GPU of this host is a machine of a group, NCCL's sockets join them.

    bench_group.py --rekindle FILE --etcd FILE [--nodes N] [--kinds ddp,fsdp] [--gib N,N] [--snapshots N] [--steps N]
                   [--kills rank,supervisor,machine] [--bandwidth] [--dir DIR] [--logs DIR] [--minutes N]
                   [--reference SECONDS]

Each trial: torchrun --nnodes N under `rekindle run --nodes N`, snapshots, the kills one after the other, then the run to
its last step. Every loss of every rank, and the digests of the weights, are compared with those of a run without rekindle.
--bandwidth  NCCL's all-reduce over sockets, in the group's network and between network namespaces that a bridge joins
--ip         the program `ip` for that
--reference  the time limit of the run without rekindle. After it the stacks of its ranks are in DIR of --logs

Only the standard library; the jobs (integration/jobs/group_job.py) need PyTorch and a GPU a machine.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from supervised import ROOT, Failed, Job, seconds, wait_for

PHASES = ["barrier", "lock", "cable", "checkpoint", "dump", "restore", "others", "settle", "unlock"]
# One host looks like several to NCCL, and its ranks use sockets.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
PORT = 23790


def lines(path):
    """(number, what was computed, time) of each step."""
    try:
        found = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    return [(int(line[0]), line[1], float(line[2])) for line in found if len(line) == 3]


def torchrun(args, kind, gib, out, node, first):
    job = f"{ROOT}/integration/jobs/group_job.py {kind} --out {out} --gib {gib} --steps {args.steps}"
    return (
        f"exec {sys.executable} -m torch.distributed.run --nnodes {args.nodes} --node-rank {node} --nproc-per-node 1 "
        f"--master-addr {first} --master-port 29511 {job}"
    )


class Member(Job):
    """One machine of a group: a supervisor with a store, a control directory and a staging area of its own."""

    def __init__(self, args, work, name, kind, gib, out, node):
        folders = {part: work / f"{name}.{node}" / part for part in ["store", "control", "staging"]}
        for folder in folders.values():
            folder.mkdir(parents=True)
        settings = {
            "group.coordinator": f"http://127.0.0.1:{PORT}", "group.network": "bridge:rkbench", "group.lease": "5s",
            "control.directory": folders["control"], "snapshot.staging-directory": folders["staging"],
            "snapshot.staging": "ram", "snapshot.rehearse": "off", "store.keep-last": 1, "log.level": "debug",
            "restart.min-uptime": "2s", "store.compression": "none",
        }  # fmt: skip
        command = ["sh", "-c", torchrun(args, kind, gib, out, node, "$REKINDLE_GROUP_FIRST")]
        environment = {**SOCKETS, "REKINDLE_LOCK_TIMEOUT": "20s", "NCCL_HOSTID": f"node{node}", "CUDA_VISIBLE_DEVICES": str(node)}
        super().__init__(
            args.rekindle, work, f"{name}.{node}", command, store=folders["store"], settings=settings,
            environment=environment,
        )  # fmt: skip
        self.command = [args.rekindle, "run", "--store", self.store, "--name", name, "--interval", "off"]
        self.command += ["--nodes", args.nodes, "--node-rank", node, "--", *command]
        self.staging = folders["staging"]

    def areas(self):
        return list(self.staging.glob("*"))

    def rank(self):
        """The process that uses the GPU."""
        pid = self.state()["pid"]
        while True:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children:
                return int(pid)
            pid = children[0]


class Group:
    def __init__(self, args, work, name, kind, gib):
        self.args, self.name = args, name
        self.out = work / f"{name}.out"
        self.out.mkdir()
        self.members = [Member(args, work, name, kind, gib, self.out, node) for node in range(args.nodes)]

    def start(self):
        for member in self.members:
            member.start()

    def steps(self, rank=0):
        return lines(self.out / str(rank))

    def last_step(self):
        found = self.steps()
        return found[-1][0] if found else 0

    def wait_for(self, what, condition, limit):
        def alive():
            return next((why for member in self.members if (why := member.ended())), None)

        wait_for(f"{what} ({self.name})", condition, limit, alive)

    def goes_on(self, more, limit=120):
        start = self.last_step()
        self.wait_for(f"step {start + more}", lambda: self.last_step() >= start + more, limit)

    def snapshot(self):
        """The phases and the freeze of each machine."""
        before = [member.state().get("last_image") for member in self.members]
        self.members[0].process.send_signal(signal.SIGUSR1)

        def done():
            now = [member.state() for member in self.members]
            why = next((state["last_failure"] for state in now if state.get("last_failure")), None)
            if why:
                raise Failed(f"{self.name}: {why}")
            return all(
                state.get("last_image") != image and state.get("state") == "running"
                for state, image in zip(now, before, strict=True)
            )

        self.wait_for("a group image", done, 120)
        found = []
        for member in self.members:
            state = member.state()
            image, freeze = state["last_image"], state["last_freeze_us"] / 1e6
            self.wait_for(f"image {image} in the store", lambda m=member, i=image: m.stored(i), 120)
            manifest = member.manifest(image)
            found.append({**(seconds(manifest) if manifest else {}), "freeze": freeze})
        return found

    def kill(self, what):
        """Answers the seconds until the next step."""
        victim = self.members[-1]
        killed = time.time()
        if what == "rank":
            os.kill(victim.rank(), 9)
        elif what == "supervisor":
            victim.kill_supervisor()
            victim.start()
        else:
            victim.lose_machine()
            victim.start()

        # What was under way when it was killed ends at once or never.
        def after():
            return [at for _, _, at in self.steps() if at > killed + 0.4]

        self.wait_for(f"a step after the loss of a {what}", after, 240)
        return after()[0] - killed

    def end(self):
        for member in self.members:
            if member.process is not None and member.process.poll() is None:
                member.process.send_signal(15)
        for member in self.members:
            member.end()


def reference(args, kind, gib, work):
    """The same training without rekindle, over sockets too: with more than two ranks the order of a sum depends on how NCCL
    joins them."""
    out = work / f"reference-{kind}-{gib:g}"
    out.mkdir()
    print(f"{kind} {gib:g} GiB: without rekindle", flush=True)
    logs = [open(out / f"{node}.log", "w+") for node in range(args.nodes)]
    # A rank that hangs writes where it does.
    environment = {**os.environ, **SOCKETS, "NCCL_SOCKET_IFNAME": "lo", "GROUP_JOB_STACKS": "60"}
    nodes = [
        subprocess.Popen(
            ["sh", "-c", torchrun(args, kind, gib, out, node, "127.0.0.1")],
            env={**environment, "NCCL_HOSTID": f"node{node}", "CUDA_VISIBLE_DEVICES": str(node)},
            stdout=log, stderr=log, start_new_session=True,
        )
        for node, log in enumerate(logs)
    ]  # fmt: skip
    try:
        end = time.monotonic() + args.reference
        codes = [node.wait(max(0, end - time.monotonic())) for node in nodes]
    except subprocess.TimeoutExpired:
        codes = ["none"]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    if any(codes):
        steps = [number for rank in range(args.nodes) for number, _, _ in lines(out / str(rank))[-1:]]
        if args.logs:
            for node in range(args.nodes):
                shutil.copy(out / f"{node}.log", args.logs / f"reference-{kind}-{node}.log")
        raise Failed(f"the run without rekindle ended with {codes} in {args.reference} s, at the steps {steps}")
    return [{number: value for number, value, _ in lines(out / str(rank))} for rank in range(args.nodes)]


def trial(args, work, kind, gib):
    name = f"{kind}{gib:g}".replace(".", "-")
    found = {"kind": kind, "gib": gib, "snapshots": [], "kills": [], "why": ""}
    group = None
    try:
        expected = reference(args, kind, gib, work)
        group = Group(args, work, name, kind, gib)
        group.start()
        group.wait_for("the first steps", lambda: group.last_step() >= 3, 180)
        for number in range(args.snapshots):
            time.sleep(0.3 + 0.017 * number)
            found["snapshots"] += group.snapshot()
            group.goes_on(2)
        for what in args.kills:
            found["kills"].append((what, group.kill(what)))
            print(f"{kind} {gib:g} GiB: {what} {found['kills'][-1][1]:.1f} s", flush=True)
            group.goes_on(3)
        group.wait_for("the last step", lambda: group.last_step() > args.steps, 300)
        time.sleep(0.5)
        for rank, values in enumerate(expected):
            for number, value, _ in group.steps(rank):
                if values.get(number) != value:
                    raise Failed(f"WRONG: rank {rank} computed {value} in step {number}, not {values.get(number)}")
            if group.steps(rank)[-1][0] != args.steps + 1:
                raise Failed(f"rank {rank} did not come to its end")
        found["why"] = "bit-identical"
    except (Failed, subprocess.TimeoutExpired) as error:
        found["why"] = str(error)
    finally:
        if group is not None:
            if args.logs:
                for member in group.members:
                    shutil.copy(member.log, args.logs / f"{member.name}.log")
            group.end()
    return found


def bandwidths(args, work):
    """GB/s over sockets: in the group's network, and without rekindle over the loopback device."""
    group = Group(args, work, "bandwidth", "bandwidth", 0)
    try:
        group.start()
        for member in group.members:
            member.wait(180)
        inside = (group.out / "0").read_text().strip()
        if args.logs:
            shutil.copy(group.members[0].log, args.logs / "bandwidth.log")
    finally:
        group.end()
    out = work / "bandwidth.plain"
    out.mkdir()
    nodes = []
    try:
        for node, enter in enumerate(plain_network(args)):
            command = torchrun(args, "bandwidth", 0, out, node, "10.214.0.1")
            environment = {"NCCL_HOSTID": f"node{node}", "CUDA_VISIBLE_DEVICES": str(node), "NCCL_SOCKET_IFNAME": "eth0"}
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            nodes.append(subprocess.Popen([*enter, "sh", "-c", command], env={**os.environ, **SOCKETS, **environment}))
        for node in nodes:
            node.wait(180)
    finally:
        for node in range(args.nodes):
            subprocess.run([args.ip, "netns", "delete", f"rkplain{node}"], check=False)
        subprocess.run([args.ip, "link", "delete", "rkplain"], check=False)
    plain = (out / "0").read_text().strip()
    print(f"all-reduce over sockets, GB/s: {inside} in the group, {plain} between plain network namespaces", flush=True)


def plain_network(args):
    """A network namespace for each node, joined by a bridge; answers how to enter each."""

    def ip(*words):
        subprocess.run([args.ip, *map(str, words)], check=True)

    ip("link", "add", "rkplain", "type", "bridge")
    ip("link", "set", "rkplain", "up")
    for node in range(args.nodes):
        name = f"rkplain{node}"
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", "rkplain", "up")
        ip("-n", name, "address", "add", f"10.214.0.{node + 1}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    return [[args.ip, "netns", "exec", f"rkplain{node}"] for node in range(args.nodes)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rekindle", required=True, type=Path)
    parser.add_argument("--etcd", required=True, type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--reference", type=int, default=300)
    parser.add_argument("--kinds", default="ddp,fsdp")
    parser.add_argument("--gib", default="4")
    parser.add_argument("--snapshots", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", default="rank,supervisor,machine")
    parser.add_argument("--bandwidth", action="store_true")
    parser.add_argument("--ip", default="ip")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--minutes", type=float, default=9)
    args = parser.parse_args()
    # The jobs are ended then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.kills = [what for what in args.kills.split(",") if what]
    end = time.monotonic() + args.minutes * 60
    rows = []
    with tempfile.TemporaryDirectory(prefix="rekindle-group-", dir=args.dir) as folder:
        work = Path(folder)
        with open(work / "etcd.log", "w") as log:
            client, peer = f"http://127.0.0.1:{PORT}", f"http://127.0.0.1:{PORT + 1}"
            etcd = subprocess.Popen(
                [
                    args.etcd, "--data-dir", work / "etcd", "--listen-client-urls", client, "--advertise-client-urls",
                    client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
                    f"default={peer}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            if args.bandwidth:
                bandwidths(args, work)
            for kind in args.kinds.split(",") if args.kinds else []:
                for gib in map(float, args.gib.split(",")):
                    if time.monotonic() > end:
                        print(f"{kind} {gib:g} GiB: no time left")
                        continue
                    rows.append(trial(args, work, kind, gib))
                    print(f"{kind} {gib:g} GiB: {rows[-1]['why'][:500]}", flush=True)
        finally:
            etcd.kill()
            etcd.wait()
    print("\nSeconds, median and (largest) of all machines; a kill until the next step:\n")
    print(" | ".join(["kind", "machines", "GiB a rank", "snapshots", *PHASES, "freeze", "kills", "note"]))
    for row in rows:
        cells = [row["kind"], str(args.nodes), f"{row['gib']:g}", str(len(row["snapshots"]) // args.nodes)]
        for phase in [*PHASES, "freeze"]:
            values = [snapshot[phase] for snapshot in row["snapshots"] if phase in snapshot]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "")
        kills = ", ".join(f"{what} {took:.1f}" for what, took in row["kills"])
        print(" | ".join([*cells, kills, row["why"][:200]]))


main()
