"""The prompt, and what may stand in an instruction."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from rlinf_plugins.core.errors import InstructionError, MissingAssetError
from rlinf_plugins.models.openvla.config import SPACE_TOKEN, TEXT_VOCABULARY

_TEMPLATE = "In: What action should the robot take to {}?\nOut:"


def clean_instruction(instruction: str, special_tokens: Sequence[str]) -> str:
    """Return the instruction as it goes into the prompt: lower case, white space collapsed.

    Args:
        instruction: Task in words.
        special_tokens: Strings the tokenizer would turn into control tokens.

    Raises:
        InstructionError: Nothing is left, or a special token occurs; either would change the prompt silently.
    """
    for token in special_tokens:
        if token.lower() in instruction.lower():
            raise InstructionError(f"the instruction {instruction!r} contains the special token {token!r}; remove it")
    cleaned = " ".join(instruction.lower().split())
    if not cleaned:
        raise InstructionError(f"the instruction is empty: {instruction!r}")
    return cleaned


class PromptEncoder:
    """Turns instructions into padded prompt ids.

    Args:
        tokenizer: The checkpoint's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = [token.content for token in added.values() if token.special]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "PromptEncoder":
        """Read ``tokenizer.json``; the file alone decides, no remote code and no question.

        Raises:
            MissingAssetError: The file is absent.
        """
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise MissingAssetError(
                f"{file} does not exist; a checkpoint with only tokenizer.model needs it written once by "
                "transformers.LlamaTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return cls(Tokenizer.from_file(str(file)))

    def ids(self, instruction: str) -> list[int]:
        """Return prompt ids of one instruction, ending in the lone space token the action tokens follow.

        Raises:
            InstructionError: See :func:`clean_instruction`.
        """
        ids = self._tokenizer.encode(_TEMPLATE.format(clean_instruction(instruction, self._special))).ids
        return ids if ids[-1] == SPACE_TOKEN else [*ids, SPACE_TOKEN]

    def batch(self, instructions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask ``[B, L]``, padded on the right."""
        return pad_prompts([self.ids(instruction) for instruction in instructions])


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask ``[B, L]`` of prompts of different lengths, padded on the right."""
    length = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), length), TEXT_VOCABULARY, dtype=torch.long)
    mask = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt)
        mask[row, : len(prompt)] = 1
    return ids, mask
