import asyncio
import threading

import pytest

from rlinf_plugins.core.errors import EngineBusyError, EngineStepError, RequestRejectedError, WeightsNotLoadedError
from rlinf_verl.rollout.host import EngineHost
from rlinf_verl.rollout.weights import BucketPacker


class Steps:
    """Lets the engine do exactly as many steps as the test allows; the step loop waits on a condition, not on time."""

    def __init__(self, engine, monkeypatch):
        self._allowed = threading.Semaphore(0)
        plain = engine.step

        def step():
            self._allowed.acquire()
            return plain()

        monkeypatch.setattr(engine, "step", step)

    def allow(self, n=1):
        self._allowed.release(n)


@pytest.fixture
async def host_of():
    hosts = []

    def make(engine, **kwargs):
        hosts.append(EngineHost(engine, **kwargs))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


async def started(host, *requests):
    tasks = [asyncio.create_task(host.generate(r)) for r in requests]
    await asyncio.sleep(0)
    return tasks


async def sync(host, model, version):
    await host.begin_sync()
    packer = BucketPacker(4096)
    for name, tensor in model.state_dict().items():
        for bucket in packer.add(name, tensor):
            await host.write(bucket)
    for bucket in packer.rest():
        await host.write(bucket)
    await host.end_sync(version)


async def test_many_requests_are_served_together(make_engine, request_for, host_of):
    host = host_of(make_engine(max_rows=3))
    ended = await asyncio.gather(*(host.generate(request_for(str(i), [5, 6 + i], 3 + i)) for i in range(10)))
    assert [g.request_id for g in ended] == [str(i) for i in range(10)]
    await host.drain()


async def test_a_rejected_request_raises_to_its_caller_only(make_engine, request_for, host_of):
    host = host_of(make_engine())
    good, bad = await asyncio.gather(
        host.generate(request_for("good", [5], 3)), host.generate(request_for("bad", [])), return_exceptions=True
    )
    assert isinstance(bad, RequestRejectedError)
    assert good.error is None


async def test_pause_ends_requests_with_partial_output_and_parks_newcomers(
    make_engine, request_for, host_of, monkeypatch
):
    engine = make_engine()
    steps = Steps(engine, monkeypatch)
    host = host_of(engine)
    (running,) = await started(host, request_for("a", [5, 6], 50, ignore_eos=True))
    pausing = asyncio.create_task(host.pause())
    steps.allow(1)
    assert await pausing == ["a"]
    partial = await running
    assert (partial.finish, len(partial.token_ids)) == ("aborted", 1)
    (parked,) = await started(host, request_for("b", [5, 6], 1))
    assert not engine.busy
    steps.allow(5)
    host.resume()
    assert (await parked).finish == "length"


async def test_pause_with_reject_turns_newcomers_away(make_engine, request_for, host_of):
    host = host_of(make_engine())
    await host.pause(reject=True)
    assert await host.generate(request_for("a", [5])) is None
    host.resume()
    assert (await host.generate(request_for("a", [5], 1))).error is None


async def test_sleep_waits_for_the_running_and_parks_the_rest(make_engine, request_for, host_of, monkeypatch):
    engine = make_engine()
    steps = Steps(engine, monkeypatch)
    host = host_of(engine)
    (running,) = await started(host, request_for("a", [5, 6], 2, ignore_eos=True))
    sleeping = asyncio.create_task(host.sleep())
    await asyncio.sleep(0)
    (parked,) = await started(host, request_for("b", [5, 6], 1))
    assert not sleeping.done()
    steps.allow(2)
    assert len((await running).token_ids) == 2
    await sleeping
    assert not parked.done()
    steps.allow(2)
    await host.wake(["weights"])
    await asyncio.sleep(0)
    assert not parked.done()
    await host.wake(["kv_cache"])
    assert (await parked).error is None


async def test_discarded_weights_come_back_with_the_next_sync(make_engine, make_model, request_for, host_of):
    host = host_of(make_engine(), discard_weights=True)
    await host.sleep()
    await host.wake()
    with pytest.raises(WeightsNotLoadedError, match="released"):
        await host.generate(request_for("a", [5]))
    await sync(host, make_model(seed=1), version=5)
    got = await host.generate(request_for("a", [5], 2))
    assert got.version == 5


async def test_requests_wait_for_a_sync_to_finish_and_carry_its_version(make_engine, make_model, request_for, host_of):
    host = host_of(make_engine(loaded=False))
    await host.begin_sync()
    (parked,) = await started(host, request_for("a", [5], 2))
    await host.end_sync(0, failed=True)
    with pytest.raises(WeightsNotLoadedError, match="did not finish"):
        await parked
    await sync(host, make_model(), version=3)
    assert (await host.generate(request_for("b", [5], 2))).version == 3


async def test_a_sync_over_running_requests_is_refused(make_engine, request_for, host_of, monkeypatch):
    engine = make_engine()
    steps = Steps(engine, monkeypatch)
    host = host_of(engine)
    (running,) = await started(host, request_for("a", [5, 6], 3, ignore_eos=True))
    refused = asyncio.create_task(host.begin_sync())
    await asyncio.sleep(0)
    steps.allow(9)
    with pytest.raises(EngineBusyError):
        await refused
    assert len((await running).token_ids) == 3


async def test_a_cancelled_caller_frees_its_row(make_engine, request_for, host_of, monkeypatch):
    engine = make_engine()
    steps = Steps(engine, monkeypatch)
    host = host_of(engine)
    (gone,) = await started(host, request_for("a", [5, 6], 99, ignore_eos=True))
    gone.cancel()
    steps.allow(3)
    with pytest.raises(asyncio.CancelledError):
        await gone
    await host.drain()
    assert not engine.busy


async def test_a_defect_of_the_engine_reaches_everyone_and_the_host_goes_on(
    make_engine, request_for, host_of, monkeypatch
):
    engine = make_engine()
    host = host_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: {}["defect"])
        for outcome in await asyncio.gather(
            *(host.generate(request_for(str(i), [5])) for i in range(3)), return_exceptions=True
        ):
            assert isinstance(outcome, EngineStepError)
            assert isinstance(outcome.__cause__, KeyError)
    assert (await host.generate(request_for("next", [5], 1))).error is None


async def test_an_id_in_use_is_refused(make_engine, request_for, host_of, monkeypatch):
    engine = make_engine()
    steps = Steps(engine, monkeypatch)
    host = host_of(engine)
    (first,) = await started(host, request_for("a", [5, 6], 1))
    with pytest.raises(RequestRejectedError, match="already running"):
        await host.generate(request_for("a", [5, 6], 1))
    steps.allow(2)
    assert (await first).error is None
