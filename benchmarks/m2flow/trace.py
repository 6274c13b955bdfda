"""The lengths of all responses, drawn once and committed before any mode was tuned: ``lengths.json``, ``turns.json``.

Run: ``$(make -s python) benchmarks/m2flow/trace.py``. Lengths are log-normal with a long tail over prompts (some
problems are hard) and a smaller spread within a prompt's group. Search agents take one to four turns, more of them for
hard questions; the tokens of each turn are log-normal.
"""

import json
import math
import random
from pathlib import Path

PROMPTS, ROLLOUTS = 160, 4
MEDIAN, OVER_PROMPTS, WITHIN_GROUP = 48, 0.9, 0.35
SHORTEST, LONGEST = 8, 400
PATH = Path(__file__).with_name("lengths.json")
TURNS, TURN_MEDIAN, TURN_SPREAD, TURN_LONGEST = 4, 20, 0.5, 60
TURNS_PATH = Path(__file__).with_name("turns.json")


def draw(seed: int = 0) -> list[list[int]]:
    """Return tokens of each response, by prompt."""
    generator = random.Random(seed)
    lengths = []
    for _ in range(PROMPTS):
        prompt = generator.gauss(math.log(MEDIAN), OVER_PROMPTS)
        group = [math.exp(generator.gauss(prompt, WITHIN_GROUP)) for _ in range(ROLLOUTS)]
        lengths.append([round(min(LONGEST, max(SHORTEST, length))) for length in group])
    return lengths


def draw_turns(seed: int = 1) -> list[list[list[int]]]:
    """Return tokens of each turn of each response, by prompt."""
    generator = random.Random(seed)
    drawn = []
    for _ in range(PROMPTS):
        hard = generator.random()
        group = []
        for _ in range(ROLLOUTS):
            turns = min(TURNS, 1 + sum(generator.random() < hard for _ in range(TURNS - 1)))
            sizes = [math.exp(generator.gauss(math.log(TURN_MEDIAN), TURN_SPREAD)) for _ in range(turns)]
            group.append([round(min(TURN_LONGEST, max(4.0, size))) for size in sizes])
        drawn.append(group)
    return drawn


if __name__ == "__main__":
    for path, groups in ((PATH, draw()), (TURNS_PATH, draw_turns())):
        rows = ",\n".join(json.dumps(group) for group in groups)
        path.write_text(f"[\n{rows}\n]\n")
