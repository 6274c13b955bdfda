"""A trivial verifiable text task with a model small enough to learn it in minutes on a CPU.

The prompt names a word, the right answer is that word. Chance is one in the size of the vocabulary; a policy that
copies scores 1.
"""

import random
from pathlib import Path
from typing import Any

WORDS = ("red", "green", "blue", "white", "black", "one", "two", "three")
ASKED = WORDS[:4]
"""Words that prompts ask for; the others are wrong answers only."""


def make(folder: Path, *, seed: int = 0, train_rows: int = 256, test_rows: int = 16) -> int:
    """Write ``model/`` (a random two-layer Llama with its tokenizer), ``train.parquet`` and ``test.parquet``.

    Returns:
        The number of parameters of the model.
    """
    import pandas
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", "say", ":", *WORDS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = random.Random(seed)
    for split, count in (("train", train_rows), ("test", test_rows)):
        rows = [_row(generator.choice(ASKED), split, index) for index in range(count)]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    return sum(parameter.numel() for parameter in model.parameters())


def _row(word: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "rlinf/say",
        "prompt": [{"role": "user", "content": f"say {word} :"}],
        "ability": "copy",
        "reward_model": {"style": "rule", "ground_truth": word},
        "extra_info": {"split": split, "index": index},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Reward 1 where the first word of the answer is the word asked for, else 0; veRL's reward-function contract."""
    words = solution_str.split()
    correct = float(bool(words) and words[0] == ground_truth)
    return {"score": correct, "acc": correct}
