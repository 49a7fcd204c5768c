#!/usr/bin/env python3
"""lie.py FOLDER: changes CRIU's image files of one process and its threads as a CRIU would that loses things in silence.

Prints a word for each item that it has changed. The fields are those of CRIU 4.2's images/*.proto."""

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


def lie(word, name, path, to):
    done = []

    def each(record):
        record, was = change(record, path, to)
        done.append(was)
        return record

    rewrite(name, each)
    assert any(done), f"{name} has no {path}"
    print(word)


job = min(int(name[len("core-") : -len(".img")]) for name in os.listdir(folder) if name.startswith("core-100") and name != "core-1000.img")
REG, EVENTFD, EPOLL, PIPE = 3, 8, 9, 18


def of_file(record, kind):
    return any(field[0] == kind for field in parse(record))


lie("umask", f"fs-{job}.img", [3], lambda _: 0o777)
lie("count", "files.img", [EVENTFD, 4], lambda value: value + 1)
rewrite("files.img", lambda record: without(record, [EPOLL, 4]) if of_file(record, EPOLL) else record)
print("epoll")


def moved(record):
    """The position of the file that was written to."""
    names = [field[2] for field in parse(record) if field[0] == REG]
    if any(b"plain" in name for name in names):
        record, _ = change(record, [REG, 3], lambda _: 3)
    return record


rewrite("files.img", moved)
print("position")
# Each record of this file has data behind it.
os.truncate(os.path.join(folder, "pipes-data.img"), 8)
print("queued")
lie("blocked-signals", f"core-{job}.img", [3, 5], lambda value: b"\0" * 8 if isinstance(value, bytes) else 0)
lie("name", f"core-{job}.img", [3, 6], lambda _: b"another")
handlers = []


def one_handler_less(record):
    """The action of SIGUSR1, the tenth signal: SIGKILL, the ninth, has none."""
    fields = parse(record)
    for field in fields:
        if field[0] == 3:
            inner = parse(field[2])
            actions = [action for action in inner if action[0] == 15]
            actions[8][2], was = change(actions[8][2], [1], lambda _: 0)
            handlers.append(was)
            field[2] = build(inner)
    return build(fields)


rewrite(f"core-{job}.img", one_handler_less)
assert any(handlers)
print("caught-signals")
