"""The same flow with its workers in processes of their own."""

import itertools

import macro_flows
import pytest
from macro_flows import MB, Broken, Generate, Train, expected, filtered

from rlinf_plugins.core.errors import StageFailedError
from rlinf_plugins.scheduler.macro import MacroFlow, Placement


@pytest.fixture(autouse=True, scope="module")
def stages_travel_by_value():
    import ray

    ray.cloudpickle.register_pickle_by_value(macro_flows)
    yield
    ray.cloudpickle.unregister_pickle_by_value(macro_flows)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("size", [None, 4])
def test_the_flow_runs_on_actors_and_takes_turns_there(ray_session, size):
    placement = Placement.temporal(("generate", "train"), ("d0",), size)
    with MacroFlow("filtered", items=20, placement=placement, memory=100 * MB, host="ray") as flow:
        for _ in range(2):
            assert sorted(itertools.chain(*filtered(flow).result(120))) == expected(20)
        ((_, where),) = flow.group("train", Train).history().result(60)
        assert where[:3] == ["on", "off", "on"]
        assert [span.attributes["resident"] for span in flow.switches()][:2] == ["generate/0", "train/0"]


def test_an_error_and_a_death_in_an_actor_end_the_flow(ray_session):
    with MacroFlow("broken", items=4, host="ray") as flow:
        call = flow.group("tool", Broken).run(flow.feed("prompts", range(4)))
        with pytest.raises(StageFailedError, match="tool/0 failed: ConnectionResetError: the tool hung up"):
            call.result(120)
    with MacroFlow("dying", items=4, host="ray") as flow:
        never = flow.channel("never")
        flow.group("generate", Generate).run(never, to=flow.channel("samples"))
        killed = flow.group("train", Train).run(flow.channel("nothing"))
        import ray

        ray.kill(flow.group("train", Train)._handles[0]._actor)
        with pytest.raises(StageFailedError, match="train/0 failed"):
            killed.result(120)
