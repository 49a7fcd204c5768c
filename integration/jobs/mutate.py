"""Changes what a user can change in a folder, at random: the hand of a job's user while its job is restored.

    mutate.py FOLDER OTHERS SEED SECONDS

FOLDER is the user's; it has `d`, with the job's things, and `root`, a folder of root's. OTHERS is a folder of root's elsewhere.
Prints each change. What the kernel refuses is no error: the user may try everything.
"""

import os
import random
import shutil
import socket
import stat
import sys
import time

folder, others, seed, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
choose = random.Random(seed)
d, aside = os.path.join(folder, "d"), os.path.join(folder, "aside")
NAMES = ["daemon.sock", "ghost", "first", "second", "log", "fifo", "data", "mapped", "program", "deep", "deep/further"]
# Names that CRIU and rekindle give for a moment.
NAMES += [f"ghost.cr.{n}.ghost" for n in range(1, 4)] + [f"link_remap.{n}" for n in range(1, 9)]
NAMES += ["daemon.sock.criu-sk-ghost", "log.rolled-back.1", "data.rolled-back.1"]
TARGETS = ["secret", "daemon.sock", "log", "data", "fifo", "first", ""]


def name():
    return os.path.join(d, choose.choice(NAMES))


def target():
    found = os.path.join(others, choose.choice(TARGETS))
    for _ in range(choose.choice([0, 0, 0, 1, 5, 30])):
        link = os.path.join(folder, f"hop{choose.randrange(1 << 30)}")
        os.symlink(found, link)
        found = link
    return found


def away(path):
    os.rename(path, os.path.join(folder, f"aside{choose.randrange(1 << 30)}"))


def replace_by_link():
    path, to = name(), target()
    away(path)
    os.symlink(to, path)


def replace_folder_by_link():
    away(d)
    os.symlink(choose.choice([others, os.path.join(folder, "root"), "/etc", "/proc/self/root" + others, "/dev"]), d)


def replace_folder_by_roots():
    away(d)
    os.rename(os.path.join(folder, "root"), d)


def exchange_folders():
    """A moment of each, again and again."""
    real, link = os.path.join(folder, "real"), os.path.join(folder, "link")
    os.symlink(choose.choice([others, os.path.join(folder, "root")]), link)
    os.rename(d, real)
    for _ in range(choose.randrange(1, 200)):
        os.symlink(real, d + ".new")
        os.rename(d + ".new", d)
        os.symlink(link, d + ".new")
        os.rename(d + ".new", d)
    os.unlink(d)
    os.rename(real, d)


def restore_folder():
    if os.path.islink(d):
        os.unlink(d)
        for entry in os.listdir(folder):
            path = os.path.join(folder, entry)
            if entry.startswith("aside") and os.path.isdir(path) and not os.path.islink(path):
                os.rename(path, d)
                break


def replace_by_hard_link():
    path, to = name(), os.path.join(others, choose.choice(["secret", "log", "data"]))
    away(path)
    os.link(to, path)


def replace_by_fifo():
    path = name()
    away(path)
    os.mkfifo(path, choose.choice([0o600, 0o666]))


def replace_by_file():
    path = name()
    if os.path.lexists(path):
        away(path)
    with open(path, "wb") as file:
        file.write(b"x" * choose.choice([0, 1, 12, 4096, 100000]))


def replace_by_socket():
    path = name()
    away(path)
    socket.socket(socket.AF_UNIX).bind(path)


def replace_by_folder():
    path = name()
    away(path)
    os.mkdir(path)


def make_link_before():
    os.symlink(target(), name())


def change_mode():
    os.chmod(choose.choice([name(), d, folder]), choose.choice([0, 0o700, 0o777, 0o755, 0o4755, 0o1777, 0o2755, 0o600]))


def back_to_mode():
    os.chmod(folder, 0o755)
    os.chmod(d, 0o755)


def truncate():
    os.truncate(name(), choose.choice([0, 1, 1 << 20, 1 << 34]))


def remove():
    path = name()
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def grow():
    # Of a FIFO that it made itself, nobody reads the other end.
    with open(os.open(name(), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK), "ab", buffering=0) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.write(b"grown" * choose.randrange(1000))


CHANGES = [
    replace_by_link, replace_folder_by_link, replace_folder_by_roots, exchange_folders, restore_folder, replace_by_hard_link,
    replace_by_fifo, replace_by_file, replace_by_socket, replace_by_folder, make_link_before, change_mode, back_to_mode,
    truncate, remove, grow,
]  # fmt: skip
end = time.monotonic() + seconds
pause = choose.choice([0, 0.001, 0.01, 0.1])
# Some restores see one change only, and get further.
left = choose.choice([1, 2, 5, 1 << 30])
time.sleep(choose.choice([0, 0, choose.random() * 0.5]))
while time.monotonic() < end and left > 0:
    change = choose.choice(CHANGES)
    left -= 1
    try:
        change()
        print(change.__name__, flush=True)
    except OSError as error:
        print(change.__name__, error.strerror, flush=True)
    time.sleep(pause)
