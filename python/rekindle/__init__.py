"""A client for rekindle's job API. Python 3.8 or newer, no dependencies.

A job uses it to ask for a snapshot, to block snapshots for a moment, and to learn that it was restored. The wheel installs
it as the module `rekindle`. A project without the wheel can copy this file as rekindle.py.
"""

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any, Callable, Iterator, List, Literal, Optional, TypedDict

__all__ = ["Gpu", "State", "ask", "check", "hold", "on_restored", "snapshot", "state"]


class Gpu(TypedDict):
    """A GPU of the machine."""

    uuid: str
    name: str


# Not a class: `from` is a keyword.
State = TypedDict(
    "State",
    {
        "job": str,
        "run": str,
        "life": str,
        "since": str,
        "from": Optional[str],
        "restores": int,
        "snapshots": int,
        "failed": Optional[str],
        "image": Optional[str],
        "host": str,
        "boot_id": str,
        "pid": int,
        "gpus": List[Gpu],
    },
)
State.__doc__ = "What the supervisor tells the job. `life` changes with each start and each restore."

_path: Optional[str] = os.environ.get("REKINDLE_SOCKET")
_life: Optional[str] = None
_asked = 0.0
_callbacks: List[Callable[[State], object]] = []
_alone_was_said = False


def _alone() -> None:
    """Print once that there is no supervisor, at the first call: many programs import a module and never use it."""
    global _alone_was_said
    if not _alone_was_said:
        print("rekindle: REKINDLE_SOCKET is not set, so there is no supervisor to ask", file=sys.stderr)
    _alone_was_said = True


def ask(request: str, tries: int = 600, **fields: object) -> Any:
    """Send one request and return the answer; None if it is refused or there is no supervisor.

    A request that a restore loses is sent again.
    """
    if not _path:
        _alone()
    while _path and tries > 0:
        tries -= 1
        # A new socket for each try. Its name is random, so it is free wherever the job is restored.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.bind("\0rekindle-" + os.urandom(16).hex())
            sock.settimeout(5.0)
            sock.sendto(json.dumps(dict(fields, version=1, request=request)).encode(), _path)
            tries -= 50  # 5 s without an answer count as 50 tries more
            text, sender = sock.recvfrom(65536)
            tries += 50
            # An answer that was unread when an image was taken has no sender after the restore: it is too old.
            answer = json.loads(text) if sender == _path else {"error": {"code": "later"}}
            if "ok" in answer:
                return next(iter(answer["ok"].values()))
            if answer["error"]["code"] not in ("later", "restored"):
                print("rekindle:", answer["error"]["message"], file=sys.stderr)
            if answer["error"]["code"] != "later":
                return None
        time.sleep(0.1)
    return None


def state() -> Optional[State]:
    """Return what the supervisor tells the job: host, boot, pid, GPUs, images. None without a supervisor."""
    answer: Optional[State] = ask("state")
    return answer


def snapshot() -> Optional[Literal["resumed", "restored"]]:
    """Take a snapshot. Returns twice, as fork does.

    "resumed" in the job that continues, "restored" in a job that was restored from the image, None if none was taken.
    """
    before = state()
    asked = before and ask("snapshot", life=before["life"])
    while before:
        now = state()
        if now and now["life"] != before["life"]:
            check(0)
            return "restored"
        if not now or not asked or now["snapshots"] >= asked["number"]:
            return "resumed" if now and asked and not now["failed"] else None
        time.sleep(0.1)
    return None


@contextlib.contextmanager
def hold(seconds: float = 60.0) -> Iterator[bool]:
    """Block snapshots within the `with` block, for at most `seconds`. Yields whether they are blocked.

    Waits for a snapshot that is being taken.
    """
    name = os.urandom(8).hex()
    held = ask("hold", seconds=seconds, holder=name)
    try:
        yield held is not None
    finally:
        if held:
            ask("release", holder=name, life=held["life"])


def on_restored(callback: Callable[[State], object]) -> None:
    """Have check() call `callback` with the new state after the job was restored."""
    _callbacks.append(callback)
    check(0)


def check(every: float = 1.0) -> None:
    """Ask at most once in `every` seconds whether the job was restored. Call it in each step of a loop."""
    global _life, _asked
    if abs(time.time() - _asked) >= every:
        now: Optional[State] = ask("state", tries=1 if _life else 600)
        _asked = time.time()
        before, _life = _life, now["life"] if now else _life
        if now and before and before != _life:
            for callback in _callbacks:
                callback(now)
