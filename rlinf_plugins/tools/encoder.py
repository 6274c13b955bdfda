"""Text encoders of dense retrievers: E5, BGE and MiniLM models with the prefixes and pooling they were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlinf_plugins.core.cpu import has_bf16
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

_CPU_BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """Which model encodes, and how.

    Attributes:
        model: A local folder or a name transformers can load.
        family: Prefixes and pooling; ``auto`` goes by the model's name.
        max_tokens: Longer texts are cut.
        batch: Texts encoded at once; on a processor at most 16, which is enough for the products and pads less.
        device: Where the model runs, e.g. ``"cpu"`` or ``"cuda"``.
        dtype: What it computes in; ``auto`` is bfloat16 on a processor that has it, which takes a third of the time
            there and turns vectors by less than a degree, and float32 elsewhere.
    """

    model: str = ""
    family: Literal["auto", "e5", "bge", "minilm"] = "auto"
    max_tokens: int = 256
    batch: int = 64
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

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
            model: Any = transformers.AutoModel.from_pretrained(config.model)
        except OSError as error:
            raise MissingAssetError(f"the encoder {config.model!r} cannot be loaded: {error}") from error
        self._model = model.eval().to(device=config.device, dtype=getattr(self._torch, _dtype_of(config)))

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
        if not texts:
            return np.empty((0, self.width), dtype=np.float32)
        torch, parts = self._torch, []
        tokens = self._tokenizer(texts, truncation=True, max_length=self._config.max_tokens)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))  # so that a batch holds little padding
        step = min(self._config.batch, _CPU_BATCH) if self._config.device == "cpu" else self._config.batch
        with torch.inference_mode():
            for start in range(0, len(order), step):
                ids, mask = self._padded([tokens[i] for i in order[start : start + step]])
                hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                if self._pooling == "cls":
                    pooled = hidden[:, 0]
                else:
                    weights = mask[:, :, None].to(hidden.dtype)
                    pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
                parts.append(torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy())
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        vectors[order] = np.concatenate(parts)
        return vectors

    def _padded(self, rows: list[list[int]]) -> tuple[Any, Any]:
        """Return ids and mask, [B, T] each, padded on the right."""
        width, pad = max(map(len, rows)), self._tokenizer.pad_token_id or 0
        ids = self._torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self._config.device)
        lengths = self._torch.tensor([len(row) for row in rows], device=self._config.device)
        return ids, (self._torch.arange(width, device=self._config.device) < lengths[:, None]).long()


def encode_corpus(encoder: Encoder, contents: Sequence[str], chunk: int = 4096) -> Vectors:
    """Encode all passages, some thousand at a time."""
    parts = [encoder.passages(contents[start : start + chunk]) for start in range(0, len(contents), chunk)]
    return np.concatenate(parts)


def _dtype_of(config: EncoderConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if config.device == "cpu" and has_bf16() else "float32"


def _family_of(model: str) -> str | None:
    name = model.lower().rstrip("/").rpartition("/")[2]
    return next((family for family in FAMILIES if family in name), None)
