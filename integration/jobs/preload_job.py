#!/usr/bin/env python3
"""What the interposer does to a process, seen from inside it: preload_job.py LIBCUDA SCENARIO, with LD_PRELOAD set.

The stand-in libcuda makes the driver's calls; ctypes makes the same calls from elsewhere. Prints "ok" at the end.
"""

import ctypes
import os
import resource
import shutil
import signal
import struct
import sys
import threading
import time

MIB = 1 << 20
PIECE = 2 * MIB
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mmap64.restype = ctypes.c_size_t
libc.mmap.argtypes = libc.mmap64.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_size_t] * 2
libc.memcpy.argtypes = [ctypes.c_size_t] * 3
# Loaded at run time, as frameworks do it, and bound late where it can be; ctypes alone would bind it now.
assert libc.dlopen(sys.argv[1].encode(), os.RTLD_LAZY)
cuda = ctypes.CDLL(sys.argv[1], use_errno=True)
cuda.standin_map.restype = ctypes.c_size_t
cuda.standin_map.argtypes = [ctypes.c_size_t]
cuda.standin_unmap.argtypes = [ctypes.c_size_t] * 2
cuda.standin_copy.argtypes = [ctypes.c_size_t] * 3
folder = os.environ["REKINDLE_LANDING"]


def landing():
    return f"{folder}/{os.getpid()}"


def arm():
    with open(landing(), "w"):
        pass


