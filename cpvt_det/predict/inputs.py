# SPDX-License-Identifier: Apache-2.0
"""Turn images of any kind into (3, H, W) uint8 RGB, as :func:`cpvt_det.data.images.read_image` decodes them."""

import os

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cpvt_det.common.errors import DataError
from cpvt_det.data.images import read_image, read_pillow

ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
ORDERS = ("rgb", "bgr")


def read_input(image: ImageInput, channels: str | None = None) -> Tensor:
    """Read one image.

    Args:
        image: path of a file; a PIL image; a tensor (3, H, W) uint8; or an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of uint8
            or uint16. Transparency is dropped, and from uint16 only the high byte is used.
        channels: order of the channels in arrays and tensors, "rgb" or "bgr". Required for colour arrays; the default of tensors is
            "rgb".

    Returns:
        (3, H, W) uint8, RGB, on the CPU.

    Raises:
        DataError: a file that cannot be read; arrays and tensors of an unsupported shape or dtype; a colour array without
            ``channels``.
    """
    if channels is not None and channels not in ORDERS:
        raise DataError(f"channels must be 'rgb' or 'bgr', got {channels!r}")
    if isinstance(image, str | os.PathLike):
        return read_image(os.path.expanduser(image))
    if isinstance(image, Image.Image):
        return read_pillow(image)
    if isinstance(image, np.ndarray):
        return _read_array(image, channels)
    if isinstance(image, Tensor):
        return _read_tensor(image, channels)
    raise DataError(f"{type(image).__name__} is not an image; pass a path, a PIL image, an array, a tensor or a list of these")


def _read_array(array: np.ndarray, channels: str | None) -> Tensor:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        advice = "; pass several images as a list" if array.ndim == 4 else ""
        raise DataError(f"an array must be (H, W, 3), (H, W, 4) or (H, W), got {array.shape}{advice}")
    if array.dtype not in (np.uint8, np.uint16):
        raise DataError(
            f"an array must be uint8 or uint16, got {array.dtype}; convert values in [0, 1] by (255 * x).round().astype('uint8')"
        )
    if array.shape[2] == 1:
        array = array.repeat(3, axis=2)
    elif channels is None:
        raise DataError("an array does not tell the order of its channels: pass channels='rgb', or 'bgr' for images from OpenCV")
    array = array[:, :, 2::-1] if channels == "bgr" else array[:, :, :3]
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    return torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous()  # (H, W, 3) -> (3, H, W)


def _read_tensor(tensor: Tensor, channels: str | None) -> Tensor:
    if tensor.ndim != 3 or tensor.shape[0] != 3 or 0 in tensor.shape:
        advice = "; pass a batch as list(batch)" if tensor.ndim == 4 else ""
        raise DataError(f"a tensor must be (3, H, W), got {tuple(tensor.shape)}{advice}")
    if tensor.dtype != torch.uint8:
        raise DataError(f"a tensor must be uint8, got {tensor.dtype}; convert values in [0, 1] by (255 * x).round().byte()")
    return (tensor.flip(0) if channels == "bgr" else tensor).cpu()
