"""Real tokenizers, from packages in the user's cache."""

import base64
import os
import re
import struct
from pathlib import Path

import pytest

CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def asset(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlinf-plugins" / "assets"
    folder = Path(os.environ.get("RLINF_TEST_ASSETS", cache)) / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder.parent}: run scripts/test_assets.sh")
    return folder


def qwen3():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(asset("tokenizer-qwen3") / "models" / "tokenizer.json"))
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHAT
    return tokenizer


def llama2():
    """Llama-2's vocabulary and merges, decoded from the package's two base64 strings."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    source = (asset("tokenizer-llama2") / "llama-tokenizer.js").read_text()
    vocab_text, merge_text = (
        base64.b64decode(re.search(rf'{name} = "([^"]+)"', source)[1])
        for name in ("llama_vocab_base64", "llama_merges_binary")
    )
    tokens = vocab_text.decode().split("\n")
    numbers = struct.unpack(f"<{len(merge_text) // 2}H", merge_text)
    merges = [(tokens[a], tokens[b]) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>", chat_template=CHAT)


def smollm2():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asset("tokenizer-smollm2"))


MAKERS = {"qwen3": qwen3, "llama2": llama2, "smollm2": smollm2}


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()
