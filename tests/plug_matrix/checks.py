# SPDX-License-Identifier: Apache-2.0
"""What must hold of every plugged model: each check is a column of the table and a test."""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import padding_mask_of
from cpvt_det.plug.attach import add_peg, remove_peg
from cpvt_det.plug.hooks import PlugError
from cpvt_det.position.peg import PEGDetection
from plug_matrix.examples import Example, tensors, valid_sizes


def plugged(example: Example, trained: bool = True, **options: Any) -> nn.Module:
    """The example's model with a PEG that does something."""
    model = add_peg(example.model(), **example.options, **options)
    if trained:
        for name, parameter in model.named_parameters():
            if ".peg." in f".{name}":
                nn.init.uniform_(parameter, 0.2, 1.0)
    return model


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def close(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, tuple[int, int], Tensor]]]:
    """What every PEG is given and gives: tokens, mask, shape, result."""
    calls: list[tuple[Tensor, Tensor, tuple[int, int], Tensor]] = []
    pegs = [module for module in model.modules() if isinstance(module, PEGDetection)]
    hooks = [peg.register_forward_hook(lambda _, args, output: calls.append((*args, output))) for peg in pegs]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def built(example: Example) -> bool:
    """The PEG is there and takes part."""
    model = plugged(example)
    with recorded(model) as calls:
        example.run(model, example.sizes[0])
    return bool(calls)


def zero_init(example: Example) -> bool:
    """A fresh PEG changes no output bit, in evaluation and in training."""
    for training in (False, True):
        model = example.model().train(training)
        torch.manual_seed(1)
        before = example.run(model, example.sizes[0])
        model = add_peg(example.model().train(training), **example.options)
        torch.manual_seed(1)
        if not equal(before, example.run(model, example.sizes[0])):
            return False
    return True


def trains(example: Example, steps: int = 20) -> bool:
    """Gradients reach every parameter of the PEG by the second step, and the loss falls."""
    model = add_peg(example.model(), **example.options).train()
    pegs = {name: parameter for name, parameter in model.named_parameters() if ".peg." in f".{name}"}
    optimizer = torch.optim.Adam(pegs.values(), lr=0.02)
    wanted = [
        torch.randn(output.shape, generator=torch.Generator().manual_seed(2)) for output in example.run(model, example.sizes[0])
    ]
    losses = []
    for step in range(steps):
        torch.manual_seed(3)  # dropout of the model's own
        outputs = example.run(model, example.sizes[0])
        loss = sum((a - b).square().mean() for a, b in zip(outputs, wanted, strict=True))
        optimizer.zero_grad()
        loss.backward()
        if step == 1 and not all(parameter.grad is not None and parameter.grad.any() for parameter in pegs.values()):
            return False
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[-1] < losses[0]


def removes(example: Example) -> bool:
    """After ``remove_peg`` outputs, keys and their order, hooks and attributes are what they were."""

    def hooks(model: nn.Module) -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    model = example.model()
    before = example.run(model, example.sizes[0])
    keys, hooked, attributes = list(model.state_dict()), hooks(model), [sorted(vars(module)) for module in model.modules()]
    for position in ("keep", "replace"):
        try:
            add_peg(model, position=position, **example.options)
        except PlugError as error:
            if "nothing to replace" not in str(error):
                raise
            continue
        example.run(model, example.sizes[0])
        remove_peg(model)
        same = keys == list(model.state_dict()) and hooked == hooks(model)
        if not same or attributes != [sorted(vars(module)) for module in model.modules()]:
            return False
        if not equal(before, example.run(model, example.sizes[0])):
            return False
    return True


def state_dict(example: Example) -> bool:
    """The state dict only gains keys with ``.peg.``, and brings the PEG back."""
    model = plugged(example)
    state = model.state_dict()
    bare = example.model()
    gained = set(state) - set(bare.state_dict())
    back = add_peg(bare, weights=state, **example.options)
    back.load_state_dict(state)
    same = equal(example.run(model, example.sizes[0]), example.run(back, example.sizes[0]))
    return same and bool(gained) and all(".peg." in f".{key}" for key in gained)


