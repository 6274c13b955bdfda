"""The policy server as a veRL rollout named ``openvla``: server actor, replica and adapter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import TokenOutput

from rlinf_plugins.core.errors import RequestRejectedError
from rlinf_plugins.models.openvla import OpenVLAForActionPrediction, OpenVLAProcessor, load_policy
from rlinf_plugins.models.openvla.checkpoint import read_config
from rlinf_verl.rollout.host import Engine
from rlinf_verl.rollout.options import check_single_process, options
from rlinf_verl.rollout.replica import InProcessAdapter, InProcessReplica
from rlinf_verl.rollout.server import RolloutServer
from rlinf_verl.rollout.weights import ResidentWeights
from rlinf_verl.vla.rollout_engine import Decision, PolicyEngine, PolicyRequest, sampling_of
from rlinf_verl.vla.rollout_options import NAME, VLAOptions


def build_policy_engine(rollout: Any, path: str, replica_rank: int) -> PolicyEngine:
    """Build the policy of a checkpoint folder and its engine.

    Args:
        rollout: veRL's ``RolloutConfig``.
        path: Checkpoint folder.
        replica_rank: Makes the seeds of replicas differ.

    Raises:
        ConfigError: Options that are unknown or impossible.
        CheckpointError: The folder does not hold what the policy needs.
    """
    chosen: VLAOptions = options(rollout, NAME, VLAOptions)
    check_single_process(rollout)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    folder, dtype = Path(path), getattr(torch, rollout.dtype)
    loaded = rollout.load_format != "dummy"
    policy = load_policy(folder, dtype=dtype) if loaded else OpenVLAForActionPrediction(read_config(folder)).to(dtype)
    return PolicyEngine(
        policy.to(chosen.device),
        OpenVLAProcessor.from_folder(
            folder, unnorm_key=chosen.unnorm_key, statistics=chosen.statistics, extremes=chosen.extremes
        ),
        ResidentWeights(policy, loaded=loaded),
        max_batch=chosen.max_batch,
        max_wait_s=chosen.max_wait_ms / 1000,
        seed=rollout.seed + replica_rank,
    )


class VLAServer(RolloutServer):
    """Observations in, actions out over ``PolicyEngine``."""

    @property
    def discard_weights(self) -> bool:  # type: ignore[override]
        """Whether sleeping frees the weights."""
        chosen: VLAOptions = options(self.config, NAME, VLAOptions)
        return chosen.discard_weights

    def read_model_config(self, model_config: Any) -> Any:
        """Keep it as it is: the policy reads its folder itself and needs no tokenizer of veRL's."""
        return model_config

    def build_engine(self) -> Engine:
        """Build the policy and its engine."""
        return build_policy_engine(self.config, copy_to_local(self.model_config.path), self.replica_rank)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        image_data: Sequence[np.ndarray] | None = None,
        video_data: Sequence[Any] | None = None,
        instruction: str = "",
        proprio: np.ndarray | None = None,
    ) -> TokenOutput:
        """Decide what to do about an observation.

        Args:
            request_id: Id of the request.
            prompt_ids: Empty; the prompt is made from the instruction.
            sampling_params: ``temperature`` (0 is greedy), ``top_k``, ``seed``.
            image_data: Camera images, uint8 ``[H, W, 3]``.
            video_data: Not taken.
            instruction: Task in words.
            proprio: Raw state ``[D]``, for a policy that takes one.

        Returns:
            Action tokens and their log-probs, flattened; ``extra_fields["decision"]`` holds the whole
            :class:`~rlinf_verl.vla.rollout_engine.Decision`. ``stop_reason`` is ``aborted`` where generation was
            interrupted: ask again.

        Raises:
            RequestRejectedError: Prompt tokens, videos or sampling settings a policy does not take.
            ObservationError: Images or state of the wrong number, shape or type.
            InstructionError: An instruction that cannot be put into the prompt.
            EngineStepError: The policy raised.
            NonFiniteLogitsError: Its output is not finite.
            WeightsNotLoadedError: No weights yet.
        """
        if len(prompt_ids) or video_data:
            raise RequestRejectedError(f"request {request_id}: a policy takes an instruction and images, no tokens")
        request = PolicyRequest(
            id=request_id,
            instruction=instruction,
            images=list(image_data or []),
            proprio=proprio,
            sampling=sampling_of(sampling_params),
            seed=sampling_params.get("seed"),
        )
        decision: Decision | None = await self._host.generate(request)
        if decision is None or decision.finish == "aborted":
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.version})
        return TokenOutput(
            token_ids=decision.tokens.reshape(-1).tolist(),
            log_probs=decision.log_probs.reshape(-1).tolist(),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": decision.version, "decision": decision},
        )


class VLAReplica(InProcessReplica):
    """One policy server beside the replica's worker."""

    server_class = VLAServer
    options_class = VLAOptions


class VLAAdapter(InProcessAdapter):
    """Pushes weights from a trainer rank to its replica's policy server."""

    options_class = VLAOptions
