#!/usr/bin/env python3
"""Jobs of many kinds that count, check themselves, and end when told to.

    kinds.py KIND FOLDER

Prints "n 1", "n 2" and so on, and checks its own state before each; ends with 7 when something is not as it was left.
Once FOLDER/finish is there, it makes its last checks, prints "done" and ends with 0.
"""

import ctypes
import fcntl
import glob
import hashlib
import mmap
import os
import random
import select
import signal
import shutil
import socket
import stat
import struct
import sys
import termios
import threading
import time
import tty
import zlib

KIND, FOLDER = sys.argv[1], sys.argv[2]


def path(name):
    return os.path.join(FOLDER, name)


def say(*words):
    # One write a line: the file is shared with children.
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def need(true, *words):
    if not true:
        say("WRONG", *words)
        os._exit(7)


def count(check=lambda n: None, last=lambda n: None, pause=0.02):
    n = 0
    while True:
        n += 1
        check(n)
        say("n", n)
        if os.path.exists(path("finish")):
            last(n)
            say("done")
            sys.stdout.flush()
            os._exit(0)
        time.sleep(pause)


def await_all(done, why):
    until = time.monotonic() + 20
    while not done():
        need(time.monotonic() < until, why)
        time.sleep(0.01)


def threads(number):
    counters = [0] * number

    def work(mine):
        private = 0
        while True:
            private += 1
            counters[mine] += 1
            if private != counters[mine]:
                need(False, "thread", mine, private, counters[mine])
            time.sleep(0.05)

    for mine in range(number):
        threading.Thread(target=work, args=(mine,), daemon=True).start()
    seen = [0] * number
    moved = [time.monotonic()] * number

    def check(_):
        now = time.monotonic()
        for at, value in enumerate(counters):
            if value != seen[at]:
                seen[at], moved[at] = value, now
            # The time in which the job was dead counts as well.
            need(now - moved[at] < 20, "thread", at, "stands still")

    def last(_):
        before = list(counters)
        await_all(lambda: all(now > then for now, then in zip(counters, before)), "a thread does not run")

    count(check, last)


def pipes():
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    if os.fork() == 0:
        total = 0
        while True:
            number = os.read(to_child, 8)
            if len(number) != 8:
                os._exit(0)
            total += struct.unpack("Q", number)[0]
            os.write(from_child, struct.pack("Q", total))
    # Nobody reads these until the end.
    held_out, held_in = os.pipe()
    os.write(held_in, b"x" * 30000 + b"y")
    pair = socket.socketpair()
    pair[0].send(b"in flight")
    expected = 0

    def check(n):
        nonlocal expected
        os.write(from_parent, struct.pack("Q", n))
        expected += n
        answer = struct.unpack("Q", os.read(to_parent, 8))[0]
        need(answer == expected, "child says", answer, "not", expected)

    def last(_):
        need(os.read(held_out, 65536) == b"x" * 30000 + b"y", "the pipe lost something")
        need(pair[1].recv(100) == b"in flight", "the socket pair lost something")

    count(check, last)


def udp():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    say("port", server.getsockname()[1])
    value = 100

    def serve():
        nonlocal value
        while True:
            _, peer = server.recvfrom(100)
            value += 1
            server.sendto(str(value).encode(), peer)

    threading.Thread(target=serve, daemon=True).start()
    count()


def tcp_listening():
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    say("port", server.getsockname()[1])
    value = 100

    def serve():
        nonlocal value
        while True:
            connection, _ = server.accept()
            value += 1
            connection.sendall(str(value).encode())
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    count()


def tcp_within():
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    if os.fork() == 0:
        client = socket.create_connection(server.getsockname())
        while True:
            data = client.recv(8)
            if not data:
                os._exit(0)
            client.sendall(struct.pack("Q", struct.unpack("Q", data)[0] * 2))
    connection, _ = server.accept()

    def check(n):
        connection.sendall(struct.pack("Q", n))
        answer = struct.unpack("Q", connection.recv(8))[0]
        need(answer == 2 * n, "the other end says", answer)

    count(check)


