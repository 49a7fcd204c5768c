#!/usr/bin/env python3
"""Jobs of many processes that count, check themselves, and end when told to, as those of kinds.py do.

    trees.py KIND FOLDER [[HOST] PORT | DEVICE...]
"""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import termios
import threading
import time

sys.dont_write_bytecode = True

from kinds import FOLDER, count, need, path, say  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)


def number(n):
    return struct.pack("Q", n)


def set_up_ring():
    """io_uring_setup(2) with 8 entries: the ring, or the error as a negative number."""
    parameters = ctypes.create_string_buffer(120)
    ring = LIBC.syscall(425, 8, parameters)
    return ring if ring >= 0 else -ctypes.get_errno()


def falls_back():
    """Tries a ring first, as libuv does, in itself and in a child, and counts with what it gets."""
    say("first", set_up_ring())

    def check(_):
        ring = set_up_ring()
        need(ring == -errno.ENOSYS, "io_uring_setup says", ring)
        child = os.fork()
        if child == 0:
            os._exit(set_up_ring() != -errno.ENOSYS)
        need(os.waitpid(child, 0)[1] == 0, "a child has an io_uring")
        # Other calls are what they were.
        need(LIBC.syscall(39) == os.getpid(), "getpid")
        need(LIBC.syscall(9999) == -1 and ctypes.get_errno() == errno.ENOSYS, "a call that is none")

    count(check)


REQUEST_PERMISSION, NO_FEATURE, ONLY_X32 = 0x1023, 999, 1 << 30


def arch_prctl(option, argument, number=158):
    """arch_prctl(2): 0, or the error as a negative number."""
    return 0 if LIBC.syscall(number, option, argument) == 0 else -ctypes.get_errno()


def has_no_amx():
    """Asks for a feature that no CPU has, so that the kernel's own answer is another error than the filter's."""
    say("first", arch_prctl(REQUEST_PERMISSION, NO_FEATURE))

    def check(_):
        need(arch_prctl(REQUEST_PERMISSION, NO_FEATURE) == -errno.EOPNOTSUPP, "AMX can be requested")
        need(arch_prctl(REQUEST_PERMISSION | 1 << 32, 18) == -errno.EOPNOTSUPP, "AMX can be requested by a long number")
        need(arch_prctl(REQUEST_PERMISSION, 18, 158 | ONLY_X32) == -errno.EOPNOTSUPP, "AMX can be requested by the number of x32")
        features = ctypes.c_uint64()
        need(arch_prctl(0x1022, ctypes.byref(features)) == 0 and not features.value >> 18 & 1, "the permission", features.value)
        need(arch_prctl(9999, 0) == -errno.EINVAL, "an option that is none")

    count(check)


def has_a_ring():
    ring = set_up_ring()
    say("ring", ring)
    count(lambda n: need(n < 3 or os.path.exists("/proc/self/fd/%d" % ring), "the ring is gone"))


def chain(depth):
    """Each process is the child of the one before, every other one in a session of its own; a number goes down and back up."""
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    if os.fork() != 0:

        def check(n):
            os.write(from_parent, number(n))
            answer = struct.unpack("Q", os.read(to_parent, 8))[0]
            need(answer == n + depth, "the chain says", answer, "to", n)

        count(check)
    level, parent = 1, os.getppid()
    lower_out, lower_in = None, None
    read, write = to_child, from_child
    while level < depth:
        down, up = os.pipe(), os.pipe()
        if os.fork() != 0:
            lower_in, lower_out = down[1], up[0]
            break
        level, parent = level + 1, os.getppid()
        read, write = down[0], up[1]
        if level % 2:
            os.setsid()
    while True:
        data = os.read(read, 8)
        if len(data) != 8 or os.getppid() != parent:
            os._exit(1)
        if lower_in is not None:
            os.write(lower_in, data)
            data = os.read(lower_out, 8)
        os.write(write, number(struct.unpack("Q", data)[0] + 1))


