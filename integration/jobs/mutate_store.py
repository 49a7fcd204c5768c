"""Changes whatever can be changed below a job's folder in a store, at random: the hand of one who can write the store.

    mutate_store.py FOLDER DECOYS LIBRARY SEED SECONDS

FOLDER is the job's; everything in it may go. DECOYS is a folder of root's on the same file system, to which links lead: files,
folders, and what is mounted there. LIBRARY is a shared object that says it was loaded. Runs as root, prints each change, and
undoes its mounts at the end. What the kernel refuses is no error: everything may be gone, or be there again, at any moment.
"""

import ctypes
import errno
import os
import random
import shutil
import socket
import stat
import sys
import tempfile
import time

folder, decoys, library = (os.path.normpath(path) for path in sys.argv[1:4])
seed, seconds = int(sys.argv[4]), float(sys.argv[5])
choose = random.Random(seed)
libc = ctypes.CDLL(None, use_errno=True)
MNT_DETACH, UMOUNT_NOFOLLOW, MS_BIND = 2, 8, 4096
# What was in the way is kept here: on the same file system, and not below the store.
aside = tempfile.mkdtemp(prefix="aside-", dir=os.path.dirname(decoys))
# What a bind mount shows: root's own is not put there, because what is removed through it is removed.
bound = os.path.join(aside, "bound")
os.mkdir(bound)
open(os.path.join(bound, ".tmp-bound"), "w").close()
mounts = []
# What the present change is about.
touched = []
# Whether the command is still to start.
is_before = True
# Names that rekindle and CRIU give, at some moment or another.
NAMES = """
lock job.json state.json result.json proven.json evidence.json staging .tmp-x .del-x images packs bin
log log/stdout.log log/stderr.log log/events.jsonl log/criu.log log/stdout.log.1
scratch scratch/plugins scratch/plugins/rekindle.so scratch/stats-dump scratch/stats-restore scratch/unpacked scratch/rehearsal
slots slots/boot slots/0 slots/1 slots/0/criu slots/1/criu slots/0/spool slots/1/spool slots/0/gpu slots/0/manifest.json
slots/0/criu/dump.log slots/0/criu/inventory.img slots/0/criu/pstree.img slots/1/manifest.json
""".split()

# Those that rekindle opens first, or that lead it to others.
FIRST = """
staging staging lock state.json log log/stdout.log log/stderr.log log/events.jsonl bin scratch scratch/plugins images packs
slots slots/0 slots/1
""".split()


def entries():
    """Everything below the folder now, and not below one that we mounted."""
    found = []
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if os.path.join(top, name) not in mounts]
        found += [os.path.join(top, name) for name in folders + files]
    return found


def name():
    found = sorted(os.path.relpath(path, folder) for path in entries())
    there = [path for path in FIRST if path in found]
    path = os.path.join(folder, choose.choice(choose.choice([there or FIRST] if is_before else [FIRST, NAMES, found or NAMES])))
    touched.append(os.path.relpath(path, folder))
    # Through a link that was made here before, a decoy would be changed.
    if os.path.commonpath([os.path.realpath(os.path.dirname(path)), os.path.realpath(folder)]) != os.path.realpath(folder):
        raise OSError(errno.EXDEV, "it leads out of the folder")
    return path


def is_decoy(path):
    """A hard link to one is the decoy itself."""
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_nlink > 1


def decoy(want=lambda path: True):
    found = [decoys]
    for top, folders, files in os.walk(decoys):
        found += [os.path.join(top, name) for name in folders + files]
    found = choose.choice(sorted(path for path in found if want(path)))
    touched.append(os.path.relpath(found, decoys))
    return found


def away(path):
    if os.path.lexists(path):
        os.rename(path, os.path.join(aside, str(choose.randrange(1 << 40))))


def replace_by_link():
    path = name()
    # One of the same kind gets further.
    is_kind = os.path.isfile if os.path.isfile(path) else os.path.isdir
    to = decoy(is_kind) if choose.random() < 0.85 else decoy()
    if choose.random() < 0.3:
        to = os.path.relpath(to, os.path.realpath(os.path.dirname(path)))
    elif choose.random() < 0.2:
        to += ".new"
    away(path)
    os.symlink(to, path)


def replace_by_link_to_what_it_was():
    path, kept = name(), os.path.join(aside, f"was{choose.randrange(1 << 40)}")
    os.rename(path, kept)
    os.symlink(kept, path)


def exchange_with_link():
    """A moment of each, again and again."""
    path, kept = name(), os.path.join(aside, f"exchanged{choose.randrange(1 << 40)}")
    to = decoy()
    os.rename(path, kept)
    for _ in range(choose.randrange(1, 100)):
        os.symlink(to, path)
        os.unlink(path)
        os.rename(kept, path)
        os.rename(path, kept)
    os.rename(kept, path)