def tcp_flowing():
    """Data that waits to be acknowledged at any time, from the process that CRIU dumps last to the one that it dumps first."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(100)
    ended, end = os.pipe()
    for _ in range(20):
        if os.fork() == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
    if os.fork() == 0:
        os.close(end)
        clients = [socket.create_connection(server.getsockname()) for _ in range(8)]
        n = 0
        while not os.path.exists(path("finish")):
            for client in clients:
                client.sendall(struct.pack("Q", n))
            n += 1
            time.sleep(0.001)
        os._exit(0)
    connections = [server.accept()[0] for _ in range(8)]
    left, wanted = [b""] * 8, [0] * 8

    def read(i):
        # What is lost never comes.
        connections[i].settimeout(30)
        data = connections[i].recv(1 << 20)
        left[i] += data
        whole = len(left[i]) // 8
        numbers = struct.unpack("%dQ" % whole, left[i][: 8 * whole])
        need(numbers == tuple(range(wanted[i], wanted[i] + whole)), "another number than", wanted[i])
        wanted[i] += whole
        left[i] = left[i][8 * whole :]
        return data

    def last(n):
        for i in range(8):
            while read(i):
                pass
        need(len(set(wanted)) == 1, "they got", wanted)

    # One at a time: the kernel acknowledges late what is not read.
    count(lambda n: read(n % 8), last, 0.03)


def nameless(keep_link):
    """A file that lost its name; with keep_link, another name of it stays."""
    file = open(path("gone"), "w+b", buffering=0)
    if keep_link:
        os.link(path("gone"), path("kept"))
    os.unlink(path("gone"))

    def check(n):
        file.write(struct.pack("Q", n))
        # Somebody else's file takes the name for a moment.
        open(path("gone"), "w").close()
        os.unlink(path("gone"))

    def last(n):
        file.seek(0)
        whole = file.read()
        need(whole == b"".join(struct.pack("Q", i) for i in range(1, n + 1)), "nameless file", len(whole), n)
        if keep_link:
            need(os.fstat(file.fileno()).st_ino == os.stat(path("kept")).st_ino, "another file")

    count(check, last)


def files():
    written = open(path("w.txt"), "w", buffering=1)
    appended = open(path("a.txt"), "a", buffering=1)
    progress = open(path("progress"), "w+", buffering=1)
    large = open(path("large"), "w+b", buffering=0)
    large.write(b"\0" * (5 << 20))
    inode = os.fstat(progress.fileno()).st_ino

    def check(n):
        print(n, file=written)
        print(n, file=appended)
        progress.seek(0)
        progress.write("epoch %d%s" % (n, "!" * (n % 7)))
        progress.truncate()
        progress.flush()
        large.write(b"%08d" % n)

    def last(n):
        wanted = "".join("%d\n" % i for i in range(1, n + 1))
        for name in "w.txt", "a.txt":
            need(open(path(name)).read() == wanted, name)
        need(open(path("progress")).read() == "epoch %d%s" % (n, "!" * (n % 7)), "progress")
        need(os.stat(path("progress")).st_ino == inode, "progress is another file")
        need(os.stat(path("large")).st_size == (5 << 20) + 8 * n, "large")

    count(check, last)


def removed():
    """A temporary folder that is used, and removed once the file `remove` is there, as multiprocessing does."""
    folder, stand = path("temporary/inner"), path("stand")
    for made, mode in [(path("temporary"), 0o711), (folder, 0o700), (stand, 0o750)]:
        os.mkdir(made)
        os.chmod(made, mode)
    os.chdir(stand)
    server = socket.socket(socket.AF_UNIX)
    server.bind(folder + "/listener")
    server.listen()
    note = open(folder + "/note", "w", buffering=1)
    # A FIFO in a folder where nothing else is; read, as mpirun has one.
    os.mkdir(path("temporary/fifo"))
    os.mkfifo(path("temporary/fifo/fifo"))
    os.chmod(path("temporary/fifo/fifo"), 0o620)
    fifo = os.open(path("temporary/fifo/fifo"), os.O_RDONLY | os.O_NONBLOCK)
    # A file that is mapped, and whose descriptor is closed, in a folder where nothing else is.
    os.mkdir(path("temporary/mapped"))
    with open(path("temporary/mapped/file"), "w+b") as file:
        file.truncate(4096)
        # Python's own mmap would keep a descriptor.
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(4096), 3, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
        mapped = ctypes.c_uint64.from_address(address)
    is_there = True

    def check(n):
        nonlocal is_there
        if is_there and not os.path.exists(path("remove")):
            need(os.getcwd() == stand and os.stat(path("temporary")).st_mode & 0o777 == 0o711, "another folder")
            print(n, file=note)
            mapped.value = n
            with open(path("temporary/fifo/fifo"), "wb") as writer:
                writer.write(b"here")
            need(os.read(fifo, 9) == b"here", "the FIFO")
            need(os.stat(path("temporary/fifo/fifo")).st_mode & 0o777 == 0o620, "another FIFO")
            need(open(path("temporary/mapped/file"), "rb").read(8) == struct.pack("<Q", n), "the mapped file")
            client = socket.socket(socket.AF_UNIX)
            client.connect(folder + "/listener")
            server.accept()[0].sendall(b"here")
            need(client.recv(4) == b"here", "the socket")
        elif is_there:
            is_there = False
            note.close()
            os.close(fifo)
            server.close()
            os.chdir("/")
            shutil.rmtree(path("temporary"))
            os.rmdir(stand)

    count(check)


def shared():
    with open(path("shared.bin"), "w+b") as file:
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
    anonymous = mmap.mmap(-1, 8192)
    name = "/dev/shm/" + os.path.basename(FOLDER)
    with open(name, "w+b") as file:
        file.truncate(4096)
        shm = mmap.mmap(file.fileno(), 4096)
    turn, answer = os.pipe(), os.pipe()
    if os.fork() == 0:
        while os.read(turn[0], 1):
            for memory in mapped, anonymous, shm:
                memory[8:16] = memory[0:8]
            os.write(answer[1], b".")
        os._exit(0)

    def check(n):
        for memory in mapped, anonymous, shm:
            need(struct.unpack("Q", memory[0:8])[0] == n - 1, "shared memory at", n)
            memory[0:8] = struct.pack("Q", n)
        os.write(turn[1], b".")
        os.read(answer[0], 1)
        for memory in mapped, anonymous, shm:
            need(struct.unpack("Q", memory[8:16])[0] == n, "the child's word at", n)

    # And what a restore put aside of it.
    count(check, lambda n: [os.unlink(found) for found in glob.glob(name + "*")])


def timers():
    rings = 0
    slept = 0

    def ring(*_):
        nonlocal rings
        rings += 1

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    def sleep():
        nonlocal slept
        while True:
            time.sleep(0.7)
            slept += 1

    threading.Thread(target=sleep, daemon=True).start()

    def last(_):
        before = rings, slept
        await_all(lambda: rings > before[0] + 5, "the timer stopped")
        await_all(lambda: slept > before[1], "a sleep does not end")

    count(last=last)


def signals():
    caught = 0

    def catch(*_):
        nonlocal caught
        caught += 1

    signal.signal(signal.SIGUSR2, catch)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGRTMIN + 3])
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGRTMIN + 3)

    def check(n):
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0)
        need(caught == n, "caught", caught, "of", n)
        pending = signal.sigpending()
        need(signal.SIGUSR1 in pending and signal.SIGRTMIN + 3 in pending, "pending", pending)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        need(signal.SIGUSR1 in blocked, "blocked", blocked)

    count(check)


def forks():
    born = 0

    def fork_all_the_time():
        nonlocal born
        while True:
            child = os.fork()
            if child == 0:
                os._exit(born % 100)
            _, status = os.waitpid(child, 0)
            need(os.waitstatus_to_exitcode(status) == born % 100, "a child ended with", status)
            born += 1

    threading.Thread(target=fork_all_the_time, daemon=True).start()

    def last(_):
        await_more(lambda: born)

    count(last=last)


def await_more(born):
    before, until = born(), time.monotonic() + 20
    while born() == before:
        need(time.monotonic() < until, "no child is born any more")
        time.sleep(0.01)


def fork_storm():
    """Hundreds of children a second, eight at a time, some of them orphans; and one that stays dead and is never reaped."""
    born = 0
    lasting = os.fork()
    if lasting == 0:
        os._exit(42)

    def storm():
        nonlocal born
        while True:
            children = []
            for code in range(8):
                child = os.fork()
                if child == 0:
                    if code == 0:
                        os.fork()
                    os._exit(code)
                children.append(child)
            for code, child in enumerate(children):
                _, status = os.waitpid(child, 0)
                need(os.waitstatus_to_exitcode(status) == code, "a child ended with", status)
            born += len(children)

    threading.Thread(target=storm, daemon=True).start()

    def last(_):
        await_more(lambda: born)
        _, status = os.waitpid(lasting, 0)
        need(os.waitstatus_to_exitcode(status) == 42, "the dead child says", status)

    count(last=last)


def environment():
    if "BIG_0" not in os.environ:
        # MAX_ARG_STRLEN is 128 KiB for one; the sum must stay below a quarter of the stack's limit.
        big = {"BIG_%d" % i: "%d" % i * 60000 for i in range(10, 25)}
        os.execve(sys.executable, [sys.executable, "-S"] + sys.argv, dict(os.environ, BIG_0="1", **big))

    def digest():
        with open("/proc/self/environ", "rb") as file:
            return hashlib.sha256(repr(sorted(os.environ.items())).encode() + file.read()).digest()

    begun = digest()
    need(len(os.environ["BIG_24"]) == 120000, "environment")
    count(lambda n: need(digest() == begun, "the environment changed"))


def memory():
    size = 48 << 20
    block = bytearray(size)
    block[0] = 1

    def rewrite(n):
        value = bytes([n % 251])
        need(block.count(block[-1]) == size or n == 1, "memory is torn at", n)
        block[:] = value * size

    count(rewrite, pause=0)


def fresh(mib):
    """So much of each image is in no other one, and cannot be compressed: random bytes, new ones all the time."""
    size = mib << 20
    block = bytearray(os.urandom(size))
    digest = zlib.crc32(block)
    others = bytearray(range(256))

    def rewrite(n):
        nonlocal digest
        need(zlib.crc32(block) == digest, "memory differs at", n)
        # Exchanging one byte for another keeps them random, and takes a fraction of the time that new ones take.
        random.shuffle(others)
        # In pieces: an image that is taken just then must not have all of it twice.
        for at in range(0, size, 65536):
            block[at : at + 65536] = block[at : at + 65536].translate(others)
        digest = zlib.crc32(block)

    # The larger, the less often, so that it leaves processor time to others.
    count(rewrite, pause=0.02 * min(mib, 10))


def large():
    block = bytearray(b"\1") * (512 << 20)
    count(lambda n: need(block[n * 4096 % len(block)] == 1, "memory differs at", n))


def daemon(has_worker=False):
    """A process that forked twice, in a session without a leader, and a worker below it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        if has_worker and os.fork() != 0:
            while True:
                time.sleep(1)
        lines = open(path("daemon.txt"), "a", buffering=1)
        n = 0
        while True:
            n += 1
            print("n", n, file=lines)
            time.sleep(0.02)
    os.wait()

    def last(_):
        before = os.stat(path("daemon.txt")).st_size
        await_all(lambda: os.stat(path("daemon.txt")).st_size > before, "the daemon is gone")

    count(last=last)