def file_at(address):
    for line in open("/proc/self/maps"):
        start, end = (int(end, 16) for end in line.split()[0].split("-"))
        # The kernel joins anonymous mappings that lie side by side.
        if start <= address < end:
            return " ".join(line.split()[5:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def is_landed(address):
    return file_at(address) == landing()


def threads():
    return len(os.listdir("/proc/self/task"))


def no_helpers():
    deadline = time.monotonic() + 5
    while threads() > 1:
        assert time.monotonic() < deadline, "helpers stay"


def has_helpers(region):
    """They are gone soon, and this thread may get no CPU meanwhile: looked for while it copies."""
    staging = ctypes.create_string_buffer(PIECE)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        cuda.standin_copy(region, ctypes.addressof(staging), PIECE)
        if threads() > 1:
            return True
    return False


def copy_pieces(region, length, rounds=1):
    """Copies in and out as the driver does and compares. The buffers are not aligned, and the last piece is short."""
    staging = ctypes.create_string_buffer(PIECE + 64)
    at = ctypes.addressof(staging) + 1
    for number in range(rounds):
        pieces = []
        for start in range(0, length, PIECE):
            size = min(PIECE, length - start)
            data = os.urandom(4096) * (size // 4096 + 1)
            pieces.append(data[:size])
            ctypes.memmove(at, data, size)
            cuda.standin_copy(region + start, at, size)
        for start, piece in zip(range(0, length, PIECE), pieces):
            ctypes.memset(at, number, len(piece))
            cuda.standin_copy(at, region + start, len(piece))
            assert ctypes.string_at(at, len(piece)) == piece, f"round {number}, piece at {start}"
    return b"".join(pieces)


def plain(length=8 * MIB):
    """The driver got its own mapping, all of which can be used."""
    region = cuda.standin_map(length)
    assert region and not is_landed(region), file_at(region)
    copy_pieces(region, length)
    assert threads() == 1
    cuda.standin_unmap(region, length)


def lands():
    arm()
    for length in [8 * MIB, 6 * MIB + 1234, 20 * MIB]:
        region = cuda.standin_map(length)
        assert is_landed(region) and region % PIECE == 0
        data = copy_pieces(region, length)
        size = (length + 4095) // 4096 * 4096
        assert os.stat(landing()).st_size == size
        # What is behind the driver's last byte is of an earlier snapshot.
        assert open(landing(), "rb").read(length) == data
        # One at a time.
        second = cuda.standin_map(length)
        assert file_at(second) != landing()
        cuda.standin_unmap(second, length)
        cuda.standin_unmap(region, length)
        assert open(landing(), "rb").read(length) == data
    region = cuda.standin_map(8 * MIB)
    assert has_helpers(region)
    cuda.standin_unmap(region, 8 * MIB)
    no_helpers()
    os.unlink(landing())
    plain()


def wrong_caller():
    arm()
    flags = 0x2 | 0x20 | 0x8000
    for function in [libc.mmap, libc.mmap64]:
        region = function(0, 8 * MIB, 3, flags, -1, 0)
        assert file_at(region) != landing()
        assert libc.munmap(region, 8 * MIB) == 0
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region)
    data = os.urandom(PIECE)
    buffer = ctypes.create_string_buffer(data)
    libc.memcpy(region, ctypes.addressof(buffer), PIECE)
    assert ctypes.string_at(region, PIECE) == data
    assert threads() == 1
    # Libcuda's own copies that have nothing to do with the region.
    other = ctypes.create_string_buffer(PIECE)
    cuda.standin_copy(ctypes.addressof(other), ctypes.addressof(buffer), PIECE)
    assert other.raw == data and threads() == 1


def objects(name):
    """Start, end, rights and file of each mapping of a file whose name begins so."""
    for line in open("/proc/self/maps"):
        fields = line.split()
        if len(fields) > 5 and os.path.basename(fields[5]).startswith(name):
            yield (*(int(end, 16) for end in fields[0].split("-")), fields[1], fields[5])


def data(library=sys.argv[1]):
    """The words of libcuda's mappings other than code, by address."""
    words = {}
    for start, end, rights, path in objects("libcuda.so"):
        if path == os.path.realpath(library) and rights.startswith("r") and "x" not in rights:
            found = struct.unpack(f"{(end - start) // 8}Q", ctypes.string_at(start, end - start))
            words.update(zip(range(start, end, 8), found))
    return words


def is_in(name, address):
    return any(start <= address < end and "x" in rights for start, end, rights, _ in objects(name))


def changes(before, after):
    """Those that lead to the interposer now: address, old and new value."""
    found = [(at, before[at], after[at]) for at in before if before[at] != after[at]]
    return [change for change in found if is_in("interposer-", change[2])]


def copies_with_one_thread(region):
    staging = ctypes.create_string_buffer(PIECE)
    for _ in range(200):
        cuda.standin_copy(region, ctypes.addressof(staging), PIECE)
        assert threads() == 1


def redirects(was_in="libc.so"):
    own = ctypes.cast(libc.memcpy, ctypes.c_void_p).value
    assert is_in("libc.so", own)
    mappings = sorted(objects("libcuda.so"))
    plain()
    arm()
    for length in [8 * MIB, 20 * MIB]:
        before = data()
        region = cuda.standin_map(length)
        assert is_landed(region)
        changed = changes(before, data())
        assert changed and len({new for _, _, new in changed}) == 1, changed
        assert all(is_in(was_in, old) for _, old, _ in changed), changed
        assert sorted(objects("libcuda.so")) == mappings, "protections are what they were"
        copy_pieces(region, length)
        assert has_helpers(region)
        cuda.standin_unmap(region, length)
        after = data()
        assert all(after[at] == old for at, old, _ in changed)
        assert sorted(objects("libcuda.so")) == mappings
        assert ctypes.cast(libc.memcpy, ctypes.c_void_p).value == own
        no_helpers()
    os.unlink(landing())
    plain()


def redirects_late():
    """The slot holds libcuda's own stub before the first copy, and so afterwards."""
    region = cuda.standin_map(8 * MIB)
    cuda.standin_unmap(region, 8 * MIB)
    before = data()
    arm()
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region)
    [(slot, stub, _)] = changes(before, data())
    assert is_in("libcuda.so", stub)
    copy_pieces(region, 8 * MIB)
    assert has_helpers(region)
    cuda.standin_unmap(region, 8 * MIB)
    no_helpers()
    assert data()[slot] == stub
    os.unlink(landing())
    plain()
    assert is_in("libc.so", data()[slot]), "bound by the first copy"
    redirects()


def no_mprotect():
    forbid(10)
    arm()
    before = data()
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region)
    assert changes(before, data()) == []
    copy_pieces(region, 8 * MIB)
    copies_with_one_thread(region)
    cuda.standin_unmap(region, 8 * MIB)


def second_libcuda():
    path = os.path.join(os.path.dirname(sys.argv[1]), "libcuda.so.2")
    shutil.copy(sys.argv[1], path)
    two = ctypes.CDLL(path, use_errno=True)
    for name in ["standin_map", "standin_unmap", "standin_copy"]:
        getattr(two, name).argtypes = getattr(cuda, name).argtypes
        getattr(two, name).restype = getattr(cuda, name).restype
    return path, two


