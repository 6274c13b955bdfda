"""Makespan of the switcher, switches included, against the offline optimum on random flows; and against eager offload.

    python benchmarks/lock/makespan.py [cases] [first seed]

The switcher runs as it is, on simulated time: with the order its rehearsal found (``switcher``), or with no more than
the length of the path behind each task (``without the flow``). The optimum knows everything and searches all
schedules. The eager peer is what RLinf and veRL's global barrier do: first come first served, offload after every use,
no prefetch. Idle time is in seconds per device and flow.
"""

import asyncio
import statistics
import sys
import time

from optimum import Case, disturbed, random_case, shortest

from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.rehearsal import PlannedResident, PlannedUse, Rehearsal
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident
from rlinf_plugins.scheduler.lock.virtual_time import run

WAYS = ("switcher", "without the flow", "eager peer")
_WRONG_BY = 0.3
"""By how much the lengths of the tasks differ from what the rehearsal was told."""


def rehearsed(case: Case) -> list[tuple[str, str]]:
    residents = {
        name: PlannedResident(footprint=footprint, move_s=case.move_s(name))
        for name, footprint in case.footprints.items()
    }
    uses = [
        PlannedUse(stage=str(i), resident=task.resident, seconds=task.seconds, after=tuple(map(str, task.after)))
        for i, task in enumerate(case.tasks)
    ]
    return list(Rehearsal(case.capacity, residents, uses).best().order)


async def play(case: Case, how: str, order: list[tuple[str, str]]) -> dict:
    clock = asyncio.get_running_loop().time
    devices = VirtualDevices(case.capacity)
    eager = how == "eager peer"
    switcher = Switcher(
        LocalLock(case.capacity, clock=clock),
        case.capacity,
        clock=clock,
        used_bytes=devices.used_bytes,
        bytes_per_s=case.bytes_per_s,
        prefetch=not eager,
    )
    fence = MemoryFence(clock)
    for name, footprint in case.footprints.items():
        await switcher.add(VirtualResident(name, footprint, devices, fence, bytes_per_s=case.bytes_per_s))
    tails = case.tails()
    done = [asyncio.Event() for _ in case.tasks]
    busy = dict.fromkeys(case.capacity, 0.0)

    async def do(index: int) -> None:
        task = case.tasks[index]
        for other in task.after:
            await done[other].wait()
        urgency = 0.0 if eager else tails[index]
        async with switcher.use(task.resident, urgency=urgency, stage=str(index)):
            await asyncio.sleep(task.seconds)
            for device in case.footprints[task.resident]:
                busy[device] += task.seconds
            if not eager:
                done[index].set()
        if eager:
            await switcher.evict(task.resident)
            done[index].set()

    if how == "switcher":
        switcher.expect(order)
    await asyncio.gather(*(do(index) for index in range(len(case.tasks))))
    spans = switcher.recorder.drain()
    await switcher.close()
    return {
        "seconds": clock(),
        "switches": sum(span.name == "switch" for span in spans),
        "idle": clock() - statistics.mean(busy.values()),
    }


def summary(name: str, ratios: list[float]) -> str:
    ranked = sorted(ratios)
    at = lambda share: ranked[min(len(ranked) - 1, int(share * len(ranked)))]  # noqa: E731
    return f"{name:22} median {at(0.5):.3f}x  p90 {at(0.9):.3f}x  p99 {at(0.99):.3f}x  worst {ranked[-1]:.3f}x"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rows, skipped, start = [], 0, time.process_time()
    for seed in range(first, first + count):
        case = random_case(seed)
        best = shortest(case)
        if best is None:
            skipped += 1
            continue
        row = {how: run(play(case, how, rehearsed(case)))[0] for how in WAYS}
        wrong = run(play(case, "switcher", rehearsed(disturbed(case, seed, _WRONG_BY))))[0]
        rows.append((seed, best, row | {"forecast 30 % wrong": wrong}))
    print(f"{len(rows)} flows, {skipped} too large for the optimum, {time.process_time() - start:.0f} s of CPU")
    for how in (WAYS[0], "forecast 30 % wrong", *WAYS[1:]):
        print(summary(how, [row[how]["seconds"] / best for _, best, row in rows]), end="  ")
        print(
            "  ".join(f"{key} {statistics.mean(row[how][key] for *_, row in rows):.1f}" for key in ("switches", "idle"))
        )
    worst = sorted(((row["switcher"]["seconds"] / best, seed) for seed, best, row in rows), reverse=True)[:8]
    print("worst seeds:", ", ".join(f"{seed} ({ratio:.2f}x)" for ratio, seed in worst))


if __name__ == "__main__":
    main()