def mixed():
    """Locks, a FIFO, epoll, eventfd, an inotify watch, a memfd, a nested session, a stopped child."""
    lock = open(path("lock"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.mkfifo(path("fifo"))
    fifo = os.open(path("fifo"), os.O_RDWR)
    event = os.eventfd(0)
    poll = select.epoll()
    poll.register(event, select.EPOLLIN)
    memfd = os.memfd_create("memory")
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(watch, FOLDER.encode(), 0x100)  # IN_CREATE
    stopped = os.fork()
    if stopped == 0:
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(1)
    os.waitpid(stopped, os.WUNTRACED)

    def check(n):
        os.write(fifo, b"%08d" % n)
        need(os.read(fifo, 8) == b"%08d" % n, "fifo")
        os.eventfd_write(event, n)
        need(poll.poll(1) == [(event, select.EPOLLIN)], "epoll")
        need(os.eventfd_read(event) == n, "eventfd")
        os.pwrite(memfd, b"%08d" % n, 8 * n)
        # CRIU lets go of us before it has stopped that one again.
        for _ in range(2000):
            with open("/proc/%d/stat" % stopped) as file:
                state = file.read().split()[2]
            if state == "T":
                return
            time.sleep(0.01)
        need(False, "the stopped child is", state)

    def last(n):
        need(os.fstat(memfd).st_size == 8 * n + 8, "memfd")
        other = open(path("lock"), "w")
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            need(False, "the lock was lost")
        except BlockingIOError:
            pass
        open(path("noticed"), "w").close()
        need(b"noticed" in os.read(watch, 65536), "inotify")

    count(check, last)


def ticks():
    """A periodic timer whose ticks nobody reads until the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    # Interval and first time, in seconds and nanoseconds.
    every = (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000)
    need(libc.timerfd_settime(timer, 0, every, None) == 0, "timerfd_settime")
    select.select([timer], [], [])

    def last(_):
        for _ in range(3):
            ready, _, _ = select.select([timer], [], [], 10)
            need(ready, "the timer has stopped")
            need(int.from_bytes(os.read(timer, 8), "little") > 0, "ticks")

    count(last=last)


def timerfds():
    """Timers of each clock that run, absolute and relative, once and periodic: each stays due when it was to be."""
    realtime, monotonic, boottime = 0, 1, 7
    absolute, cancel_on_set, hour = 1, 2, 3600 * 10**9
    libc = ctypes.CDLL(None, use_errno=True)

    class Times(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "s", "ns")]

        def set(self):
            return self.s * 10**9 + self.ns

    timers = []
    for clock in (realtime, monotonic, boottime):
        for flags in (0, absolute, absolute | cancel_on_set):
            for interval in (0, hour):
                timer = libc.timerfd_create(clock, os.O_NONBLOCK | os.O_CLOEXEC)
                clock_of_due = monotonic if not flags and clock == realtime else clock
                due = time.clock_gettime_ns(clock_of_due) + hour
                times = Times(interval // 10**9, 0, *divmod(due if flags else hour, 10**9))
                need(libc.timerfd_settime(timer, flags, ctypes.byref(times), None) == 0, "timerfd_settime")
                timers.append((timer, clock, flags, interval, clock_of_due, due))

    def late(timer, clock, due):
        """The least of some readings: another process may run between the two calls."""
        times, readings = Times(), []
        for _ in range(5):
            need(libc.timerfd_gettime(timer, ctypes.byref(times)) == 0, "timerfd_gettime")
            readings.append(time.clock_gettime_ns(clock) + times.set() - due)
        return min(readings) / 1e9, times.interval_s * 10**9 + times.interval_ns

    def check(_):
        for timer, clock, flags, interval, clock_of_due, due in timers:
            seconds, every = late(timer, clock_of_due, due)
            need(abs(seconds) < 0.02, "clock", clock, "flags", flags, "interval", interval, "is late by", seconds)
            need(every == interval, "interval", every, interval)
            with open(f"/proc/self/fdinfo/{timer}") as shown:
                need(f"settime flags: 0{flags:o}\n" in shown.read(), "flags of clock", clock)

    count(check)


def program(kind):
    """A program without a file: from memory, until the file `end`, or a deleted one."""
    with open("/bin/cat", "rb") as original:
        content = original.read()
    source, sink = os.pipe()
    if kind == "from-memory":
        descriptor = os.memfd_create("program")
        os.write(descriptor, content)
    else:
        with open(path("program"), "wb") as file:
            file.write(content)
        os.chmod(path("program"), 0o755)
        descriptor = os.open(path("program"), os.O_RDONLY)
        os.remove(path("program"))
    echo, answers = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(source, 0)
        os.dup2(answers, 1)
        # Its end for writing would keep it from the end of its input.
        os.close(sink)
        os.execve(descriptor, ["cat"], os.environ)
    os.close(source)

    runs = [True]

    def check(_):
        if runs[0] and os.path.exists(path("end")):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.remove(path("end"))
            runs[0] = False
        if runs[0]:
            os.write(sink, b"x")
            need(os.read(echo, 2) == b"x", "the program does not answer")

    count(check)


def posix_timers():
    """One whose thread has ended, one of a thread's CPU time, and one of the process' CPU time. None of them fires."""
    numbers = {"x86_64": (222, 223, 224), "aarch64": (107, 110, 108)}  # timer_create, timer_settime, timer_gettime
    create, settime, gettime = numbers[os.uname().machine]
    libc = ctypes.CDLL(None, use_errno=True)
    signal_thread, of_process, of_thread = 4, 2, 3
    signal.signal(signal.SIGRTMIN + 2, signal.SIG_IGN)

    def make(clock):
        # sigevent: a value, a signal, how, a thread.
        event = struct.pack("qiii44x", 0, signal.SIGRTMIN + 2, signal_thread, threading.get_native_id())
        timer = ctypes.c_int()
        need(libc.syscall(create, clock, event, ctypes.byref(timer)) == 0, "timer_create", clock)
        need(libc.syscall(settime, timer, 0, struct.pack("qqqq", 0, 0, 1000, 0), None) == 0, "timer_settime")
        return timer

    def left(timer):
        times = ctypes.create_string_buffer(32)
        need(libc.syscall(gettime, timer, times) == 0, "timer_gettime", timer)
        _, _, seconds, rest = struct.unpack("qqqq", times.raw)
        return seconds + rest / 1e9

    made, work, done = [], threading.Event(), threading.Event()

    def work_once():
        made.append(make(of_thread))
        done.set()
        work.wait()
        before = left(made[1])
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        need(before - left(made[1]) > 0.15, "the timer does not count its thread's CPU time")
        done.set()

    short = threading.Thread(target=lambda: made.append(make(time.CLOCK_MONOTONIC)))
    short.start()
    short.join()
    threading.Thread(target=work_once, daemon=True).start()
    done.wait()
    done.clear()
    made.append(make(of_process))

    def check(_):
        for timer in made:
            need(900 < left(timer) <= 1000, "a timer has", left(timer), "s left")

    def last(_):
        work.set()
        done.wait()

    count(check, last)


def scheduled():
    """A thread of each policy, and what else sched_setattr(2) sets."""
    setattr_number, getattr_number = {"x86_64": (314, 315), "aarch64": (274, 275)}[os.uname().machine]
    libc = ctypes.CDLL(None, use_errno=True)
    layout = struct.Struct("IIQiIQQQII")

    def get(thread):
        attributes = ctypes.create_string_buffer(layout.size)
        need(libc.syscall(getattr_number, thread, attributes, layout.size, 0) == 0, "sched_getattr")
        return layout.unpack(attributes.raw)

    reset, keep, clamps = 1, 0x18, 0x60
    wanted = {
        # policy, flags, nice, priority, runtime, deadline, period, least and greatest utilization
        "nice": (0, 0, 7, 0, 0, 0, 0, 0, 0),
        "less nice": (0, 0, -3, 0, 0, 0, 0, 0, 0),
        "batch": (3, 0, 4, 0, 0, 0, 0, 0, 0),
        "idle": (5, 0, 0, 0, 0, 0, 0, 0, 0),
        "fifo": (1, 0, 0, 3, 0, 0, 0, 0, 0),
        "round robin": (2, reset, 0, 4, 0, 0, 0, 0, 0),
        "deadline": (6, 0, 0, 0, 1000000, 10000000, 10000000, 0, 0),
        "deadline, reset": (6, reset, 0, 0, 1000000, 10000000, 20000000, 0, 0),
        "ext": (7, 0, 0, 0, 0, 0, 0, 0, 0),
        "slice": (0, 0, 0, 0, 5000000, 0, 0, 0, 0),
        "clamped": (0, keep | clamps, 0, 0, 0, 0, 0, 100, 500),
    }
    seen = {}
    for name, attributes in wanted.items():
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        if libc.syscall(setattr_number, thread.native_id, layout.pack(layout.size, *attributes), 0) != 0:
            say("no thread can be:", name, os.strerror(ctypes.get_errno()))
            continue
        seen[thread.native_id] = name, get(thread.native_id)

    def check(_):
        for thread, (name, before) in seen.items():
            need(get(thread) == before, name, "was", before, "and is", get(thread))

    count(check)


def bound():
    """Two threads on one processor each, until there is the file `anywhere`."""
    processors = sorted(os.sched_getaffinity(0))
    mine, others = {processors[-1]}, {processors[0]}

    def sleep():
        os.sched_setaffinity(0, others)
        while True:
            time.sleep(0.1)
            if not os.path.exists(path("anywhere")):
                need(os.sched_getaffinity(0) == others, "the thread is not bound to", others)

    threading.Thread(target=sleep, daemon=True).start()
    os.sched_setaffinity(0, mine)

    def check(_):
        if not os.path.exists(path("anywhere")):
            need(os.sched_getaffinity(0) == mine, "not bound to", mine)

    count(check)


def outside():
    """A connection that nobody outside has accepted, until the file `close` is there."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path("outside"))

    def check(n):
        if os.path.exists(path("close")):
            stream.close()
            os.remove(path("close"))

    count(check)


def renamed_socket():
    """A UNIX socket that is bound under another name, and renamed when it listens: nobody finds it earlier."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path("socket.new"))
    server.listen(9)
    os.rename(path("socket.new"), path("socket"))

    def check(_):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path("socket"))
            server.accept()[0].close()
        need(not os.path.exists(path("socket.new")), "the file has its old name")

    count(check)


def async_input():
    """Signals for what arrives in a FIFO, a pipe, a terminal and a socket (O_ASYNC), with the number of the descriptor."""
    os.mkfifo(path("fifo"))
    fifo = os.open(path("fifo"), os.O_RDWR | os.O_NONBLOCK)
    out, into = os.pipe()
    master, slave = os.openpty()
    tty.setraw(slave)
    here, there = socket.socketpair()
    number = signal.SIGRTMIN + 3
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    signals = ctypes.CDLL(None).signalfd(-1, struct.pack("Q", 1 << (number - 1)), os.O_NONBLOCK)
    ends = {fifo: fifo, out: into, slave: master, here.fileno(): there.fileno()}
    for end in ends:
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, fcntl.F_SETSIG, number)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)

    def check(_):
        for end, other in ends.items():
            os.write(other, b"x")
            need(select.select([signals], [], [], 5)[0], "no signal for descriptor", end)
            need(os.read(end, 1) == b"x", "another byte")
            while select.select([signals], [], [], 0)[0]:
                # struct signalfd_siginfo: the descriptor is behind five numbers.
                found = struct.unpack("6i", os.read(signals, 128)[:24])[5]
                need(found == end, "the signal names descriptor", found, "and not", end)

    count(check)


def lease(kind):
    """Any open(2) by somebody else breaks a write lease, with a signal that ends the job; a read lease, one for writing."""
    with open(path("leased"), "wb") as file:
        file.write(b"leased")
    leased = open(path("leased"), "rb" if kind == fcntl.F_RDLCK else "r+b", buffering=0)
    set_lease, get_lease = 1024, 1025
    fcntl.fcntl(leased, set_lease, kind)

    held = [kind]

    def check(n):
        if os.path.exists(path("release")):
            held[0] = fcntl.F_UNLCK
            fcntl.fcntl(leased, set_lease, fcntl.F_UNLCK)
            os.remove(path("release"))
        need(fcntl.fcntl(leased, get_lease) == held[0], "the lease is gone")

    count(check)


def breaking_lease():
    """A read lease that a child wants to be given up: the signal for that comes once. Given up when it is told to."""
    with open(path("leased"), "wb") as file:
        file.write(b"leased")
    leased = open(path("leased"), "rb", buffering=0)
    set_lease, get_lease = 1024, 1025
    signals = []
    signal.signal(signal.SIGIO, lambda *_: signals.append(1))
    fcntl.fcntl(leased, set_lease, fcntl.F_RDLCK)
    try:
        os.open(path("leased"), os.O_WRONLY | os.O_NONBLOCK)
        need(False, "the lease is not in the way")
    except BlockingIOError:
        pass
    await_all(lambda: signals, "no signal")

    def check(n):
        if os.path.exists(path("release")):
            fcntl.fcntl(leased, set_lease, fcntl.F_UNLCK)
            os.remove(path("release"))
        need(len(signals) == 1, "signals of the lease:", len(signals))

    count(check)


def opened():
    """Files whose names are gone, opened in ways that say nothing about them afterwards, and an epoll set that watches a
    pipe under a number that was closed since."""
    os.mkdir(path("gone"))
    folder = os.open(path("gone"), os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(path("gone"))
    nameless = os.open(FOLDER, os.O_RDWR | os.O_TMPFILE, 0o600)
    os.write(nameless, b"nameless")
    out, into = os.pipe()
    watched = select.epoll()
    twice = os.dup2(out, 200)
    watched.register(twice, select.EPOLLIN)
    os.close(twice)
    # Another file with the number that the set knows.
    os.dup2(into, 200)

    def check(n):
        need(stat.S_ISDIR(os.fstat(folder).st_mode), "no folder")
        need(os.pread(nameless, 100, 0) == b"nameless", "the nameless file")
        need(watched.poll(0) == [], "an event for nothing")
        os.write(into, b"x")
        need([event for _, event in watched.poll(1)] == [select.EPOLLIN], "no event")
        os.read(out, 1)

    count(check)


def nameless_files():
    """Files without names: one that is watched, one that had two names and is mapped by each, and shared memory that is open."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path("watched"), "wb"):
        watched = os.open(path("watched"), os.O_RDWR)
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    need(libc.inotify_add_watch(inotify, FOLDER.encode(), 0x40) == 1, "no first watch")
    need(libc.inotify_add_watch(inotify, path("watched").encode(), 0x2) == 2, "no second watch")
    os.remove(path("watched"))
    # A log that somebody has moved away, and then deleted.
    with open(path("watched"), "wb"):
        pass
    with open(path("one"), "wb") as file:
        file.write(b"x" * 4096)
    os.link(path("one"), path("two"))
    maps = []
    for name in "one", "two":
        with open(path(name), "rb") as file:
            maps.append(mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ))
        os.remove(path(name))
    memory = mmap.mmap(-1, 8192)
    with open("/proc/self/maps") as lines:
        line = next(line for line in lines if line.endswith("/dev/zero (deleted)\n"))
    start, end = (int(word, 16) for word in line.split()[0].split("-"))
    memory_file = os.open(f"/proc/self/map_files/{start:x}-{end:x}", os.O_RDWR)

    def check(n):
        os.pwrite(watched, b"%d" % n, 0)
        events = os.read(inotify, 4096)
        need(struct.unpack_from("iI", events) == (2, 0x2), "the watch says", events)
        need([each[:] for each in maps] == [b"x" * 4096] * 2, "the mappings")
        memory[:4] = struct.pack("i", n)
        need(os.pread(memory_file, 4, 0) == memory[:4], "shared memory")

    count(check)


def odd_sockets():
    """A raw socket with an address, packet sockets with packets that nobody reads and with a ring, and a socket whose other
    end was closed after it had sent something."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    raw.bind(("127.0.0.14", 0))
    unread = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    unread.bind(("lo", 3))
    ring = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packet_level, receive_ring = 263, 5
    ring.setsockopt(packet_level, receive_ring, struct.pack("IIII", 4096, 2, 2048, 4))
    mapped = mmap.mmap(ring.fileno(), 8192)
    talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    talk.sendto(b"to nobody", ("127.0.0.1", 9))
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.send(b"last words")
    other.close()

    def check(n):
        need(raw.getsockname()[0] == "127.0.0.14", "the raw socket has", raw.getsockname())
        need(len(mapped[:]) == 8192, "the ring")

    def last(n):
        need(one.recv(100) == b"last words", "no last words")

    count(check, last)


def full():
    """Connections with more data than the other end has room for: it was written, and not even sent."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    ends = []
    for at in range(8):
        client = socket.socket()
        client.connect(listener.getsockname())
        server = listener.accept()[0]
        for writer, reader in (client, server), (server, client):
            writer.setblocking(False)
            block, total = bytes([at]) * 65521, 0
            while True:
                try:
                    total += writer.send(block)
                except BlockingIOError:
                    break
            ends.append((reader, at, total))
            if at % 2:
                writer.shutdown(socket.SHUT_WR)
    for reader, _, _ in ends:
        reader.settimeout(20)

    def last(n):
        for reader, at, total in ends:
            while total:
                piece = reader.recv(1 << 20)
                need(piece == bytes([at]) * len(piece) and piece, "a connection has lost", total)
                total -= len(piece)
            if at % 2:
                need(reader.recv(1) == b"", "more than was written")

    count(last=last)


def inherited_terminal():
    """Children of the leader of a session with a terminal, as in script, tmux and a notebook's terminals."""
    pid, master = os.forkpty()
    if pid == 0:
        if os.fork() == 0:
            while True:
                os.write(1, b"from a child\n")
                time.sleep(0.02)
        while True:
            time.sleep(1)

    def check(n):
        found = b""
        while b"child\r" not in found:
            found += os.read(master, 10000)

    count(check)


def terminals():
    """One terminal with both ends here, one whose other end has a child in a session of its own, one that leads it."""
    own, both = os.openpty(), os.openpty()
    if os.fork() == 0:
        os.close(both[0])
        os.setsid()
        while True:
            os.write(both[1], b"from a session\n")
            time.sleep(0.02)
    os.close(both[1])
    pid, leader = os.forkpty()
    if pid == 0:
        while True:
            os.write(1, b"from a leader\n")
            time.sleep(0.02)

    def comes(words, fd):
        # A terminal gives a line in as many pieces as it likes.
        found = b""
        while words not in found:
            found += os.read(fd, 10000)

    def check(n):
        os.write(own[1], b"%d\n" % n)
        comes(b"%d\r" % n, own[0])
        comes(b"session\r", both[0])
        comes(b"leader\r", leader)

    count(check)


def mounted():
    """A file system that the job mounts itself, until it is told to release it."""
    libc, folder = ctypes.CDLL(None, use_errno=True), path("mounted")
    os.makedirs(folder, exist_ok=True)
    need(libc.mount(b"none", folder.encode(), b"tmpfs", 0, None) == 0, "mount", ctypes.get_errno())

    def check(n):
        if os.path.exists(path("release")):
            need(libc.umount2(folder.encode(), 0) == 0, "umount", ctypes.get_errno())
            os.remove(path("release"))

    count(check)


def not_accepted():
    """Connections that wait to be accepted: without data, and with, until it is told to accept that one."""
    listeners, silent = [], []
    for kind, name in (socket.SOCK_STREAM, "silent"), (socket.SOCK_SEQPACKET, "silent-packets"), (socket.SOCK_STREAM, "data"):
        if os.path.exists(path(name)):
            os.remove(path(name))
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(path(name))
        listener.listen(5)
        client = socket.socket(socket.AF_UNIX, kind)
        client.connect(path(name))
        listeners.append(listener)
        silent.append(client)
    silent[2].sendall(b"first")
    accepted = []

    def check(n):
        if os.path.exists(path("accept")):
            accepted.append(listeners[2].accept()[0])
            os.remove(path("accept"))

    def last(n):
        need(accepted[0].recv(100) == b"first", "what was accepted")
        for listener, client in list(zip(listeners, silent))[:2]:
            client.sendall(b"words")
            need(listener.accept()[0].recv(100) == b"words", "what was not accepted")

    count(check, last)


def named_semaphore():
    """A semaphore that other processes find by its name."""
    libc, name = ctypes.CDLL(None, use_errno=True), "rekindle-%08x" % zlib.crc32(FOLDER.encode())
    libc.sem_open.restype = ctypes.c_void_p
    need(libc.sem_open(b"/" + name.encode(), os.O_CREAT, ctypes.c_uint(0o600), ctypes.c_uint(0)), "sem_open")
    file = "/dev/shm/sem." + name

    def check(n):
        # The mapping shows the name that the C library gave it first.
        with open("/proc/self/maps") as maps:
            inodes = [line.split()[4] for line in maps if "/dev/shm/" in line]
        need(os.path.exists(file) and str(os.stat(file).st_ino) in inodes, "the name leads elsewhere", inodes)

    def last(n):
        libc.sem_unlink(b"/" + name.encode())

    count(check, last)


def several_names():
    """Programs and mapped files with several names, and a program whose name was given to another file."""

    def program(name):
        """A child that runs this file for an hour."""
        child = os.fork()
        if child == 0:
            os.execl(name, name, "3600")
        while os.readlink("/proc/%d/exe" % child) == os.readlink("/proc/self/exe"):
            time.sleep(0.01)
        return child

    def mapped(name):
        with open(name, "r+b") as file:
            return mmap.mmap(file.fileno(), 4096)

    shutil.copy(shutil.which("sleep"), path("program"))
    os.link(path("program"), path("alias"))
    shutil.copy(path("program"), path("replaced"))
    children = [program(path(name)) for name in ("program", "alias", "replaced")]
    os.unlink(path("replaced"))
    shutil.copy(shutil.which("cat"), path("replaced"))
    with open(path("data"), "wb") as file:
        file.write(bytes(4096))
    with open(path("other"), "wb") as file:
        file.write(bytes(4096))
    os.link(path("data"), path("link"))
    os.link(path("other"), path("temporary"))
    # As the C library makes a semaphore with a name.
    first, temporary = mapped(path("data")), mapped(path("temporary"))
    os.unlink(path("temporary"))
    second, lasting = mapped(path("link")), mapped(path("other"))

    def check(n):
        first[0] = temporary[0] = n & 255
        need((second[0], lasting[0]) == (n & 255, n & 255), "the mappings are of two files")
        names = [os.path.basename(os.readlink("/proc/%d/exe" % child)) for child in children]
        need({*names[:2]} <= {"program", "alias"} and names[2].endswith(" (deleted)"), "programs", names)

    def last(n):
        for child in children:
            os.kill(child, signal.SIGKILL)

    count(check, last)


def fixed_addresses():
    """A program without random addresses, whose heap is the neighbour of its own data."""
    libc, no_randomize = ctypes.CDLL(None), 0x40000
    persona = libc.personality(0xFFFFFFFF)
    if not persona & no_randomize:
        libc.personality(persona | no_randomize)
        os.execv(sys.executable, [sys.executable, "-S", *sys.argv])
    count()


def handler_on_its_stack():
    """A signal handler that runs on an alternate stack (sigaltstack(2), SA_ONSTACK), and does not return."""
    libc, on_stack, size = ctypes.CDLL(None), 0x08000000, 1 << 20
    stack = ctypes.create_string_buffer(size)
    address = ctypes.addressof(stack)
    need(libc.sigaltstack(struct.pack("PixxxxN", address, 0, size), None) == 0, "sigaltstack")

    def check(n):
        told = ctypes.create_string_buffer(24)
        libc.sigaltstack(None, told)
        need(struct.unpack("PixxxxN", told.raw) == (address, 1, size), "the stack", told.raw)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: count(check))
    action = struct.pack("P128xixxxxP", ctypes.cast(handler, ctypes.c_void_p).value, on_stack, 0)
    need(libc.sigaction(signal.SIGUSR1, action, None) == 0, "sigaction")
    # Not by the interpreter, which would only take note of it.
    getattr(libc, "raise")(signal.SIGUSR1)