def missed_ends():
    """Nobody tells of the end of the region, nor of that of its libcuda."""
    unmap = lambda region: libc.syscall(ctypes.c_long(11), ctypes.c_size_t(region), ctypes.c_size_t(8 * MIB))
    arm()
    before = data()
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region) and unmap(region) == 0
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region)
    changed = changes(before, data())
    assert changed and has_helpers(region)
    cuda.standin_unmap(region, 8 * MIB)
    assert all(data()[at] == old for at, old, _ in changed)
    no_helpers()

    path, two = second_libcuda()
    before = data(path)
    region = two.standin_map(8 * MIB)
    assert is_landed(region) and unmap(region) == 0
    (slot, _, ours), *_ = changes(before, data(path))
    libc.dlclose(ctypes.c_void_p(two._handle))
    assert not any(mapping[3] == path for mapping in objects("libcuda.so"))
    page = slot & ~4095
    assert libc.mmap(page, 4096, 3, 0x32, -1, 0) == page
    ctypes.c_size_t.from_address(slot).value = ours
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region) and has_helpers(region)
    copy_pieces(region, 8 * MIB)
    cuda.standin_unmap(region, 8 * MIB)
    assert ctypes.c_size_t.from_address(slot).value == ours, "somebody else's memory"


def two_libcudas():
    """The one that made the region is redirected; the other one copies as ever. Then the other way round."""
    global cuda
    path, two = second_libcuda()
    one = cuda
    arm()
    for maps, other, idle in [(one, two, path), (two, one, sys.argv[1])]:
        before = data(idle)
        region = maps.standin_map(8 * MIB)
        assert is_landed(region) and changes(before, data(idle)) == []
        cuda = other
        copies_with_one_thread(region)
        cuda = maps
        assert has_helpers(region)
        copy_pieces(region, 8 * MIB)
        cuda.standin_unmap(region, 8 * MIB)
        no_helpers()


def functions_of_two_libcudas():
    """Those of the one that was found first are ours, and lead to it; the other one keeps its own."""
    path, _ = second_libcuda()
    libc.dlsym.restype = ctypes.c_void_p
    libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    libc.dlopen.restype = ctypes.c_void_p
    call = ctypes.CFUNCTYPE(ctypes.c_int)
    context, handle = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    arguments = ctypes.byref(handle), ctypes.c_size_t(2 * MIB), None, ctypes.c_uint64(0)
    first = libc.dlsym(cuda._handle, b"cuMemCreate")
    assert is_in("interposer-", first) and call(first)(*arguments) == 304
    # It has no context.
    other = libc.dlsym(libc.dlopen(path.encode(), os.RTLD_LAZY), b"cuMemCreate")
    assert is_in("libcuda.so.2", other) and call(other)(*arguments) == 3
    assert call(first)(*arguments) == 304
    assert libc.dlsym(cuda._handle, b"cuMemCreate") == first


def a_libcuda_that_is_loaded_again():
    """At another address. Its functions are ours again, and lead to where it is now."""
    path = os.path.join(os.path.dirname(sys.argv[1]), "libcuda.so.2")
    shutil.copy(sys.argv[1], path)
    libc.dlsym.restype = ctypes.c_void_p
    libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    libc.dlopen.restype = ctypes.c_void_p
    libc.dlclose.argtypes = [ctypes.c_void_p]
    call = ctypes.CFUNCTYPE(ctypes.c_int)
    handle = ctypes.c_uint64()
    arguments = ctypes.byref(handle), ctypes.c_size_t(2 * MIB), None, ctypes.c_uint64(0)
    for _ in range(3):
        library = libc.dlopen(path.encode(), os.RTLD_LAZY)
        found = [libc.dlsym(library, name) for name in [b"cuMemCreate", b"cuMemRelease"]]
        assert all(is_in("interposer-", address) for address in found)
        assert call(found[0])(*arguments) == 3
        place = next(mapping for mapping in objects("libcuda.so") if mapping[3] == path)
        assert libc.dlclose(library) == 0
        assert not any(mapping[3] == path for mapping in objects("libcuda.so"))
        assert libc.mmap(place[0], MIB, 0, 0x32, -1, 0) == place[0]


def small():
    arm()
    plain(4 * MIB - 4096)
    region = cuda.standin_map(4 * MIB)
    assert is_landed(region)
    copy_pieces(region, 256 * 1024 - 1)
    assert threads() == 1


def unarmed():
    plain()
    assert os.listdir(folder) == []


def refused():
    """Whatever is wrong with the file: no space, too long for the limit, not on a tmpfs."""
    arm()
    plain(16 * MIB)
    assert os.stat(landing()).st_size == 0


