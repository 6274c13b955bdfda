"""The actor that hosts environments and runs their episodes, and writes each finished one to TransferQueue."""

import asyncio
import traceback
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import LLMServerClient

from rlinf_plugins.core.errors import RestartStormError
from rlinf_plugins.envs import EnvPool, InitialState
from rlinf_verl import handshake
from rlinf_verl.trainer.arrivals import RolloutFailure
from rlinf_verl.vla.dataset import check_episodes
from rlinf_verl.vla.loop_config import embodied_config
from rlinf_verl.vla.loop_episode import EpisodeRunner
from rlinf_verl.vla.loss_value import value_options
from rlinf_verl.vla.rollout_engine import Decision
from rlinf_verl.vla.rows import EpisodeTrace

_TURNED_AWAY_S = 0.05


class Slots:
    """Free environments of a pool; those that were given up never come back.

    Args:
        count: Number of environments.
    """

    def __init__(self, count: int) -> None:
        self._free: asyncio.Queue[int | None] = asyncio.Queue()
        self._left = count
        self._storm: RestartStormError | None = None
        for slot in range(count):
            self._free.put_nowait(slot)

    async def take(self) -> int:
        """Wait for a free environment.

        Raises:
            RestartStormError: All were given up.
        """
        slot = await self._free.get()
        if slot is None:
            self._free.put_nowait(None)
            raise RestartStormError(f"no environment is left: {self._storm}")
        return slot

    def give_back(self, slot: int) -> None:
        """Free an environment."""
        self._free.put_nowait(slot)

    def lose(self, storm: RestartStormError) -> None:
        """Take an environment out for good."""
        self._left, self._storm = self._left - 1, storm
        if not self._left:
            self._free.put_nowait(None)


class EmbodiedWorker:
    """Runs the episodes of prompts in its environments.

    Args:
        config: veRL's whole configuration.
        llm_client: Way to the policy servers.
        index: Which of the job's workers this is.
    """

    def __init__(self, config: DictConfig, llm_client: LLMServerClient, index: int) -> None:
        handshake.require()
        tq.init()
        self._rollout = config.actor_rollout_ref.rollout
        self._client = llm_client
        self._arrivals: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] | None = None
        options = embodied_config(config)
        self._pool = EnvPool(options.make_factory(), options.share(index), options.pool)
        check_episodes(config, self._pool.spec)
        self._slots = Slots(options.share(index))
        given = OmegaConf.to_container(config.actor_rollout_ref.model.override_config or OmegaConf.create())
        always = value_options(given if isinstance(given, dict) else {}).value_bootstrap == "always"
        self._runner = EpisodeRunner(
            self._pool, options, options.choose_cameras(self._pool.spec), values_the_end=always
        )

    async def ready(self) -> int:
        """Return the number of environments once they are up."""
        return len(self._pool)

    async def set_arrivals(self, arrivals: Any) -> None:
        """Receive the handle of the actor that is told of finished prompts."""
        self._arrivals = arrivals

    async def run_until_exit(self) -> None:
        """Never return: the pending call fails with this process or with what broke it, and so the trainer learns."""
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        await self._broken

    async def close(self) -> None:
        """End the environments."""
        self._pool.close()

    async def generate_sequences(self, batch: TensorDict) -> None:
        """Begin the episodes of each prompt and return; rows follow in TransferQueue."""
        for prompt in _rows(batch):
            task = asyncio.create_task(self._run_prompt(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Episodes report their own failures; what else ends a prompt is a defect of this worker or of its storage."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _run_prompt(self, prompt: dict[str, Any]) -> None:
        validate = bool(prompt.pop("validate", False))
        partition, uid = ("val" if validate else "train"), prompt["uid"]
        sampling = self._sampling(validate)
        default = self._rollout.val_kwargs.n if validate else self._rollout.n
        count = int(prompt.pop("__rollout_n__", default))
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        episodes = [self._run_episode(prompt, session, partition, sampling) for session in range(count)]
        outcomes = await asyncio.gather(*episodes, return_exceptions=True)
        failures = [
            _failure(uid, session, error) for session, error in enumerate(outcomes) if isinstance(error, BaseException)
        ]
        status = "failure" if failures else "finished"
        if self._arrivals is not None:
            await self._arrivals.report.remote(partition, failures)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})
        if self._arrivals is not None:
            await self._arrivals.publish.remote(partition)

    async def _run_episode(
        self, prompt: Mapping[str, Any], session: int, partition: str, sampling: dict[str, Any]
    ) -> None:
        uid, slot = str(prompt["uid"]), await self._slots.take()
        try:
            trace = await self._runner.run(
                uid=uid,
                session=session,
                slot=slot,
                initial=InitialState(task=int(prompt["task"]), trial=int(prompt["trial"])),
                decide=self._policy(f"{uid}-{session}", sampling),
                sampling=sampling,
            )
        except RestartStormError as storm:
            self._slots.lose(storm)
            raise
        except BaseException:
            self._slots.give_back(slot)
            raise
        self._slots.give_back(slot)
        await self._write(trace, {**prompt, "session_id": session}, partition)

    def _policy(self, session: str, sampling: dict[str, Any]) -> Any:
        async def decide(images: list[Any], instruction: str, proprio: Any) -> Decision:
            while True:
                output = await self._client.generate(
                    request_id=session,
                    prompt_ids=[],
                    sampling_params=dict(sampling),
                    image_data=images,
                    instruction=instruction,
                    proprio=proprio,
                )
                if output.stop_reason != "aborted":
                    decision: Decision = output.extra_fields["decision"]
                    return decision
                # A paused server parks the next request until it may go on; one that left the rotation turns it away
                # at once, and the balancer knows another only after a while.
                await asyncio.sleep(_TURNED_AWAY_S)

        return decide

    def _sampling(self, validate: bool) -> dict[str, Any]:
        source = self._rollout.val_kwargs if validate else self._rollout
        return {"temperature": source.temperature, "top_k": source.top_k, "top_p": source.top_p}

    @staticmethod
    async def _write(trace: EpisodeTrace, prompt: dict[str, Any], partition: str) -> None:
        await tq.async_kv_batch_put(
            keys=trace.keys(),
            fields=list_of_dict_to_tensordict(trace.fields(prompt)),
            tags=trace.tags(int(prompt["global_steps"])),
            partition_id=partition,
        )


def _rows(batch: TensorDict) -> list[dict[str, Any]]:
    """Split a batch into one plain mapping a row; what is set for the whole batch is in each."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    for name, value in batch.items():
        for i, row in enumerate(rows):
            if isinstance(value, NonTensorStack):
                row[name] = value[i].data
            else:
                row[name] = value.data if isinstance(value, NonTensorData) else value[i]
    return rows


def _failure(uid: str, session: int, error: BaseException) -> RolloutFailure:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RolloutFailure(
        uid=uid,
        session_id=session,
        kind=type(error).__name__,
        message=str(error)[:500],
        where=f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}",
    )
