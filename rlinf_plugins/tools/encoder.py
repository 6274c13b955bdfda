"""Text encoders of dense retrievers: E5, BGE and MiniLM models with the prefixes and pooling they were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_plugins.core.extras import require

Vectors = npt.NDArray[np.float32]

Pooling = Literal["mean", "cls"]

FAMILIES: dict[str, tuple[str, str, Pooling]] = {
    "e5": ("query: ", "passage: ", "mean"),
    "bge": ("Represent this sentence for searching relevant passages: ", "", "cls"),
    "minilm": ("", "", "mean"),
}
"""Family -> prefix of queries, prefix of passages, pooling; from the model cards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """Which model encodes, and how.

    Attributes:
        model: A local folder or a name transformers can load.
        family: Prefixes and pooling; ``auto`` goes by the model's name.
        max_tokens: Longer texts are cut.
        batch: Texts encoded at once while an index is built.
        device: Where the model runs, e.g. ``"cpu"`` or ``"cuda"``.
    """

    model: str = ""
    family: Literal["auto", "e5", "bge", "minilm"] = "auto"
    max_tokens: int = 256
    batch: int = 64
    device: str = "cpu"

    def validate(self, where: str) -> None:
        """Reject a family that cannot be told."""
        if self.model and self.family == "auto" and _family_of(self.model) is None:
            raise ConfigError(
                f"{where}: cannot tell the family of {self.model!r}, and a wrong prefix or pooling ruins recall "
                f"silently; set family to one of {', '.join(FAMILIES)}"
            )
        if self.max_tokens < 1 or self.batch < 1:
            raise ConfigError(f"{where} needs max_tokens >= 1 and batch >= 1, got {self}")


class Encoder:
    """Encodes texts to unit vectors.

    Args:
        config: The model.

    Raises:
        MissingAssetError: No model was named, or it cannot be found.
    """

    def __init__(self, config: EncoderConfig) -> None:
        if not config.model:
            raise MissingAssetError("a dense retriever needs an encoder: set options.encoder.model to a model's folder")
        self._torch = require("torch", "search")
        transformers = require("transformers", "search")
        family = config.family if config.family != "auto" else _family_of(config.model)
        self._query_prefix, self._passage_prefix, self._pooling = FAMILIES[str(family)]
        self._config = config
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
            self._model: Any = transformers.AutoModel.from_pretrained(config.model).eval().to(config.device)
        except OSError as error:
            raise MissingAssetError(f"the encoder {config.model!r} cannot be loaded: {error}") from error

    @property
    def width(self) -> int:
        """Components of a vector."""
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Encode queries to [N, width] unit vectors."""
        return self._encode([self._query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Encode passages to [N, width] unit vectors."""
        return self._encode([self._passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> Vectors:
        torch = self._torch
        parts = []
        # Sorted by length, so that a batch holds little padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        with torch.inference_mode():
            for start in range(0, len(order), self._config.batch):
                chunk = [texts[i] for i in order[start : start + self._config.batch]]
                inputs = self._tokenizer(
                    chunk, padding=True, truncation=True, max_length=self._config.max_tokens, return_tensors="pt"
                ).to(self._config.device)
                hidden = self._model(**inputs).last_hidden_state
                if self._pooling == "cls":
                    pooled = hidden[:, 0]
                else:
                    mask = inputs["attention_mask"][:, :, None].to(hidden.dtype)
                    pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
                parts.append(torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy())
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        if parts:
            vectors[order] = np.concatenate(parts)
        return vectors


def encode_corpus(encoder: Encoder, contents: Sequence[str], chunk: int = 4096) -> Vectors:
    """Encode all passages, some thousand at a time."""
    parts = [encoder.passages(contents[start : start + chunk]) for start in range(0, len(contents), chunk)]
    return np.concatenate(parts)


def _family_of(model: str) -> str | None:
    name = model.lower().rstrip("/").rpartition("/")[2]
    return next((family for family in FAMILIES if family in name), None)
