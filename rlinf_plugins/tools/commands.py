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
    """Serve until SIGINT or SIGTERM; SIGHUP reloads the index."""
    from aiohttp import web

    from rlinf_plugins.tools.index import open_index
    from rlinf_plugins.tools.server import SearchServer, ServerConfig

    search = SearchServer(lambda version: open_index(config, version), ServerConfig(topk=topk))
    reloads: set[asyncio.Task[None]] = set()
    stop = asyncio.Event()

    async def reload() -> None:
        try:
            typer.echo(f"serving index {await search.reload()}")
        except (RlinfError, OSError) as error:
            typer.secho(f"reload failed, the old index stays: {error}", err=True, fg=typer.colors.RED)

    def hang_up() -> None:
        task = asyncio.ensure_future(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await search.reload()
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    runner = web.AppRunner(search.app(), access_log=None, shutdown_timeout=10.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        typer.echo(f"serving http://{host}:{runner.addresses[0][1]}/retrieve")  # port 0 picked one
        await stop.wait()
    finally:
        await runner.cleanup()  # requests under way have ten seconds to finish
        await search.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
