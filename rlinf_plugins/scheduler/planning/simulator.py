"""A discrete-event simulation of a flow under a plan: the judge of plans and of predictions.

Every stage, pool, stream, transfer and phase is a simpy process; durations come from :mod:`draws`. No line of the
planner's cost code is used.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow, Loop
from rlinf_plugins.scheduler.planning.draws import Draws
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan
from rlinf_plugins.scheduler.planning.profile import Profile

Events = Generator[simpy.Event, Any, None]

STEADY_STEPS = 4
"""Steps over which an overlapping plan's steady time is measured, after two to fill the pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failures to inject.

    Attributes:
        per_device_hour: Rate at which a busy device fails.
        restart_seconds: Time until its pool is back; the call it interrupted starts again.
    """

    per_device_hour: float
    restart_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One simulated step.

    Attributes:
        seconds: Duration of the step, weight transfers included.
        spans: Every call: name = stage, actor = pool, attributes = phase and micro-batch.
        failures: Failures that struck.
    """

    seconds: float
    spans: tuple[Span, ...]
    failures: int


def simulate(
    flow: Flow,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    rng: np.random.Generator,
    *,
    failures: Failures | None = None,
    noise: bool = True,
) -> Simulated:
    """Simulate one step (several for an overlapping plan, whose steady time is returned).

    Raises:
        PlanError: The plan lacks a stage of the flow.
        ProfileError: A component has no samples.
    """
    return _simulated(flow, cluster, Draws(profile, rng, noise=noise), plan, rng, failures)


def simulate_many(
    flow: Flow,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    *,
    seed: int,
    repeats: int,
    failures: Failures | None = None,
) -> NDArray[np.float64]:
    """Return the seconds of ``repeats`` independent simulated steps."""
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(repeats)]
    draws = Draws(profile, rngs[0])
    return np.array([_simulated(flow, cluster, draws.with_rng(rng), plan, rng, failures).seconds for rng in rngs])


def _simulated(
    flow: Flow, cluster: Cluster, draws: Draws, plan: Plan, rng: np.random.Generator, failures: Failures | None
) -> Simulated:
    missing = {stage.name for stage in flow.stages} - set(plan.stages())
    if missing:
        raise PlanError(f"the plan has no place for {', '.join(sorted(missing))}")
    return _Run(flow, cluster, draws, plan, rng, failures).result()


class _Run:
    def __init__(
        self,
        flow: Flow,
        cluster: Cluster,
        draws: Draws,
        plan: Plan,
        rng: np.random.Generator,
        failures: Failures | None,
    ) -> None:
        self.flow, self.cluster, self.draws, self.plan, self.rng = flow, cluster, draws, plan, rng
        self.failures = failures
        self.struck = 0
        self.env = simpy.Environment()
        self.spans: list[Span] = []
        self.alone = len(plan.phases) == 1

    def result(self) -> Simulated:
        overlapping = any(phase.overlap for phase in self.plan.phases)
        steps = 2 + STEADY_STEPS if overlapping else 1
        ends: list[float] = []
        done = self.env.process(self._steps(steps, ends))
        self.env.run(until=done)
        seconds = (ends[-1] - ends[1]) / STEADY_STEPS if overlapping else ends[-1]
        return Simulated(seconds=seconds + self._sync(), spans=tuple(self.spans), failures=self.struck)

    def _steps(self, steps: int, ends: list[float]) -> Events:
        for index, phase in enumerate(self.plan.phases):
            pipeline = _Pipeline(self, phase, index, steps)
            switched = not (self.alone or phase.resident)
            if switched:
                yield self.env.all_of([self.env.process(self._switch(pool, 0)) for pool in phase.pools])
            yield self.env.process(pipeline.run(ends))
            if switched:
                yield self.env.all_of([self.env.process(self._switch(pool, 1)) for pool in phase.pools])
        if steps == 1:
            ends.append(self.env.now)

    def _switch(self, pool: PoolPlan, way: int) -> Events:
        yield self.env.timeout(sum(self.draws.switch(s, pool.kind, self.devices(pool, s))[way] for s in pool.stages))

    def devices(self, pool: PoolPlan, stage: str) -> int:
        return pool.allotted.get(stage, pool.devices)

    def hold(self, seconds: float, devices: int) -> Events:
        """Be busy for ``seconds``; a failure costs the restart and what was done."""
        while self.failures is not None and self.failures.per_device_hour > 0:
            until = float(self.rng.exponential(3600.0 / (self.failures.per_device_hour * devices)))
            if until >= seconds:
                break
            self.struck += 1
            yield self.env.timeout(until + self.failures.restart_seconds)
        yield self.env.timeout(seconds)

    def _sync(self) -> float:
        place = {
            name: (index, pool.stages)
            for index, phase in enumerate(self.plan.phases)
            for pool in phase.pools
            for name in pool.stages
        }
        total = 0.0
        for edge in self.flow.edges:
            if edge.kind == "weights":
                source, target = place[edge.source], place[edge.target]
                total += self.draws.sync(edge.source, edge.target, shared=source[0] != target[0] or source == target)
        return total


