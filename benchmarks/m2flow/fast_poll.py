"""veRL's own replay buffers with their poll shortened, so that no mode is compared with a 2-second sleep."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_S = 0.05


class FastPoll(ReplayBuffer):
    """For ``sync``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)


class FastPollAsync(ReplayBufferAsync):
    """For ``colocate_async`` and ``separate_async``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)