def replace_by_hard_link():
    path, to = name(), decoy(os.path.isfile)
    away(path)
    os.link(to, path)


def replace_by_fifo():
    path = name()
    away(path)
    os.mkfifo(path, choose.choice([0o600, 0o666]))


def replace_by_socket():
    path = name()
    away(path)
    socket.socket(socket.AF_UNIX).bind(path)


def replace_by_device():
    path = name()
    away(path)
    # /dev/null and /dev/full: nothing happens to whoever writes there.
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, choose.choice([3, 7])))


def replace_by_file():
    path = name()
    away(path)
    with open(path, "wb") as file:
        file.write(choose.randbytes(choose.choice([0, 1, 100, 4096, 100000])))


def replace_by_folder():
    path = name()
    away(path)
    os.mkdir(path)


def plant_library():
    path = name()
    if os.path.isdir(path) and not os.path.islink(path):
        path = os.path.join(path, choose.choice(["x.so", "cuda_plugin.so", "rekindle.so"]))
    elif choose.random() < 0.5:
        path = os.path.join(os.path.dirname(path), "x.so")
    away(path)
    shutil.copyfile(library, path)
    os.chmod(path, 0o755)


def mount(source, kind, flags, options):
    path = choose.choice(sorted(path for path in entries() if os.path.isdir(path) and not os.path.islink(path)) or [folder])
    touched.append(os.path.relpath(path, folder))
    mounts.append(path)
    if libc.mount(source.encode(), path.encode(), kind, flags, options) != 0:
        mounts.remove(path)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount_tmpfs():
    mount("rekindle", b"tmpfs", 0, b"size=1m,mode=0700")


def mount_folder():
    mount(bound, None, MS_BIND, None)


def unmount():
    if mounts:
        point = mounts.pop(choose.randrange(len(mounts)))
        # A folder above it may be a link to a decoy by now, and what is mounted there is not ours.
        if os.path.realpath(point) == os.path.join(os.path.realpath(folder), os.path.relpath(point, folder)):
            libc.umount2(point.encode(), MNT_DETACH | UMOUNT_NOFOLLOW)


def change_owner():
    path = name()
    if not is_decoy(path):
        os.chown(path, choose.choice([0, 1, 65534]), choose.choice([0, 1, 65534]), follow_symlinks=False)


def change_mode():
    path = name()
    if not os.path.islink(path) and not is_decoy(path):
        os.chmod(path, choose.choice([0, 0o700, 0o777, 0o755, 0o4755, 0o1777, 0o2755, 0o600, 0o666]))


def rename_to_another():
    os.rename(name(), name())


def truncate():
    path = name()
    if os.path.isfile(path) and not os.path.islink(path) and not is_decoy(path):
        os.truncate(path, choose.choice([0, 1, 1 << 20, 1 << 34]))


def remove():
    away(name())


CHANGES = [
    replace_by_link, replace_by_link, replace_by_link, replace_by_link_to_what_it_was, exchange_with_link, replace_by_hard_link,
    replace_by_fifo, replace_by_socket, replace_by_device, replace_by_file, replace_by_folder, plant_library, mount_tmpfs,
    mount_folder, unmount, change_owner, change_mode, rename_to_another, truncate, remove,
]  # fmt: skip
# What is only there between two commands is the attack that needs no luck.
BEFORE = [replace_by_link] * 3 + [plant_library] * 2 + [replace_by_hard_link, replace_by_fifo]


def change_something():
    change = choose.choice(BEFORE if is_before else CHANGES)
    touched.clear()
    try:
        change()
        print(change.__name__, *touched, flush=True)
    except OSError as error:
        print(change.__name__, *touched, error.strerror, flush=True)


end = time.monotonic() + seconds
pause = choose.choice([0, 0.001, 0.01, 0.05])
# Some commands meet a few changes only, and get further. All lines must fit into a pipe: they are read at the end.
left = choose.choice([0, 2, 300, 300])
try:
    for _ in range(choose.choice([0, 1, 1, 1, 2])):
        change_something()
    is_before = False
    print("ready", flush=True)
    time.sleep(choose.choice([0, 0, choose.random() * seconds / 2]))
    while time.monotonic() < end and left > 0:
        left -= 1
        change_something()
        time.sleep(pause)
finally:
    # By now they may have another path: a folder above was renamed. One may hide another.
    for _ in range(100):
        with open("/proc/self/mountinfo") as table:
            points = [line.split()[4] for line in table]
        points = [point for point in points if point.startswith((os.path.dirname(folder) + "/", aside + "/"))]
        for point in points:
            libc.umount2(point.encode(), MNT_DETACH | UMOUNT_NOFOLLOW)
        if not points:
            break
    shutil.rmtree(aside, ignore_errors=True)