def file_size_limit():
    arm()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    plain()


def no_file():
    """Not what the supervisor makes, or nothing that can be opened for writing."""
    makers = [lambda: os.mkdir(landing()), lambda: os.mkfifo(landing()), lambda: os.symlink("/dev/shm/x", landing())]
    for make in makers:
        make()
        plain()
        os.system(f"rm -rf -- {landing()}")
    assert not os.path.exists("/dev/shm/x")


def cannot_open():
    assert os.path.exists(landing()) or not os.access(folder, os.W_OK)
    plain()


def forks():
    arm()
    region = cuda.standin_map(8 * MIB)
    copy_pieces(region, 8 * MIB)
    assert has_helpers(region)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert threads() == 1
            # What it inherited is no landing of its own.
            copy_pieces(region, 4 * MIB)
            assert threads() == 1
            cuda.standin_unmap(region, 8 * MIB)
            plain()
            lands()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    copy_pieces(region, 8 * MIB)
    assert has_helpers(region)
    cuda.standin_unmap(region, 8 * MIB)


def signals():
    seen = 0

    def handler(number, frame):
        nonlocal seen
        seen += 1

    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGUSR1, handler)
    arm()
    region = cuda.standin_map(8 * MIB)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    storm = os.fork()
    if storm == 0:
        while True:
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(0.0001)
    copy_pieces(region, 8 * MIB, rounds=50)
    os.kill(storm, signal.SIGKILL)
    os.waitpid(storm, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert seen > 100, seen
    no_helpers()


def concurrent():
    """The job's own copies, of all sizes, from four threads, while the driver's are split."""
    arm()
    region = cuda.standin_map(8 * MIB)
    failed = []

    def work(seed):
        source = ctypes.create_string_buffer(os.urandom(MIB) * 2, 2 * MIB)
        target = ctypes.create_string_buffer(2 * MIB)
        size = 1
        for number in range(3000):
            size = (size * 7 + number + seed) % MIB + 1 if number % 10 == 0 else (size * 7 + seed) % 4096
            at = number % 61
            libc.memcpy(ctypes.addressof(target), ctypes.addressof(source) + at, size)
            if ctypes.string_at(target, size) != ctypes.string_at(ctypes.addressof(source) + at, size):
                failed.append(size)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [worker.start() for worker in workers]
    while any(worker.is_alive() for worker in workers):
        copy_pieces(region, 8 * MIB)
    assert not failed, failed
    no_helpers()


def errno():
    arm()
    ctypes.set_errno(77)
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region) and ctypes.get_errno() == 77
    staging = ctypes.create_string_buffer(PIECE)
    ctypes.set_errno(78)
    cuda.standin_copy(region, ctypes.addressof(staging), PIECE)
    assert ctypes.get_errno() == 78
    cuda.standin_unmap(region, 8 * MIB)
    os.unlink(landing())
    ctypes.set_errno(79)
    region = cuda.standin_map(8 * MIB)
    assert not is_landed(region) and ctypes.get_errno() == 79
    # And it is set where libc sets it.
    assert libc.mmap(0, 1 << 60, 3, 0x22, -1, 0) == 2**64 - 1 and ctypes.get_errno() == 12
    assert libc.mmap(0, 1, 3, 0x22, -1, 5) == 2**64 - 1 and ctypes.get_errno() == 22
    assert libc.munmap(1, 1) == -1 and ctypes.get_errno() == 22
    assert libc.munmap(0, 0) == -1 and ctypes.get_errno() == 22


def other_preload():
    """Another object's mmap comes after ours and sees what is not for us; its memcpy is called as ever."""
    other = ctypes.CDLL(None)
    count = lambda what: ctypes.c_size_t.in_dll(other, what).value
    calls, copies = count("other_calls"), count("other_copies")
    plain()
    assert count("other_calls") == calls + 1 and count("other_copies") >= copies + 8
    arm()
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region) and count("other_calls") == calls + 1
    staging = ctypes.create_string_buffer(b"x" * PIECE)
    before = count("other_copies")
    for _ in range(100):
        cuda.standin_copy(region, ctypes.addressof(staging), PIECE)
    assert count("other_copies") == before and ctypes.string_at(region, PIECE) == staging.raw[:PIECE]


