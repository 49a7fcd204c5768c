#!/usr/bin/env python3
"""mpirun (Open MPI 4) over the machines of a group, without ssh. The same command on each machine:

    srun --ntasks-per-node=1 rekindle run --group -- python3 mpirun.py 8 --mca btl tcp,self ./solver

The first argument is the number of processes on each machine. The rest are options of mpirun, and the program.

On the machine with rank 0 this runs mpirun. On the others it waits for the order to start Open MPI's daemon, and becomes that
daemon. mpirun gives the order through this file, which it starts in place of ssh.

The order is accepted from rank 0 only, and through the network of the group. It needs Python 3.8, and nothing else.
"""

import os
import socket
import sys
import time

# A port of the job's own network, in which nothing else listens before the job does.
PORT = int(os.environ.get("REKINDLE_MPIRUN_PORT", "4700"))
# How long the others may need until they wait for the order.
LIMIT = 300


def machines():
    """The name of the group, and the number of machines."""
    try:
        # GROUP.RANK
        return os.environ["REKINDLE_JOB"].rpartition(".")[0], int(os.environ["REKINDLE_GROUP_SIZE"])
    except KeyError as missing:
        sys.exit(f"mpirun.py: {missing} is not set: run it with `rekindle run --group`")


def run(per_machine, args):
    """mpirun itself, on the first machine."""
    group, size = machines()
    here = os.path.abspath(__file__)
    if any(letter in here + sys.executable for letter in " :"):
        sys.exit(f"mpirun.py: Open MPI cannot start {here}: its path must have no blank and no colon")
    settings = {
        "plm_rsh_agent": f"{sys.executable} {here} --order",
        # The order is over once the daemon has begun, and the daemon stays the job's first process on its machine.
        "orte_leave_session_attached": "1",
        "plm_rsh_no_tree_spawn": "1",
        # Only these connections are kept in an image.
        "oob_tcp_if_include": "rk0",
        "btl_tcp_if_include": "rk0",
    }
    for name, value in settings.items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    hosts = ",".join(f"{group}-{rank}:{per_machine}" for rank in range(size))
    command = ["mpirun", "--host", hosts, "-n", str(per_machine * size), *args]
    os.execvp(command[0], command)


def wait():
    """Becomes the daemon of this machine when the order comes."""
    first = os.environ["REKINDLE_GROUP_FIRST"]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((os.environ["REKINDLE_GROUP_OWN"], PORT))
        listener.listen()
        while True:
            connection, (sender, _) = listener.accept()
            with connection:
                if sender != first:
                    continue
                order = b""
                while piece := connection.recv(65536):
                    order += piece
                # Whole only with its mark: rank 0 may have ended in the middle.
                if order.endswith(b"\0"):
                    connection.sendall(b"\0")
                    break
    os.execv("/bin/sh", ["sh", "-c", order[:-1].decode()])


def order(host, command):
    """What mpirun starts in place of ssh."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            with socket.create_connection((host, PORT), timeout=5) as connection:
                connection.settimeout(None)
                connection.sendall(" ".join(command).encode() + b"\0")
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1) == b"\0":
                    return
        except OSError as error:
            if time.monotonic() > until:
                sys.exit(f"mpirun.py: {host} does not wait for an order: {error}. Is this the command on all machines?")
        time.sleep(0.2)


def main():
    args = sys.argv[1:]
    if args[:1] == ["--order"] and len(args) > 2:
        return order(args[1], args[2:])
    if len(args) < 2 or not args[0].isdecimal() or args[0] == "0":
        sys.exit("usage: mpirun.py PROCESSES_PER_MACHINE [OPTION OF MPIRUN]... PROGRAM [ARGUMENT]...")
    machines()
    if os.environ["REKINDLE_GROUP_RANK"] == "0":
        return run(int(args[0]), args[1:])
    return wait()


main()
