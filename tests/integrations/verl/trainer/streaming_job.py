"""One rank of the streaming test: veRL's own step and the streamed one from the same weights, for every case.

Run as ``python streaming_job.py MODEL OUT`` under torch's rank variables; rank 0 writes ``OUT/result.json``: for every
case the largest relative difference of a parameter, how far the step moved it, and both gradient norms.
"""

import json
import os
import random
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin
from tensordict import TensorDict

PROMPTS, SESSIONS, MICRO = 6, 2, 3
CASES = {
    "grpo": {},
    "grpo-ref-entropy": {"ref": True, "entropy": 0.01},
    "grpo-seq-mean": {"agg": "seq-mean-token-mean"},
    "grpo-two-mini-batches-two-epochs": {"mini": 3, "epochs": 2},
    "ppo": {"critic": True},
    "ppo-ref-two-mini-batches": {"critic": True, "ref": True, "mini": 3},
    "one-prompt-chunks": {"chunks": 1},
    "failed-groups": {"failed": (2, 3), "chunks": 1},
    "failed-groups-seq-mean": {"failed": (2, 3), "agg": "seq-mean-token-mean"},
    "dapo-filtered": {"filtered": (1, 4, 5), "clip": (0.2, 0.28)},
    "dapo-filtered-uneven": {"filtered": (0, 2, 3), "clip": (0.2, 0.28), "chunks": 4},
    **{f"order-{seed}": {"seed": seed, "chunks": (1, 2, 4, 5)[seed % 4]} for seed in range(10)},
}


def make_rows(seed: int = 3):
    """Rows of all prompts: different lengths, masked tokens inside, one response that counts nothing."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(PROMPTS * SESSIONS):
        prompt = torch.from_numpy(draw.integers(2, 12, 2 + number % 3))
        response = torch.from_numpy(draw.integers(2, 12, int(draw.integers(2, 9))))
        mask = torch.ones(len(response), dtype=torch.int64)
        mask[1] = number % 2
        if number == 4:
            mask[:] = 0
        rewards = torch.zeros(len(response))
        rewards[-1] = float(draw.normal())
        tokens = torch.cat([prompt, response])
        rows.append(
            {
                "prompts": prompt,
                "responses": response,
                "input_ids": tokens,
                "position_ids": torch.arange(len(tokens)),
                "response_mask": mask,
                "loss_mask": mask,
                "rewards": rewards,
                "shift": torch.from_numpy(draw.normal(0, 0.3, len(response)).astype(np.float32)),
                "ref_log_prob": torch.from_numpy(draw.normal(-2, 0.3, len(response)).astype(np.float32)),
                "uid": number // SESSIONS,
            }
        )
    return rows


def rows_of(case, streamed: bool):
    """The rows of a step. DAPO's filter drops groups; of failed ones veRL has rows that count nothing, we have none."""
    rows = [row for row in make_rows() if row["uid"] not in case.get("filtered", ())]
    if streamed:
        return [row for row in rows if row["uid"] not in case.get("failed", ())]
    for row in rows:
        if row["uid"] in case.get("failed", ()):
            row["response_mask"][:] = 0  # the loss mask too: they are one tensor
    return rows


def batch_of(rows, **settings):
    from verl.utils import tensordict_utils as tu

    names = [name for name in rows[0] if isinstance(rows[0][name], torch.Tensor)]
    data = TensorDict(
        {name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in names},
        batch_size=[len(rows)],
    )
    tu.assign_non_tensor(data, temperature=1.0, **settings)
    return data


