import pytest

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import ConfigError, UnknownNameError
from rlinf_plugins.envs import EnvSpec, InitialState
from rlinf_verl.vla.suites import SUITES, read_suite


def spec(trials=3, tasks=2):
    return EnvSpec(
        name="Toy",
        action_low=(-1.0,),
        action_high=(1.0,),
        observation={"main_images": Field(shape=(4, 4, 3), dtype="uint8")},
        tasks=tuple(f"task {i}" for i in range(tasks)),
        trials=trials,
    )


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_reads(name):
    assert read_suite(name).factory.partition(":")[2] in ("LiberoFactory", "ManiSkillFactory")


def test_a_suite_is_every_pair_once_task_by_task():
    suite = read_suite("maniskill", ["trials=null"])
    assert suite.pairs(spec()) == [InitialState(task=task, trial=trial) for task in (0, 1) for trial in (0, 1, 2)]
    chosen = read_suite("maniskill", ["tasks=[1, 1]", "trials=2", "first_trial=1"])
    assert chosen.pairs(spec()) == [InitialState(task=1, trial=1), InitialState(task=1, trial=2)]


@pytest.mark.parametrize(
    ("overrides", "trials", "message"),
    [
        (["tasks=[2]"], 3, "Toy has tasks 0 to 1"),
        (["trials=4"], 3, "Toy has trials 0 to 2 of each task, got up to 3"),
        (["trials=null"], None, "any number of initial states"),
    ],
)
def test_what_the_environment_does_not_have_is_named(overrides, trials, message):
    with pytest.raises(ConfigError, match=message):
        read_suite("maniskill", overrides).pairs(spec(trials=trials))


def test_a_file_is_a_suite(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("factory: m:f\ntrials: 2\n")
    assert read_suite(str(file), ["kwargs.size=3"]).kwargs == {"size": 3}
    file.write_text("factory: [")
    with pytest.raises(ConfigError, match="not readable YAML"):
        read_suite(str(file))


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'libero_spatial'"):
        read_suite("libero_spatail")
    with pytest.raises(ConfigError, match="unknown option suite maniskill.trails"):
        read_suite("maniskill", ["trails=3"])
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        read_suite("maniskill", ["trials=0"])