def disarmed():
    """A descriptor that an epoll set has reported once (EPOLLONESHOT), as one that a worker is busy with."""
    ours, other = socket.socketpair()
    poll, once = select.epoll(), select.EPOLLIN | select.EPOLLONESHOT
    poll.register(ours, once)
    other.send(b"x")
    need(poll.poll(1) == [(ours.fileno(), select.EPOLLIN)], "the event")

    def last(n):
        poll.modify(ours, once)
        need(poll.poll(1) == [(ours.fileno(), select.EPOLLIN)], "it is not reported again")

    count(lambda n: need(poll.poll(0) == [], "it is reported"), last)


def own_namespaces():
    """Descriptors of the namespaces that the process is in, some of which a restore makes anew."""
    names = sorted(name for name in os.listdir("/proc/self/ns") if not name.endswith("_for_children"))
    opened = [(name, os.open("/proc/self/ns/" + name, os.O_RDONLY)) for name in names]

    def check(n):
        for name, descriptor in opened:
            leads = os.readlink("/proc/self/fd/%d" % descriptor)
            need(leads == os.readlink("/proc/self/ns/" + name), "it leads to another namespace", leads)

    count(check)


def watch_flags():
    """Watches of inotify that end with the first event (IN_ONESHOT), or leave out files without names (IN_EXCL_UNLINK)."""
    libc, created, modified, attributes, ignored = ctypes.CDLL(None, use_errno=True), 0x100, 0x2, 0x4, 0x8000
    os.mkdir(path("folder"))
    with open(path("file"), "wb"):
        pass
    gone = open(path("folder/gone"), "wb", buffering=0)
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    need(libc.inotify_add_watch(inotify, path("file").encode(), attributes | 0x80000000) == 1, "no first watch")
    need(libc.inotify_add_watch(inotify, path("folder").encode(), created | modified | 0x04000000) == 2, "no second watch")
    os.remove(gone.name)

    def events():
        try:
            data = os.read(inotify, 4096)
        except BlockingIOError:
            return []
        found = []
        while data:
            number, mask, _, length = struct.unpack_from("iIII", data)
            found.append((number, mask))
            data = data[16 + length :]
        return found

    def check(n):
        gone.write(b"x")
        need(events() == [], "a file without a name is reported")

    def last(n):
        os.chmod(path("file"), 0o600)
        os.chmod(path("file"), 0o644)
        need(events() == [(1, attributes), (1, ignored)], "a watch for one event")
        with open(path("folder/new"), "wb"):
            pass
        need(events() == [(2, created)], "the other watch")
        need(libc.inotify_add_watch(inotify, path("file").encode(), modified) == 3, "the next number")

    count(check, last)


