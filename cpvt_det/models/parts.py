# SPDX-License-Identifier: Apache-2.0
"""Parts of a model by name, as configs give them: ``backbone``, ``encoder``, ``transformer.encoder.layers.0``, ``class_embed``."""

from collections.abc import Iterable, Sequence

from torch import nn

from cpvt_det.errors import UnknownNameError


def in_part(name: str, part: str) -> bool:
    """Whether a module or parameter of a detector is a part or in it.

    Args:
        name: as in ``named_modules`` and ``named_parameters``.
        part: the name of a module or parameter, where ``transformer.`` may be left out.
    """
    return f"{name}.".startswith((f"{part}.", f"transformer.{part}."))


def require_parts(model: nn.Module, parts: Iterable[str], what: str) -> None:
    """Refuse names of parts without any parameter.

    Args:
        model: a detector.
        parts: names, as of :func:`in_part`.
        what: they are for.

    Raises:
        UnknownNameError: with the parts there are.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(in_part(name, part) for name in names):
            known = {name.removeprefix("transformer.").partition(".")[0] for name in names}
            raise UnknownNameError(f"part of the model ({what})", part, known)


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Take the gradients of parts away.

    Args:
        model: a detector, changed in place.
        parts: names, as of :func:`in_part`.

    Raises:
        UnknownNameError: a name of no part.
    """
    require_parts(model, parts, "frozen")
    for name, parameter in model.named_parameters():
        if any(in_part(name, part) for part in parts):
            parameter.requires_grad_(False)
