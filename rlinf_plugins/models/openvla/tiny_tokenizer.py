"""A small tokenizer with the id layout of Llama-2's: enough to write prompts, not Llama's segmentation."""

import string

from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Tokenizer,
    decoders,
    normalizers,
    processors,
)
from tokenizers.models import Unigram  # type: ignore[import-untyped]

from rlinf_plugins.models.openvla.config import BOS_TOKEN, SPACE_TOKEN, TEXT_VOCABULARY

_MARK = "\u2581"
_BYTES = 3
_FIRST_FREE = 259

# Words of the prompt template stand where Llama-2 has them.
_TEMPLATE_IDS = {
    f"{_MARK}In": 512,
    f"{_MARK}What": 1724,
    f"{_MARK}action": 3158,
    f"{_MARK}should": 881,
    f"{_MARK}the": 278,
    f"{_MARK}robot": 19964,
    f"{_MARK}take": 2125,
    f"{_MARK}to": 304,
    "Out": 3744,
    ":": 29901,
    "?": 29973,
    _MARK: SPACE_TOKEN,
}

_TASK_WORDS = (
    "a and alphabet apple back banana basket between black block blue book both bottom bowl box brown butter cabinet "
    "can carrot chocolate close cookie corner cream cube cup dressing drawer eggplant front frying goal green grey in "
    "into it juice left lift ketchup milk moka move mug of off on onto open orange pan peg pick pink place plate pot "
    "pudding pull purple push put rack ramekin red right salad sauce side small soup spoon square stack stove sugar "
    "target tea tomato top towel tray turn up white wine with yellow"
)


def tiny_tokenizer() -> Tokenizer:
    """Build the tokenizer: special tokens 0-2, bytes 3-258, words and letters in between, ``<PAD>`` at 32000.

    Words it knows are one token each, others are spelt, anything else falls back to bytes.
    """
    ids = dict(_TEMPLATE_IDS)
    taken = set(ids.values())
    free = (number for number in range(_FIRST_FREE, TEXT_VOCABULARY) if number not in taken)
    for word in _TASK_WORDS.split():
        ids[_MARK + word] = next(free)
    for letter in string.ascii_letters + string.digits + ".,;!'\"-_()[]{}<>/|\\+*=&%$#@^~`":
        ids[letter] = next(free)
    pieces = [(f"<unused_{number}>", -1e4) for number in range(TEXT_VOCABULARY)]
    for number, token in enumerate(("<unk>", "<s>", "</s>")):
        pieces[number] = (token, 0.0)
    for value in range(256):
        pieces[_BYTES + value] = (f"<0x{value:02X}>", 0.0)
    for piece, number in ids.items():
        pieces[number] = (piece, -1.0 if len(piece) > 1 else -10.0)
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_TOKEN)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>", "<PAD>")]
    )
    return tokenizer
