"""Configuration of the policy: the published ``config.json`` and what it leaves unsaid.

Importing this module registers ``model_type: openvla`` with transformers, so that ``AutoConfig`` and
``AutoTokenizer`` read a published folder without its remote code and without a question on stdin.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.llama.configuration_llama import LlamaConfig

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError

TEXT_VOCABULARY = 32000
"""Ids of the Llama-2 tokenizer; actions take the last ``n_action_bins`` of them, padding rows follow."""

BOS_TOKEN, STOP_TOKEN, SPACE_TOKEN = 1, 2, 29871
"""``<s>``, ``</s>`` and the lone space marker every prompt ends with."""

_BACKBONES = {"dinosiglip-vit-so-224px": ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """How a checkpoint turns hidden states into actions; published ``config.json`` files do not say.

    Attributes:
        decoding: ``"autoregressive"`` (OpenVLA: token after token, causal) or ``"parallel"`` (OpenVLA-OFT with
            discrete tokens: the whole chunk in one bidirectional pass).
        chunk: Actions predicted at once; 1 for OpenVLA, 8 (LIBERO), 5 (Bridge) or 25 (ALOHA) for OFT.
        dim: Numbers in one action.
        stop_token: Parallel decoding only: append ``</s>`` after the placeholders. The published OFT checkpoints
            were trained with it; RLinf's were not.
        num_images: Camera images per observation.
        proprio_dim: Size of the proprioceptive state that follows the patches as one token; 0 for none.
        value_head: What the value head predicts: ``"none"``, ``"chunk"`` (one number) or ``"action"`` (one an action).
    """

    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    chunk: int = 1
    dim: int = 7
    stop_token: bool = True
    num_images: int = 1
    proprio_dim: int = 0
    value_head: Literal["none", "chunk", "action"] = "none"

    @property
    def tokens(self) -> int:
        """Action tokens per decision."""
        return self.chunk * self.dim

    @property
    def values(self) -> int:
        """Outputs of the value head."""
        return {"none": 0, "chunk": 1, "action": self.chunk}[self.value_head]

    def validate(self, where: str) -> None:
        """Reject sizes that no checkpoint can have.

        Raises:
            ConfigError: A size below its minimum.
        """
        for name, minimum in (("chunk", 1), ("dim", 1), ("num_images", 1), ("proprio_dim", 0)):
            value = getattr(self, name)
            if value < minimum:
                raise ConfigError(f"{where}.{name} must be at least {minimum}, got {value}")


class OpenVLAConfig(PreTrainedConfig):  # type: ignore[misc]
    """The published ``config.json``. Values in the file override the tables of this class.

    Beyond the published keys, ``timm_model_kwargs`` (two mappings that override the size of the timm models) and
    ``action_spec`` (see :class:`ActionSpec`) are understood and, where absent, left out when saving.
    """

    model_type = "openvla"
    sub_configs = {"text_config": LlamaConfig}

    def __init__(self, **kwargs: Any) -> None:
        self.arch_specifier: str = kwargs.pop("arch_specifier", "no-align+fused-gelu-mlp")
        self.vision_backbone_id: str = kwargs.pop("vision_backbone_id", "dinosiglip-vit-so-224px")
        self.llm_backbone_id: str = kwargs.pop("llm_backbone_id", "llama2-7b-pure")
        self.image_resize_strategy: str = kwargs.pop("image_resize_strategy", "resize-naive")
        self.image_sizes: list[int] = list(kwargs.pop("image_sizes", [224, 224]))
        self.timm_model_ids: list[str] = list(kwargs.pop("timm_model_ids", _BACKBONES.get(self.vision_backbone_id, ())))
        self.timm_override_act_layers: list[str | None] = list(kwargs.pop("timm_override_act_layers", [None, None]))
        self.use_fused_vision_backbone: bool = kwargs.pop("use_fused_vision_backbone", True)
        self.n_action_bins: int = kwargs.pop("n_action_bins", 256)
        self.pad_to_multiple_of: int = kwargs.pop("pad_to_multiple_of", 64)
        self.norm_stats: dict[str, Any] | None = kwargs.pop("norm_stats", None)
        self.timm_model_kwargs: list[dict[str, Any]] | None = kwargs.pop("timm_model_kwargs", None)
        self.action_spec: dict[str, Any] | None = kwargs.pop("action_spec", None)
        text = kwargs.pop("text_config", None) or {}
        self.text_config = text if isinstance(text, LlamaConfig) else LlamaConfig(**_text_defaults(text))
        kwargs.setdefault("pad_token_id", TEXT_VOCABULARY)
        kwargs.setdefault("bos_token_id", BOS_TOKEN)
        kwargs.setdefault("eos_token_id", STOP_TOKEN)
        super().__init__(**kwargs)
        self._check()

    @property
    def action_token_range(self) -> tuple[int, int]:
        """First action token and one past the last: ``[31744, 32000)`` for 256 bins."""
        return TEXT_VOCABULARY - self.n_action_bins, TEXT_VOCABULARY

    def spec(self) -> ActionSpec:
        """Return the action specification in the file, or OpenVLA's where the file has none.

        Raises:
            ConfigError: An entry that is unknown, of the wrong type or impossible.
        """
        return from_mapping(ActionSpec, self.action_spec or {}, "config.json: action_spec")

    def with_spec(self, spec: ActionSpec) -> "OpenVLAConfig":
        """Record ``spec``, so that it is saved with the checkpoint; returns this object."""
        self.action_spec = asdict(spec)
        return self

    def _check(self) -> None:
        if not self.use_fused_vision_backbone or len(self.timm_model_ids) != 2:
            raise ConfigError(
                f"config.json: only the fused DINOv2 + SigLIP backbone is supported, got vision_backbone_id="
                f"{self.vision_backbone_id!r} with timm_model_ids={self.timm_model_ids}"
            )
        if self.arch_specifier != "no-align+fused-gelu-mlp":
            raise ConfigError(
                f"config.json: arch_specifier must be no-align+fused-gelu-mlp, got {self.arch_specifier!r}"
            )
        if not 2 <= self.n_action_bins <= 256:
            raise ConfigError(f"config.json: n_action_bins must be in [2, 256], got {self.n_action_bins}")


def _text_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Complete ``text_config``: published files hold almost nothing, Llama's own defaults apply to the rest."""
    known = {"vocab_size": TEXT_VOCABULARY + 64, "pad_token_id": TEXT_VOCABULARY, "tie_word_embeddings": False}
    return known | {key: value for key, value in values.items() if key != "model_type"}


AutoConfig.register("openvla", OpenVLAConfig, exist_ok=True)
AutoTokenizer.register(OpenVLAConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