def watched_link():
    """A watch of inotify on a symbolic link itself, until the file `end` is there."""
    libc = ctypes.CDLL(None)
    os.symlink("nowhere", path("link"))
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    need(libc.inotify_add_watch(inotify, path("link").encode(), 0x4 | 0x02000000) == 1, "no watch")

    def check(n):
        if os.path.exists(path("end")):
            libc.inotify_rm_watch(inotify, 1)
            os.read(inotify, 4096)
            os.remove(path("end"))

    count(check)


def moved_sockets():
    """UNIX sockets whose paths were removed, given to another socket, or to a file, since they were bound."""

    def bound(kind, name):
        made = socket.socket(socket.AF_UNIX, kind)
        made.bind(path(name))
        if kind == socket.SOCK_STREAM:
            made.listen(5)
        made.settimeout(20)
        return made

    def connected(kind, name):
        made = socket.socket(socket.AF_UNIX, kind)
        made.connect(path(name))
        return made

    pairs, newer = [], []
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        for fate in "removed", "replaced", "file":
            name = "%s-%d" % (fate, kind)
            server = bound(kind, name)
            client = connected(kind, name)
            pairs.append((kind, name, server, client, server.accept()[0] if kind == socket.SOCK_STREAM else server))
            os.remove(path(name))
            if fate == "replaced":
                newer.append((kind, name, bound(kind, name)))
            elif fate == "file":
                with open(path(name), "w") as file:
                    file.write(name)

    def check(n):
        for kind, name, server, client, reader in pairs:
            client.send(b"%d" % n)
            need(reader.recv(100) == b"%d" % n, "the older", name)
            need(server.getsockname() == path(name), "its name", name)
        for kind, name, server in newer:
            client = connected(kind, name)
            client.send(b"new")
            reader = server.accept()[0] if kind == socket.SOCK_STREAM else server
            need(reader.recv(100) == b"new", "the newer", name)
        for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
            need(not os.path.exists(path("removed-%d" % kind)), "it has its path again")
            with open(path("file-%d" % kind)) as file:
                need(file.read() == "file-%d" % kind, "the file at its path")

    count(check)


