import asyncio

from rlinf_verl.trainer.arrivals import Arrivals, RolloutFailure


def failure(session: int) -> RolloutFailure:
    return RolloutFailure(uid="u", session_id=session, kind="OSError", message="m", where="w")


async def test_waits_for_the_count_of_its_own_partition():
    arrivals = Arrivals()
    waiter = asyncio.create_task(arrivals.wait_for("train", 2))
    await arrivals.publish("val")
    await arrivals.publish("train")
    await asyncio.sleep(0)
    assert not waiter.done()
    await arrivals.publish("train")
    assert await waiter == 2


async def test_what_has_arrived_is_not_waited_for():
    arrivals = Arrivals()
    for _ in range(3):
        await arrivals.publish("train")
    assert await arrivals.wait_for("train", 1) == 3


async def test_failures_are_taken_once():
    arrivals = Arrivals()
    await arrivals.report("train", [failure(0), failure(1)])
    await arrivals.report("val", [failure(2)])
    assert [f.session_id for f in await arrivals.take_failures("train")] == [0, 1]
    assert await arrivals.take_failures("train") == []
    assert [f.session_id for f in await arrivals.take_failures("val")] == [2]
