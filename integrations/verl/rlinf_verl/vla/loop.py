"""Agent-loop manager of embodied jobs: prompts are (task, initial state), rollouts are episodes in environments.

Set with ``actor_rollout_ref.rollout.agent.agent_loop_manager_class=rlinf_verl.vla.loop.EmbodiedLoopManager``.
"""

from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.workers.rollout.llm_server import LLMServerClient

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.vla.loop_config import EmbodiedConfig, embodied_config
from rlinf_verl.vla.loop_worker import EmbodiedWorker

_CONCURRENCY = 1024  # calls in flight in a worker; each is a coroutine that waits


class EmbodiedLoopManager:
    """Spreads prompts over the workers that host environments.

    Args:
        config: veRL's whole configuration.
        options: Its embodied part.
        llm_client: Way to the policy servers.
    """

    def __init__(self, config: DictConfig, options: EmbodiedConfig, llm_client: LLMServerClient) -> None:
        actor = ray.remote(EmbodiedWorker)
        self.agent_loop_workers = [
            actor.options(num_cpus=0, max_concurrency=_CONCURRENCY).remote(config, llm_client, index)
            for index in range(options.workers)
        ]
        self._next = 0

    @classmethod
    def create(
        cls,
        config: DictConfig,
        llm_client: LLMServerClient,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> "EmbodiedLoopManager":
        """Start the workers and their environments; called by veRL's task runner.

        Args:
            config: veRL's whole configuration.
            llm_client: Way to the policy servers.
            teacher_client: Not used; distillation of policies is not supported.
            reward_loop_worker_handles: Not used; environments give the reward.

        Raises:
            ConfigError: Options that are unknown or impossible.
            EnvStartError: An environment cannot be made.
        """
        if teacher_client:
            raise ConfigError("distillation is not supported for embodied policies; set distillation.enabled=false")
        manager = cls(config, embodied_config(config), llm_client)
        ray.get([worker.ready.remote() for worker in manager.agent_loop_workers])
        return manager

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Begin the episodes of every prompt; returns at once, rows go to TransferQueue."""
        shares: list[list[int]] = [[] for _ in self.agent_loop_workers]
        for row in range(len(prompts)):
            shares[self._next].append(row)
            self._next = (self._next + 1) % len(self.agent_loop_workers)
        ray.get(
            [
                worker.generate_sequences.remote(prompts[rows])
                for worker, rows in zip(self.agent_loop_workers, shares, strict=True)
                if rows
            ]
        )

    def attach_arrivals(self, arrivals: Any) -> list[ray.ObjectRef]:
        """Give every worker the actor that is told of finished prompts.

        Returns:
            One reference per worker that stays pending until that worker dies.
        """
        ray.get([worker.set_arrivals.remote(arrivals) for worker in self.agent_loop_workers])
        return [worker.run_until_exit.remote() for worker in self.agent_loop_workers]