def datagrams():
    """Datagrams that wait: of a bound sender, of one without an address, to a path and to an abstract name."""

    def bound(name):
        if isinstance(name, str):
            name = path(name)
            if os.path.exists(name):
                os.remove(name)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.bind(name)
        made.setblocking(False)
        return made

    server, hidden, client = bound("server"), bound(b"\0rekindle-%d" % os.getpid()), bound("client")
    nobody = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    talks = bound("talks")
    talks.connect(path("server"))

    def received(by):
        found = []
        try:
            while True:
                data, sender = by.recvfrom(100)
                found.append((data, sender or None))
        except BlockingIOError:
            return found

    def check(n):
        if n > 1:
            data = b"%d" % (n - 1)
            wanted = [(data, path("client")), (data, None), (data, path("talks"))]
            found = received(server)
            need(found == wanted, "server", found, "not", wanted)
            found = received(hidden)
            need(found == [(data, None), (data, path("client"))], "hidden", found)
        data = b"%d" % n
        client.sendto(data, path("server"))
        nobody.sendto(data, path("server"))
        talks.send(data)
        nobody.sendto(data, hidden.getsockname())
        client.sendto(data, hidden.getsockname())

    count(check)


def empty_datagram():
    """Datagrams behind an empty one, in a pair of sockets that have no address. The empty one may be lost."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for data in (b"one", b"", b"two", b"three"):
        one.send(data)
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    first.send(b"")
    first.send(b"four")

    def last(_):
        for by, wanted in ((other, [b"one", b"two", b"three"]), (second, [b"four"])):
            by.setblocking(False)
            found = []
            while not found or found[-1] != wanted[-1]:
                found.append(by.recv(100))
            need([data for data in found if data] == wanted, found)

    count(last=last)


def unread_terminals():
    """Output and input that wait in terminals: cooked, raw, in packet mode, with an end of file, closed by its program."""

    def opened(raw=False, echo=False):
        master, slave = os.openpty()
        settings = termios.tcgetattr(slave)
        if raw:
            tty.setraw(slave)
            settings = termios.tcgetattr(slave)
        if not echo:
            settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        os.set_blocking(master, False)
        return master, slave

    def all_of(fd, length, end=b""):
        found = b""
        while len(found) < length:
            try:
                found += os.read(fd, length - len(found))
            except BlockingIOError:
                time.sleep(0.001)
        try:
            need(os.read(fd, 100) == end, fd, "has more than", found)
        except BlockingIOError:
            need(end == b"", fd, "has nothing more")
        return found

    plain, echoing, raw, packet, cooked = opened(), opened(echo=True), opened(raw=True), opened(), opened()
    fcntl.ioctl(packet[0], termios.TIOCPKT, struct.pack("i", 1))
    closed = os.openpty()
    os.write(closed[1], b"last\n")
    os.close(closed[1])

    def check(n):
        if n > 1:
            line = b"%d\n" % (n - 1)
            shown = line.replace(b"\n", b"\r\n")
            need(all_of(plain[0], len(shown)) == shown, "output", n)
            need(all_of(echoing[0], len(shown)) == shown, "echo", n)
            need(os.read(echoing[1], 100) == line, "echoed line", n)
            need(os.read(raw[1], 100) == line + b"\x03", "raw input", n)
            need(all_of(packet[0], len(shown) + 1) == b"\0" + shown, "packet", n)
            # A line, a line that ends with the file, and the end of the file.
            need([os.read(cooked[1], 100) for _ in range(3)] == [line, line[:-1], b""], "input", n)
        line = b"%d\n" % n
        os.write(plain[1], line)
        os.write(echoing[0], line)
        os.write(raw[0], line + b"\x03")
        os.write(packet[1], line)
        os.write(cooked[0], line + line[:-1] + b"\x04\x04")

    def last(n):
        need(os.read(closed[0], 100) == b"last\r\n", "a closed terminal")
        try:
            need(False, "it is not closed", os.read(closed[0], 100))
        except OSError:
            pass

    count(check, last)


def one_thread_filtered():
    """A seccomp filter that one thread has and the others do not: no getcwd."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Step(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

    getcwd, refuse, allow = 79, 0x00050001, 0x7FFF0000
    steps = (Step * 4)(Step(0x20, 0, 0, 0), Step(0x15, 0, 1, getcwd), Step(6, 0, 0, refuse), Step(6, 0, 0, allow))
    ready, seen = threading.Event(), [0]

    def filtered():
        no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
        need(libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0, "no-new-privileges")
        need(libc.prctl(set_seccomp, filter_mode, ctypes.byref(Program(4, steps)), 0, 0) == 0, "the filter")
        ready.set()
        while True:
            try:
                need(not os.getcwd(), "the filter is gone")
            except PermissionError:
                seen[0] += 1
            time.sleep(0.01)

    threading.Thread(target=filtered, daemon=True).start()
    ready.wait()
    before = [-1]

    def check(n):
        os.getcwd()
        if n % 50 == 0:
            need(seen[0] > before[0], "the thread stands still")
            before[0] = seen[0]

    count(check)


