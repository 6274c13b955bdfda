"""Agent-loop manager that announces finished prompts and reports failed rollouts with their cause."""

import asyncio
import traceback
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rlinf_verl import handshake
from rlinf_verl.trainer.arrivals import RolloutFailure
from rlinf_verl.trainer.finished import FinishedStore, folder_of

# AgentLoopWorkerTQ is wrapped as a Ray actor class; the plain class behind it is what can be subclassed.
_PlainAgentLoopWorker: type = AgentLoopWorkerTQ.__ray_actor_class__


class ArrivalAgentLoopWorker(_PlainAgentLoopWorker):  # type: ignore[misc]
    """veRL's worker, publishing each prompt to :class:`~rlinf_verl.trainer.arrivals.Arrivals` when it is over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        handshake.require()
        super().__init__(*args, **kwargs)
        self._arrivals: Any = None
        self._broken: asyncio.Future[None] | None = None
        self._finished = FinishedStore(folder_of(self.config))

    async def set_arrivals(self, arrivals: Any) -> None:
        """Receive the handle of the Arrivals actor."""
        self._arrivals = arrivals

    async def run_until_exit(self) -> None:
        """Never return: the pending call fails with this process or with what broke it, and so the trainer learns."""
        self._broken = asyncio.get_running_loop().create_future()
        await self._broken

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        partition_id = "val" if trajectory["validate"] else "train"
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            if self._arrivals is not None:
                await self._arrivals.publish.remote(partition_id)
        except Exception as error:  # failing rollouts are veRL's to handle; this is its bookkeeping that failed
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)
            raise

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        try:
            if not trajectory["validate"] and (outputs := self._finished.load(kwargs)) is not None:
                del kwargs["agent_name"], kwargs["trace"]
                return await super()._agent_loop_postprocess(outputs, trajectory["validate"], **kwargs)
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            if self._arrivals is not None:
                partition_id = "val" if trajectory["validate"] else "train"
                await self._arrivals.report.remote(partition_id, [_describe(error, **kwargs)])
            raise

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        if not validate:
            self._finished.save(kwargs, output)


def _describe(error: Exception, *, uid: str, session_id: int, **_: Any) -> RolloutFailure:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RolloutFailure(
        uid=uid,
        session_id=session_id,
        kind=type(error).__name__,
        message=str(error)[:500],
        where=f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}",
    )


class ArrivalAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """veRL's manager with workers that announce arrivals; set by the trainer mode where the user names no other."""

    worker_class: type = ArrivalAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(self.worker_class)

    def attach_arrivals(self, arrivals: Any) -> list[ray.ObjectRef]:
        """Give every worker the Arrivals actor.

        Returns:
            One reference per worker that stays pending until that worker dies.
        """
        ray.get([worker.set_arrivals.remote(arrivals) for worker in self.agent_loop_workers])
        return [worker.run_until_exit.remote() for worker in self.agent_loop_workers]
