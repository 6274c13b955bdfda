"""OpenVLA and OpenVLA-OFT as one policy module: encode once, act, evaluate.

``act`` (rollout) and ``forward`` (training) build their log-probabilities with the same functions from the same
sequence layout; the only difference is that autoregressive rollout feeds its own tokens through a KV cache.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from rlinf_plugins.core.errors import ConfigError, ObservationError
from rlinf_plugins.models.openvla.config import BOS_TOKEN, STOP_TOKEN, ActionSpec, OpenVLAConfig
from rlinf_plugins.models.openvla.heads import FusedProjector, ProprioProjector, ValueHead, VocabularyHead
from rlinf_plugins.models.openvla.sampling import ActionDistribution, Generators, Sampling
from rlinf_plugins.models.openvla.sequence import Sequence, align_prompts, assemble, attention_bias
from rlinf_plugins.models.openvla.vision import FusedVisionBackbone


class ActionOutput(NamedTuple):
    """What the policy says about a batch of action tokens.

    Attributes:
        tokens: ``[B, chunk, dim]`` token ids.
        log_probs: ``[B, chunk, dim]``, in nats.
        entropy: ``[B, chunk, dim]`` in nats; None in rollout.
        values: ``[B, 1]`` or ``[B, chunk]``; None without a value head.
        hidden: ``[B, H]``, last hidden state (after the final norm) at the end of the prompt.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    values: torch.Tensor | None
    hidden: torch.Tensor


