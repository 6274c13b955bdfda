"""veRL's own synchronous replay buffer with its poll shortened, so that we are not compared with a 2-second sleep."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_S = 0.05


class FastPollReplayBuffer(ReplayBuffer):
    """See the module."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)
