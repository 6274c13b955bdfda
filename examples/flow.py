"""A macro flow with an extra stage, a filter, run unchanged under every mode and granularity; no Ray, no veRL.

python examples/flow.py
"""

import time

from rlinf_plugins.scheduler.macro import MacroFlow, Placement, Worker

MB = 10**6


class Generate(Worker):
    """Answers prompts."""

    footprint = 60 * MB

    def run(self) -> None:
        """Send a sample for each prompt."""
        for prompts in self.recv():
            time.sleep(0.002 * len(prompts))
            for prompt in prompts:
                self.send({"prompt": prompt, "reward": prompt % 3})


class Filter(Worker):
    """The extra stage: keeps samples with a reward."""

    def run(self) -> None:
        """Send on what is kept."""
        for samples in self.recv():
            for sample in samples:
                if sample["reward"] > 0:
                    self.send(sample)


class Train(Worker):
    """Learns from samples, batch by batch."""

    footprint = 60 * MB

    def run(self) -> list[int]:
        """Return the prompts it has learnt from."""
        seen: list[int] = []
        for samples in self.recv():
            time.sleep(0.002 * len(samples))
            seen += [sample["prompt"] for sample in samples]
        return seen


def macro_flow(flow: MacroFlow) -> list[int]:
    """The whole flow."""
    prompts, samples, kept = flow.feed("prompts", range(flow.items)), flow.channel("samples"), flow.channel("kept")
    flow.group("generate", Generate).run(prompts, to=samples)
    flow.group("filter", Filter).run(samples, to=kept)
    trained = flow.group("train", Train).run(kept)
    return sorted(prompt for seen in trained.result() for prompt in seen)


def main() -> dict[str, list[int]]:
    stages, found = ("generate", "train"), {}
    for size in (None, 16, 4, 1):
        modes = {
            "temporal": Placement.temporal((*stages, "filter"), ("d0", "d1"), size),
            "spatial": Placement.spatial({"generate": ["d0"], "train": ["d1"], "filter": ["cpu"]}, size),
            "hybrid": Placement(devices={"generate": ("d0", "d1"), "train": ("d1",)}, granularity=size),
        }
        for mode, placement in modes.items():
            with MacroFlow("filtered", items=64, placement=placement, memory=100 * MB) as flow:
                start = time.perf_counter()
                found[f"{mode}, {size or 'all'}"] = macro_flow(flow)
                seconds, switches = time.perf_counter() - start, len(flow.switches())
                print(f"{mode:8} {size or 'all':>3} items at a time: {seconds:.3f} s, {switches} switches")
    return found


if __name__ == "__main__":
    main()
