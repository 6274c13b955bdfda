"""RLinf's main ManiSkill task rebuilt from primitives: a Panda puts an object on a plate. Needs no download.

Registered as ``RlinfPutOnPlate-v1`` when imported. Imports ManiSkill: only the worker process does so.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import sapien
import torch
from mani_skill.agents.robots import Panda
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs import Actor, Pose

ENV_ID = "RlinfPutOnPlate-v1"

Variant = Literal["train", "object", "plate", "texture", "instruction"]
"""``train``, or what differs from training: other objects, plate positions, colours of table and plate, or words."""

_PLATE_RADIUS, _PLATE_HALF_HEIGHT = 0.07, 0.006
_CUPBOARD = -2.0  # objects that play no part lie there, out of sight
_HOLD_STEPS = 5
_REST_QPOS = (0.0, np.pi / 8, 0.0, -np.pi * 5 / 8, 0.0, np.pi * 3 / 4, np.pi / 4, 0.04, 0.04)
_ARM_LINKS = tuple(f"panda_link{index}" for index in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """An object that can be picked.

    Attributes:
        name: What the instruction calls it.
        shape: Box, or cylinder that stands upright.
        half_size: Half extents ``(x, y, z)`` in metres; a cylinder's are radius, radius and half height.
        colour: RGB in 0..1.
    """

    name: str
    shape: Literal["box", "cylinder"]
    half_size: tuple[float, float, float]
    colour: tuple[float, float, float]


_TRAIN_THINGS = (
    Thing(name="red cube", shape="box", half_size=(0.02, 0.02, 0.02), colour=(0.85, 0.1, 0.1)),
    Thing(name="green cube", shape="box", half_size=(0.018, 0.018, 0.018), colour=(0.1, 0.65, 0.2)),
    Thing(name="blue brick", shape="box", half_size=(0.03, 0.018, 0.018), colour=(0.1, 0.25, 0.85)),
    Thing(name="yellow can", shape="cylinder", half_size=(0.02, 0.02, 0.025), colour=(0.95, 0.8, 0.1)),
)
_UNSEEN_THINGS = (
    Thing(name="orange brick", shape="box", half_size=(0.03, 0.02, 0.016), colour=(0.95, 0.5, 0.05)),
    Thing(name="purple can", shape="cylinder", half_size=(0.018, 0.018, 0.03), colour=(0.5, 0.15, 0.7)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One variant of the task.

    Attributes:
        things: Objects to choose from; one task each.
        plate_y: Range of the plate's y coordinate in metres.
        table_colour: RGB.
        plate_colour: RGB.
        words: Instruction, with a place for the object's name.
    """

    things: tuple[Thing, ...] = _TRAIN_THINGS
    plate_y: tuple[float, float] = (0.08, 0.14)
    table_colour: tuple[float, float, float] = (0.45, 0.33, 0.22)
    plate_colour: tuple[float, float, float] = (0.9, 0.9, 0.95)
    words: str = "put the {} on the plate"


SETTINGS: dict[Variant, Setting] = {
    "train": Setting(),
    "object": Setting(things=_UNSEEN_THINGS),
    "plate": Setting(plate_y=(0.17, 0.22)),
    "texture": Setting(table_colour=(0.2, 0.35, 0.4), plate_colour=(0.95, 0.75, 0.8)),
    "instruction": Setting(words="move the {} over to the dish and leave it there"),
}


