"""The switcher: who comes, who stays, who leaves, and what it does when a step is not what it claims to be."""

import asyncio

import pytest

from rlinf_plugins.core.errors import (
    ConfigError,
    ExceedsCapacityError,
    LockTimeoutError,
    NotFreedError,
    ResidentBytesError,
    ResidentStateError,
    StaleTokenError,
    UnknownDeviceError,
    UnknownNameError,
)
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.virtual_time import run

GB = 10**9


async def work(rig, *names, seconds=1.0, **options):
    async with rig.switcher.use(*names, **options):
        assert all(rig.switcher.is_on(name) for name in names)
        await asyncio.sleep(seconds)
    return rig.clock()


def test_the_protocol_is_structural(make_rig):
    async def main():
        return make_rig().resident("a", GB)

    assert isinstance(run(main())[0], Resident)
    assert not isinstance(object(), Resident)


def test_a_resident_stays_while_nobody_needs_its_room(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("actor", 6 * GB)
        await rig.add("critic", 4 * GB)
        for name in ("actor", "critic", "actor", "critic"):
            await work(rig, name)
        return [span.attributes["resident"] for span in rig.spans("switch")]

    switches, seconds = run(main())
    assert switches == ["actor", "critic"], "both fit: each comes once and stays"
    assert seconds == pytest.approx(6 + 4 + 4 * 1.0)


def test_who_must_leave_leaves_confirmed_before_the_next_one_comes(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("actor", 6 * GB)
        await rig.add("rollout", 8 * GB)
        await work(rig, "actor")
        await work(rig, "rollout")
        assert not rig.switcher.is_on("actor")
        names = [span.name for span in rig.switcher.recorder.drain()]
        assert rig.devices.peak["d0"] == 8 * GB
        return names

    names, _ = run(main())
    assert names[-7:] == ["drain", "offload", "confirm", "evict", "onload", "resume", "switch"]


@pytest.mark.parametrize(("for_good", "second"), [(False, "a"), (True, "b")])
def test_an_assumed_cost_gives_way_to_measured_ones_unless_it_is_for_good(make_rig, for_good, second):
    async def main():
        rig = make_rig()
        for name, size in (("a", 2 * GB), ("b", 5 * GB), ("c", 4 * GB)):
            await rig.add(name, size)
        for name in ("b", "a", "b"):
            await work(rig, name)
            if name == "b":
                await rig.switcher.evict("b")
        rig.switcher.assume("b", 0.0, for_good=for_good)
        await work(rig, "b")
        rig.spans("switch")
        await work(rig, "c")
        return [evicted for span in rig.spans("switch") for evicted in span.attributes.get("evicted", ())]

    evicted, _ = run(main())
    assert evicted == [second]


def test_every_switch_is_a_span_with_reason_bytes_and_waiters(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("actor", 6 * GB)
        await rig.add("rollout", 8 * GB)
        await asyncio.gather(*(work(rig, name) for name in ("actor", "rollout", "rollout")))
        return rig.spans("switch")

    spans, _ = run(main())
    second = spans[1]
    assert second.attributes == {
        "resident": "rollout",
        "reason": "rollout#2 runs next",
        "waiters": 1,
        "evicted": ["actor"],
        "bytes_in": 8 * GB,
        "bytes_out": 6 * GB,
    }
    assert second.seconds == pytest.approx(6 + 8)


def test_the_next_one_is_brought_while_the_current_one_works(make_rig):
    async def main(prefetch):
        rig = make_rig(prefetch=prefetch)
        await rig.add("actor", 5 * GB)
        await rig.add("reference", 4 * GB)
        return await asyncio.gather(work(rig, "actor", seconds=10), work(rig, "reference", seconds=1))

    assert run(main(True))[1] == pytest.approx(5 + 10 + 1)
    assert run(main(False))[1] == pytest.approx(5 + 10 + 4 + 1)


def test_what_the_flow_expects_is_brought_before_anybody_asks(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("rollout", 5 * GB)
        await rig.add("reward", 4 * GB)
        rig.switcher.expect(["rollout", "reward"])
        await work(rig, "rollout", seconds=10)
        await work(rig, "reward")

    assert run(main())[1] == pytest.approx(5 + 10 + 1)


def test_prefetch_takes_no_room_from_those_who_are_needed_sooner(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("a", 5 * GB)
        await rig.add("b", 4 * GB)
        await rig.add("c", 3 * GB)
        await work(rig, "a", seconds=1)
        await work(rig, "b", seconds=1)
        rig.switcher.expect(["b", "a", "c"])
        await work(rig, "b", seconds=10)
        assert rig.switcher.is_on("a")
        assert not rig.switcher.is_on("c")

    run(main())


def test_the_one_needed_latest_leaves(make_rig):
    async def main(order):
        rig = make_rig(prefetch=False)
        for name in ("a", "b", "c"):
            await rig.add(name, 5 * GB)
        await work(rig, "a")
        await work(rig, "b")
        rig.switcher.expect(["c", *order])
        await work(rig, "c")
        return {name for name in "ab" if rig.switcher.is_on(name)}

    assert run(main(["a", "b"]))[0] == {"a"}
    assert run(main(["b", "a"]))[0] == {"b"}


def test_a_kv_cache_comes_after_its_weights_and_leaves_before_them(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("weights", 5 * GB)
        await rig.add("kv", 4 * GB, after=["weights"])
        await rig.add("actor", 9 * GB)
        await work(rig, "kv")
        await work(rig, "actor")
        moves = [(span.name, span.attributes["resident"]) for span in rig.switcher.recorder.drain()]
        return [move for move in moves if move[0] in ("onload", "offload")]

    moves, _ = run(main())
    assert moves == [
        ("onload", "weights"),
        ("onload", "kv"),
        ("offload", "kv"),
        ("offload", "weights"),
        ("onload", "actor"),
    ]


def test_only_the_kv_cache_leaves_when_that_is_enough(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("weights", 5 * GB)
        await rig.add("kv", 4 * GB, after=["weights"])
        await rig.add("env", 3 * GB)
        await work(rig, "kv")
        await work(rig, "env")
        return rig.switcher.is_on("weights"), rig.switcher.is_on("kv")

    assert run(main())[0] == (True, False)


def test_sharers_work_at_the_same_time_when_they_fit(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("env", 4 * GB)
        await rig.add("policy", 6 * GB)
        await rig.add("big", 5 * GB)
        await asyncio.gather(*(work(rig, name, seconds=10, shared=True) for name in ("env", "policy", "big")))
        return rig.devices.peak["d0"]

    peak, seconds = run(main())
    assert peak == 10 * GB
    assert seconds == pytest.approx(4 + 6 + 10 + 5 + 10, abs=6.1), "two together, then the third"


def test_residents_of_several_devices_leave_all_of_them(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("wide", 8 * GB, devices=("d0", "d1"))
        await rig.add("left", 6 * GB, devices=("d0",))
        await rig.add("right", 6 * GB, devices=("d1",))
        await work(rig, "wide")
        await asyncio.gather(work(rig, "left"), work(rig, "right"))
        await asyncio.gather(work(rig, "left"), work(rig, "wide"), work(rig, "right"))
        return rig.devices.peak

    assert run(main())[0] == {"d0": 8 * GB, "d1": 8 * GB}


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_free_that_lags_until_synchronised_is_waited_for(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("lagging", 8 * GB, lag_until_synchronised=True)
        await rig.add("next", 8 * GB)
        await work(rig, "lagging")
        await work(rig, "next")
        return rig.devices.peak["d0"]

    assert run(main())[0] == 8 * GB


def test_a_release_that_reports_ok_early_is_not_believed(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("early", 8 * GB, early_ok_s=5.0)
        await rig.add("next", 8 * GB)
        await work(rig, "early")
        await work(rig, "next")
        return rig.devices.peak["d0"]

    peak, seconds = run(main())
    assert peak == 8 * GB
    assert 8 + 1 + 8 + 5 + 8 + 1 <= seconds < 31.5


def test_one_that_never_leaves_keeps_its_booking_and_the_lock_stays_usable(make_rig):
    async def main():
        rig = make_rig(patience_s=20.0)
        stuck = await rig.add("stuck", 8 * GB, never_leaves=True)
        await rig.add("next", 8 * GB)
        await rig.add("small", 1 * GB)
        await work(rig, "stuck")
        with pytest.raises(
            NotFreedError, match=r"stuck reported that it left, but \{'d0': 8000000000\} bytes are still"
        ):
            await work(rig, "next")
        assert rig.switcher.budget.used("d0") == 8 * GB
        assert (await rig.lock.astate()).holders == ()
        await work(rig, "small")
        stuck.never_leaves = False
        await work(rig, "next")

    run(main())


def test_one_that_never_drains_is_not_moved(make_rig):
    async def main():
        rig = make_rig(patience_s=20.0)
        await rig.add("busy", 8 * GB, drains_for_ever=True)
        await rig.add("next", 8 * GB)
        await work(rig, "busy")
        with pytest.raises(NotFreedError, match="busy did not drain within 20 s"):
            await work(rig, "next")
        assert rig.devices.held("d0", "busy") == 8 * GB
        await work(rig, "busy")

    run(main())


@pytest.mark.parametrize(("taken", "match"), [(9 * GB, "has 9000000000 there"), (0, "has 0 there")])
def test_one_that_takes_other_bytes_than_declared_is_sent_off_again(make_rig, taken, match):
    async def main():
        rig = make_rig()
        await rig.add("liar", 6 * GB, takes_bytes=taken)
        await rig.add("honest", 10 * GB)
        with pytest.raises(ResidentBytesError, match=f"liar declared 6000000000 bytes on d0 and {match}"):
            await work(rig, "liar")
        assert rig.devices.used_bytes("d0") == 0
        await work(rig, "honest")

    run(main())


def test_a_failed_onload_is_taken_back_and_raised(make_rig):
    async def main():
        rig = make_rig()
        broken = await rig.add("broken", 6 * GB, fails_onload=True)
        await rig.add("other", 10 * GB)
        with pytest.raises(RuntimeError, match="CUDA error"):
            await work(rig, "broken")
        assert rig.devices.used_bytes("d0") == 0
        await work(rig, "other")
        broken.fails_onload = False
        await work(rig, "broken")

    run(main())


def test_bytes_of_strangers_are_found_before_an_onload(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("a", 6 * GB)
        rig.devices.allocate("d0", "a suspended process", 5 * GB)
        with pytest.raises(NotFreedError, match="5000000000 of 10000000000 are in use, but only 0 by residents"):
            await work(rig, "a")
        rig.devices.free("d0", "a suspended process")
        await work(rig, "a")

    run(main())


def test_a_stale_token_at_onload_is_refused_by_the_resident_and_nothing_moves(make_rig):
    async def main():
        rig = make_rig()
        a = await rig.add("a", 6 * GB)
        rig.fence.seal(Permit({"d0": 10**6}, "another job"))
        with pytest.raises(StaleTokenError, match="another job|1000000 was there"):
            await work(rig, "a")
        assert await a.resident_bytes() == {"d0": 0}
        assert rig.switcher.budget.used("d0") == 0
        assert (await rig.lock.astate()).holders == ()

    run(main())


def test_what_can_never_fit_is_refused_at_plan_time_with_the_numbers(make_rig):
    async def main():
        rig = make_rig()
        with pytest.raises(ExceedsCapacityError, match="giant can never run: it needs 11000000000 bytes on d0"):
            await rig.add("giant", 11 * GB)
        await rig.add("a", 6 * GB)
        await rig.add("b", 6 * GB)
        rig.switcher.check_plan({"first": ["a"], "second": ["b"]})
        with pytest.raises(
            ExceedsCapacityError,
            match=r"train can never run: it needs 12000000000 bytes on d0 \(a 6000000000, b 6000000000\), which has 1",
        ):
            rig.switcher.check_plan({"first": ["a"], "train": ["a", "b"]})
        with pytest.raises(ExceedsCapacityError):
            await work(rig, "a", "b")
        with pytest.raises(UnknownDeviceError, match="needs device 'd9'"):
            await rig.add("elsewhere", GB, devices=("d9",))
        await rig.add("giant", 10 * GB), "a refused name can be used again"

    run(main())


def test_misuse_is_named(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("actor", GB)
        with pytest.raises(ConfigError, match="was added before"):
            await rig.add("actor", GB)
        with pytest.raises(ConfigError, match="has no devices"):
            await rig.add("nowhere", {})
        for misuse in (lambda: rig.switcher.expect(["actr"]), lambda: rig.switcher.is_on("actr")):
            with pytest.raises(UnknownNameError, match="did you mean 'actor'"):
                misuse()
        with pytest.raises(UnknownNameError):
            await work(rig, "critic")
        with pytest.raises(UnknownNameError):
            await rig.add("kv", GB, after=["weights"])

    run(main())


def test_a_use_that_times_out_leaves_nothing_behind(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("a", 6 * GB)
        await rig.add("b", 6 * GB)
        holder = asyncio.ensure_future(work(rig, "a", seconds=100))
        await asyncio.sleep(50)
        with pytest.raises(LockTimeoutError, match="d0 held by a#1"):
            await work(rig, "b", timeout_s=5)
        cancelled = asyncio.ensure_future(work(rig, "b"))
        await asyncio.sleep(1)
        cancelled.cancel()
        await holder
        assert (await rig.lock.astate()).waiters == ()
        await work(rig, "b")

    run(main())


def test_asking_one_to_leave(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("weights", 5 * GB)
        await rig.add("kv", 4 * GB, after=["weights"])
        using = asyncio.ensure_future(work(rig, "kv", seconds=10))
        await asyncio.sleep(12)
        with pytest.raises(ResidentStateError, match="weights cannot leave: kv, weights in use"):
            await rig.switcher.evict("weights")
        await using
        await rig.switcher.evict("weights")
        assert rig.devices.used_bytes("d0") == 0
        await rig.switcher.evict("weights")

    run(main())


def test_one_found_on_a_device_is_booked_as_it_is(make_rig):
    async def main():
        rig = make_rig()
        rig.devices.allocate("d0", "hybrid", 6 * GB)
        await rig.add("hybrid", 6 * GB)
        assert rig.switcher.is_on("hybrid")
        await rig.add("next", 6 * GB)
        await work(rig, "next")
        assert not rig.switcher.is_on("hybrid")
        await rig.switcher.close()

    run(main())


def test_one_that_is_taken_into_use_while_others_leave_is_left_alone(make_rig):
    async def main():
        rig = make_rig()
        await rig.add("busy", 2 * GB, devices=("d0",))
        for name in ("first", "second"):
            await rig.add(name, 4 * GB, devices=("d1",))
            await work(rig, name)
        await rig.add("wide", 8 * GB, devices=("d0", "d1"))
        busy = asyncio.ensure_future(work(rig, "busy", seconds=100))
        await asyncio.sleep(3)
        wide = asyncio.ensure_future(work(rig, "wide"))  # waits for d0; is prefetched, for which both must leave d1
        await asyncio.sleep(1)
        (other,) = [name for name in ("first", "second") if rig.switcher.is_on(name)]
        async with rig.switcher.use(other):
            await asyncio.sleep(50)
            assert rig.devices.held("d1", other) == 4 * GB, "it was taken off while it was used"
        await asyncio.gather(busy, wide)

    run(main())
