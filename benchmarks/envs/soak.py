"""Episodes under fire: a worker is killed every few seconds, and every episode must be on record exactly once.

python benchmarks/envs/soak.py --minutes 10
python benchmarks/envs/soak.py --simulator maniskill | maniskill-state | libero | robotics --kills 5
"""

import argparse
import os
import random
import signal
import threading
import time
from collections import Counter

import numpy as np
import psutil

from rlinf_plugins.core.supervision import RestartPolicy
from rlinf_plugins.envs import EnvPool, EpisodeConfig, InitialState, PoolConfig, play
from rlinf_plugins.envs.gym import GymFactory
from rlinf_plugins.envs.libero import LiberoFactory
from rlinf_plugins.envs.maniskill import ManiSkillFactory
from rlinf_plugins.testing.envs import ToyFactory

SIMULATORS = {
    "null": ToyFactory(image=64, length=lambda task, trial: 5 + trial % 20, trials=None),
    "maniskill": ManiSkillFactory(env_id="RlinfPutOnPlate-v1", image_size=64, options={"hide_arm": True}),
    "maniskill-state": ManiSkillFactory(env_id="PickCube-v1", obs_mode="state"),
    "libero": LiberoFactory(suite="libero_object", image_size=64, wrist=False, max_episode_steps=20),
    "robotics": GymFactory(env_id="FetchPickAndPlace-v4", modules=("gymnasium_robotics",), render_size=64),
}


def held() -> dict[str, float]:
    """Return what this process holds: descriptors, memory of its own, shared memory, threads and children."""
    me = psutil.Process()
    memory = me.memory_full_info()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "MB": (memory.rss - memory.shared) / 2**20,
        "shared MB": memory.shared / 2**20,
        "threads": threading.active_count(),
        "children": len(me.children(recursive=True)),
    }


class Killer(threading.Thread):
    """Kills a worker of the pool every ``every`` seconds, whatever it is doing."""

    def __init__(self, pool: EnvPool, every: float, kills: int | None) -> None:
        super().__init__(daemon=True)
        self._crew, self._every, self._left = pool._desk.crew, every, kills
        self.phases: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        """Kill until told to stop, or as often as asked for."""
        while self._left != 0 and not self.over.wait(self._every):
            with self._crew.lock:
                slot = random.choice(self._crew.slots)
                if slot.worker is None or slot.status.value not in ("idle", "busy"):
                    continue  # it is on its way back already
                os.kill(slot.worker.pid, signal.SIGKILL)
                self.phases[slot.status.value] += 1
            if self._left is not None:
                self._left -= 1
        self.over.set()


def main() -> None:
    """Play episodes until the time is over or the kills are done; then count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", choices=SIMULATORS, default="null")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--kills", type=int, help="end after so many, instead of after the minutes")
    parser.add_argument("--envs", type=int, default=4)
    options = parser.parse_args()
    config = PoolConfig(
        episode=EpisodeConfig(max_steps=25), restart=RestartPolicy(max_failures=50, first_delay_s=0.1, max_delay_s=1.0)
    )
    pool = EnvPool(SIMULATORS[options.simulator], options.envs, config)
    killer = Killer(pool, options.every, options.kills)
    end = time.monotonic() + (options.minutes * 60 if options.kills is None else 3600)
    asked = 0

    def episodes():
        nonlocal asked
        while time.monotonic() < end and not killer.over.is_set():
            yield InitialState(trial=asked % 40)
            asked += 1

    low, high = (np.clip(np.asarray(bound), -1, 1) for bound in (pool.spec.action_low, pool.spec.action_high))
    numbers: Counter[int] = Counter()
    endings: Counter[str] = Counter()
    killer.start()
    began, early = time.monotonic(), None
    for record in play(pool, lambda shown: np.random.uniform(low, high, (len(shown.slots), 4, len(low))), episodes()):
        numbers[record.number] += 1
        endings[record.failure.kind if record.failure else record.ending] += 1
        if early is None and time.monotonic() - began > 0.25 * (end - began):
            early = held()
    killer.over.set()
    killer.join()
    late, stats = held(), pool.stats()
    pool.close()
    print(f"{options.simulator}: {time.monotonic() - began:.0f} s, {asked} episodes asked for, {stats}")
    print(f"  kills of workers that were {dict(killer.phases)}; endings {dict(endings)}")
    print(f"  a quarter through {early}")
    print(f"  at the end        {late}")
    assert set(numbers.values()) == {1}, "an episode is on record twice"
    assert len(numbers) == asked == stats["episodes_begun"] == stats["episodes_closed"], "an episode is lost"
    left = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
    print("  none lost, none twice, no process left", flush=True)


main()
