"""Checks the veRL integration adds to ``rlinf-plugins doctor``."""

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

from rlinf_plugins.core.doctor import CheckResult
from rlinf_verl.versions import SUPPORTED, in_range, installed

_WORKER_TIMEOUT_S = 180


def checks() -> Iterator[CheckResult]:
    """Yield versions, plugin, registries, patches, devices and rollout engines, in the order a failure spreads."""
    yield from _versions()
    yield from _attachment()
    if installed("verl") is not None:
        yield from _registries()
        yield from _patches()
    yield _worker()
    yield from _devices()
    yield from _engines()


def _versions() -> Iterator[CheckResult]:
    for name, supported in SUPPORTED.items():
        found = installed(name)
        good = found is not None and in_range(found, supported)
        yield CheckResult(
            feature="verl",
            name=f"{name}{supported}",
            status="ok" if good else "fail",
            detail=found or "not installed",
            fix="" if good else f"pip install '{name}{supported}'",
        )


def _attachment() -> Iterator[CheckResult]:
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    disabled = policy != "auto" and "rlinf" not in [name.strip() for name in policy.split(",")]
    if disabled:
        yield CheckResult(
            feature="verl",
            name="plugin switched on",
            status="fail",
            detail=f"VERL_USE_EXTERNAL_PLUGINS={policy}",
            fix="unset VERL_USE_EXTERNAL_PLUGINS, or add rlinf to it",
        )
        return
    logging.disable(logging.WARNING)  # veRL warns at import that there is no accelerator; the line below says it better
    importlib.import_module("verl")
    logging.disable(logging.NOTSET)
    from rlinf_verl import handshake

    failure = handshake.failure()
    yield CheckResult(
        feature="verl",
        name="plugin attached in the driver",
        status="ok" if handshake.attached() else "fail",
        detail="yes" if handshake.attached() else f"{type(failure).__name__}: {failure}" if failure else "not loaded",
        fix="" if handshake.attached() else "reinstall rlinf-plugins in this environment, then run doctor again",
    )


def _registries() -> Iterator[CheckResult]:
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    importlib.import_module("verl.trainer.ppo.v1")
    importlib.import_module("verl.workers.engine")
    facts = {
        "trainer m2flow": "m2flow" in TRAINER_REGISTRY,
        "platform cpu": "cpu" in PlatformRegistry.registered_names(),
        "rollout hf": "hf" in RolloutReplicaRegistry._registry,
        "rollout openvla": "openvla" in RolloutReplicaRegistry._registry,
        "engine language_model on cpu": "cpu" in EngineRegistry._engines.get("language_model", {}).get("fsdp2", {}),
    }
    for name, present in facts.items():
        yield CheckResult(
            feature="verl",
            name=f"registered: {name}",
            status="ok" if present else "fail",
            detail="yes" if present else "no",
            fix="" if present else "the plugin did not attach fully; see the lines above",
        )


def _patches() -> Iterator[CheckResult]:
    from rlinf_verl import patches
    from rlinf_verl.cpu.patches import CPU_PATCHES

    for spec in CPU_PATCHES:
        problem = patches.would_apply(spec)
        state = "in force" if patches.in_force(spec) else "ready, not needed here"
        yield CheckResult(
            feature="verl",
            name=f"patch {spec.name} ({spec.needed_when})",
            status="warn" if problem else "ok",
            detail=problem or state,
            fix="install the supported veRL unmodified; virtual devices will not work until then" if problem else "",
        )


def _worker() -> CheckResult:
    """Start a small Ray of our own and ask a worker; in a process that is killed when it does not answer."""
    code = (
        "import json, ray\n"
        "from rlinf_verl.cpu.devices import listen_on_loopback\n"
        "listen_on_loopback()\n"
        "ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False,"
        " _node_ip_address='127.0.0.1', object_store_memory=80 * 1024**2)\n"
        "@ray.remote\n"
        "def ask():\n"
        "    import verl\n"
        "    from rlinf_verl import handshake\n"
        "    return [handshake.attached(), str(handshake.failure())]\n"
        "print(json.dumps(ray.get(ask.remote())))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_WORKER_TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        loaded, failure = json.loads(done.stdout.strip().splitlines()[-1])
        detail = "yes" if loaded else failure
    except subprocess.TimeoutExpired:
        loaded, detail = False, f"Ray did not answer within {_WORKER_TIMEOUT_S} s"
    except (ValueError, IndexError):
        loaded, detail = False, (done.stderr.strip().splitlines() or ["no output"])[-1]
    return CheckResult(
        feature="verl",
        name="plugin attached in a Ray worker",
        status="ok" if loaded else "fail",
        detail=detail,
        fix="" if loaded else "install rlinf-plugins in the environment the Ray workers use, on every node",
    )


def _devices() -> Iterator[CheckResult]:
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    count = torch.cuda.device_count()
    yield CheckResult(
        feature="gpu",
        name="accelerators",
        status="ok" if count else "absent",
        detail=", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none seen by torch",
        fix="" if count else "recipes on virtual devices work; others need an NVIDIA driver and a CUDA build of torch",
    )
    yield CheckResult(
        feature="core", name="virtual devices", status="ok", detail=f"{cores} cores, {memory:.0f} GiB to divide"
    )


def _engines() -> Iterator[CheckResult]:
    yield CheckResult(
        feature="hf",
        name="rollout engine hf (in process)",
        status="ok",
        detail=f"transformers {installed('transformers')}",
    )
    for name in ("sglang", "vllm"):
        found = installed(name)
        yield CheckResult(
            feature=name,
            name=f"rollout engine {name}",
            status="ok" if found else "absent",
            detail=found or "not installed",
            fix="" if found else f"pip install 'verl[{name}]' on a GPU machine",
        )
