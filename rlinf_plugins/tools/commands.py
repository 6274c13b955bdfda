"""Commands this part adds to ``rlinf-plugins``."""

import asyncio
import ipaddress
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from rlinf_plugins.core.errors import RlinfError
from rlinf_plugins.core.options import parse_options


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command("serve-search")
    def serve_search(
        corpus: Annotated[Path, typer.Option(help="jsonl file with 'id' and 'contents' per line.")],
        index: Annotated[Path | None, typer.Option(help="Folder for indexes; default: beside the corpus.")] = None,
        retriever: Annotated[str, typer.Option(help="bm25, dense, faiss, tantivy or qdrant.")] = "bm25",
        option: Annotated[
            list[str] | None, typer.Option(help="Retriever setting, e.g. encoder.model=/models/e5; may be repeated.")
        ] = None,
        host: Annotated[str, typer.Option(help="Address to listen on; others than loopback open it to the net.")] = (
            "127.0.0.1"
        ),
        port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
        topk: Annotated[int, typer.Option(help="Passages for requests that name no number.")] = 3,
        build_only: Annotated[bool, typer.Option("--build-only", help="Build the index and exit.")] = False,
    ) -> None:
        """Build an index if need be and serve POST /retrieve (Search-R1, RLinf), /health, /metrics, POST /reload."""
        from rlinf_plugins.core.config import from_mapping
        from rlinf_plugins.tools.index import IndexConfig, build_index

        values = {
            "corpus": str(corpus),
            "index": None if index is None else str(index),
            "retriever": retriever,
            "options": parse_options(option or []),
        }
        config = from_mapping(IndexConfig, values, "serve-search")
        manifest = build_index(config)
        typer.echo(f"index {manifest.version}: {manifest.passages} passages")
        if not build_only:
            if not _is_loopback(host):
                typer.secho(f"warning: {host} is reachable by others; there is no authentication", err=True)
            asyncio.run(_serve(config, host, port, topk))


async def _serve(config: Any, host: str, port: int, topk: int) -> None:
    import uvicorn

    from rlinf_plugins.tools.index import open_index
    from rlinf_plugins.tools.server import SearchServer, ServerConfig

    class Announcing(uvicorn.Server):
        """Says where it listens, once it does; with port 0 nobody could know otherwise."""

        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                bound = self.servers[0].sockets[0].getsockname()[1]
                typer.echo(f"serving http://{host}:{bound}/retrieve")

    search = SearchServer(lambda version: open_index(config, version), ServerConfig(topk=topk))
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        try:
            typer.echo(f"serving index {await search.reload()}")
        except (RlinfError, OSError) as error:
            typer.secho(f"reload failed, the old index stays: {error}", err=True, fg=typer.colors.RED)

    def hang_up() -> None:
        task = asyncio.ensure_future(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    options = uvicorn.Config(search.app(), host=host, port=port, log_level="warning", access_log=False)
    await Announcing(options).serve()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
