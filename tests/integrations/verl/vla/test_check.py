"""What does not fit together is refused in the driver, before Ray, weights or simulators."""

import json

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import CheckpointError, ConfigError, MissingAssetError, RlinfError
from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint
from rlinf_verl.vla.check import check_policy

SPEC = ActionSpec(decoding="parallel", chunk=4, dim=3, proprio_dim=2)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_checkpoint(tmp_path, variant="openvla-oft", sizes=TinySizes.learner(), spec=SPEC)


@pytest.fixture
def job(folder):
    """Function from changes, by dotted key, to a job whose settings fit the checkpoint."""

    def build(changes):
        config = OmegaConf.create(
            {
                "algorithm": {"adv_estimator": "grpo"},
                "actor_rollout_ref": {
                    "model": {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}},
                    "rollout": {"engine_kwargs": {"openvla": {"unnorm_key": "tiny"}}},
                },
                "trainer": {
                    "v1": {"m2flow": {"envs": {"factory": "m:f", "cameras": ["main_images"], "proprio": "states"}}}
                },
            }
        )
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return build


ENVS, MODEL = "trainer.v1.m2flow.envs", "actor_rollout_ref.model"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.openvla"


@pytest.mark.parametrize("changes", [{}, {f"{ENVS}.execute": 4}, {MODEL + ".path": "hdfs://far/away"}])
def test_what_fits_passes(job, changes):
    check_policy(job(changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ENGINE}.unnorm_key": "bridge"}, "no statistics for unnorm_key 'bridge'; present: tiny"),
        ({f"{ENGINE}.unnorm_keys": "tiny"}, "did you mean 'unnorm_key'"),
        ({"algorithm.adv_estimator": "episode_gae"}, "needs a policy with a value head"),
        ({f"{MODEL}.override_config.log_prob_level": "episode"}, "log_prob_level must be one of"),
        ({f"{MODEL}.override_config.value_huber": 0.0}, "value_huber must be positive"),
        ({f"{ENVS}.cameras": ["main_images", "wrist"]}, "are 2 images, the policy takes 1"),
        ({f"{ENVS}.proprio": None}, "proprio=None, but the policy takes a state of 2 numbers"),
        ({f"{ENVS}.execute": 5}, "execute=5 actions, but the policy predicts 4 at once"),
    ],
)
def test_what_does_not_fit_is_named(job, changes, message):
    with pytest.raises(RlinfError, match=message):
        check_policy(job(changes))


def test_statistics_of_another_robot_are_refused(job, folder):
    file = folder / "dataset_statistics.json"
    tables = json.loads(file.read_text())
    tables["tiny"]["action"]["q01"].append(-1.0)
    file.write_text(json.dumps(tables))
    with pytest.raises(CheckpointError, match=r"action\.q01 has 4 numbers, the policy works with 3"):
        check_policy(job({}))


def test_an_absent_tokenizer_is_named(job, folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MissingAssetError, match=r"tokenizer\.json does not exist"):
        check_policy(job({}))


def test_an_action_specification_with_a_wrong_entry_is_named(job, folder):
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["action_spec"] |= {"value_heads": "chunk"}
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="action_spec.*value_heads.*did you mean 'value_head'"):
        check_policy(job({}))
