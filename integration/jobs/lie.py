#!/usr/bin/env python3
"""lie.py FOLDER: changes CRIU's image files of one process and its threads as a CRIU would that loses things in silence.

Prints a line for each item that it has changed: what is to become of it, and its word. The fields are those of CRIU 4.2's images/*.proto."""

import glob
import os
import struct
import sys

folder = sys.argv[1]


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def number(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def parse(data):
    """The fields of a message: [number, kind, value], in order."""
    at, fields = 0, []
    while at < len(data):
        key, at = varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            length = 8 if kind == 1 else 4
            value, at = data[at : at + length], at + length
        fields.append([field, kind, value])
    return fields


def build(fields):
    out = b""
    for field, kind, value in fields:
        out += number(field << 3 | kind)
        if kind == 0:
            out += number(value)
        elif kind == 2:
            out += number(len(value)) + value
        else:
            out += value
    return out


def plus(value):
    """A value of the field's kind that is another one."""
    if isinstance(value, int):
        return value + 1
    return value[:-1] + bytes([value[-1] ^ 1])


def change(message, path, to):
    """Changes the field at a path of numbers. Returns the message, and whether it had the field."""
    fields, done = parse(message), False
    for field in fields:
        if field[0] == path[0]:
            if len(path) == 1:
                field[2], done = to(field[2]), True
            else:
                field[2], inner = change(field[2], path[1:], to)
                done = done or inner
    return build(fields), done


def without(message, path):
    """Removes the first field at a path."""
    fields = parse(message)
    for at, field in enumerate(fields):
        if field[0] == path[0]:
            if len(path) == 1:
                del fields[at]
            else:
                field[2] = without(field[2], path[1:])
            return build(fields)
    return message


def added(message, field, kind, value):
    return build([*parse(message), [field, kind, value]])


def rewrite(name, each):
    """Replaces each record of an image file by what `each` returns; None leaves it out."""
    path = os.path.join(folder, name)
    data = open(path, "rb").read()
    at = 4 if name == "inventory.img" else 8
    out = data[:at]
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        record = each(data[at + 4 : at + 4 + length])
        at += 4 + length
        if record is not None:
            out += struct.pack("<I", len(record)) + record
    # The file may be of memory that is mapped: in place.
    with open(path, "r+b") as file:
        file.write(out)
        file.truncate()


def lie(word, name, path, to=plus, where=lambda record: True, becomes="found"):
    """Changes a field of those records of an image file that are to be changed."""
    done = []

    def each(record):
        if where(record):
            record, was = change(record, path, to)
            done.append(was)
        return record

    rewrite(name, each)
    assert any(done), f"no record of {name} has {path} for {word}"
    print(becomes, word)


def without_all(word, name, path, where=lambda record: True):
    """Removes all fields at a path."""

    def each(record):
        while where(record) and (less := without(record, path)) != record:
            record = less
        return record

    before = open(os.path.join(folder, name), "rb").read()
    rewrite(name, each)
    assert open(os.path.join(folder, name), "rb").read() != before, f"no record of {name} has {path} for {word}"
    print("found", word)


def value_at(record, path):
    """The first value at a path of numbers, and None if there is none."""
    for field in parse(record):
        if field[0] == path[0]:
            return field[2] if len(path) == 1 else value_at(field[2], path[1:])
    return None


def is_at(path, *values):
    return lambda record: value_at(record, path) in values


def file_named(end):
    return lambda record: (value_at(record, [REG, 6]) or b"").endswith(end)


def records(name):
    found = []
    rewrite(name, lambda record: found.append(record) or record)
    return found


def read_only(mapping):
    """Of memory that is shared, and of no file."""
    is_shared = value_at(mapping, [6]) == MAP_SHARED and value_at(mapping, [5]) == READ | WRITE
    return change(mapping, [5], lambda _: READ)[0] if is_shared else mapping


def without_advice(mapping):
    """Of memory that is in no dump: madvise(2) numbers are bits."""
    return change(mapping, [9], lambda advice: advice & ~(1 << 16))[0]


MAP_SHARED, READ, WRITE = 1, 1, 2
REG, INET, EVENTFD, EPOLL, SIGNALFD, TIMERFD, INOTIFY, UNIX, PIPE, PIDFD = 3, 4, 8, 9, 10, 12, 13, 16, 18, 22
UDP, LISTENS, WRITES, NONBLOCK = 17, 10, 1, 0o4000
reaper, job, child, another_child = [value_at(record, [1]) for record in records("pstree.img")]
thread, another_thread = [field[2] for field in parse(records("pstree.img")[1]) if field[0] == 5 and field[2] != job]
core, core_of_thread, core_of_child = (f"core-{pid}.img" for pid in (job, thread, child))
table = f"fdinfo-{value_at(records(f'ids-{job}.img')[0], [2])}.img"
table_of_child = f"fdinfo-{value_at(records(f'ids-{child}.img')[0], [2])}.img"
ids = {end: value_at(record, [2]) for record in records("files.img") for end in (b"/plain", b"/gone") if file_named(end)(record)}

# Processes and threads.
rewrite("pstree.img", lambda record: None if value_at(record, [1]) == another_child else record)
print("found process")


def without_a_thread(record):
    return build([field for field in parse(record) if field[0] != 5 or field[2] != another_thread])


rewrite("pstree.img", without_a_thread)
print("found thread")
lie("parent", "pstree.img", [2], lambda _: reaper, is_at([1], child))
lie("root", f"fs-{child}.img", [2], lambda _: value_at(records(f"fs-{child}.img")[0], [1]))
lie("umask", f"fs-{job}.img", [3], lambda _: 0o777)
lie("directory", f"fs-{job}.img", [1], lambda _: value_at(records(f"fs-{job}.img")[0], [2]))
lie("process-group", "pstree.img", [3], lambda _: reaper, is_at([1], job))
loader = next(value_at(record, [2]) for record in records("files.img") if file_named(b"/ld-linux-x86-64.so.2")(record))
lie("executable", f"mm-{child}.img", [12], lambda _: loader)
lie("layout", f"mm-{job}.img", [8])
lie("mapping", f"mm-{job}.img", [14], read_only)
lie("huge-pages", f"mm-{job}.img", [17], lambda _: 1)
lie("blocked-signals", core, [3, 5], lambda value: b"\0" * 8 if isinstance(value, bytes) else 0)
lie("memory-advice", f"mm-{job}.img", [14], without_advice)
lie("memory-barriers", core, [3, 22], lambda _: 0)
lie("interval-timers", core, [3, 7, 1, 3], lambda seconds: seconds // 2)
lie("alternate-stack", core, [5, 7, 2], lambda size: size // 2)
lie("rseq", core_of_thread, [5, 15, 3])
lie("clear-at-end", core_of_thread, [2, 1])
lie("name", core, [3, 6], lambda _: b"another")
lie("robust-list", core_of_thread, [5, 1])
lie("capabilities", core_of_thread, [5, 10, 11], lambda value: 0)
lie("more-groups", core_of_child, [5, 10], lambda creds: creds + bytes([14 << 3, 7]))
lie("users", core_of_thread, [5, 10, 7], lambda _: 7)
lie("groups", core_of_thread, [5, 10, 8], lambda _: 7)
lie("no-new-privileges", core_of_child, [5, 10], lambda creds: creds + number(18 << 3) + b"\1")
without_all("timers", core, [3, 7, 4])
print("found timer-times")
without_all("pending-signals", core, [3, 10, 1])

# Descriptors.
lie("flags", "files.img", [PIPE, 3], lambda flags: flags & ~NONBLOCK, is_at([PIPE, 3], NONBLOCK))
lie("owner", "files.img", [PIPE, 4, 5], lambda _: child, is_at([PIPE, 4, 5], job))
lie("position", "files.img", [REG, 3], lambda _: 3, file_named(b"/plain"))
lie("object", "files.img", [PIPE, 2], where=is_at([PIPE, 3], WRITES))
lie("count", "files.img", [EVENTFD, 4])
lie("signals", "files.img", [SIGNALFD, 4], lambda mask: mask * 2)
lie("clock", "files.img", [TIMERFD, 4], lambda _: 7)
lie("inotify", "files.img", [INOTIFY, 5, 3], lambda _: 0x200)
lie("process", "files.img", [PIDFD, 4], lambda _: job)
lie("shutdown", "files.img", [UNIX, 12], lambda _: 0, is_at([UNIX, 12], 1, 2))
lie("address", "files.img", [INET, 7], where=is_at([INET, 5], UDP))
lie("peer", "files.img", [INET, 8], where=lambda record: is_at([INET, 5], UDP)(record) and value_at(record, [INET, 8]))
lie("state", "files.img", [INET, 6], lambda _: 7, is_at([INET, 6], LISTENS))
lie("settings", "tty-info.img", [9, 4], lambda flags: flags ^ 2, is_at([2], 1))
lie("window", "tty-info.img", [11, 1], where=is_at([2], 1))
without_all("epoll", "files.img", [EPOLL, 4])
# A copy of the one descriptor leads to the file of another.
copies = [value_at(record, [4]) for record in records(table) if value_at(record, [1]) == ids[b"/plain"]]
lie("same", table, [1], lambda _: ids[b"/gone"], is_at([4], max(copies)))
rewrite(table_of_child, lambda record: None if value_at(record, [4]) == max(copies) else record)
print("found descriptor")


def event_for_null(record):
    """The child's descriptor of /dev/null leads to the eventfd, which is of another kind."""
    if value_at(record, [4]) != 0:
        return record
    event = next(record for record in records(table) if value_at(record, [3]) == 6)
    record, _ = change(record, [1], lambda _: value_at(event, [1]))
    return change(record, [3], lambda _: 6)[0]


rewrite(table_of_child, event_for_null)
print("found kind")
os.truncate(os.path.join(folder, "filelocks.img"), 8)
print("found locks")
# Each record of these files has data behind it.
for name, word in [("pipes-data.img", "queued"), ("sk-queues.img", "readable")]:
    os.truncate(os.path.join(folder, name), 8)
    print("found", word)

# What rekindle puts back, whatever CRIU does.
lie("personality", core, [3, 3], lambda _: 0x40000, becomes="put back")
lie("scheduling", core, [5, 3], lambda _: 4, becomes="put back")
lie("parent-death-signal", core_of_child, [5, 8], lambda _: 15, becomes="put back")
lie("dumpable", f"mm-{child}.img", [15], lambda _: 0, becomes="put back")
lie("child-subreaper", core, [3, 18], lambda _: 0, becomes="put back")
lie("secure-bits", core, [5, 10, 13], lambda _: 0x10, becomes="put back")
lie("limits", core, [3, 8, 1, 1], lambda value: 1234 if value == 4096 else value, becomes="put back")
lie("oom-score-adj", core, [3, 14], lambda _: 77, becomes="put back")
lie("SO_PRIORITY", "files.img", [INET, 14, 8], where=is_at([INET, 5], UDP), becomes="put back")
lie("seals", "memfd.img", [6], lambda _: 0, where=is_at([1], b"x"), becomes="put back")

handlers = []


def other_flags(record):
    """Of the action of SIGINT."""
    fields = parse(record)
    for field in fields:
        if field[0] == 3:
            inner = parse(field[2])
            action = [action for action in inner if action[0] == 15][1]
            action[2], was = change(action[2], [2], lambda flags: flags ^ 0x10000000)
            handlers.append(was)
            field[2] = build(inner)
    return build(fields)


rewrite(core, other_flags)
print("found signal-actions")


def without_action(signal):
    """The action of a signal. SIGKILL and SIGSTOP, the 9th and the 19th, have none."""

    def each(record):
        fields = parse(record)
        for field in fields:
            if field[0] == 3:
                inner = parse(field[2])
                actions = [action for action in inner if action[0] == 15]
                at = signal - 1 - (signal > 9) - (signal > 19)
                actions[at][2], was = change(actions[at][2], [1], lambda _: 0)
                handlers.append(was)
                field[2] = build(inner)
        return build(fields)

    return each


for signal, word in [(13, "ignored-signals"), (10, "caught-signals")]:
    rewrite(core, without_action(signal))
    print("found", word)
assert all(handlers)