def sent():
    """A descriptor on its way in one direction."""
    pair = socket.socketpair(socket.AF_UNIX)
    with open(path("sent"), "w+") as file:
        file.write("what was sent")
        file.flush()
        pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fileno()))])

    def last(n):
        _, control, _, _ = pair[1].recvmsg(10, 100)
        fd = struct.unpack("i", control[0][2][:4])[0]
        need(os.pread(fd, 100, 0) == b"what was sent", "what was sent is not what is received")

    count(last=last)


def control_groups():
    """A child in the groups that FOLDER/groups names, with the settings that it names. A line each:
    FOLDER-OF-GROUP [FILE VALUE]
    """
    with open(path("groups")) as file:
        wanted = [line.split() for line in file]
    if os.fork() == 0:
        for group, *setting in wanted:
            os.makedirs(group, exist_ok=True)
            if setting:
                with open(os.path.join(group, setting[0]), "w") as file:
                    file.write(setting[1])
        for group, *_ in wanted:
            with open(os.path.join(group, "cgroup.procs"), "w") as file:
                file.write(str(os.getpid()))
        with open("/proc/self/cgroup") as file:
            first = file.read()
        say("in its groups")
        while True:
            with open("/proc/self/cgroup") as file:
                now = file.read()
            if now != first:
                with open(path("strayed"), "w") as file:
                    file.write(now)
            time.sleep(0.002)
    count()


