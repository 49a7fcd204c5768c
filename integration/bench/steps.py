"""The lines that a measured job writes (jobs/bench_torch.py says which). Only the standard library."""


class Steps:
    """The file of one job. A job that came back from an image goes on in it, and may repeat steps."""

    def __init__(self, path):
        self.path = path

    def lines(self):
        """The fields of all whole lines."""
        text = self.path.read_text() if self.path.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def all(self):
        """(number, time of day at the end, length, result) of each step, in the order they were done."""
        found = [line for line in self.lines() if line[0] != "0"]
        return [(int(line[0]), float(line[1]), float(line[2]), tuple(line[3:])) for line in found]

    def last(self):
        """The number of the newest step; 0 before the first."""
        return next((number for number, *_ in reversed(self.all())), 0)

    def bytes(self):
        """The device memory that the job holds; None before it said so."""
        return next((int(line[1]) for line in self.lines() if line[0] == "0"), None)

    def first_after(self, when):
        """When the first step after `when` was done, or None. By the clock on the wall: CLOCK_MONOTONIC of a restored
        process goes on from where it was at the dump."""
        return next((end for _, end, *_ in self.all() if end > when), None)

    def differs(self, known):
        """The number of a step whose result is not the one in `known`, or None. New ones are put there."""
        for number, _, _, result in self.all():
            if known.setdefault(number, result) != result:
                return number
        return None

    def lengths(self, windows):
        """The lengths of the steps within each window (from, to), without the first there: it was waited for."""
        found = []
        for begin, end in windows:
            found += [length for _, at, length, _ in self.all() if begin <= at <= end][1:]
        return found