def comers():
    """Children, grandchildren in sessions of their own, and threads that all come and go all the time, with memory and pipes."""
    born = [0]

    def come_and_go(mine):
        while True:
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                if mine % 2:
                    os.setsid()
                block = bytearray(1 << 20)
                grandchild = os.fork()
                if grandchild == 0:
                    os.write(into, b"g" * 5)
                    os._exit(block[0])
                os.waitpid(grandchild, 0)
                os.write(into, b"c")
                os._exit(mine)
            _, status = os.waitpid(child, 0)
            need(os.waitstatus_to_exitcode(status) == mine, "a child ended with", status)
            need(os.read(out, 10) == b"gggggc", "a pipe lost something")
            os.close(out)
            os.close(into)
            born[0] += 1

    for mine in range(3):
        threading.Thread(target=come_and_go, args=(mine,), daemon=True).start()

    def last(_):
        before, until = born[0], time.monotonic() + 20
        while born[0] == before:
            need(time.monotonic() < until, "no child is born any more")
            time.sleep(0.01)

    count(last=last)


def terminal():
    """A child on a terminal that this process made, as script(1) and every terminal in a browser do."""
    master, slave = os.openpty()
    if os.fork() == 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in 0, 1, 2:
            os.dup2(slave, fd)
        os.close(master)
        os.close(slave)
        while True:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            os.write(1, b"heard %s on a terminal: %d\n" % (line.strip().encode(), os.isatty(0)))
    os.close(slave)
    attributes = termios.tcgetattr(master)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(master, termios.TCSANOW, attributes)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 33, 111, 0, 0))
    rest = b""

    def check(n):
        nonlocal rest
        os.write(master, b"%d\n" % n)
        while b"\n" not in rest:
            need(select.select([master], [], [], 20)[0], "the terminal is silent")
            rest += os.read(master, 1000)
        line, rest = rest.split(b"\n", 1)
        need(line.strip() == b"heard %d on a terminal: 1" % n, "the terminal says", line)
        size = struct.unpack("4H", fcntl.ioctl(master, termios.TIOCGWINSZ, b"\0" * 8))
        need(size[:2] == (33, 111), "its size is", size)

    count(check)


class Shared:
    """Shared memory without a name and a child that adds to a number in it, by way of two semaphores."""

    def __init__(self, memory, up, down):
        """`up(i)` and `down(i)` are those of semaphore i."""
        self.memory, self.up, self.down = memory, up, down
        if os.fork() == 0:
            while True:
                down(0)
                memory[8:16] = number(struct.unpack("Q", memory[0:8])[0] * 3)
                up(1)

    def check(self, n):
        need(struct.unpack("Q", self.memory[0:8])[0] == n - 1, "shared memory at", n)
        self.memory[0:8] = number(n)
        self.up(0)
        self.down(1)
        need(struct.unpack("Q", self.memory[8:16])[0] == 3 * n, "the child's word at", n)


def failed(result):
    need(result != -1, os.strerror(ctypes.get_errno()))
    return result


def posix_semaphores(memory):
    """Two unnamed ones at byte 64 of memory that is shared: of 32 bytes each, for processes, at 0."""
    at = [ctypes.c_char.from_buffer(memory, 64 + 32 * i) for i in range(2)]
    for semaphore in at:
        failed(LIBC.sem_init(ctypes.byref(semaphore), 1, 0))
    return lambda i: failed(LIBC.sem_post(ctypes.byref(at[i]))), lambda i: failed(LIBC.sem_wait(ctypes.byref(at[i])))