KINDS = {
    "control-groups": control_groups,
    "read-lease": lambda: lease(fcntl.F_RDLCK),
    "write-lease": lambda: lease(fcntl.F_WRLCK),
    "breaking-lease": breaking_lease,
    "opened": opened,
    "nameless-files": nameless_files,
    "odd-sockets": odd_sockets,
    "full": full,
    "inherited-terminal": inherited_terminal,
    "terminals": terminals,
    "mounted": mounted,
    "not-accepted": not_accepted,
    "named-semaphore": named_semaphore,
    "moved-sockets": moved_sockets,
    "datagrams": datagrams,
    "empty-datagram": empty_datagram,
    "unread-terminals": unread_terminals,
    "one-thread-filtered": one_thread_filtered,
    "sent": sent,
    "outside": outside,
    "renamed-socket": renamed_socket,
    "async-input": async_input,
    "plain": count,
    "threads": lambda: threads(8),
    "200-threads": lambda: threads(200),
    "pipes": pipes,
    "udp": udp,
    "tcp-listening": tcp_listening,
    "tcp-within": tcp_within,
    "tcp-flowing": tcp_flowing,
    "ghost": lambda: nameless(False),
    "link-remap": lambda: nameless(True),
    "files": files,
    "removed": removed,
    "shared": shared,
    "timers": timers,
    "ticks": ticks,
    "timerfds": timerfds,
    "posix-timers": posix_timers,
    "from-memory": lambda: program("from-memory"),
    "several-names": several_names,
    "fixed-addresses": fixed_addresses,
    "watched-link": watched_link,
    "watch-flags": watch_flags,
    "own-namespaces": own_namespaces,
    "disarmed": disarmed,
    "handler": handler_on_its_stack,
    "deleted-program": lambda: program("deleted-program"),
    "scheduled": scheduled,
    "bound": bound,
    "signals": signals,
    "forks": forks,
    "fork-storm": fork_storm,
    "environment": environment,
    "memory": memory,
    "fresh-2": lambda: fresh(2),
    "fresh-8": lambda: fresh(8),
    "fresh-32": lambda: fresh(32),
    "fresh-128": lambda: fresh(128),
    "large": large,
    "daemon": daemon,
    "daemon-with-worker": lambda: daemon(True),
    "mixed": mixed,
}
if __name__ == "__main__":
    KINDS[KIND]()
