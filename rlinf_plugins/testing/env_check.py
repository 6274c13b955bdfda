"""Runs the contract's rules on an environment in a process of its own, which may crash or hang without harm."""

import contextlib
import inspect
import os
import select
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import cloudpickle  # type: ignore[import-untyped]

from rlinf_plugins.core.buffers import anonymous_file
from rlinf_plugins.core.supervision import Channel, Worker, pack, unpack
from rlinf_plugins.envs.protocol import EnvFactory
from rlinf_plugins.testing.env_rules import RULES, BrokenRuleError, Subject

TARGET = "rlinf_plugins.testing.env_check:serve"
MADE = "the environment can be made"
CLOSES = "the environment closes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a rule said of an environment.

    Attributes:
        rule: The rule, in words.
        verdict: ``kept``, ``broken``, or ``unknown`` where an earlier rule took the process down.
        explanation: What the environment does and what it should do, if broken.
    """

    rule: str
    verdict: Literal["kept", "broken", "unknown"]
    explanation: str = ""


def check_environment(factory: EnvFactory, *, timeout: float = 300.0, seed: int = 0) -> Iterator[Finding]:
    """Check an environment against the contract of :mod:`rlinf_plugins.envs.protocol`.

    Args:
        factory: Makes it, in a process that is started for the purpose.
        timeout: Seconds a rule may take.
        seed: Of the actions that are tried.

    Yields:
        One finding per rule, as soon as it is known.
    """
    rules = [MADE, *(_words(rule.__name__) for rule in RULES), CLOSES]
    payload = anonymous_file("check-env")
    try:
        with open(payload, "wb", closefd=False) as file:
            try:
                cloudpickle.dump(factory, file)
            except Exception as error:  # whatever a user's object raises when pickled
                why = f"the factory cannot be sent to a process ({type(error).__name__}: {error})"
                yield Finding(rule=MADE, verdict="broken", explanation=why)
                return
        environment = dict(getattr(factory, "environment", {}))
        worker = Worker(TARGET, {"payload": payload, "seed": seed}, environment, pass_fds=[payload])
        try:
            yield from _findings(worker, rules, timeout)
        finally:
            worker.kill()
            worker.wait()
    finally:
        os.close(payload)


def serve(channel: Channel, payload: int, seed: int) -> None:
    """Run the rules in this process and send the explanation of each, empty if kept."""
    factory: EnvFactory = cloudpickle.loads(os.pread(payload, os.fstat(payload).st_size, 0))
    try:
        subject = Subject(factory=factory, env=factory(), seed=seed)
    except BaseException as error:  # SystemExit too: a simulator that asks a question on stdin ends that way
        channel.send(pack(_explain(error)))
        return
    channel.send(pack(""))
    for rule in (*RULES, _close):
        explanation = ""
        try:
            rule(subject)
        except BrokenRuleError as broken:
            explanation = str(broken)
        except BaseException as error:
            explanation = _explain(error)
        channel.send(pack(explanation))


def _close(subject: Subject) -> None:
    subject.env.close()


def _findings(worker: Worker, rules: list[str], timeout: float) -> Iterator[Finding]:
    poll = select.poll()
    for descriptor in (worker.channel.fileno(), worker.sentinel):
        poll.register(descriptor, select.POLLIN)
    for at, rule in enumerate(rules):
        deadline = time.monotonic() + timeout
        lost = ""
        while not lost and not worker.channel.has_message():
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                lost = f"no answer within {timeout:g} s: {_place(worker)}"
            elif not worker.channel.has_message():
                lost = f"the process {worker.wait()}"
        if not lost:
            try:
                explanation = unpack(worker.channel.recv())
            except EOFError:
                worker.kill()
                lost = f"the process {worker.wait()}"
        if lost:
            yield Finding(rule=rule, verdict="broken", explanation=lost)
            for later in rules[at + 1 :]:
                yield Finding(rule=later, verdict="unknown")
            return
        yield Finding(rule=rule, verdict="broken" if explanation else "kept", explanation=explanation)
        if explanation and rule == MADE:
            return


def _place(worker: Worker) -> str:
    """Have a process that hangs print where, and return that."""
    with contextlib.suppress(OSError):
        worker.ask_stacks()
        time.sleep(0.2)  # it cannot say when it is done
    worker.kill()
    return f"it {worker.wait()}"


def _explain(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    if isinstance(error, EOFError):
        return f"it asked a question on standard input, where nobody answers{where}"
    return f"it raises {type(error).__name__}: {error}{where}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def sentence(rule: str) -> str:
    """Return the sentence of the contract behind a rule's words, or an empty string."""
    for function in RULES:
        if _words(function.__name__) == rule:
            return inspect.getdoc(function) or ""
    return ""
