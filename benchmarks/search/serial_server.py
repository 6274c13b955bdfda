"""The peer: a server that searches inside its event loop, one request after another, on the same index."""

import socket
import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from rlinf_plugins.tools.index import IndexConfig, open_index


class Body(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def main(corpus: str, index: str, kind: str, model: str | None = None) -> None:
    """Serve until terminated."""
    options = {"encoder": {"model": model}} if model else {}
    retriever = open_index(IndexConfig(corpus=corpus, index=index, retriever=kind, options=options))
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(body: Body) -> dict:
        found = retriever.search(body.queries, body.topk or 3)
        rows = [[{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in ps] for ps in found]
        return {"result": rows}

    # The protocol is named because asyncio turns Nagle's algorithm off only where it is, and 40 ms would be the peer's.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)  # from now on connections wait for the server instead of being refused
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


main(*sys.argv[1:])
