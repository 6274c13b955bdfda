"""Stages and flows that the tests run."""

import threading

from rlinf_plugins.scheduler.macro import Worker

MB = 10**6


class Generate(Worker):
    footprint = 60 * MB

    def run(self):
        for prompts in self.recv():
            for prompt in prompts:
                self.send(prompt * prompt, weight=1 + prompt % 5)


class Filter(Worker):
    def run(self):
        for samples in self.recv():
            for sample in samples:
                if sample % 3:
                    self.send(sample)


class Train(Worker):
    footprint = 60 * MB

    def __init__(self, scale=1):
        self.scale = scale
        self.sizes = []
        self.where = []

    def onload(self):
        self.where.append("on")

    def offload(self):
        self.where.append("off")

    def run(self):
        total = []
        for samples in self.recv():
            self.sizes.append(len(samples))
            total += [self.scale * sample for sample in samples]
        return total

    def history(self):
        return self.sizes, self.where


class Whiten(Worker):
    """Needs everything before it can send anything."""

    def run(self):
        values = self.recv_all()
        for value in values:
            self.send(value - min(values))


class Env(Worker):
    def run(self, turns):
        for turn in range(turns):
            self.send((self.rank, turn), "observations")
            actions = next(iter(self.recv("actions", key=self.rank)))
            assert actions == [(self.rank, turn, "action")]
        return turns


class Policy(Worker):
    def run(self):
        for observations in self.recv("observations"):
            for rank, turn in observations:
                self.send((rank, turn, "action"), "actions", key=rank)


class Broken(Worker):
    def run(self):
        for _ in self.recv():
            raise ConnectionResetError("the tool hung up")


class Alone(Worker):
    """Notes how many of its kind work on a device at once."""

    footprint = 1
    now, most, lock = 0, 0, threading.Lock()

    def run(self):
        for _ in self.recv():
            with Alone.lock:
                Alone.now += 1
                Alone.most = max(Alone.most, Alone.now)
            threading.Event().wait(0.002)
            with Alone.lock:
                Alone.now -= 1


def filtered(flow):
    """The flow of the documentation: three stages, one of them extra."""
    prompts = flow.feed("prompts", range(flow.items))
    samples, kept = flow.channel("samples"), flow.channel("kept")
    flow.group("generate", Generate).run(prompts, to=samples)
    flow.group("filter", Filter).run(samples, to=kept)
    return flow.group("train", Train, scale=2).run(kept)


def expected(items):
    """What :func:`filtered` must give, in any order."""
    return sorted(2 * n * n for n in range(items) if n * n % 3)