@register_env(ENV_ID, max_episode_steps=80)
class PutOnPlateEnv(BaseEnv):  # type: ignore[misc]
    """A Panda at a table with one object and a plate.

    Solved when the object rests on the plate and is let go. ``info`` has ``success``, ``is_src_obj_grasped``,
    ``consecutive_grasp`` (held for 5 steps), ``src_on_target``. Which object is used is chosen at a reset with
    ``options={"task": index}``; everything else is a function of the seed.

    Args:
        variant: The setting.
        hide_arm: Do not draw the robot's upper arm, two thirds of a software renderer's work.
        **kwargs: ManiSkill's own.
    """

    SUPPORTED_ROBOTS = ("panda",)
    SUPPORTED_REWARD_MODES = ("normalized_dense", "dense", "sparse", "none")
    agent: Panda

    def __init__(self, *args: Any, variant: Variant = "train", hide_arm: bool = False, **kwargs: Any) -> None:
        self.setting = SETTINGS[variant]
        self.task_names = [self.setting.words.format(thing.name) for thing in self.setting.things]
        self._hide_arm = hide_arm
        super().__init__(*args, robot_uids="panda", **kwargs)

    @property
    def _default_sensor_configs(self) -> list[CameraConfig]:
        pose = sapien_utils.look_at(eye=(0.28, 0.0, 0.42), target=(-0.1, 0.03, 0.02))
        return [CameraConfig("3rd_view_camera", pose, 128, 128, 1.1, 0.01, 10)]

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        pose = sapien_utils.look_at(eye=(0.5, 0.5, 0.6), target=(-0.15, 0.0, 0.1))
        return CameraConfig("render_camera", pose, 512, 512, 1.0, 0.01, 10)

    def _load_agent(self, options: dict[str, Any]) -> None:
        super()._load_agent(options, sapien.Pose(p=[-0.615, 0, 0]))

    def _load_scene(self, options: dict[str, Any]) -> None:
        self._box("table", (0.75, 0.9, 0.2), self.setting.table_colour, sapien.Pose([-0.2, 0, -0.2]))
        self._box("cupboard", (1.0, 1.0, 0.05), (0.1, 0.1, 0.1), sapien.Pose([0, 0, _CUPBOARD - 0.05]))
        self.plate = self._build_plate()
        self.things = [self._build_thing(index, thing) for index, thing in enumerate(self.setting.things)]
        self._heights = torch.tensor([t.half_size[2] for t in self.setting.things], device=self.device)
        if self._hide_arm:
            for link in self.agent.robot.links:
                if link.name in _ARM_LINKS:
                    for part in link._objs:
                        part.entity.find_component_by_type(sapien.render.RenderBodyComponent).visibility = 0.0

    def _box(self, name: str, half_size: Any, colour: Any, pose: sapien.Pose) -> Actor:
        builder = self.scene.create_actor_builder()
        builder.add_box_collision(half_size=half_size)
        builder.add_box_visual(half_size=half_size, material=_paint(colour))
        builder.initial_pose = pose
        return builder.build_static(name=name)

    def _build_plate(self) -> Actor:
        builder = self.scene.create_actor_builder()
        upright = sapien.Pose(q=[np.sqrt(0.5), 0, np.sqrt(0.5), 0])  # a cylinder's axis is x
        size = {"radius": _PLATE_RADIUS, "half_length": _PLATE_HALF_HEIGHT}
        builder.add_cylinder_collision(pose=upright, **size)
        builder.add_cylinder_visual(pose=upright, material=_paint(self.setting.plate_colour), **size)
        builder.initial_pose = sapien.Pose(p=[0, 0.1, _PLATE_HALF_HEIGHT])
        return builder.build_kinematic(name="plate")

    def _build_thing(self, index: int, thing: Thing) -> Actor:
        builder = self.scene.create_actor_builder()
        material = _paint(thing.colour)
        if thing.shape == "box":
            builder.add_box_collision(half_size=thing.half_size)
            builder.add_box_visual(half_size=thing.half_size, material=material)
        else:
            upright = sapien.Pose(q=[np.sqrt(0.5), 0, np.sqrt(0.5), 0])
            size = {"radius": thing.half_size[0], "half_length": thing.half_size[2]}
            builder.add_cylinder_collision(pose=upright, **size)
            builder.add_cylinder_visual(pose=upright, material=material, **size)
        builder.initial_pose = sapien.Pose(p=[0.2 * index, 0.5, _CUPBOARD + thing.half_size[2]])
        return builder.build(name=f"thing-{index}")

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        rng, count = self._batched_episode_rng[env_idx.cpu().numpy()], len(env_idx)
        if not hasattr(self, "chosen"):
            self.chosen = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
            self._grasped = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
            self._held_steps = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.chosen[env_idx] = torch.as_tensor(options.get("task", 0), device=self.device)
        self._grasped[env_idx], self._held_steps[env_idx] = False, 0
        drawn = torch.as_tensor(rng.uniform(0, 1, 5), dtype=torch.float32, device=self.device).reshape(count, 5)
        spot = torch.stack([-0.16 + 0.12 * drawn[:, 0], -0.14 + 0.12 * drawn[:, 1]], dim=1)
        angle = (drawn[:, 2] - 0.5) * np.pi / 2
        for index, thing in enumerate(self.things):
            here = self.chosen[env_idx] == index
            parked = torch.tensor([0.2 * index, 0.5], device=self.device)
            xy = torch.where(here[:, None], spot, parked)
            z = torch.where(here, self._heights[index], _CUPBOARD + self._heights[index])
            q = torch.stack([torch.cos(angle / 2), *[torch.zeros_like(angle)] * 2, torch.sin(angle / 2)], dim=1)
            thing.set_pose(Pose.create_from_pq(torch.cat([xy, z[:, None]], dim=1), q))
        low, high = self.setting.plate_y
        plate = torch.stack([-0.14 + 0.1 * drawn[:, 3], low + (high - low) * drawn[:, 4]], dim=1)
        level = torch.full((count, 1), _PLATE_HALF_HEIGHT, device=self.device)
        self.plate.set_pose(Pose.create_from_pq(torch.cat([plate, level], dim=1)))
        noise = np.asarray(rng.normal(0, 0.02, len(_REST_QPOS))).reshape(count, -1)
        noise[:, -2:] = 0.0
        self.agent.reset(np.asarray(_REST_QPOS) + noise)

    def _after_control_step(self) -> None:
        grasped = torch.zeros_like(self._grasped)
        for index in torch.unique(self.chosen).tolist():
            grasped = torch.where(self.chosen == index, self.agent.is_grasping(self.things[index]), grasped)
        self._grasped = grasped
        self._held_steps = torch.where(grasped, self._held_steps + 1, 0)

    def source_position(self) -> torch.Tensor:
        """Return the position of the object that plays, ``[envs, 3]`` in metres."""
        if self.num_envs == 1:
            position: torch.Tensor = self.things[int(self.chosen[0])].pose.p
            return position
        positions = torch.stack([thing.pose.p for thing in self.things])
        return positions[self.chosen, torch.arange(self.num_envs, device=self.device)]

    def evaluate(self) -> dict[str, torch.Tensor]:
        """Return success and the grasp; changes nothing."""
        offset = self.source_position() - self.plate.pose.p
        flat = torch.linalg.norm(offset[:, :2], dim=1) <= _PLATE_RADIUS - 0.015
        resting = torch.abs(offset[:, 2] - _PLATE_HALF_HEIGHT - self._heights[self.chosen]) <= 0.008
        on_plate = flat & resting
        return {
            "is_src_obj_grasped": self._grasped,
            "consecutive_grasp": self._held_steps >= _HOLD_STEPS,
            "src_on_target": on_plate,
            "success": on_plate & ~self._grasped,
        }

    def get_language_instruction(self) -> list[str]:
        """Return the instruction of each environment."""
        return [self.task_names[index] for index in self.chosen.tolist()]

    def _get_obs_extra(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        extra = {"tcp_pose": self.agent.tcp.pose.raw_pose}
        if self.obs_mode_struct.use_state:
            extra["source"] = self.source_position()
            extra["plate"] = self.plate.pose.p
            extra["grasped"] = self._grasped.float()
        return extra

    def compute_dense_reward(self, obs: Any, action: torch.Tensor, info: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return reach (0..1), grasp (1) and carry (0..1) while unsolved, 5 when solved; ``[envs]``."""
        source = self.source_position()
        reach = 1 - torch.tanh(5 * torch.linalg.norm(source - self.agent.tcp.pose.p, dim=1))
        carry = 1 - torch.tanh(5 * torch.linalg.norm(source - self.plate.pose.p, dim=1))
        reward = reach + (1 + carry) * (self._grasped | info["src_on_target"])
        return torch.where(info["success"], 5.0, reward)

    def compute_normalized_dense_reward(self, obs: Any, action: torch.Tensor, info: dict[str, Any]) -> torch.Tensor:
        """Return the dense reward divided by its largest value; ``[envs]``."""
        return self.compute_dense_reward(obs, action, info) / 5

    def get_state_dict(self) -> dict[str, Any]:
        """Return ManiSkill's state with the task's own counters."""
        own = {"chosen": self.chosen, "grasped": self._grasped, "held_steps": self._held_steps}
        return {**super().get_state_dict(), "put_on_plate": {name: value.clone() for name, value in own.items()}}

    def set_state_dict(self, state: dict[str, Any], env_idx: torch.Tensor | None = None) -> None:
        """Restore what :meth:`get_state_dict` gave."""
        own = state["put_on_plate"]
        self.chosen, self._grasped, self._held_steps = own["chosen"], own["grasped"], own["held_steps"]
        super().set_state_dict({name: value for name, value in state.items() if name != "put_on_plate"}, env_idx)


def scripted_action(env: PutOnPlateEnv) -> np.ndarray:
    """Return the next action of a controller that solves the task; for ``pd_ee_delta_pos`` and ``pd_ee_delta_pose``.

    It looks at the simulator's state, not at images: for demonstrations and for tests that the task can be solved.

    Args:
        env: The one environment, not vectorised.

    Returns:
        float32 ``[action_dim]`` within the bounds.
    """
    tcp, source = env.agent.tcp.pose.p[0].cpu().numpy(), env.source_position()[0].cpu().numpy()
    plate, height = env.plate.pose.p[0].cpu().numpy(), float(env._heights[env.chosen[0]])
    grasped = bool(env._grasped[0])
    over_plate = np.linalg.norm(source[:2] - plate[:2]) < 0.02
    opening = float(env.agent.robot.get_qpos()[0, -1])
    closing = np.linalg.norm(tcp - source) < 0.012
    grip = 1.0
    if grasped and not over_plate:
        grip = -1.0
        lifted = source[2] > 0.06
        goal = np.array([plate[0], plate[1], 0.09]) if lifted else np.array([tcp[0], tcp[1], 0.12])
    elif grasped or (over_plate and opening < 0.035 and source[2] < 0.1):
        low = source[2] - height - 2 * _PLATE_HALF_HEIGHT < 0.004
        grip, goal = (1.0, tcp) if low else (-1.0, np.array([plate[0], plate[1], tcp[2] - 0.03]))
    elif over_plate:
        goal = tcp + np.array([0, 0, 0.05])
    elif np.linalg.norm(tcp[:2] - source[:2]) > 0.02:
        goal = np.array([source[0], source[1], source[2] + 0.06])
    else:
        goal, grip = source, -1.0 if closing else 1.0
    action = np.zeros(env.single_action_space.shape[0], np.float32)
    action[:3] = np.clip((goal - tcp) / 0.1, -1, 1)
    action[-1] = grip
    return action


def _paint(colour: tuple[float, float, float]) -> sapien.render.RenderMaterial:
    material = sapien.render.RenderMaterial()
    material.set_base_color([*colour, 1.0])
    return material
