"""Orders found by rehearsal, and how far a running switcher lets them bind it."""

import asyncio

import pytest

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.scheduler.lock.rehearsal import PlannedResident, PlannedUse, Rehearsal
from rlinf_plugins.scheduler.lock.virtual_time import run

GB = 10**9
RESIDENTS = {
    "rollout": PlannedResident(footprint={"d0": 8 * GB}, move_s=8.0),
    "actor": PlannedResident(footprint={"d0": 7 * GB}, move_s=7.0),
    "critic": PlannedResident(footprint={"d0": 3 * GB}, move_s=3.0),
}


def flow(*uses):
    return [PlannedUse(stage=stage, resident=name, seconds=s, after=after) for stage, name, s, after in uses]


PPO = flow(
    ("generate", "rollout", 20.0, ()),
    ("log_prob", "actor", 5.0, ("generate",)),
    ("values", "critic", 4.0, ("generate",)),
    ("update_critic", "critic", 6.0, ("values", "log_prob")),
    ("update_actor", "actor", 10.0, ("values", "log_prob")),
)


def test_the_order_found_needs_each_resident_once():
    best = Rehearsal({"d0": 10 * GB}, RESIDENTS, PPO).best()
    assert best.order[0] == ("rollout", "generate")
    # 8 to bring the rollout, 20 of work, 8 to take it off; actor and critic come together while the first works.
    assert best.seconds == pytest.approx(8 + 20 + 8 + 3 + 4 + 5 + 6 + 10 + 3, abs=1.1)


def test_the_search_beats_the_longest_path_where_that_is_blind_to_switches():
    uses = flow(
        ("a1", "rollout", 3.0, ()),
        ("b1", "actor", 3.0, ()),
        ("a2", "rollout", 3.0, ()),
        ("b2", "actor", 3.0, ()),
        ("end", "critic", 1.0, ("a1", "b1", "a2", "b2")),
    )
    rehearsal = Rehearsal({"d0": 10 * GB}, RESIDENTS, uses)
    best = rehearsal.best()
    names = [resident for resident, _ in best.order[:4]]
    assert names in (["rollout"] * 2 + ["actor"] * 2, ["actor"] * 2 + ["rollout"] * 2)
    assert best.seconds < rehearsal.play(["a1", "b1", "a2", "b2", "end"])


@pytest.mark.parametrize(
    ("uses", "match"),
    [
        (flow(("a", "actor", 1.0, ("b",))), "'a' comes after 'b', which is not in the flow"),
        (flow(("a", "actor", 1.0, ("b",)), ("b", "actor", 1.0, ("a",))), "a, b wait for each other in a circle"),
    ],
)
def test_flows_that_cannot_run_are_refused(uses, match):
    with pytest.raises(FlowError, match=match):
        Rehearsal({"d0": 10 * GB}, RESIDENTS, uses)


def test_a_use_lets_one_go_first_that_it_would_displace_and_that_comes_soon(make_rig):
    async def main(delay):
        rig = make_rig(prefetch=False)
        await rig.add("actor", 8 * GB)
        await rig.add("critic", 8 * GB)
        order = []

        async def use(name):
            async with rig.switcher.use(name):
                order.append(name)

        await use("actor")
        rig.switcher.expect(["actor", "critic"])
        early = asyncio.ensure_future(use("critic"))
        await asyncio.sleep(delay)
        await use("actor")
        await early
        return order[1:]

    assert run(main(5.0))[0] == ["actor", "critic"], "waiting costs less than two moves of each"
    assert run(main(100.0))[0] == ["critic", "actor"], "but nobody waits longer than that could save"


def test_stages_of_one_resident_are_told_apart(make_rig):
    async def main():
        rig = make_rig(prefetch=False)
        await rig.add("actor", 8 * GB)
        order = []

        async def use(stage):
            async with rig.switcher.use("actor", stage=stage):
                order.append(stage)
                await asyncio.sleep(1)

        rig.switcher.expect([("actor", "first"), ("actor", "log_prob"), ("actor", "update")])
        await asyncio.gather(*(use(stage) for stage in ("first", "update", "log_prob")))
        return order

    assert run(main())[0] == ["first", "log_prob", "update"]
