"""The patches veRL needs on the CPU platform, and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

from rlinf_verl.patches import PatchSpec

_NEEDED_WHEN = "the platform is cpu"


def _single_gloo_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _unpinned_offload(original: Callable[..., Any]) -> Callable[..., Any]:
    def cpu_offload_policy(pin_memory: bool = True) -> Any:
        return original(pin_memory=False)

    return cpu_offload_policy


def _value_head_without_flash(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


SINGLE_GLOO_BACKEND = PatchSpec(
    name="single-gloo-backend",
    module="verl.utils.distributed",
    attribute="initialize_global_process_group_ray",
    fingerprint="761a94d1a2e058d3",
    versions=">=0.9.1,<0.9.2",
    needed_when=_NEEDED_WHEN,
    reason="the backend string becomes 'cpu:gloo,cpu:gloo', which torch refuses as a duplicate device type",
    upstream="verl/utils/distributed.py",
    remove_when="veRL builds the string from distinct devices",
    build=_single_gloo_backend,
)

UNPINNED_OFFLOAD = PatchSpec(
    name="unpinned-offload",
    module="verl.workers.engine.fsdp.transformer_impl",
    attribute="CPUOffloadPolicy",
    source_of="FSDPEngine._build_fsdp_module",
    fingerprint="41da6c4ed82d496a",
    versions=">=0.9.1,<0.9.2",
    needed_when=_NEEDED_WHEN,
    reason="the reference engine asks for pinned memory, which only an accelerator's runtime can give",
    upstream="verl/workers/engine/fsdp/transformer_impl.py",
    remove_when="veRL makes pin_memory follow the platform",
    build=_unpinned_offload,
)

VALUE_HEAD_ATTENTION = PatchSpec(
    name="value-head-attention",
    module="verl.utils.model",
    attribute="load_valuehead_model",
    fingerprint="2371ca280654b53b",
    versions=">=0.9.1,<0.9.2",
    needed_when=_NEEDED_WHEN,
    reason="the critic is loaded with flash attention whatever the configuration says",
    upstream="verl/utils/model.py",
    remove_when="the critic's attention follows model.override_config",
    build=_value_head_without_flash,
)

CPU_PATCHES = (SINGLE_GLOO_BACKEND, UNPINNED_OFFLOAD, VALUE_HEAD_ATTENTION)
