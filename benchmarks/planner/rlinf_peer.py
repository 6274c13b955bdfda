"""RLinf's own placement tool as a peer: loaded from a checkout outside this repository, fed with our profiles.

Only its search runs (``toolkits/auto_placement``); cluster and configuration classes it imports are stood in for, and
each component's cost is a table. ``mended`` lifts the upper end of its split loop by one, so that the last stage may
get a single device.
"""

import sys
import types
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.ranges import plan_from_ranges

LOOP = "range(1, gpu_num - 1)"
MODULES = ("fitter", "util", "node", "placement", "workflow", "auto_placement_worker")


class RLinf:
    """RLinf's search over cost tables.

    Args:
        checkout: Root of a checkout of RLinf.
        mended: Let the last stage have one device.
    """

    def __init__(self, checkout: Path, *, mended: bool = False) -> None:
        folder = checkout / "toolkits" / "auto_placement"
        if not folder.is_dir():
            raise SystemExit(f"{folder} is not there; give the root of a checkout of RLinf with --rlinf")
        for name in ("hydra", "rlinf", "rlinf.scheduler", "rlinf.utils", "rlinf.utils.placement"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["hydra"].main = lambda **options: lambda function: function
        sys.modules["rlinf.scheduler"].Cluster = object
        sys.modules["rlinf.utils.placement"].HybridComponentPlacement = object
        sys.modules["rlinf.utils.placement"].ModelParallelComponentPlacement = object
        loaded: dict[str, types.ModuleType] = {}
        for name in MODULES:
            text = (folder / f"{name}.py").read_text()
            if mended:
                text = text.replace(LOOP, "range(1, gpu_num)")
            module = types.ModuleType(name)
            sys.modules[name] = loaded[name] = module
            exec(compile(text, str(folder / f"{name}.py"), "exec"), module.__dict__)
        for name in MODULES:
            del sys.modules[name]
        self._modules = loaded

    def search(self, devices: int, items: int, costs: Mapping[str, Mapping[int, float]]) -> Any:
        """Return RLinf's schedule of a chain of components, each given as seconds per item by device count."""
        modules = self._modules
        modules["util"]._GLOBAL_CONFIG = Namespace(
            task_type="reasoning", total_gpus=devices, rollout_batch_size=items, components_config={}
        )

        class Table(modules["node"].ComponentNode):
            def __init__(self, role: str) -> None:
                self.role = role
                self._gpu_num_to_cost = dict(costs[role])

            def _init_profile_data(self) -> None:
                return

        class Worker(modules["auto_placement_worker"].AutoPlacementWorker):
            def get_node(self, name: str) -> Any:
                if name not in self._name_to_node_dict:
                    self._name_to_node_dict[name] = Table(name)
                return self._name_to_node_dict[name]

        names = list(costs)
        graph = {a: [b] for a, b in zip(names, names[1:], strict=False)} | {names[-1]: []}
        return Worker(None, None, graph).run()

    @staticmethod
    def plan(result: Any, flow: Flow, cluster: Cluster) -> Plan:
        """Return RLinf's schedule as a plan; it pipelines item by item."""
        ranges = {node.role: f"{numbers[0]}-{numbers[-1]}" for node, numbers in result.placement.items()}
        return plan_from_ranges(flow, cluster, ranges, items=1)
