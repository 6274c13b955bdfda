"""GRPO on a small OpenVLA-OFT over 16 ManiSkill environments that draw nothing.

The simulation is ManiSkill's own (``PushCube-v1``, observation mode ``state``); as the policy wants an image, the
state's numbers are laid out as one. Every episode takes the same number of steps, as in RLinf's ManiSkill recipe.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.envs.maniskill import ManiSkillFactory
from rlinf_plugins.envs.protocol import EnvSpec, InitialState, Observation, Outcome

ENVS, TASKS, ROLLOUTS, STEPS, CHUNK = 16, 8, 8, 20, 4
_EDGE = 56


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFactory:
    """Makes :class:`StateEnv`."""

    def __call__(self) -> "StateEnv":
        """Return a new environment, in the process that runs it."""
        return StateEnv()


class StateEnv:
    """ManiSkill's PushCube from its state; each number is a patch of the image, as bright as the number is large."""

    def __init__(self) -> None:
        options = {"obs_mode": "state", "control_mode": "pd_ee_delta_pos", "reward_mode": "normalized_dense"}
        self._inner = ManiSkillFactory(env_id="PushCube-v1", **options)()
        inner: EnvSpec = self._inner.spec
        images = Field(shape=(_EDGE, _EDGE, 3), dtype="uint8")
        self.spec = replace(inner, observation={**inner.observation, "main_images": images})

    def reset(self, initial: InitialState) -> str:
        """Start an episode."""
        return self._inner.reset(initial)

    def step(self, action: np.ndarray) -> Outcome:
        """Apply one action."""
        return self._inner.step(action)

    def observe(self) -> Observation:
        """Return the state, and as an image."""
        seen = self._inner.observe()
        cells = np.zeros(64, np.float32)
        numbers = seen["states"][:64]
        cells[: len(numbers)] = 127.5 * (1 + np.tanh(numbers))
        image = np.repeat(np.repeat(cells.reshape(8, 8), _EDGE // 8, axis=0), _EDGE // 8, axis=1)
        return {**seen, "main_images": np.repeat(image[..., None], 3, axis=2).astype(np.uint8)}

    def close(self) -> None:
        """Release the simulation."""
        self._inner.close()


def make(folder: Path) -> None:
    """Write the policy."""
    from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

    sizes = replace(TinySizes.learner(action_bins=32), hidden=192, intermediate=512, layers=4, heads=6)
    spec = ActionSpec(decoding="parallel", chunk=CHUNK, dim=4)
    make_tiny_checkpoint(folder / "policy", variant="openvla-oft", seed=0, sizes=sizes, spec=spec)


WORKLOAD = [
    "+recipe=openvla_maniskill_grpo_tiny",
    "~trainer.v1.m2flow.envs",
    f"+trainer.v1.m2flow.envs={{factory: 'embodied:StateFactory', num_envs: {ENVS}, cameras: [main_images],"
    f" pool: {{out_of_range: clip, episode: {{max_steps: {STEPS}}}, reward: {{mode: raw}}}}}}",
    "actor_rollout_ref.model.path=policy",
    f"data.train_batch_size={TASKS}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "trainer.v1.m2flow.virtual_devices.count=2",
    "trainer.v1.m2flow.virtual_devices.cores_per_device=1",
    "trainer.save_freq=-1",
]
