"""From camera images to the six normalised channels of the fused backbone."""

import functools
import io
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from rlinf_plugins.core.errors import ConfigError, ObservationError

Resize = Literal["resize-naive", "letterbox", "resize-crop"]
Frame = npt.NDArray[np.uint8]

# Rounded to bfloat16, as the released checkpoints were trained with.
_MEANS = ((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5))
_STDS = ((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5))

_GREY = (127, 127, 127)
"""What letterboxing fills in: 0 after SigLIP's normalisation, to within half a level."""


class ImageProcessor:
    """Resizes, scales and normalises camera images twice: for DINOv2 and for SigLIP.

    Args:
        strategy: How a picture that is not square, or of another size, is brought to ``size``. The released models
            use ``"resize-naive"``.
        size: Side of the result in pixels.

    Raises:
        ConfigError: An unknown strategy.
    """

    def __init__(self, strategy: str = "resize-naive", size: int = 224) -> None:
        if strategy not in get_args(Resize):
            raise ConfigError(f"image_resize_strategy must be one of {', '.join(get_args(Resize))}, got {strategy!r}")
        self._strategy, self._size = strategy, size
        self._mean = torch.tensor([m for means in _MEANS for m in means]).view(6, 1, 1)
        self._std = torch.tensor([s for stds in _STDS for s in stds]).view(6, 1, 1)

    def __call__(self, frames: Sequence[Any]) -> torch.Tensor:
        """Process the images of one observation.

        Args:
            frames: RGB images, each a ``uint8`` array ``[H, W, 3]`` or a PIL image.

        Returns:
            ``[6 * images, size, size]`` float32.

        Raises:
            ObservationError: Wrong type, number of channels or dtype; the image's place is named.
        """
        return torch.cat([self._one(as_rgb(frame, f"image {i}")) for i, frame in enumerate(frames)])

    def _one(self, image: Image.Image) -> torch.Tensor:
        pixels = np.asarray(self._resize(image), dtype=np.uint8)
        unit = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255.0
        return (unit.repeat(2, 1, 1) - self._mean) / self._std

    def _resize(self, image: Image.Image) -> Image.Image:
        size, (width, height) = self._size, image.size
        if self._strategy == "letterbox":
            side = max(width, height)
            square = Image.new("RGB", (width + 2 * ((side - width) // 2), height + 2 * ((side - height) // 2)), _GREY)
            square.paste(image, ((side - width) // 2, (side - height) // 2))
            image = square
        if self._strategy == "resize-crop":
            short = min(width, height)
            scaled = (int(size * width / short), int(size * height / short))
            left, top = round((scaled[0] - size) / 2.0), round((scaled[1] - size) / 2.0)
            return _bicubic(image, scaled).crop((left, top, left + size, top + size))
        return _bicubic(image, (size, size))


def as_rgb(frame: Any, where: str) -> Image.Image:
    """Check one camera image and return it as a PIL image.

    Args:
        frame: ``uint8`` array ``[H, W, 3]`` or PIL image.
        where: Name of the image in the message.

    Raises:
        ObservationError: Anything else.
    """
    if isinstance(frame, Image.Image):
        if frame.mode != "RGB":
            raise ObservationError(f"{where} must be RGB, got a PIL image of mode {frame.mode!r}; convert it first")
        return frame
    array = frame.numpy(force=True) if isinstance(frame, torch.Tensor) else np.asarray(frame)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ObservationError(f"{where} must have shape [height, width, 3], got {list(array.shape)}")
    if array.dtype != np.uint8:
        raise ObservationError(f"{where} must be uint8 in [0, 255], got {array.dtype}; scale and cast it first")
    if min(array.shape[:2]) < 1:
        raise ObservationError(f"{where} is empty: shape {list(array.shape)}")
    return Image.fromarray(np.ascontiguousarray(array))


def libero_view(frame: Frame, size: int = 224, upright: bool = False) -> Frame:
    """Bring a LIBERO camera frame to what the released OFT checkpoints were trained on.

    Rotates by 180 degrees, passes through JPEG (the training data was stored that way) and resizes with Lanczos-3.

    Args:
        frame: ``[H, W, 3]`` uint8, as the simulator renders it.
        size: Side of the result in pixels.
        upright: The frame was rotated already, as ``rlinf_plugins.envs.libero`` does.
    """
    return _lanczos(_jpeg(np.ascontiguousarray(frame if upright else frame[::-1, ::-1])), size)


def centre_crop(frame: Frame, area: float = 0.9, size: int = 224) -> Frame:
    """Crop the centre and scale it, as at evaluation of checkpoints trained with random crops.

    Args:
        frame: ``[H, W, 3]`` uint8.
        area: Fraction of the *area* that stays; the side is its square root.
        size: Side of the result in pixels.

    Returns:
        ``[size, size, 3]`` uint8; sampled bilinearly on a grid whose corners are the crop's corners.
    """
    side = area**0.5
    pixels = frame.astype(np.float32) / np.float32(255.0)
    rows, columns = (_grid(length, side, size) for length in frame.shape[:2])
    mixed = _mix(_mix(pixels, rows, 0), columns, 1)
    levels: Frame = np.clip(np.trunc(mixed * np.float32(255.5)), 0, 255).astype(np.uint8)
    return levels


def _grid(length: int, side: float, size: int) -> npt.NDArray[np.float32]:
    start = (1.0 - side) / 2.0
    return ((start + side * np.arange(size) / (size - 1)) * (length - 1)).astype(np.float32)


def _mix(pixels: npt.NDArray[np.float32], at: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, pixels.shape[axis] - 1)
    weight = (at - low).reshape([-1 if i == axis else 1 for i in range(3)])
    below, above = pixels.take(low, axis), pixels.take(high, axis)
    mixed: npt.NDArray[np.float32] = (below + (above - below) * weight).astype(np.float32)
    return mixed


def _bicubic(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _lanczos(frame: Frame, size: int) -> Frame:
    """Resize with an antialiased Lanczos-3 kernel in float32; Pillow's rounds and clips between the two axes."""
    pixels = frame.astype(np.float32)
    rows, columns = (_lanczos_weights(length, size) for length in frame.shape[:2])
    mixed = np.einsum("pw,owc->opc", columns, np.einsum("oh,hwc->owc", rows, pixels))
    levels: Frame = np.clip(np.round(mixed), 0, 255).astype(np.uint8)
    return levels


@functools.cache
def _lanczos_weights(length: int, size: int) -> npt.NDArray[np.float32]:
    scale = length / size
    centres = (np.arange(size) + 0.5) * scale
    distance = (np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1.0)
    kernel = np.where(np.abs(distance) <= 3.0, np.sinc(distance) * np.sinc(distance / 3.0), 0.0)
    weights: npt.NDArray[np.float32] = (kernel / kernel.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights


def _jpeg(frame: Frame) -> Frame:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=95, subsampling="4:2:0")
    return np.asarray(Image.open(buffer), dtype=np.uint8)
