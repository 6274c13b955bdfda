"""The in-process engine against transformers' own batching, on the same random model and the same requests.

Two workloads: equal lengths (the best case of plain ``generate``) and unlike ones (prompts of 8-64 tokens, outputs of
8-64 tokens), grouped as GRPO groups them. Prints CPU seconds and generated tokens per CPU second; one thread.

    python benchmarks/rollout/hf_engine.py --requests 32
"""

import argparse
import random
import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from rlinf_verl.rollout.engine import EngineLimits, HFEngine, Request
from rlinf_verl.rollout.sampling import SamplingParams
from rlinf_verl.rollout.weights import ResidentWeights

GROUP = 8


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).eval()


def workload(kind, requests, seed=0):
    rng = random.Random(seed)
    jobs = []
    for _ in range(requests // GROUP):
        size = 32 if kind == "equal" else rng.randrange(8, 65)
        prompt = [rng.randrange(10, 8000) for _ in range(size)]
        jobs += [(prompt, 48 if kind == "equal" else rng.randrange(8, 65)) for _ in range(GROUP)]
    return jobs


def ours(model, jobs):
    limits = EngineLimits(max_rows=64, max_prefill_tokens=8192, max_length=2048, eos_ids=frozenset())
    engine = HFEngine(model, limits, ResidentWeights(model, loaded=True))
    for i, (prompt, tokens) in enumerate(jobs):
        engine.submit(Request(id=str(i), prompt=prompt, params=SamplingParams(max_tokens=tokens, seed=i)))
    total = 0
    while engine.busy:
        total += sum(len(g.token_ids) for g in engine.step())
    return total


@torch.no_grad()
def generate(model, jobs):
    """One padded batch that runs as long as its longest request; the surplus is thrown away."""
    width, longest = max(len(p) for p, _ in jobs), max(n for _, n in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(jobs):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=longest,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return sum(n for _, n in jobs)


def generate_batch(model, jobs):
    """Continuous batching of transformers with a paged cache."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=64, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        block_size=16,
        num_blocks=1024,
        max_batch_tokens=512,
        return_logprobs=True,
        use_cuda_graph=False,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    ids = [manager.add_request(prompt, max_new_tokens=tokens) for prompt, tokens in jobs]
    total, left = 0, set(ids)
    while left:
        result = manager.get_result(timeout=60)
        if result is not None and result.is_finished() and result.request_id in left:
            left.remove(result.request_id)
            total += len(result.generated_tokens)
    manager.stop(block=True, timeout=10)
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, float32, one thread")
    for kind in ("equal", "unlike"):
        jobs = workload(kind, args.requests)
        base = None
        for contender in (ours, generate, generate_batch):
            model.set_attn_implementation("sdpa")
            best = min(_cpu(contender, model, jobs) for _ in range(args.repeat))
            rate = sum(n for _, n in jobs) / best
            base = base or rate
            name = f"{kind:7s} {contender.__name__:15s}"
            print(f"{name} {best:6.2f} CPU s  {rate:6.0f} tokens/s  ours is {base / rate:.2f}x")


def _cpu(contender, model, jobs):
    start = time.process_time()
    total = contender(model, jobs)
    if total != sum(n for _, n in jobs):
        raise SystemExit(f"{contender.__name__} made {total} tokens")
    return time.process_time() - start


if __name__ == "__main__":
    main()
