"""A client for rekindle's job API (docs/job-api.md). Python 3.8 or newer, no dependencies: copy this file."""
import contextlib, json, os, socket, sys, time

_path, _life, _asked, _callbacks = os.environ.get("REKINDLE_SOCKET"), None, 0.0, []
if not _path:
    print("rekindle: no REKINDLE_SOCKET, so nothing is asked of a supervisor", file=sys.stderr)


def ask(request, tries=600, **fields):
    """What the supervisor answers; None where it refuses, or there is none. What a restore loses is asked for again."""
    while _path and tries > 0:
        tries -= 1
        # A socket a try. Its name is abstract, others get no answer, and nobody has it where the job may be restored.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.bind("\0rekindle-" + os.urandom(16).hex())
            sock.settimeout(5.0)
            sock.sendto(json.dumps(dict(fields, version=1, request=request)).encode(), _path)
            tries -= 50  # what 5 s without an answer are worth
            text, sender = sock.recvfrom(65536)
            tries += 50
            # One that was unread in an image has no sender any more: it is from before the restore.
            answer = json.loads(text) if sender == _path else {"error": {"code": "later"}}
            if "ok" in answer:
                return next(iter(answer["ok"].values()))
            if answer["error"]["code"] not in ("later", "restored"):
                print("rekindle:", answer["error"]["message"], file=sys.stderr)
            if answer["error"]["code"] != "later":
                return None
        time.sleep(0.1)


def state():
    """The host, the boot, the pid there, the GPUs; `life` is another after a restore. None without a supervisor."""
    return ask("state")


def snapshot():
    """Has a snapshot taken: "resumed" after it, "restored" in a job that was brought back from it, None if there is none."""
    before = state()
    asked = before and ask("snapshot", life=before["life"])
    while before:
        now = state()
        if now and now["life"] != before["life"]:
            return check(0) or "restored"
        if not now or not asked or now["snapshots"] >= asked["number"]:
            return "resumed" if now and asked and not now["failed"] else None
        time.sleep(0.1)


@contextlib.contextmanager
def hold(seconds=60.0):
    """No snapshot begins within, for so long at most. Waits for one that is being taken; yields whether it holds."""
    name = os.urandom(8).hex()
    held = ask("hold", seconds=seconds, holder=name)
    try:
        yield held is not None
    finally:
        held and ask("release", holder=name, life=held["life"])


def on_restored(callback):
    """Has check() call it with the new state once the job was brought back."""
    _callbacks.append(callback)
    check(0)


def check(every=1.0):
    """For each step of a loop: asks once in so many seconds, no more, whether the job was brought back."""
    global _life, _asked
    if abs(time.time() - _asked) >= every:
        now, _asked = ask("state", tries=1 if _life else 600), time.time()
        before, _life = _life, now["life"] if now else _life
        for callback in _callbacks if before and before != _life else ():
            callback(now)