def shared_without_name():
    """As DataLoader's workers and NCCL have it: a file of /dev/shm that lost its name at once, and a memfd."""
    name = "/dev/shm/" + os.path.basename(FOLDER) + "-nameless"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(name)
    memfd = os.memfd_create("shared")
    each = []
    for fd in file, memfd:
        os.ftruncate(fd, 4 << 20)
        memory = mmap.mmap(fd, 4 << 20)
        memory[4096:8192] = b"\7" * 4096
        each.append(Shared(memory, *posix_semaphores(memory)))
    os.close(memfd)

    def check(n):
        for shared in each:
            shared.check(n)
            need(shared.memory[4096:8192] == b"\7" * 4096, "shared memory lost something")
        # The descriptor and the mapping are of one file.
        need(os.pread(file, 8, 0) == number(n), "the file is another than the mapping")

    count(check)


def named_semaphores():
    """sem_open(3), as multiprocessing has them: one with a name, and one that lost it at once."""
    LIBC.sem_open.restype = ctypes.c_void_p
    create = os.O_CREAT | os.O_EXCL
    names = [b"/%s-%d" % (os.path.basename(FOLDER).encode(), i) for i in range(2)]
    both = [ctypes.c_void_p(LIBC.sem_open(name, create, 0o600, 0)) for name in names]
    need(all(semaphore.value for semaphore in both), "sem_open")
    failed(LIBC.sem_unlink(names[1]))
    memory = mmap.mmap(-1, 4096)
    shared = Shared(memory, lambda i: failed(LIBC.sem_post(both[i])), lambda i: failed(LIBC.sem_wait(both[i])))
    count(shared.check, lambda _: failed(LIBC.sem_unlink(names[0])))


def system_v():
    """Shared memory, semaphores and a queue of messages, found by their numbers only."""
    private, create = 0, 0o1600
    LIBC.shmat.restype = ctypes.c_void_p
    segment = failed(LIBC.shmget(private, 1 << 20, create))
    address = LIBC.shmat(segment, None, 0)
    memory = (ctypes.c_char * (1 << 20)).from_address(address)
    semaphores = failed(LIBC.semget(private, 2, create))
    queue = failed(LIBC.msgget(private, create))

    class Message(ctypes.Structure):
        _fields_ = [("kind", ctypes.c_long), ("text", ctypes.c_char * 8)]

    failed(LIBC.msgsnd(queue, ctypes.byref(Message(5, b"waiting")), 8, 0))

    def operate(i, by):
        # It is not begun again after a stop (signal(7)), which each snapshot is.
        while LIBC.semop(semaphores, struct.pack("Hhh", i, by, 0), 1) == -1:
            need(ctypes.get_errno() == errno.EINTR, "semop", os.strerror(ctypes.get_errno()))

    shared = Shared(memory, lambda i: operate(i, 1), lambda i: operate(i, -1))

    def last(_):
        message = Message()
        failed(LIBC.msgrcv(queue, ctypes.byref(message), 8, 5, 0))
        need(message.text == b"waiting", "the message is", message.text)

    count(shared.check, last)


def large_ghost(mib):
    file = open(path("gone"), "w+b", buffering=0)
    os.unlink(path("gone"))
    for _ in range(mib):
        file.write(os.urandom(4096) * 256)
    size = mib << 20
    count(last=lambda _: need(os.fstat(file.fileno()).st_size == size, "the file has another size"))


def connection(address="127.0.0.1"):
    """Two processes with a connection, and a listener that does not reuse its port (SO_REUSEADDR)."""
    server = socket.socket()
    server.bind((address, 0))
    server.listen()
    say("port", server.getsockname()[1])
    if os.fork() == 0:
        client = socket.create_connection(server.getsockname())
        while True:
            data = client.recv(8)
            if not data:
                os._exit(0)
            client.sendall(number(struct.unpack("Q", data)[0] * 2))
    return server, server.accept()[0]


def ask(peer, n):
    peer.sendall(number(n))
    answer = struct.unpack("Q", peer.recv(8))[0]
    need(answer == 2 * n, "the other end says", answer)


