"""One rank of an engine test: infers, trains one mini-batch, saves, loads, and writes what it saw.

Run as ``python engine_job.py CHECKPOINT OUT [OPTIONS]`` under torch's rank variables; rank 0 writes ``OUT/result.pt``.
``OPTIONS`` is JSON: ``model`` settings, ``override`` of its configuration, ``precision``, ``clip`` (low, high),
``dropped`` rows.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401  loads the plugin

from rlinf_verl.vla import register  # noqa: F401
from rlinf_verl.vla.rows import Chunk, EpisodeTrace

ROWS = 8
MICRO = 2
VALUE = {"value_lr": 0.5, "value_clip": 0.2, "value_huber": 1.5, "value_coef": 0.7}
LR, CLIP = 1.0, 0.5  # SGD: what a step moves is the clipped gradient itself


def rows(policy_spec, seed: int = 5, dropped=()):
    """Fields of ``ROWS`` rows: prompts of different lengths, one row with masked steps, no step of ``dropped`` ones."""
    generator = np.random.default_rng(seed)
    fields = []
    for number in range(ROWS):
        length = 6 + number % 3
        prompt = [1, *generator.integers(300, 29000, length).tolist(), 29871]
        valid = np.ones(policy_spec.chunk, bool)
        valid[1 if number == 3 and policy_spec.chunk > 1 else policy_spec.chunk :] = False
        chunk = Chunk(
            prompt=prompt,
            images=generator.integers(0, 256, (policy_spec.num_images, 32, 32, 3), dtype=np.uint8),
            proprio=generator.uniform(-1, 1, policy_spec.proprio_dim) if policy_spec.proprio_dim else None,
            tokens=generator.integers(31744, 32000, (policy_spec.chunk, policy_spec.dim)),
            log_probs=np.zeros((policy_spec.chunk, policy_spec.dim)),
            values=np.zeros(policy_spec.values) if policy_spec.values else None,
            temperature=1.3,
            top_k=0,
            version=0,
            rewards=np.zeros(policy_spec.chunk),
            valid=valid,
            terminated=False,
            truncated=False,
        )
        (row,) = EpisodeTrace(uid=f"u{number}", session=0, chunks=[chunk]).fields({})
        # One number an action, as the estimators give it.
        advantage = np.repeat(generator.normal(size=policy_spec.chunk).astype(np.float32), policy_spec.dim)
        row["advantages"] = torch.from_numpy(advantage)
        row["old_shift"] = torch.from_numpy(generator.normal(0, 0.3, policy_spec.tokens).astype(np.float32))
        if policy_spec.values:
            for name in ("chunk_returns", "rollout_values"):
                row[name] = torch.from_numpy(generator.normal(0, 2, size=policy_spec.values).astype(np.float32))
        if number in dropped:
            row["response_mask"] = row["loss_mask"] = torch.zeros_like(row["response_mask"])
        fields.append(row)
    return fields


def tensordict(fields, **settings):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    dropped = ("extra_fields", "num_turns", "episode_id")
    names = [name for name in fields[0] if name not in dropped]
    data = TensorDict(
        {name: torch.nested.as_nested_tensor([row[name] for row in fields], layout=torch.jagged) for name in names},
        batch_size=[len(fields)],
    )
    for name, value in settings.items():
        tu.assign_non_tensor(data, **{name: value})
    return data


def engine_for(folder: str, override, precision="fp32", **model):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    settings = {"use_remove_padding": False, "enable_gradient_checkpointing": True} | model
    model_config = HFModelConfig(
        path=folder,
        override_config={"attn_implementation": "sdpa"} | VALUE | override,
        external_lib="rlinf_verl.vla.register",
        **settings,
    )
    model_config.model_type = "openvla"
    engine_config = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        model_dtype="fp32",
        mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=MICRO,
        infer_micro_batch_size_per_gpu=MICRO,
    )
    engine = EngineRegistry.new(
        "openvla",
        "fsdp2",
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=LR, weight_decay=0.0, clip_grad=CLIP, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def full(engine):
    gathered, _ = engine.get_per_tensor_param()
    return {name: value.detach().clone().cpu() for name, value in gathered}


def main(folder: str, out: Path, options: dict) -> None:
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    engine = engine_for(
        folder, options.get("override", {}), options.get("precision", "fp32"), **options.get("model", {})
    )
    mine = rows(engine.policy.spec, dropped=options.get("dropped", ()))[
        rank * ROWS // world : (rank + 1) * ROWS // world
    ]
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": MICRO,
        "max_token_len_per_gpu": None,
        "temperature": 1.3,
        "calculate_entropy": True,
        "global_batch_size": ROWS,
    }
    data = tensordict(mine, **settings)
    with engine.eval_mode():
        inferred = engine.infer_batch(data, loss_function=None)["model_output"]
    log_probs = response_from_nested(inferred["log_probs"], data["response_mask"])
    entropy = response_from_nested(inferred["entropy"], data["response_mask"])
    before = full(engine)
    data = tensordict(mine, **settings)
    data["old_log_probs"] = torch.nested.nested_tensor_from_jagged(
        log_probs.values() + data["old_shift"].values(), log_probs.offsets()
    )
    low, high = options.get("clip", (0.2, 0.2))
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size_per_gpu=MICRO,
        entropy_coeff=0.01,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    with engine.train_mode():
        trained = engine.train_batch(data, loss_function=partial(ppo_loss, config=config))
    after = full(engine)
    engine.save_checkpoint(str(out / "checkpoint"), global_step=1)
    with engine.train_mode():
        engine.train_batch(data, loss_function=partial(ppo_loss, config=config))
    moved = full(engine)
    engine.load_checkpoint(str(out / "checkpoint"), del_local_after_load=False)
    restored = full(engine)
    wrapped = sorted({type(m).__name__ for m in engine.module.modules() if type(m).__name__.startswith("FSDP")})
    gathered = [None] * world
    mine_out = (log_probs.values().view(len(mine), -1), entropy.values().view(len(mine), -1), trained["loss"])
    dist.all_gather_object(gathered, mine_out)
    if rank == 0:
        torch.save(
            {
                "log_probs": torch.cat([part[0] for part in gathered]),
                "entropy": torch.cat([part[1] for part in gathered]),
                # veRL averages over ranks what every rank multiplied by their number.
                "loss": sum(sum(part[2]) for part in gathered) / world,
                "grad_norm": trained["metrics"]["grad_norm"],
                "metrics": sorted(trained["metrics"]),
                "before": before,
                "after": after,
                "moved": moved,
                "restored": restored,
                "wrapped": wrapped,
            },
            out / "result.pt",
        )
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo")
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    dist.destroy_process_group()
