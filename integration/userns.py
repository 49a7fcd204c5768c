"""Runs a command as root of a new user namespace, with network and mount namespaces of its own.

    python3 integration/userns.py COMMAND ARGS...

There it has CAP_SYS_RESOURCE over all its children, which CRIU needs for jobs of another user and which the root of many
containers and virtual machines lacks. A restore does not work there (SO_SNDBUFFORCE asks for rights over the whole machine), a dump does, and its image can be
restored outside. Needs root, because all ids are mapped.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def bring_up_loopback():
    """CRIU tries its TCP functions on it before anything else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def main():
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    # The maps have to be written from outside: by a child that was made before, so that the pid stays the command's.
    child = os.fork()
    if child == 0:
        os.close(writer)
        if os.read(reader, 1) == b"x":
            for name in "uid_map", "gid_map":
                with open(f"/proc/{os.getppid()}/{name}", "w") as table:
                    table.write("0 0 65536\n")
        os._exit(0)
    # The network namespace must belong to the user namespace, or CRIU may not do to sockets what it needs to.
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET):
        sys.exit("userns: unshare: " + os.strerror(ctypes.get_errno()))
    os.write(writer, b"x")
    os.waitpid(child, 0)
    os.setgid(0)
    os.setuid(0)
    bring_up_loopback()
    os.execvp(sys.argv[1], sys.argv[1:])


if len(sys.argv) < 2:
    sys.exit(__doc__)
main()
