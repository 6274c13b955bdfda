"""The Ray actor behind a replica: veRL's server protocol over an ``EngineHost``."""

from collections.abc import Sequence
from typing import Any

from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rlinf_plugins.core.errors import RequestRejectedError
from rlinf_verl.cpu.devices import bind_assigned_device
from rlinf_verl.rollout.engine import Generation, Request
from rlinf_verl.rollout.host import Engine, EngineHost
from rlinf_verl.rollout.options import HFOptions, build_engine, options
from rlinf_verl.rollout.sampling import SamplingParams
from rlinf_verl.rollout.weights import Bucket


class RolloutServer:
    """What veRL asks of a server, whatever its engine.

    Args:
        config: veRL's rollout config.
        model_config: veRL's model config (dataclass, or the DictConfig it is made from).
        rollout_mode: How the replica shares its devices with training.
        replica_rank: Rank of the replica.
    """

    def __init__(self, config: RolloutConfig, model_config: Any, rollout_mode: RolloutMode, replica_rank: int) -> None:
        bind_assigned_device()
        self.config = config
        self.model_config = self.read_model_config(model_config)
        self.replica_rank = replica_rank
        self._mode = rollout_mode
        self._host = EngineHost(self.build_engine(), discard_weights=self.discard_weights)

    discard_weights = False

    def read_model_config(self, model_config: Any) -> Any:
        """Turn veRL's model config into what ``build_engine`` reads."""
        return omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)

    @property
    def version(self) -> int | None:
        """Version of the weights: the trainer's step."""
        return self._host.engine.weights.version

    def build_engine(self) -> Engine:
        """Build the engine this server runs."""
        raise NotImplementedError

    async def ready(self) -> dict[str, Any]:
        """Return once the engine is built."""
        return {"replica_rank": self.replica_rank, "version": self.version}

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo ``sleep``; ``tags`` as in veRL (``weights``, ``kv_cache``), None for both."""
        await self._host.wake(tags)

    async def sleep(self) -> None:
        """Let running requests finish, park newcomers and free memory.

        A standalone replica stays awake: nobody waits for its memory, and its weights would not come back.
        """
        if self.config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self._host.sleep()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with its partial output and stay closed until ``resume_generation``."""
        ids = await self._host.pause(reject=reject_request)
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with its partial output."""
        return {"aborted": bool(await self._host.abort([request_id])), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Serve again after ``abort_all_requests``."""
        self._host.resume()

    async def wait_for_requests_to_drain(self) -> None:
        """Return once no request is running."""
        await self._host.drain()

    async def clear_kv_cache(self) -> None:
        """Nothing to clear: the KV cache never outlives the requests it belongs to."""

    async def release_kv_cache(self) -> None:
        """Return once no request is running, and with it no KV cache is held."""
        await self._host.drain()

    async def resume_kv_cache(self) -> None:
        """Nothing to restore: the cache grows with the next request."""

    async def begin_weight_sync(self) -> None:
        """Park newcomers; weights follow."""
        await self._host.begin_sync()

    async def write_weights(self, bucket: Bucket) -> None:
        """Take a part of the weights."""
        await self._host.write(bucket)

    async def end_weight_sync(self, version: int | None, failed: bool = False) -> None:
        """Use the new weights; ``version`` is the trainer's step."""
        await self._host.end_sync(version, failed=failed)

    async def set_global_steps(self, global_steps: int | None) -> None:
        """Name the weights' version without changing them."""
        self._host.engine.weights.version = global_steps

    async def start_profile(self, **kwargs: Any) -> None:
        """Nothing to start: the engine has no profiler of its own."""

    async def stop_profile(self) -> None:
        """Counterpart of ``start_profile``."""


class HFServer(RolloutServer):
    """Tokens in, tokens out over ``HFEngine``."""

    @property
    def discard_weights(self) -> bool:  # type: ignore[override]
        """Whether sleeping frees the weights."""
        chosen: HFOptions = options(self.config)
        return chosen.discard_weights

    def build_engine(self) -> Engine:
        """Build the model and its engine."""
        return build_engine(self.config, self.model_config, self.replica_rank)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Raises:
            RequestRejectedError: The request cannot be served.
            EngineStepError: The model raised.
            NonFiniteLogitsError: The model's output is not finite.
            WeightsNotLoadedError: No weights yet.
        """
        if image_data or video_data or audio_data:
            raise RequestRejectedError(f"request {request_id}: rollout.name=hf reads text only; use vllm or sglang")
        prompt = normalize_token_ids(prompt_ids)
        params = SamplingParams.from_request(sampling_params, max_tokens=self._room(len(prompt)))
        ended: Generation | None = await self._host.generate(Request(id=request_id, prompt=prompt, params=params))
        if ended is None:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.version})
        return TokenOutput(
            token_ids=ended.token_ids,
            log_probs=ended.log_probs,
            stop_reason="aborted" if ended.finish == "aborted" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": ended.version, "finish_reason": ended.finish},
        )

    def _room(self, prompt: int) -> int:
        """Tokens a request without a limit of its own may generate; multi-turn prompts use up the budget."""
        most, asked = int(self.config.response_length), int(self.config.prompt_length)
        return max(1, min(most, asked + most - prompt))