def forbid(call, first_argument=None, index=0):
    """Lets a system call fail with EINVAL from now on, where its argument number `index` is this."""
    load = lambda offset: struct.pack("HBBI", 0x20, 0, 0, offset)
    unless = lambda value, skip: struct.pack("HBBI", 0x15, 0, skip, value)
    give = lambda value: struct.pack("HBBI", 0x06, 0, 0, value)
    program = [load(0), unless(call, 1 if first_argument is None else 3)]
    if first_argument is not None:
        program += [load(16 + 8 * index), unless(first_argument, 1)]
    program += [give(0x00050000 | 22), give(0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(program))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0


def old_kernel():
    """Without MADV_POPULATE_READ, which came with Linux 5.14."""
    forbid(28, 22, 2)
    lands()


def old_kernel_refused():
    forbid(28, 22, 2)
    refused()


def ways_to_the_driver():
    """Every way leads to the driver's function, which here has no resource manager to talk to: 304, or 3 before a context."""
    libc.dlsym.restype = ctypes.c_void_p
    libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    linked = ctypes.CDLL(os.path.join(os.path.dirname(sys.argv[1]), "linked.so"))
    assert linked.create() == 3
    context, handle = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    # A library of its own, which is linked to libcuda and found ours first.
    assert linked.create() == 304
    arguments = ctypes.byref(handle), ctypes.c_size_t(2 * MIB), None, ctypes.c_uint64(0)
    call = ctypes.CFUNCTYPE(ctypes.c_int)
    # Its name in one library, in all, and the function that the driver hands out, at any version.
    found = [libc.dlsym(library, b"cuMemCreate") for library in [cuda._handle, None]]
    for version in [11030, 12000]:
        address, get = ctypes.c_void_p(), ctypes.c_void_p()
        name = b"cuGetProcAddress" if version < 12000 else b"cuGetProcAddress_v2"
        get = call(libc.dlsym(cuda._handle, name))
        assert get(b"cuMemCreate", ctypes.byref(address), version, ctypes.c_uint64(0), None) == 0
        found.append(address.value)
        again = ctypes.c_void_p()
        assert get(b"cuGetProcAddress", ctypes.byref(again), version, ctypes.c_uint64(0), None) == 0
        assert is_in("interposer-", again.value)
        assert call(again.value)(b"cuMemCreate", ctypes.byref(address), version, ctypes.c_uint64(0), None) == 0
        found.append(address.value)
    assert all(is_in("interposer-", address) for address in found), found
    for address in found:
        assert call(address)(*arguments) == 304
    # What is not ours is the driver's own, and what nobody has is not there.
    assert is_in("libcuda.so", libc.dlsym(cuda._handle, b"cuMemAddressReserve"))
    assert libc.dlsym(cuda._handle, b"cuMemNothing") is None and libc.dlsym(None, b"cuMemNothing") is None
    assert is_in("libc.so", libc.dlsym(None, b"getpid")) and is_in("libc.so", libc.dlsym(None, b"cuserid"))


def is_marked(process="self"):
    return "/memfd:rekindle-cuinit (deleted)" in open(f"/proc/{process}/maps").read()


def init_is_marked():
    """By every way to it, while it lasts, and not in a child."""
    fault = os.environ["STANDIN_CUDA_DIR"] + "/fail-init"

    def set_fault(text):
        with open(fault + ".draft", "w") as file:
            file.write(text)
        os.rename(fault + ".draft", fault)

    libc.dlsym.restype = ctypes.c_void_p
    libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    found = [libc.dlsym(library, b"cuInit") for library in [cuda._handle, None]]
    address = ctypes.c_void_p()
    assert cuda.cuGetProcAddress_v2(b"cuInit", ctypes.byref(address), 12000, ctypes.c_uint64(0), None) == 0
    for address in [*found, address.value]:
        assert is_in("interposer-", address)
        assert not is_marked()
        answers = []
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(address)
        thread = threading.Thread(target=lambda: answers.append(call(0)))
        set_fault("hold")
        thread.start()
        deadline = time.monotonic() + 60
        while not is_marked():
            assert time.monotonic() < deadline
        child = os.fork()
        if child == 0:
            os._exit(is_marked())
        assert os.waitpid(child, 0)[1] == 0
        assert is_marked() and not answers
        set_fault("0")
        thread.join()
        assert answers == [0] and not is_marked()


def no_threads():
    forbid(56)
    arm()
    region = cuda.standin_map(8 * MIB)
    assert is_landed(region)
    copy_pieces(region, 8 * MIB)
    assert threads() == 1


globals()[sys.argv[2]]()
print("ok")
