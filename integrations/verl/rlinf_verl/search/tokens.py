"""Token-exact text: where a sampled turn ends, and how text that was not sampled becomes tokens.

Nothing that was sampled is ever encoded again. A turn is cut between tokens: behind the token that completes the
closing tag, even where that token carries characters beyond it (with Qwen3, ``>`` and a blank line are one token).
"""

from collections.abc import Sequence
from typing import Any, Literal

from rlinf_verl.search.actions import (
    OBSERVATION_HEAD,
    OBSERVATION_TAIL,
    STOP_STRINGS,
    Action,
    actions,
    chosen_action,
)

_ANCHORS = ("a", "\n", ".")


class TokenText:
    """A tokenizer as the loop uses it.

    Args:
        tokenizer: A Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchors = [(anchor, self._plain(anchor)) for anchor in _ANCHORS]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` as it is: special tokens shown, no blanks tidied up."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` as a continuation: no special tokens and no blank put in front.

        Tokenizers of Llama-2's kind put a blank before the first word of whatever they are given; encoding behind an
        anchor, which is then removed, avoids it. An anchor serves only where it does not merge with the text.
        """
        if not text:
            return []
        for anchor, alone in self._anchors:
            behind = self._plain(anchor + text)
            if behind[: len(alone)] == alone:
                return behind[len(alone) :]
        return self._plain(text)

    def cut(self, ids: Sequence[int], match: Literal["first", "last"]) -> tuple[int, Action | None]:
        """Find where a sampled turn ends.

        Args:
            ids: The sampled tokens.
            match: Which complete action counts.

        Returns:
            The number of tokens to keep and the action, or all of them and None where no action is complete. The
            tokens kept are the fewest that decode to a text in which the action is complete.
        """
        text = self.decode(ids)
        action = chosen_action(text, match)
        if action is None:
            return len(ids), None
        wanted = 1 if match == "first" else len(actions(text))
        low, high = 1, len(ids)  # decoding more tokens only appends, so completeness is monotone
        while low < high:
            middle = (low + high) // 2
            if len(actions(self.decode(ids[:middle]))) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low, action

    def observation(self, documents: str, limit: int) -> tuple[list[int], bool]:
        """Return an observation of at most ``limit`` tokens, its closing tag always included.

        Args:
            documents: What stands between the tags.
            limit: Largest number of tokens, tags included.

        Returns:
            The tokens, and whether documents had to be cut; no tokens where not even the tags fit.
        """
        whole = self.encode(OBSERVATION_HEAD + documents + OBSERVATION_TAIL)
        if len(whole) <= limit:
            return whole, False
        head, tail = self.encode(OBSERVATION_HEAD), self.encode(OBSERVATION_TAIL)
        room = limit - len(head) - len(tail)
        if room < 0:
            return [], True
        body = self.encode(documents)[:room]
        while body and self.decode(body).endswith("�"):  # a character cut in the middle of its bytes
            body.pop()
        return [*head, *body, *tail], True

    def completing_ids(self) -> list[int]:
        """Return every token that can complete a closing tag of the protocol.

        For engines that stop on ids but not on strings. Such a token also completes other tags, such as the one that
        ends a thought; the loop then lets the engine go on.
        """
        suffixes = {tag[start:] for tag in STOP_STRINGS for start in range(len(tag))}
        longest = max(map(len, suffixes))
        found = []
        for token in range(len(self._tokenizer)):
            text = self.decode([token])
            ends = (place for place, letter in enumerate(text) if letter == ">")
            # Either the token begins with the tag's end, or it holds the tag whole.
            if any(text[: e + 1] in suffixes or text[max(0, e + 1 - longest) : e + 1] in STOP_STRINGS for e in ends):
                found.append(token)
        return found

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
