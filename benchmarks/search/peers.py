"""How others call a retrieval server, re-enacted from what their tools do; all against the same server as ours."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
import ray
import requests
from ray import cloudpickle


def _post(url: str, query: str) -> dict:
    """One query, one connection, as a bare ``requests.post`` makes it."""
    for _ in range(10):
        reply = requests.post(url, json={"queries": [query], "topk": 3, "return_scores": True}, timeout=30)
        if reply.status_code == 200:
            return reply.json()
        time.sleep(1)
    raise RuntimeError("no reply")


@ray.remote(num_cpus=0, max_concurrency=200)
class TokenBucket:
    """A global limit on calls under way, asked before and told after each."""

    def __init__(self, limit: int) -> None:
        import threading

        self._semaphore = threading.Semaphore(limit)

    def acquire(self) -> None:
        """Wait for a permit."""
        self._semaphore.acquire()

    def release(self) -> None:
        """Give it back."""
        self._semaphore.release()


@ray.remote(num_cpus=0, max_concurrency=120)
class ThreadWorker:
    """Runs a pickled function per call in one of its threads."""

    def __init__(self, bucket: object) -> None:
        self._bucket = bucket

    def execute(self, function: bytes, *arguments: object) -> object:
        """Take a permit, run, give it back."""
        ray.get(self._bucket.acquire.remote())
        try:
            return cloudpickle.loads(function)(*arguments)
        finally:
            self._bucket.release.remote()


def verl_search_tool(url: str) -> Callable[[str], Awaitable[object]]:
    """The SearchTool veRL had: a Ray actor with threads, a token bucket in another actor, a bare post per query."""
    worker = ThreadWorker.remote(TokenBucket.remote(120))

    async def call(query: str) -> object:
        return await worker.execute.remote(cloudpickle.dumps(_post), url, query)

    return call


def rlinf_search_worker(url: str) -> Callable[[str], Awaitable[object]]:
    """RLinf's search worker: a new HTTP session and one query per call."""

    async def call(query: str) -> object:
        timeout = aiohttp.ClientTimeout(total=120)
        for _ in range(10):
            async with aiohttp.ClientSession(timeout=timeout) as session:
                body = {"queries": [query], "topk": 3, "return_scores": True}
                async with session.post(url, json=body) as reply:
                    if reply.status == 200:
                        return await reply.json()
            await asyncio.sleep(10)
        raise RuntimeError("no reply")

    return call
