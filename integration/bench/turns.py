"""Step times with and without rekindle. Only the standard library.

One process is faster than another by a per cent or two for as long as it lives: its memory lies elsewhere. So there are
several of each kind, all on the same GPU, and only one of them does steps at a time: clocks and neighbours hit all alike.
"""

import random
import statistics
import time

from steps import Steps

# The step that a closed gate finds under way.
AFTERMATH_S = 0.15


class Runner:
    """A job with a gate: while the file is there, no step of it begins."""

    def __init__(self, path, kind):
        self.steps, self.pause, self.kind = Steps(path), path.with_suffix(".pause"), kind
        self.windows, self.job = [], None
        self.pause.touch()

    def turn(self, length):
        self.pause.unlink()
        begun = time.time()
        time.sleep(length)
        self.windows.append((begun, time.time()))
        self.pause.touch()
        time.sleep(AFTERMATH_S)

    def lengths(self):
        return self.steps.lengths(self.windows)


def take(runners, rounds, length):
    """Lets each have its turn, in another order each round, so that none has always the same one before it."""
    for runner in runners:
        runner.windows = []
    order = random.Random(7)
    for _ in range(rounds):
        for runner in order.sample(runners, len(runners)):
            runner.turn(length)


def compare(ours, alone):
    """How much longer a step takes in `ours` than in `alone`, each the step lengths of several processes: the ratio less
    one, and the half width of its 95 % interval by drawing processes, and steps of them, with replacement."""

    def middle(processes):
        return statistics.mean(statistics.median(lengths) for lengths in processes)

    def draw(processes, chance):
        return [chance.choices(lengths, k=len(lengths)) for lengths in chance.choices(processes, k=len(processes))]

    chance = random.Random(7)
    drawn = sorted(middle(draw(ours, chance)) / middle(draw(alone, chance)) for _ in range(400))
    low, high = drawn[len(drawn) // 40], drawn[-(len(drawn) // 40) - 1]
    return middle(ours) / middle(alone) - 1, (high - low) / 2
