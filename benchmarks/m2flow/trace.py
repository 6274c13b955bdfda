"""The lengths of all responses, drawn once and committed before any mode was tuned: ``lengths.json``.

Run: ``$(make -s python) benchmarks/m2flow/trace.py``. Lengths are log-normal with a long tail over prompts (some
problems are hard) and a smaller spread within a prompt's group.
"""

import json
import math
import random
from pathlib import Path

PROMPTS, ROLLOUTS = 160, 4
MEDIAN, OVER_PROMPTS, WITHIN_GROUP = 48, 0.9, 0.35
SHORTEST, LONGEST = 8, 400
PATH = Path(__file__).with_name("lengths.json")


def draw(seed: int = 0) -> list[list[int]]:
    """Return tokens of each response, by prompt."""
    generator = random.Random(seed)
    lengths = []
    for _ in range(PROMPTS):
        prompt = generator.gauss(math.log(MEDIAN), OVER_PROMPTS)
        group = [math.exp(generator.gauss(prompt, WITHIN_GROUP)) for _ in range(ROLLOUTS)]
        lengths.append([round(min(LONGEST, max(SHORTEST, length))) for length in group])
    return lengths


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(group) for group in draw())
    PATH.write_text(f"[\n{rows}\n]\n")
