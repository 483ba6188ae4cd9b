# SPDX-License-Identifier: Apache-2.0
"""Parts of a model by name, as configs give them: ``backbone``, ``encoder``, ``transformer.encoder.layers.0``, ``class_embed``."""

from collections.abc import Iterable, Sequence

from torch import nn

from cpvt_det.errors import UnknownNameError


def belongs_to_part(name: str, part: str) -> bool:
    """Whether a module or parameter of a detector is a part, or lies in it.

    Args:
        name: name in ``named_modules`` or ``named_parameters``.
        part: name of a module or parameter; ``transformer.`` may be omitted.
    """
    return f"{name}.".startswith((f"{part}.", f"transformer.{part}."))


def require_parts(model: nn.Module, parts: Iterable[str], what: str) -> None:
    """Refuse names of parts without any parameter.

    Args:
        model: a detector.
        parts: names, as of :func:`belongs_to_part`.
        what: purpose of the names, for the error.

    Raises:
        UnknownNameError: with the parts there are.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(belongs_to_part(name, part) for name in names):
            known = {name.removeprefix("transformer.").partition(".")[0] for name in names}
            raise UnknownNameError(f"part of the model ({what})", part, known)


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Take the gradients of parts away.

    Args:
        model: a detector, changed in place.
        parts: names, as of :func:`belongs_to_part`.

    Raises:
        UnknownNameError: a name of no part.
    """
    require_parts(model, parts, "frozen")
    for name, parameter in model.named_parameters():
        if any(belongs_to_part(name, part) for part in parts):
            parameter.requires_grad_(False)