def copies(example: Example) -> bool:
    """A deep copy and an unpickled copy, of a model that can be pickled without PEG, use their own PEG, on their own grid."""
    model = plugged(example)
    first, last = example.sizes[0], example.sizes[-1]
    expected = {size: example.run(model, size) for size in (last, first)}
    bare = example.model()
    example.run(bare, first)  # transformers' models record outputs by closures after a first call
    for other in (copy.deepcopy(model), *([_pickled(model)] if _is_picklable(bare) else [])):
        if not equal(expected[last], example.run(other, last)) or not equal(expected[first], example.run(model, first)):
            return False
        for module in other.modules():
            if isinstance(module, PEGDetection):
                nn.init.zeros_(module.scale)
        if equal(expected[first], example.run(other, first)) or not equal(expected[first], example.run(model, first)):
            return False
    return True


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _is_picklable(model: nn.Module) -> bool:
    try:
        _pickled(model)
    except AttributeError as error:
        return "local object" not in str(error)
    return True


def compiles(example: Example, bare: bool = True, backend: str = "aot_eager") -> bool | None:
    """``torch.compile``, in one graph unless the ``bare`` model needs several; ``None`` where not even that compiles."""
    for one_graph in (True, False) if bare else (True,):
        passed = _converts(example, bare, lambda model, *_, f=one_graph: torch.compile(model, backend=backend, fullgraph=f))
        if passed is not None:
            return passed
    return None


def exports(example: Example, bare: bool = True) -> bool | None:
    """``torch.export``; ``None`` where not even the ``bare`` model can be exported."""
    return _converts(example, bare, lambda model, args, kwargs: torch.export.export(model, args, kwargs).module())


def _converts(example: Example, bare: bool, convert: Callable[[nn.Module, tuple, dict[str, Any]], Callable]) -> bool | None:
    def outputs(model: nn.Module) -> list[Tensor]:
        torch._dynamo.reset()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            converted = convert(model, *example.inputs(example.sizes[0]))
            args, kwargs = example.inputs(example.sizes[0])  # again: some models write into them
            return tensors(converted(*args, **kwargs))

    if bare:
        try:
            outputs(example.model())
        except Exception:
            return None
    model = plugged(example)
    return close(example.run(model, example.sizes[0]), outputs(model))


def sizes(example: Example) -> bool:
    """At each size the PEG's grid has the shape of the image, height first."""
    model = plugged(example)
    for size in example.sizes:
        with recorded(model) as calls:
            example.run(model, size)
        grids = [tuple(-(-side // 2**k) for side in size) for k in range(8)]
        if not calls or not all(tuple(shape) in grids for _, _, shape, _ in calls):
            return False
    return True


def padding(example: Example) -> bool | None:
    """The PEG gets the padding of each image, and gives padded tokens back unchanged; ``None`` without a mask."""
    model = plugged(example)
    size = example.sizes[0]
    with recorded(model) as calls:
        example.run(model, size)
    if not any(mask.any() for _, mask, _, _ in calls):
        return None
    for tokens, mask, shape, result in calls:
        expected = padding_mask_of(valid_sizes(size, -(-size[0] // shape[0])), shape).flatten(1)
        moved = (result != tokens).any(-1)
        if not torch.equal(mask, expected) or not torch.equal(moved, ~mask):
            return False
    return True


CHECKS: dict[str, Callable[[Example], bool | None]] = {
    "built": built,
    "zero-init equal": zero_init,
    "trained 20 steps": trains,
    "removed equal": removes,
    "state dict": state_dict,
    "copies": copies,
    "compile": compiles,
    "export": exports,
    "sizes": sizes,
    "padding": padding,
}


def check(example: Example, name: str) -> str:
    """``yes``, ``no``, ``-`` where the model has nothing of the kind, or the error."""
    try:
        passed = CHECKS[name](example)
    except Exception as error:
        return f"{type(error).__name__}"
    return {True: "yes", False: "no", None: "-"}[passed]
