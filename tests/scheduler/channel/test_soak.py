"""Processes are killed and stopped at named failpoints while items flow; nothing is lost or committed twice.

All failpoints of consumers lie before the acknowledgement: one that dies after it and before it has written it down has
committed items that no file names, which is no fault of the channel.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

MEMBERS = Path(__file__).with_name("soak_members.py")
LEASE = 2.0


class Crew:
    """Starts members, hurts them and starts them again."""

    def __init__(self, tmp_path, seed, journal):
        self.seed = seed
        self.random = random.Random(seed)
        self.path = str(tmp_path / "socket")
        self.out = tmp_path
        self.journal = str(tmp_path / "journal") if journal else ""
        self.processes = {}
        self.arguments = {}
        self.deaths = Counter()

    def start(self, name, *arguments, failpoint=""):
        self.arguments[name] = arguments
        environment = {**os.environ, "RLINF_FAILPOINTS": failpoint}
        self.processes[name] = subprocess.Popen([sys.executable, str(MEMBERS), *arguments], env=environment)

    def stop_all(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def crew(tmp_path, seed):
    made = []

    def make(journal):
        made.append(Crew(tmp_path, seed, journal))
        return made[-1]

    yield make
    for each in made:
        each.stop_all()


def stopped(process):
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state in "tT"


def run(crew, items, producers, hurt, seconds):
    """Let the crew work; members armed by ``hurt`` die or stop, and are started or continued after a lease."""
    crew.start("broker", "broker", crew.path, crew.journal, str(LEASE), failpoint=hurt("broker"))
    share = items // producers
    for index in range(producers):
        name, first = f"p{index}", index * share
        arguments = (crew.path, name, str(first), str(first + share), str(crew.out / name))
        crew.start(name, "produce", *arguments, failpoint=hurt(name))
    for name in (f"{kind}{key}" for key in range(4) for kind in "cd"):
        crew.start(name, "consume", crew.path, name, name[1], str(crew.out / name), failpoint=hurt(name))
    sleeping, end = {}, time.monotonic() + seconds
    while len({value for *_, value in committed(crew)}) < items:
        assert time.monotonic() < end, f"{len(committed(crew))} of {items} in {seconds} s, hurt: {dict(crew.deaths)}"
        time.sleep(0.1)
        for name, process in list(crew.processes.items()):
            if process.poll() == 0:
                continue
            if process.poll() is not None:
                crew.deaths[f"{name[0]} killed"] += 1
                crew.start(name, *crew.arguments[name], failpoint=hurt(name))
            elif stopped(process) and name not in sleeping:
                crew.deaths[f"{name[0]} stopped"] += 1
                sleeping[name] = time.monotonic() + LEASE * 1.5
            elif name in sleeping and time.monotonic() > sleeping[name]:
                del sleeping[name]
                process.send_signal(signal.SIGCONT)


def written(crew):
    """What each consumer wrote: producer, epoch, number, value, deliveries so far, and the broker's life."""
    for file in [*crew.out.glob("c?"), *crew.out.glob("d?")]:
        lines = [line.split() for line in file.read_text().splitlines()]
        yield [(producer, *map(int, numbers)) for producer, *numbers in lines]


def committed(crew):
    return [row[:4] for rows in written(crew) for row in rows]


def judge(crew, items, put_again):
    """Lost, duplicate, phantom, order: one pass each. ``put_again``: values that dead producers may have put twice."""
    rows = committed(crew)
    twice = [row for row, times in Counter((p, e, s) for p, e, s, _ in rows).items() if times > 1]
    assert twice == [], f"committed twice: {twice[:5]}"
    values = Counter(value for *_, value in rows)
    assert set(values) == set(range(items)), "lost or phantom"
    assert values.total() - items <= put_again
    for mine in written(crew):
        last = {}
        for producer, epoch, seq, value, attempts, life in mine:
            if attempts == 1:  # what comes back goes to its old place, behind what this consumer had meanwhile
                source = producer, epoch, value % 4, life
                assert last.get(source, -1) < seq, f"out of order: {producer} {epoch} {seq} after {last[source]}"
                last[source] = seq


ACTIONS = {
    "p": ["producer.packed=kill@{}", "producer.sent=kill@{}", "producer.packed=stop@{}", "producer.sent=stop@{}"],
    "c": [
        "consumer.received=kill@{}",
        "consumer.unpacked=stop@{}",
        "consumer.unpacked=kill@{}",
        "consumer.received=stop@{}",
    ],
    "b": [
        "broker.received=kill@{}",
        "broker.applied=kill@{}",
        "broker.journalled=kill@{}",
        "broker.replied=kill@{}",
        "broker.received=stop@{}",
    ],
}
PASSAGES = {"p": (20, 60), "c": (10, 40), "b": (200, 500)}


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("victims", ["p", "c", "b"], ids=["producers", "consumers", "broker"])
def test_nothing_is_lost_and_nothing_committed_twice(crew, victims):
    """Every failpoint in turn; the broker keeps a journal where it is the victim."""
    team = crew(journal=victims == "b")
    turns = itertools.cycle(ACTIONS[victims])

    def hurt(name):
        kind = "c" if name[0] == "d" else name[0]
        if kind != victims or team.deaths.total() >= 12:
            return ""
        return next(turns).format(team.random.randint(*PASSAGES[kind]))

    items = int(os.environ.get("RLINF_CHANNEL_SOAK", "12000"))
    run(team, items, 2, hurt, 240)
    print(f"seed {team.seed}: {dict(team.deaths)}")
    assert any("killed" in what for what in team.deaths)
    judge(team, items, put_again=50 * team.deaths["p killed"])