class _Pipeline:
    """The processes of one phase."""

    def __init__(self, run: _Run, phase: PhasePlan, index: int, steps: int) -> None:
        self.run_, self.phase, self.index, self.steps = run, phase, index, steps
        self.env = run.env
        self.count = run.flow.items // phase.items
        self.pool_of = {name: pool for pool in phase.pools for name in pool.stages}
        self.free = {pool.stages: simpy.Resource(self.env) for pool in phase.pools}
        self.loops = {
            name: loop for loop in run.flow.loops for name in loop.stages if set(loop.stages) & set(self.pool_of)
        }
        nodes = dict.fromkeys(self.loops[n].stages if n in self.loops else (n,) for n in self.pool_of)
        self.nodes = list(nodes)
        self.ready = {
            (node, step, k): self.env.event() for node in self.nodes for step in range(steps) for k in range(self.count)
        }
        self.step_done = [self.env.event() for _ in range(steps)]
        self.delivered = {
            (source, node, step, k): self.env.event()
            for node in self.nodes
            for source, _ in self._inputs(node)
            for step in range(steps)
            for k in range(self.count)
        }

    def run(self, ends: list[float]) -> Events:
        """Run the phase; append each step's end to ``ends`` where steps overlap."""
        for node in self.nodes:
            self.env.process(self._node(node))
            for source, other in self._inputs(node):
                self.env.process(self._deliver(source, other, node))
        for step in range(self.steps):
            yield self.env.all_of([self.ready[node, step, k] for node in self.nodes for k in range(self.count)])
            self.step_done[step].succeed()
            if self.steps > 1:
                ends.append(self.env.now)

    def _inputs(self, node: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        owner = {name: other for other in self.nodes for name in other}
        return [
            (edge.source, owner[edge.source])
            for edge in self.run_.flow.edges
            if edge.kind != "weights" and edge.target in node and edge.source in owner and owner[edge.source] != node
        ]

    def _node(self, node: tuple[str, ...]) -> Events:
        loop = self.loops.get(node[0])
        stage = self.run_.flow.stage(node[0])
        serving = loop is None and stage.streaming and self.count > 1
        for step in range(self.steps):
            if step >= 2 and not self._inputs(node):
                yield self.step_done[step - 2]
            if serving and len(self.pool_of[node[0]].stages) == 1:
                yield self.env.process(self._serve(node, step))
                continue
            pauses = np.diff(self._completions(node[0]), prepend=0.0) if serving else None
            for k in range(self.count):
                yield self.env.process(self._turn(node, step, k))
                yield self.env.process(self._arrive(node, step, k))
                if loop is not None:
                    yield self.env.process(self._turns(loop, node, step, k))
                else:
                    yield self.env.process(self._call(node[0], k, None if pauses is None else float(pauses[k])))
                self.ready[node, step, k].succeed()

    def _turn(self, node: tuple[str, ...], step: int, k: int) -> Events:
        """In a shared pool a micro-batch goes through all of the pool's stages before the next one begins."""
        before = (step, k - 1) if k else (step - 1, self.count - 1)
        if before[0] >= 0:
            mates = self.pool_of[node[0]].stages
            yield self.env.all_of([self.ready[other, *before] for other in self.nodes if other[0] in mates])

    def _arrive(self, node: tuple[str, ...], step: int, k: int) -> Events:
        """Wait for the node's inputs of a micro-batch."""
        for source, _ in self._inputs(node):
            yield self.delivered[source, node, step, k]

    def _deliver(self, source: str, other: tuple[str, ...], node: tuple[str, ...]) -> Events:
        """Carry the micro-batches of one edge, one after the other; within a pool that takes no time."""
        cluster = self.run_.cluster
        bandwidth = cluster.intra_gib_s if sum(n.count for n in cluster.nodes) == 1 else cluster.inter_gib_s
        apart = self.pool_of[source].stages != self.pool_of[node[0]].stages
        seconds = self.run_.draws.bytes_per_item(source) * self.phase.items / 2**30 / bandwidth if apart else 0.0
        for step in range(self.steps):
            for k in range(self.count):
                yield self.ready[other, step, k]
                if seconds:
                    yield self.env.timeout(seconds)
                if not self.delivered[source, node, step, k].triggered:
                    self.delivered[source, node, step, k].succeed()

    def _completions(self, name: str) -> NDArray[np.float64]:
        pool = self.pool_of[name]
        stage = self.run_.flow.stage(name)
        devices = self.run_.devices(pool, name)
        curve = self.run_.draws.completions(
            name, pool.kind, devices, stage.replica, self.run_.flow.items, self.phase.items
        )
        return curve * self._factor(name)

    def _serve(self, node: tuple[str, ...], step: int) -> Events:
        """A serving stage on its own pool: items leave as they finish, micro-batch by micro-batch."""
        yield self.env.process(self._arrive(node, step, 0))
        start = begun = self.env.now
        for k, moment in enumerate(self._completions(node[0])):
            yield self.env.process(self._arrive(node, step, k))
            yield from self.run_.hold(max(start + float(moment) - self.env.now, 0.0), self.pool_of[node[0]].devices)
            self._record(node[0], begun, k)
            begun = self.env.now
            self.ready[node, step, k].succeed()

    def _call(self, name: str, k: int, seconds: float | None) -> Events:
        pool = self.pool_of[name]
        with self.free[pool.stages].request() as turn:
            yield turn
            start = self.env.now
            yield from self.run_.hold(
                self._duration(name, self.phase.items) if seconds is None else seconds, pool.devices
            )
            if not pool.resident:
                yield self.env.timeout(sum(self.run_.draws.switch(name, pool.kind, self.run_.devices(pool, name))))
            self._record(name, start, k)

    def _turns(self, loop: Loop, node: tuple[str, ...], step: int, k: int) -> Events:
        streams = self.phase.streams.get("<->".join(node), 1)
        share = self.phase.items // streams
        yield self.env.all_of([self.env.process(self._stream(loop, k, share)) for _ in range(streams)])

    def _stream(self, loop: Loop, k: int, share: int) -> Events:
        for _ in range(loop.turns):
            for name in loop.stages:
                pool = self.pool_of[name]
                with self.free[pool.stages].request() as turn:
                    yield turn
                    start = self.env.now
                    yield from self.run_.hold(self._duration(name, share), pool.devices)
                    if not pool.resident:
                        yield self.env.timeout(
                            sum(self.run_.draws.switch(name, pool.kind, self.run_.devices(pool, name)))
                        )
                    self._record(name, start, k)

    def _duration(self, name: str, items: int) -> float:
        pool = self.pool_of[name]
        drawn = self.run_.draws.call(name, pool.kind, self.run_.devices(pool, name), items)
        return drawn * self._factor(name)

    def _factor(self, name: str) -> float:
        mine = set(self.pool_of[name].stages)
        return self.run_.draws.slowdown(name, set(self.pool_of) - mine)

    def _record(self, name: str, start: float, k: int) -> None:
        pool = "+".join(self.pool_of[name].stages)
        attributes = {"phase": self.index + 1, "micro_batch": k}
        self.run_.spans.append(Span(name=name, actor=pool, start=start, end=self.env.now, attributes=attributes))


def mean_and_tail(seconds: NDArray[np.float64], level: float = 0.99) -> tuple[float, float, float]:
    """Return mean, the ``level`` quantile, and CVaR (mean of what lies at or above it)."""
    quantile = float(np.quantile(seconds, level))
    worst = seconds[seconds >= quantile - 1e-12 * math.fabs(quantile)]
    return float(seconds.mean()), quantile, float(worst.mean())
