"""Runs an engine behind an asyncio front: awaitable requests, and control operations that fall between two steps.

The engine is computed on one thread. Everything that touches it from outside - abort, sleep, weight sync - takes the
turn lock, which the step loop gives up after each step, so the longest wait is one step. Requests that arrive while
generation is closed are parked until it opens.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from rlinf_plugins.core.errors import EngineBusyError, EngineStepError, RequestRejectedError, RlinfError
from rlinf_verl.rollout.weights import Bucket, ResidentWeights

T = TypeVar("T")


class Result(Protocol):
    """What an engine returns for a request."""

    request_id: str
    error: RlinfError | None


class Engine(Protocol):
    """What the host drives; ``HFEngine`` and the policy engine of the VLA are such engines."""

    weights: ResidentWeights

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        ...

    @property
    def delay(self) -> float:
        """Seconds the next step should wait for company."""
        ...

    def submit(self, request: Any) -> None:
        """Queue a request; safe during a step on another thread."""
        ...

    def step(self) -> list[Any]:
        """Do one step and return the results of requests that ended."""
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Any]:
        """End requests and return what they have."""
        ...


class EngineHost:
    """Awaitable requests over an engine.

    Args:
        engine: The engine; used from the host's thread only.
        discard_weights: Sleeping frees the weights too; they must be synced before the next request.
    """

    def __init__(self, engine: Engine, *, discard_weights: bool = False) -> None:
        self.engine = engine
        self._discard = discard_weights
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-engine")
        self._turn = asyncio.Lock()
        self._closed: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._more = asyncio.Event()
        self._results: dict[str, asyncio.Future[Any]] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def generate(self, request: Any) -> Any | None:
        """Serve a request.

        Returns:
            Its result, or None if generation is closed to newcomers (``abort(reject=True)``).

        Raises:
            RlinfError: The request was rejected or failed; the type says how.
        """
        while self._closed:
            if self._rejecting:
                return None
            await self._open.wait()
        if request.id in self._results:
            raise RequestRejectedError(f"a request with id {request.id!r} is already running")
        self.engine.submit(request)
        result = self._results[request.id] = asyncio.get_running_loop().create_future()
        self._idle.clear()
        self._work.set()
        self._more.set()
        self._ensure_running()
        try:
            ended = await result
        except asyncio.CancelledError:
            self._results.pop(request.id, None)
            await self.abort([request.id])
            raise
        if ended.error is not None:
            raise ended.error
        return ended

    async def abort(self, ids: Iterable[str] | None = None) -> list[str]:
        """End requests (all, or those named) with their partial output; return their ids."""
        return self._deliver(await self._between_steps(lambda: self.engine.abort(ids)))

    async def pause(self, *, reject: bool = False) -> list[str]:
        """Close generation and end every request with its partial output.

        Args:
            reject: Turn newcomers away instead of parking them until ``resume``.
        """
        self._close("paused")
        self._rejecting = reject
        return await self.abort()

    def resume(self) -> None:
        """Open generation after ``pause``."""
        self._rejecting = False
        self._reopen("paused")

    async def drain(self) -> None:
        """Wait until no request is running."""
        await self._idle.wait()

    async def sleep(self) -> None:
        """Park newcomers, let running requests finish, then free what the engine holds."""
        self._close("asleep")
        await self.drain()
        if self._discard:
            await self._between_steps(self.engine.weights.release)

    async def wake(self, tags: Iterable[str] | None = None) -> None:
        """Undo ``sleep``: ``"weights"`` gets memory back, ``"kv_cache"`` opens generation; None is both."""
        wanted = {"weights", "kv_cache"} if tags is None else set(tags)
        if "weights" in wanted and self._discard:
            await self._between_steps(self.engine.weights.restore)
        if "kv_cache" in wanted:
            self._reopen("asleep")

    async def begin_sync(self) -> None:
        """Park newcomers while weights are written.

        Raises:
            EngineBusyError: Requests are running; a swap would mix two models in one answer.
        """
        self._close("syncing")
        try:
            await self._between_steps(self._begin)
        except RlinfError:
            self._reopen("syncing")
            raise

    async def write(self, bucket: Bucket) -> None:
        """Write part of the weights."""
        await self._between_steps(lambda: self.engine.weights.write(bucket))

    async def end_sync(self, version: int | None, *, failed: bool = False) -> None:
        """Take the new weights into use; after a failed sync requests are refused until a whole one."""
        try:
            if not failed:
                await self._between_steps(lambda: self.engine.weights.commit(version))
        finally:
            self._reopen("syncing")

    def close(self) -> None:
        """Stop the thread and the loop; outstanding requests are cancelled."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        for result in self._results.values():
            result.cancel()
        self._thread.shutdown(wait=True)

    def _begin(self) -> None:
        if self.engine.busy:
            raise EngineBusyError("a weight sync began while requests are running; abort or drain them first")
        self.engine.weights.begin()

    async def _between_steps(self, call: Callable[[], T]) -> T:
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _ensure_running(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self._wait_for_company()
            try:
                self._deliver(await self._between_steps(self.engine.step))
            except Exception as error:  # a defect of the engine: nobody may be left waiting
                self._fail_all(error)

    async def _wait_for_company(self) -> None:
        """Let the engine's latency bound pass, or the batch fill, whichever is first."""
        while (delay := self.engine.delay) > 0:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), delay)
            except TimeoutError:
                return

    def _deliver(self, ended: Iterable[Any]) -> list[str]:
        ids = []
        for generation in ended:
            ids.append(generation.request_id)
            result = self._results.pop(generation.request_id, None)
            if result is not None and not result.done():
                result.set_result(generation)
        self._note_idle()
        return ids

    def _fail_all(self, cause: Exception) -> None:
        self.engine.abort()
        error = EngineStepError(f"the rollout engine failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        for result in self._results.values():
            if not result.done():
                result.set_exception(error)
        self._results.clear()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.engine.busy:
            self._work.clear()
            self._idle.set()

    def _close(self, reason: str) -> None:
        self._closed.add(reason)
        self._open.clear()

    def _reopen(self, reason: str) -> None:
        self._closed.discard(reason)
        if not self._closed:
            self._open.set()