def ranks():
    """Talk over one connection that stays, and over new ones all the time, which leave the port in TIME_WAIT on both ends."""
    server, peer = connection()

    def check(n):
        ask(peer, n)
        client = socket.create_connection(server.getsockname())
        short = server.accept()[0]
        for one, other in (short, client), (client, short):
            one.sendall(b"x")
            need(other.recv(1) == b"x", "a short connection")
        # Both sides are in turn the one that waits.
        (short if n % 2 else client).close()
        (client if n % 2 else short).close()

    count(check)


def late_event():
    """Watches a folder, in which it makes a file when CRIU is started; it learns of it a moment later."""
    begun = sys.argv[3]
    watch = LIBC.inotify_init1(os.O_NONBLOCK)
    os.mkdir(path("watched"))
    LIBC.inotify_add_watch(watch, path("watched").encode(), 0x100)  # IN_CREATE
    learnt = []

    def wait():
        while not os.path.exists(begun):
            time.sleep(0.0002)
        made = time.monotonic()
        open(path("watched/new"), "w").close()
        open(path("made"), "w").close()
        # CRIU has looked.
        while not os.path.exists(path("tried")):
            time.sleep(0.01)
        try:
            learnt.append(b"new" in os.read(watch, 4096))
        except BlockingIOError:
            learnt.append(False)
        say("learnt", time.monotonic() - made)

    threading.Thread(target=wait, daemon=True).start()
    count(lambda _: need(learnt in ([], [True]), "the event is lost"))


def late_connection():
    """Has one connection, to a server outside, until CRIU is started (the file `begun` is there); then one inside."""
    port, begun = sys.argv[3:5]
    outside = socket.create_connection(("127.0.0.1", int(port)))
    need(not os.path.exists(begun), "CRIU has begun already")
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    ends = []

    def wait():
        while not os.path.exists(begun):
            time.sleep(0.0002)
        client = socket.create_connection(server.getsockname())
        ends.extend([server.accept()[0], client])
        open(path("made"), "w").close()
        say("connected", outside.fileno() > 0)

    threading.Thread(target=wait, daemon=True).start()

    def check(n):
        if ends:
            ends[0].sendall(number(n))
            need(ends[1].recv(8) == number(n), "the other end says")

    count(check)


def inside_and_outside():
    """One connection within the job, one with a server outside of it, which is connected anew when it breaks."""
    _, peer = connection()
    there = ("127.0.0.1", int(sys.argv[3]))
    outside = socket.create_connection(there)
    lost = 0

    def check(n):
        nonlocal outside, lost
        ask(peer, n)
        try:
            try:
                if outside.recv(1, socket.MSG_DONTWAIT) == b"":
                    say("what it has sent", "looks complete")
            except BlockingIOError:
                pass
            outside.sendall(b"?")
            alive = outside.recv(1) == b"!"
        except OSError as error:
            say("lost", error.strerror)
            alive = False
        if not alive:
            lost += 1
            say("connections lost", lost)
            outside = socket.create_connection(there)

    count(check)


def uplink():
    """Two processes in a network of their own, connected over loopback and over the uplink's address, with datagrams at that too;
    and a server outside, connected anew when that breaks."""
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.bind(("10.0.2.100", 0))
    other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    other.bind(("10.0.2.100", 0))
    other.settimeout(1)
    peers = [connection(address)[1] for address in ("127.0.0.1", "10.0.2.100")]
    names = open("/etc/resolv.conf")
    need("nameserver 10.0.2.3\n" in names, "no name server")
    there = (sys.argv[3], int(sys.argv[4]))
    outside, lost, found = None, 0, 0

    def check(n):
        nonlocal outside, lost, found
        for peer in peers:
            ask(peer, n)
        # One that waits in a socket at the snapshot is lost, as any datagram can be.
        while True:
            own.sendto(number(n), other.getsockname())
            try:
                got, sender = other.recvfrom(8)
            except TimeoutError:
                continue
            need(sender == own.getsockname(), "a datagram")
            if got == number(n):
                break
        try:
            if outside is None:
                outside = socket.create_connection(there, timeout=3)
                found += 1
                say("connections", found)
            outside.sendall(b"?")
            need(outside.recv(1) == b"!", "the server answers wrong")
        except OSError as error:
            if outside is not None:
                lost += 1
                say("lost", lost, error)
            outside = None

    def last(_):
        names.seek(0)
        need("nameserver 10.0.2.3\n" in names, "no name server")

    count(check, last)