class OpenVLAForActionPrediction(nn.Module):
    """The policy. Parameter names are those of the published checkpoints.

    Args:
        config: The checkpoint's configuration.
        spec: How actions are decoded; the configuration's where None.
    """

    def __init__(self, config: OpenVLAConfig, spec: ActionSpec | None = None) -> None:
        super().__init__()
        self.config = config
        self.spec = spec or config.spec()
        config.text_config._attn_implementation = "sdpa"
        self.vision_backbone = FusedVisionBackbone(config)
        width = config.text_config.hidden_size
        self.projector = FusedProjector(self.vision_backbone.width, width)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.language_model.lm_head = VocabularyHead(self.language_model.lm_head.weight)
        self.proprio_projector = ProprioProjector(self.spec.proprio_dim, width) if self.spec.proprio_dim else None
        self.value_head = ValueHead(width, self.spec.values) if self.spec.values else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the language model's embeddings."""
        return self.language_model.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    def can_generate(self) -> bool:
        """Answer transformers' question whether this is a text generator: it is not."""
        return False

    def encode(self, pixel_values: torch.Tensor, proprio: torch.Tensor | None = None) -> torch.Tensor:
        """Encode an observation once; the result serves every later pass over it.

        Args:
            pixel_values: ``[B, 6 * images, H, W]`` from the image processor.
            proprio: ``[B, proprio_dim]``, normalised; required exactly where the policy has a proprio projector.

        Returns:
            ``[B, P, H]``: projected patches, then the proprioceptive token.

        Raises:
            ConfigError: ``proprio`` is missing, or given to a policy without a projector for it.
            ObservationError: Pixels of another size or number of channels.
        """
        size = (6 * self.spec.num_images, self.config.image_sizes[0], self.config.image_sizes[0])
        if tuple(pixel_values.shape[1:]) != size:
            raise ObservationError(
                f"pixel_values must be [B, {', '.join(map(str, size))}], got {list(pixel_values.shape)}"
            )
        if (proprio is None) != (self.proprio_projector is None):
            wanted = "needs" if self.proprio_projector is not None else "has no projector for"
            raise ConfigError(f"the policy {wanted} proprio (spec.proprio_dim={self.spec.proprio_dim})")
        patches = self.projector(self.vision_backbone(pixel_values.to(self.dtype)))
        if self.proprio_projector is None or proprio is None:
            return patches  # type: ignore[no-any-return]
        return torch.cat([patches, self.proprio_projector(proprio.to(self.dtype))], dim=1)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokens: torch.Tensor,
        *,
        sampling: Sampling,
        pixel_values: torch.Tensor | None = None,
        proprio: torch.Tensor | None = None,
        patches: torch.Tensor | None = None,
    ) -> ActionOutput:
        """Log-probabilities, entropies and values of given action tokens, in one pass; differentiable.

        Args:
            input_ids: ``[B, L]`` prompts.
            attention_mask: ``[B, L]``; the padding may be on either side, or behind the first token.
            tokens: ``[B, chunk, dim]`` or ``[B, chunk * dim]`` action token ids.
            sampling: The settings the tokens were drawn with.
            pixel_values: ``[B, 6 * images, H, W]``; or ``patches``.
            proprio: Given together with ``pixel_values``.
            patches: What :meth:`encode` returned.

        Returns:
            Shapes as in :class:`ActionOutput`.

        Raises:
            ObservationError: Another number of tokens than the policy decodes.
        """
        if tokens[0].numel() != self.spec.tokens:
            raise ObservationError(
                f"tokens must hold {self.spec.tokens} action tokens a row, got {list(tokens.shape)}; check spec.chunk "
                "and spec.dim"
            )
        flat = tokens.reshape(tokens.shape[0], self.spec.tokens)
        hidden, start = self.hidden_states(
            input_ids, attention_mask, flat, pixel_values=pixel_values, proprio=proprio, patches=patches
        )
        distribution = self._distribution(hidden[:, start : start + self.spec.tokens], sampling)
        log_probs, entropy = distribution.log_prob_and_entropy(flat)
        return self._output(flat, log_probs, entropy, hidden[:, start])

    @torch.no_grad()
    def act(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        sampling: Sampling,
        generator: Generators | None = None,
        pixel_values: torch.Tensor | None = None,
        proprio: torch.Tensor | None = None,
        patches: torch.Tensor | None = None,
    ) -> ActionOutput:
        """Choose action tokens for a batch of observations.

        Args:
            input_ids: ``[B, L]`` prompts of any lengths.
            attention_mask: ``[B, L]``.
            sampling: Temperature, top-k, greedy.
            generator: Source of randomness; one, or one per row. Not needed when greedy.
            pixel_values: ``[B, 6 * images, H, W]``; or ``patches``.
            proprio: Given together with ``pixel_values``.
            patches: What :meth:`encode` returned.

        Returns:
            Shapes as in :class:`ActionOutput`; no entropy.
        """
        if self.spec.decoding == "autoregressive":
            sequence = self._sequence(input_ids, attention_mask, None, pixel_values, proprio, patches)
            return self._act_step_by_step(sequence, sampling, generator)
        hidden, start = self.hidden_states(
            input_ids, attention_mask, None, pixel_values=pixel_values, proprio=proprio, patches=patches
        )
        distribution = self._distribution(hidden[:, start : start + self.spec.tokens], sampling)
        tokens = distribution.choose(generator)
        return self._output(tokens, distribution.log_prob(tokens), None, hidden[:, start])

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokens: torch.Tensor | None,
        *,
        pixel_values: torch.Tensor | None = None,
        proprio: torch.Tensor | None = None,
        patches: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Return last hidden states ``[B, S, H]`` of prompt and actions, and the column that predicts the first token.

        Args:
            input_ids: ``[B, L]``.
            attention_mask: ``[B, L]``.
            tokens: ``[B, chunk * dim]``; read in autoregressive decoding only.
            pixel_values: See :meth:`forward`.
            proprio: See :meth:`forward`.
            patches: See :meth:`forward`.
        """
        sequence = self._sequence(input_ids, attention_mask, tokens, pixel_values, proprio, patches)
        length = sequence.mask.shape[1]
        causal = self.spec.decoding == "autoregressive"
        output = self.language_model.model(
            inputs_embeds=sequence.embeds,
            attention_mask=attention_bias(sequence.mask, length, sequence.embeds.dtype, causal),
            position_ids=sequence.positions,
            use_cache=False,
        )
        return output.last_hidden_state, sequence.prompt_end

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute activations of vision blocks and decoder layers in the backward pass."""
        self.vision_backbone.set_gradient_checkpointing(enabled)
        if enabled:
            self.language_model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.language_model.gradient_checkpointing_disable()

    def _sequence(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokens: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        proprio: torch.Tensor | None,
        patches: torch.Tensor | None,
    ) -> Sequence:
        if (pixel_values is None) == (patches is None):
            raise ConfigError("give either pixel_values or the patches that encode() returned")
        if patches is None and pixel_values is not None:
            patches = self.encode(pixel_values, proprio)
        ids, mask = align_prompts(input_ids, attention_mask)
        embed = self.language_model.get_input_embeddings()
        return assemble(embed(ids), mask, patches, self._tail(embed, ids, tokens))  # type: ignore[arg-type]

    def _tail(self, embed: nn.Module, ids: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """Embeddings after the prompt: given tokens but the last, or zeroed placeholders and the stop token."""
        batch = ids.shape[0]
        if self.spec.decoding == "autoregressive":
            fed = ids.new_full((batch, 0), BOS_TOKEN) if tokens is None else tokens[:, :-1]
            return embed(fed)  # type: ignore[no-any-return]
        width = self.config.text_config.hidden_size
        placeholders = torch.zeros(batch, self.spec.tokens, width, dtype=self.dtype, device=ids.device)
        if not self.spec.stop_token:
            return placeholders
        return torch.cat([placeholders, embed(ids.new_full((batch, 1), STOP_TOKEN))], dim=1)

    def _act_step_by_step(self, sequence: Sequence, sampling: Sampling, generator: Generators | None) -> ActionOutput:
        """Decode token after token with a KV cache; every row is one column further at each step."""
        embed, cache = self.language_model.get_input_embeddings(), DynamicCache()
        embeds, mask, positions = sequence.embeds, sequence.mask, sequence.positions
        tokens, log_probs = [], []
        prompt_hidden: torch.Tensor | None = None
        for _ in range(self.spec.tokens):
            hidden = self.language_model.model(
                inputs_embeds=embeds,
                attention_mask=attention_bias(mask, embeds.shape[1], embeds.dtype, causal=True),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            prompt_hidden = hidden if prompt_hidden is None else prompt_hidden
            distribution = self._distribution(hidden.unsqueeze(1), sampling)
            tokens.append(distribution.choose(generator))
            log_probs.append(distribution.log_prob(tokens[-1]))
            embeds, positions = embed(tokens[-1]), positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        if prompt_hidden is None:
            raise ConfigError("a policy of zero action tokens cannot act")
        return self._output(torch.cat(tokens, 1), torch.cat(log_probs, 1), None, prompt_hidden)

    def _distribution(self, hidden: torch.Tensor, sampling: Sampling) -> ActionDistribution:
        head: Any = self.language_model.lm_head
        if sampling.vocabulary == "full":
            return ActionDistribution(head(hidden), 0, sampling)
        first, last = self.config.action_token_range
        if isinstance(head, VocabularyHead):
            return ActionDistribution(head(hidden, first, last), first, sampling)
        # An adapter around the layer computes all rows.
        return ActionDistribution(head(hidden)[..., first:last], first, sampling)

    def _output(
        self, tokens: torch.Tensor, log_probs: torch.Tensor, entropy: torch.Tensor | None, prompt_hidden: torch.Tensor
    ) -> ActionOutput:
        shape = (tokens.shape[0], self.spec.chunk, self.spec.dim)
        return ActionOutput(
            tokens=tokens.reshape(shape),
            log_probs=log_probs.reshape(shape),
            entropy=None if entropy is None else entropy.reshape(shape),
            values=None if self.value_head is None else self.value_head(prompt_hidden),
            hidden=prompt_hidden,
        )
