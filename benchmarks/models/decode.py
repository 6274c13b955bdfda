"""Actions per second of the policy against the plain recipe, on the same weights in one run.

The plain recipe is what published evaluation scripts do: one observation at a time, logits over the whole vocabulary at
every position, and for OpenVLA no KV cache, so the whole sequence is computed anew for each of its tokens. The image is
encoded once per decision on both sides.

CPU seconds are counted, not wall time. Run: ``python benchmarks/models/decode.py --variant openvla``.
"""

import argparse
import json
import tempfile
import time

import torch

from rlinf_plugins.models.openvla import ActionSpec, Sampling, TinySizes, load_policy, make_tiny_checkpoint

SIZES = {
    "demo": TinySizes.demo(),
    "small": TinySizes(
        vision_dims=(96, 96), vision_heads=(4, 4), hidden=256, intermediate=688, layers=4, heads=4, vision_depth=4
    ),
    "medium": TinySizes(
        vision_dims=(192, 192), vision_heads=(4, 4), hidden=512, intermediate=1376, layers=8, heads=8, vision_depth=6
    ),
}


def observations(batch: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [20 + (5 * row) % 16 for row in range(batch)]
    ids = torch.full((batch, max(lengths)), 32000)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(300, 29000, (length,), generator=generator)
        ids[row, 0], ids[row, length - 1] = 1, 29871
        mask[row, :length] = 1
    return ids, mask, torch.randn(batch, 6, 224, 224, generator=generator)


@torch.no_grad()
def plain(policy, ids, mask, pixels):
    """One observation at a time, no cache, logits over the whole vocabulary."""
    tokens = []
    for row in range(ids.shape[0]):
        prompt = ids[row][mask[row].bool()][None]
        one = torch.ones_like(prompt)
        patches = policy.encode(pixels[row : row + 1])
        if policy.spec.decoding == "parallel":
            hidden, start = policy.hidden_states(prompt, one, None, patches=patches)
            logits = policy.language_model.lm_head(hidden)[:, start : start + policy.spec.tokens]
            tokens.append(logits[..., 31744:32000].argmax(-1)[0] + 31744)
            continue
        chosen = torch.zeros(1, 0, dtype=torch.long)
        for _ in range(policy.spec.tokens):
            fed = torch.cat([chosen, chosen.new_zeros(1, 1)], dim=1)  # the last token is never fed
            hidden, _ = policy.hidden_states(prompt, one, fed, patches=patches)
            logits = policy.language_model.lm_head(hidden)[:, -1]
            chosen = torch.cat([chosen, logits[:, 31744:32000].argmax(-1, keepdim=True) + 31744], dim=1)
        tokens.append(chosen[0])
    return torch.stack(tokens)


def batched(policy, ids, mask, pixels):
    out = policy.act(ids, mask, pixel_values=pixels, sampling=Sampling(greedy=True))
    return out.tokens.flatten(1)


def seconds(function, *arguments, repeats: int):
    function(*arguments)
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = function(*arguments)
        best = min(best, time.process_time() - start)
    return best, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["openvla", "openvla-oft"], default="openvla")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = ActionSpec() if options.variant == "openvla" else ActionSpec(decoding="parallel", chunk=8)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint(folder, variant=options.variant, sizes=SIZES[options.size], spec=spec)
        policy = load_policy(folder)
    for batch in options.batches:
        inputs = observations(batch)
        ours, tokens = seconds(batched, policy, *inputs, repeats=options.repeats)
        theirs, reference = seconds(plain, policy, *inputs, repeats=1 if batch > 4 else options.repeats)
        agreement = float((tokens == reference).float().mean())
        row = {
            "variant": options.variant,
            "batch": batch,
            "actions_per_s": round(batch * spec.chunk / ours, 1),
            "plain_actions_per_s": round(batch * spec.chunk / theirs, 1),
            "ratio": round(theirs / ours, 2),
            "same_tokens": round(agreement, 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