def waiting_to_be_accepted():
    """A listener with connections that it has not accepted: one from the job itself, others from outside."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    own = socket.create_connection(server.getsockname())
    need(own.getpeername() == server.getsockname(), "names")
    say("port", server.getsockname()[1])

    def last(_):
        # What waited is gone with the restore, and others come.
        client = socket.create_connection(server.getsockname())
        while server.accept()[1] != client.getsockname():
            pass

    count(last=last)


def devices(mapped=False, other=False, libraries=()):
    """Has devices open that stand for NVIDIA's, and a child by fork: tells what they are, and that no call works in the end."""
    control, memory, unknown = sys.argv[3:6]
    file = os.open(control, os.O_RDWR)
    loaded = []
    for name in libraries:
        # The memory's device too, as OpenCL opens it.
        path = os.path.join(sys.argv[2], name)
        with open(path, "wb+") as library:
            library.write(bytes(4096))
            library.flush()
            loaded.append(mmap.mmap(library.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ))
        block = os.open(memory, os.O_RDONLY)
        held = mmap.mmap(block, 8192, mmap.MAP_SHARED, mmap.PROT_READ)
    if mapped:
        block = os.open(memory, os.O_RDWR)
        held = mmap.mmap(block, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if other:
        os.open(unknown, os.O_RDONLY)
    child = os.fork()
    while child == 0:
        say("child has", os.readlink("/proc/self/fd/%d" % file))
        time.sleep(0.02)

    def last(_):
        os.kill(child, 9)
        os.waitpid(child, 0)

    def check(_):
        name = os.readlink("/proc/self/fd/%d" % file)
        say("job has", name)
        if name == "/dev/null":
            try:
                fcntl.ioctl(file, 0xC020462A, b"\0" * 32)
                need(False, "a call of it works")
            except OSError as error:
                need(error.errno == errno.ENOTTY, "a call of it says", error)
        need(not mapped or len(held) == 8192)
        need(all(not any(library[:]) for library in loaded))

    count(check, last)


def devices_of_a_child():
    """Starts a child that has a device mapped, as a CUDA program has when it starts, until the file `tried` is there."""
    child = os.fork()
    if child == 0:
        block = os.open(sys.argv[4], os.O_RDWR)
        held = mmap.mmap(block, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        while not os.path.exists(path("tried")):
            time.sleep(0.005)
        held.close()
        os._exit(0)
    threading.Thread(target=os.waitpid, args=(child, 0)).start()
    count(lambda _: None)


KINDS = {
    "devices-of-a-child": devices_of_a_child,
    "devices-asked": devices,
    "devices-opencl": lambda: devices(libraries=["libnvidia-opencl.so.1"]),
    "devices-hwloc": lambda: devices(mapped=True, libraries=["hwloc_opencl.so", "libnvidia-opencl.so.1"]),
    "devices-mapped": lambda: devices(mapped=True),
    "devices-other": lambda: devices(other=True),
    "uring": falls_back,
    "uring-open": has_a_ring,
    "amx": has_no_amx,
    "deep": lambda: chain(60),
    "comers": comers,
    "terminal": terminal,
    "shared-without-name": shared_without_name,
    "named-semaphores": named_semaphores,
    "system-v": system_v,
    "ghost-64": lambda: large_ghost(64),
    "ghost-1200": lambda: large_ghost(1200),
    "ranks": ranks,
    "late-event": late_event,
    "late-connection": late_connection,
    "inside-and-outside": inside_and_outside,
    "uplink": uplink,
    "waiting": waiting_to_be_accepted,
}
KINDS[sys.argv[1]]()
