"""The env-worker pool and its simulator adapters.

What is exported here imports no simulator; adapters are modules of their own (``maniskill``, ``libero``, ``gym``).
"""

from rlinf_plugins.envs.config import (
    Deadlines,
    EpisodeConfig,
    PoolConfig,
    RewardConfig,
    VideoConfig,
)
from rlinf_plugins.envs.evaluation import Evaluation, evaluate
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.initial_states import InitialStates, all_pairs
from rlinf_plugins.envs.play import PolicyInput, play
from rlinf_plugins.envs.pool import EnvPool
from rlinf_plugins.envs.protocol import (
    EnvFactory,
    Environment,
    EnvSpec,
    InitialState,
    Outcome,
    Snapshotting,
)
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult

__all__ = [
    "Batch",
    "Deadlines",
    "EnvFactory",
    "EnvPool",
    "EnvSpec",
    "Environment",
    "EpisodeConfig",
    "EpisodeRecord",
    "Evaluation",
    "Failure",
    "InitialState",
    "InitialStates",
    "Outcome",
    "PolicyInput",
    "PoolConfig",
    "RewardConfig",
    "Snapshotting",
    "StepResult",
    "VideoConfig",
    "all_pairs",
    "evaluate",
    "play",
]
