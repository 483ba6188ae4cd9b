# SPDX-License-Identifier: Apache-2.0
"""Images as users have them -> (3, H, W) uint8 RGB, as :func:`cpvt_det.data.images.read_image` decodes them."""

import os

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cpvt_det.data.images import read_image, read_pillow
from cpvt_det.errors import DataError

ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
ORDERS = ("rgb", "bgr")


def read_input(image: ImageInput, channels: str | None = None) -> Tensor:
    """One image, however it comes.

    Args:
        image: the path of a file; an image of Pillow's; an array (H, W, 3), (H, W, 4), whose transparency is dropped, (H, W) or
            (H, W, 1) of uint8, or of uint16, whose high byte is taken; a tensor (3, H, W) uint8.
        channels: the order in arrays and tensors, "rgb" or "bgr". Arrays of colours need it; tensors are RGB without it.

    Returns:
        (3, H, W) uint8, RGB, on the CPU.

    Raises:
        DataError: a file that cannot be read; arrays and tensors of another shape or dtype; channels whose order is not told.
    """
    if channels is not None and channels not in ORDERS:
        raise DataError(f"channels is {channels!r}; 'rgb' or 'bgr'")
    if isinstance(image, str | os.PathLike):
        return read_image(os.path.expanduser(image))
    if isinstance(image, Image.Image):
        return read_pillow(image)
    if isinstance(image, np.ndarray):
        return _read_array(image, channels)
    if isinstance(image, Tensor):
        return _read_tensor(image, channels)
    raise DataError(f"{type(image).__name__} is no image; give a path, an image of Pillow's, an array, a tensor or a list of them")


def _read_array(array: np.ndarray, channels: str | None) -> Tensor:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        advice = "; several images go into a list" if array.ndim == 4 else ""
        raise DataError(f"an array should be (H, W, 3), (H, W, 4) or (H, W), got {array.shape}{advice}")
    if array.dtype not in (np.uint8, np.uint16):
        raise DataError(f"an array should hold uint8 or uint16, got {array.dtype}; (255 * x).round().astype('uint8') for [0, 1]")
    if array.shape[2] == 1:
        array = array.repeat(3, axis=2)
    elif channels is None:
        raise DataError("an array does not tell the order of its channels: give channels='rgb', or 'bgr' for images of OpenCV")
    array = array[:, :, 2::-1] if channels == "bgr" else array[:, :, :3]
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    return torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous()  # (H, W, 3) -> (3, H, W)


def _read_tensor(tensor: Tensor, channels: str | None) -> Tensor:
    if tensor.ndim != 3 or tensor.shape[0] != 3 or 0 in tensor.shape:
        advice = "; list(batch) for a batch" if tensor.ndim == 4 else ""
        raise DataError(f"a tensor should be (3, H, W), got {tuple(tensor.shape)}{advice}")
    if tensor.dtype != torch.uint8:
        raise DataError(f"a tensor should be uint8, got {tensor.dtype}; (255 * x).round().byte() for [0, 1]")
    return (tensor.flip(0) if channels == "bgr" else tensor).cpu()