def worker_of(model: str, model_type: str, loss_function):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from rlinf_verl.trainer.workers import M2FlowTrainingWorker

    torch.manual_seed(0)
    worker = M2FlowTrainingWorker(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(
                path=model,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                model_dtype="fp32",
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=MICRO,
                infer_micro_batch_size_per_gpu=1,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=0.5, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(loss_function)
    return worker


class Chunk:
    """Rows with settings, as a ``KVBatchMeta`` is keys with settings."""

    def __init__(self, rows):
        self.rows, self.extra_info = rows, {}

    def __len__(self):
        return len(self.rows)


class Ranked:
    """A worker group of which this process is one rank: it takes its share of every batch, as veRL's dispatch does."""

    def __init__(self, worker, rank, world):
        self.worker, self.rank, self.world = worker, rank, world
        self.begin_mini_batch, self.apply_gradients = worker.begin_mini_batch, worker.apply_gradients

    def share(self, rows):
        return rows[self.rank * len(rows) // self.world : (self.rank + 1) * len(rows) // self.world]

    def accumulate(self, chunk):
        self.worker.accumulate(batch_of(self.share(chunk.rows), **chunk.extra_info))

    def infer(self, rows, output):
        """Per-token outputs (``log_probs`` or ``values``) of every row, from whichever rank computed them."""
        from verl.workers.utils.padding import response_from_nested

        data = batch_of(self.share(rows), calculate_entropy=False, compute_loss=False)
        found = response_from_nested(self.worker.infer_batch(data)[output], data["response_mask"])
        gathered = [None] * self.world
        dist.all_gather_object(gathered, [value.detach().clone() for value in found.unbind()])
        return [value for part in gathered for value in part]

    def train_whole(self, mini_batches, **settings):
        """veRL's own step: this rank's share of each mini-batch, one after the other."""
        mine = [row for rows in mini_batches for row in self.share(rows)]
        sizes = {"mini_batch_size": len(mini_batches[0]), "global_batch_size": len(mini_batches[0]), "seed": 1}
        from verl.utils import tensordict_utils as tu

        done = self.worker.train_mini_batch(batch_of(mine, dataloader_kwargs={"shuffle": False}, **sizes, **settings))
        return tu.get(done, "metrics")

    def parameters(self):
        found, _ = self.worker.engine.get_per_tensor_param()
        return {name: value.detach().clone() for name, value in found}


def log_probs_of(actor, rows):
    for row, value in zip(rows, actor.infer(rows, "log_probs"), strict=True):
        row["old_log_probs"] = value + row["shift"]


def values_of(critic, rows):
    for row, value in zip(rows, critic.infer(rows, "values"), strict=True):
        row["values"] = value


def advantages_of(rows, with_values):
    """GRPO's or GAE's advantages of the rows given, by veRL's functions."""
    from torch.nn.utils.rnn import pad_sequence
    from verl.trainer.ppo import core_algos

    columns = {
        name: pad_sequence([row[name] for row in rows], batch_first=True) for name in ("rewards", "response_mask")
    }
    if with_values:
        values = pad_sequence([row["values"] for row in rows], batch_first=True)
        advantages, returns = core_algos.compute_gae_advantage_return(
            columns["rewards"], values, columns["response_mask"], gamma=0.99, lam=0.9
        )
    else:
        index = np.array([row["uid"] for row in rows])
        advantages, returns = core_algos.compute_grpo_outcome_advantage(
            columns["rewards"], columns["response_mask"], index
        )
    for row, advantage, value in zip(rows, advantages, returns, strict=True):
        row["advantages"], row["returns"] = advantage[: len(row["rewards"])], value[: len(row["rewards"])]


def groups(model, case, rank, world):
    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    agg = case.get("agg", "token-mean")
    actor_config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=SESSIONS,
        ppo_mini_batch_size=PROMPTS,
        ppo_micro_batch_size_per_gpu=MICRO,
        entropy_coeff=case.get("entropy", 0.0),
        use_kl_loss=case.get("ref", False),
        kl_loss_coef=0.1,
        loss_agg_mode=agg,
        **({"clip_ratio_low": case["clip"][0], "clip_ratio_high": case["clip"][1]} if "clip" in case else {}),
    )
    actor = Ranked(worker_of(model, "language_model", partial(ppo_loss, config=actor_config)), rank, world)
    if not case.get("critic"):
        return actor, None
    critic_config = FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=MICRO, loss_agg_mode=agg, optim={})
    return actor, Ranked(worker_of(model, "value_model", partial(value_loss, config=critic_config)), rank, world)


def whole_step(case, actor, critic, settings):
    rows = rows_of(case, streamed=False)
    log_probs_of(actor, rows)
    if critic:
        values_of(critic, rows)
    advantages_of(rows, bool(critic))
    size = case.get("mini", PROMPTS) * SESSIONS
    mini_batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    if critic:
        critic.train_whole(mini_batches, epochs=case.get("epochs", 1))
    return actor.train_whole(mini_batches, epochs=case.get("epochs", 1), **settings)


def streamed_step(case, actor, critic, settings):
    from rlinf_verl.trainer.updates import StreamedUpdate

    rows, mini = rows_of(case, streamed=True), case.get("mini", PROMPTS)
    size, agg = case.get("chunks", 2), case.get("agg", "token-mean")
    order = list(range(PROMPTS))
    random.Random(case.get("seed", 5)).shuffle(order)
    shared = {
        "mini_batches": PROMPTS // mini,
        "epochs": case.get("epochs", 1),
        "denominator": "tokens" if agg == "token-mean" else "rows",
    }
    actor_update = StreamedUpdate(actor, settings=settings, **shared)
    critic_update = StreamedUpdate(critic, settings={}, **shared) if critic else None
    for number in range(PROMPTS // mini):
        prompts = [prompt for prompt in order if prompt // mini == number]
        for start in range(0, len(prompts), size):
            wanted = prompts[start : start + size]
            chunk = Chunk([row for prompt in wanted for row in rows if row["uid"] == prompt])
            if not chunk.rows:
                continue
            log_probs_of(actor, chunk.rows)
            if critic:
                values_of(critic, chunk.rows)
            advantages_of(chunk.rows, bool(critic))
            if critic:
                critic_update.add(number, chunk)  # returns are row by row; the actor waits for whitened advantages
            else:
                actor_update.add(number, chunk)
    if critic:
        critic_update.finish(mini * SESSIONS)
        advantages_of(rows, True)
        step = mini * SESSIONS
        mini_batches = [rows[start : start + step] for start in range(0, len(rows), step)]
        return actor.train_whole(mini_batches, epochs=case.get("epochs", 1), **settings)
    return actor_update.finish((mini - len(case.get("filtered", ()))) * SESSIONS)


def compare(left, right):
    return max(((left[k] - right[k]).norm() / right[k].norm().clamp_min(1e-12)).item() for k in right)


def norms(metrics):
    return [step["grad_norm"] for step in metrics] if isinstance(metrics, list) else list(metrics["grad_norm"])


def main(model: str, out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results, references = {}, {}
    for name, case in CASES.items():
        settings = {"calculate_entropy": bool(case.get("entropy"))}
        kind = json.dumps({k: v for k, v in case.items() if k not in ("chunks", "seed")}, sort_keys=True)
        if kind not in references:
            actor, critic = groups(model, case, rank, world)
            before = actor.parameters()
            reported = norms(whole_step(case, actor, critic, settings))
            references[kind] = (before, actor.parameters(), critic.parameters() if critic else {}, reported)
        before, actor_after, critic_after, reported = references[kind]
        actor, critic = groups(model, case, rank, world)
        mine = norms(streamed_step(case, actor, critic, settings))
        results[name] = {
            "moved": compare(actor_after, before),
            "actor": compare(actor.parameters(), actor_after),
            "critic": compare(critic.parameters(), critic_after) if critic else 0.0,
            "norms": [mine, reported],
        }
    if rank == 0:
        (out / "result.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()
