"""Indexes on disk: built once per corpus and settings, named by a version, opened memory-mapped.

Layout: ``INDEX/<version>/`` holds the retriever's files, the corpus' line offsets and ``manifest.json``. The version is
made of the retriever's name and digests of corpus and settings, so a changed corpus gets a folder of its own and a
server can change from one to the other while it serves.
"""

import hashlib
import importlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rlinf_plugins.core.config import from_mapping, suggest
from rlinf_plugins.core.errors import ConfigError, IndexVersionError
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.retriever import Retriever

RETRIEVERS: dict[str, tuple[str, str, str]] = {
    "bm25": ("rlinf_plugins.tools.bm25", "Bm25Retriever", "Bm25Config"),
    "dense": ("rlinf_plugins.tools.dense", "DenseRetriever", "DenseConfig"),
    "faiss": ("rlinf_plugins.tools.faiss_index", "FaissRetriever", "FaissConfig"),
    "tantivy": ("rlinf_plugins.tools.tantivy_index", "TantivyRetriever", "TantivyConfig"),
    "qdrant": ("rlinf_plugins.tools.qdrant", "QdrantRetriever", "QdrantConfig"),
}
"""Name -> module, retriever class, its config class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexConfig:
    """What to search and how.

    Attributes:
        corpus: The jsonl file.
        index: Folder for the indexes; None puts them beside the corpus, in ``<corpus>.index``.
        retriever: One of ``bm25``, ``dense``, ``faiss``, ``tantivy``, ``qdrant``.
        options: The retriever's own settings.
    """

    corpus: str
    index: str | None = None
    retriever: str = "bm25"
    options: dict[str, Any] = field(default_factory=dict)

    def validate(self, where: str) -> None:
        """Reject unknown retrievers and options."""
        if self.retriever not in RETRIEVERS:
            raise ConfigError(f"{where}.retriever {self.retriever!r} is unknown; {suggest(self.retriever, RETRIEVERS)}")
        retriever_config(self, where)

    @property
    def folder(self) -> Path:
        """Where the versions are."""
        return Path(self.index) if self.index else Path(f"{self.corpus}.index")


class RetrieverClass(Protocol):
    """What :data:`RETRIEVERS` names: a retriever that can build its files and open them."""

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: Any) -> None:
        """Write the index of ``corpus`` into the empty ``folder``."""
        ...

    def __call__(self, folder: Path, corpus: Corpus, version: str, config: Any) -> Retriever:
        """Open the index in ``folder``."""
        ...


class Manifest(msgspec.Struct, frozen=True):
    """What an index was built from."""

    version: str
    retriever: str
    passages: int
    fingerprint: str
    size: int
    mtime_ns: int
    options: dict[str, Any]


def retriever_config(config: IndexConfig, where: str = "index") -> Any:
    """Return the retriever's typed settings."""
    module, _, name = RETRIEVERS[config.retriever]
    options: Mapping[str, Any] = config.options
    return from_mapping(getattr(importlib.import_module(module), name), options, f"{where}.options")


def build_index(config: IndexConfig) -> Manifest:
    """Build the index of the corpus as it is now, unless it exists; safe to call from several processes.

    Returns:
        The manifest of the version that belongs to the corpus and settings.

    Raises:
        MissingAssetError: There is no corpus.
        CorpusError: A line of it is malformed.
    """
    path, settings = Path(config.corpus), asdict(retriever_config(config))
    known = {m.version: m for m in manifests(config.folder)}
    digest = hashlib.sha256(msgspec.json.encode([config.retriever, settings], order="deterministic")).hexdigest()[:8]
    if path.is_file():
        stat = path.stat()
        for manifest in known.values():  # the same file as before: no need to read it again
            unchanged = (manifest.size, manifest.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
            if unchanged and manifest.version == _version(config.retriever, manifest.fingerprint, digest):
                return manifest
    corpus = Corpus(path)
    try:
        stat = path.stat()
        fingerprint = corpus.fingerprint()
        manifest = Manifest(
            version=_version(config.retriever, fingerprint, digest),
            retriever=config.retriever,
            passages=len(corpus),
            fingerprint=fingerprint,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            options=settings,
        )
        if manifest.version in known:
            _write_manifest(config.folder / manifest.version, manifest)
        else:
            _build(config, corpus, manifest)
        return manifest
    finally:
        corpus.close()


def open_index(config: IndexConfig, version: str | None = None) -> Retriever:
    """Open an index, built first where no ``version`` is named and the current one is absent.

    Raises:
        IndexVersionError: The named version does not exist or is of another retriever.
    """
    if version is None:
        manifest = build_index(config)
    else:
        found = {m.version: m for m in manifests(config.folder)}
        if version not in found:
            raise IndexVersionError(f"no version {version!r} in {config.folder}; {suggest(version, found)}")
        manifest = found[version]
    if manifest.retriever != config.retriever:
        raise IndexVersionError(f"version {version!r} was built by {manifest.retriever}, not {config.retriever}")
    folder = config.folder / manifest.version
    corpus = Corpus(Path(config.corpus), np.load(folder / "offsets.npy", mmap_mode="r"))
    if corpus.path.stat().st_size != manifest.size:
        raise IndexVersionError(f"{corpus.path} has changed since version {manifest.version} was built")
    settings = retriever_config(replace(config, options=manifest.options))
    return _class(config.retriever)(folder, corpus, manifest.version, settings)


def manifests(folder: Path) -> list[Manifest]:
    """Return the complete versions in an index folder."""
    paths = sorted(folder.glob("*/manifest.json")) if folder.is_dir() else []
    return [msgspec.json.decode(path.read_bytes(), type=Manifest) for path in paths]


def _build(config: IndexConfig, corpus: Corpus, manifest: Manifest) -> None:
    config.folder.mkdir(parents=True, exist_ok=True)
    final = config.folder / manifest.version
    scratch = config.folder / f".building-{manifest.version}-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _class(config.retriever).build(corpus, scratch, retriever_config(config))
        np.save(scratch / "offsets.npy", corpus.offsets)
        _write_manifest(scratch, manifest)
        try:
            scratch.rename(final)
        except OSError:
            if not (final / "manifest.json").is_file():  # else another process built the same, just now
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _version(retriever: str, fingerprint: str, settings: str) -> str:
    return f"{retriever}-{fingerprint[:12]}-{settings}"


def _class(retriever: str) -> RetrieverClass:
    module, name, _ = RETRIEVERS[retriever]
    found: RetrieverClass = getattr(importlib.import_module(module), name)
    return found
