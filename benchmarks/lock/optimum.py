"""Random flows of residents, and the shortest time in which anybody who knows the future could run them.

The model is the switcher's: a task computes alone on all devices of its resident; a resident must be there, whole,
while it computes; its bytes count from the start of its onload to the end of its offload; moves take bytes over
bandwidth, run beside computation, and one at a time per device. The optimum is found by A* over all schedules,
deliberate idling included, so it bounds every scheduler from below.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """One use of a resident: seconds of work, and the tasks that must be over before."""

    resident: str
    seconds: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Devices, residents and tasks."""

    capacity: dict[str, int]
    footprints: dict[str, dict[str, int]]
    tasks: tuple[Task, ...]
    bytes_per_s: float

    def move_s(self, resident: str) -> float:
        """Seconds of an onload or offload."""
        return max(self.footprints[resident].values()) / self.bytes_per_s

    def tails(self) -> list[float]:
        """Seconds from the start of each task to the end of the flow along its longest path, moves left out."""
        tails = [0.0] * len(self.tasks)
        for index in reversed(range(len(self.tasks))):
            behind = [tails[i] for i, task in enumerate(self.tasks) if index in task.after]
            tails[index] = self.tasks[index].seconds + max(behind, default=0.0)
        return tails


def random_case(seed: int) -> Case:
    """Two to five residents on one or two devices, four to seven tasks in a random DAG, moves as long as tasks."""
    rng = random.Random(seed)
    capacity = {f"d{i}": 100 for i in range(rng.randint(1, 2))}
    footprints = {}
    for index in range(rng.randint(2, 5)):
        devices = rng.sample(sorted(capacity), rng.randint(1, len(capacity)))
        footprints[f"r{index}"] = dict.fromkeys(devices, rng.randint(20, 90))
    tasks: list[Task] = []
    for index in range(rng.randint(4, 7)):
        earlier = range(max(0, index - 3), index)
        after = tuple(i for i in earlier if rng.random() < 0.4)
        tasks.append(Task(rng.choice(sorted(footprints)), rng.uniform(2.0, 20.0), after))
    return Case(capacity, footprints, tuple(tasks), bytes_per_s=rng.choice([10.0, 20.0, 50.0]))


class Search:
    """A* over (done, computing, moving, there); times are relative to now, so equal situations meet."""

    def __init__(self, case: Case, limit: int = 400_000) -> None:
        self.case = case
        self.limit = limit
        self.names = sorted(case.footprints)
        self.devices = {name: frozenset(case.footprints[name]) for name in self.names}
        self.tails = case.tails()
        self.everything = (1 << len(case.tasks)) - 1

    def run(self) -> float | None:
        """Return the shortest makespan in seconds, or None if the search grew beyond its limit."""
        start = (0, (), (), frozenset())
        tie = itertools.count()
        queue = [(self.bound(start), next(tie), 0.0, start)]
        best = {start: 0.0}
        while queue:
            _, _, now, state = heapq.heappop(queue)
            if now > best[state]:
                continue
            if state[0] == self.everything:
                return now
            if len(best) > self.limit:
                return None
            for later, following in self.options(now, state):
                if later < best.get(following, float("inf")) - 1e-9:
                    best[following] = later
                    heapq.heappush(queue, (later + self.bound(following), next(tie), later, following))
        raise AssertionError("every flow can be run")

    def bound(self, state) -> float:
        """Seconds that no continuation can beat: the longest path, each device's work, each device's moves."""
        done, computing, moving, there = state
        path = max((left + self.tails[t] - self.case.tasks[t].seconds for left, t in computing), default=0.0)
        started = done | sum(1 << t for _, t in computing)
        work = dict.fromkeys(self.case.capacity, 0.0)
        moves = dict.fromkeys(self.case.capacity, 0.0)
        for left, t in computing:
            for device in self.devices[self.case.tasks[t].resident]:
                work[device] += left
        absent = set()
        arriving = {name: left for left, kind, name in moving if kind == "on"}
        for t, task in enumerate(self.case.tasks):
            if not started >> t & 1:
                if task.resident in arriving:
                    wait = arriving[task.resident]
                elif task.resident in there:
                    wait = 0.0
                else:
                    wait = self.case.move_s(task.resident)
                    absent.add(task.resident)
                path = max(path, wait + self.tails[t])
                for device in self.devices[task.resident]:
                    work[device] += task.seconds
        for name in absent:
            for device in self.devices[name]:
                moves[device] += self.case.move_s(name)
        return max(path, *work.values(), *moves.values())

    def options(self, now, state):
        """Yield (time, state) after each thing that can be done now, and after the next thing that ends by itself."""
        done, computing, moving, there = state
        case = self.case
        started = done | sum(1 << t for _, t in computing)
        in_use = {case.tasks[t].resident for _, t in computing}
        busy = {d for name in in_use for d in self.devices[name]}
        in_move = {name for _, _, name in moving}
        engines = {d for name in in_move for d in self.devices[name]}
        pending = {case.tasks[t].resident for t in range(len(case.tasks)) if not started >> t & 1}
        used = dict.fromkeys(case.capacity, 0)
        for name in there | in_move:
            for device, nbytes in case.footprints[name].items():
                used[device] += nbytes
        for t, task in enumerate(case.tasks):
            ready = not started >> t & 1 and all(done >> i & 1 for i in task.after)
            there_and_free = task.resident in there - in_move and not self.devices[task.resident] & busy
            if ready and there_and_free:
                yield now, (done, tuple(sorted([*computing, (task.seconds, t)])), moving, there)
        crowded = set()
        for name in pending - there - in_move:
            short = {d for d, n in case.footprints[name].items() if used[d] + n > case.capacity[d]}
            crowded |= short
            if not short and not self.devices[name] & engines:
                move = (case.move_s(name), "on", name)
                yield now, (done, computing, tuple(sorted([*moving, move])), there)
        for name in there - in_use - in_move:
            if self.devices[name] & crowded and not self.devices[name] & engines:
                move = (case.move_s(name), "off", name)
                yield now, (done, computing, tuple(sorted([*moving, move])), there - {name})
        if computing or moving:
            step = min(left for left, *_ in [*computing, *moving])
            ended = sum(1 << t for left, t in computing if left <= step + 1e-9)
            arrived = {name for left, kind, name in moving if left <= step + 1e-9 and kind == "on"}
            still = tuple((round(left - step, 9), t) for left, t in computing if left > step + 1e-9)
            on_way = tuple((round(left - step, 9), kind, name) for left, kind, name in moving if left > step + 1e-9)
            yield now + step, (done | ended, still, on_way, there | arrived)


def shortest(case: Case) -> float | None:
    """Return the optimum of ``case`` in seconds, or None where the search is too large."""
    return Search(case).run()


def disturbed(case: Case, seed: int, share: float) -> Case:
    """Return ``case`` with each task's length changed by up to ``share``, as a forecast is wrong."""
    rng = random.Random(seed)
    tasks = tuple(replace(task, seconds=task.seconds * rng.uniform(1 - share, 1 + share)) for task in case.tasks)
    return replace(case, tasks=tasks)
