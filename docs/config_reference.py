# SPDX-License-Identifier: Apache-2.0
"""``docs/config.md``, from the defaults in ``cpvt_det/config.py`` and the comments beside them."""

import ast
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

import cpvt_det.config
from cpvt_det.builders import DETECTOR_REGISTRY
from cpvt_det.common.registry import PartRegistry
from cpvt_det.losses import CLASSIFICATION_REGISTRY
from cpvt_det.models import BACKBONE_REGISTRY, NECK_REGISTRY, QUERY_REGISTRY
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.position.encoding import FACTS, POSITION_REGISTRY

DOCUMENT = Path(__file__).resolve().parent / "config.md"
HEAD = """\
# Every config key

A config is YAML; `_BASE_` names a file that it starts from, by its path from this one or by its name among the package's, and
KEY VALUE pairs on the command line override it. Names and meanings are detectron2's where detectron2 has the key. The nodes of
parts take what their part takes (last section); other options are refused. This page is written by
`python docs/config_reference.py` from `cpvt_det/config.py` and from the parts themselves.
"""
PARTS_HEAD = """\
## Options of parts

Keys that stand in a part's node beside its `NAME`, with their defaults. Those of a sum stand under the name of each:
`MODEL.POSITION: {NAME: sine+peg, PEG: {ZERO_INIT: True}}`. `None` takes back what a base file has set.
"""
GIVEN = {"num_classes", "map_channels", "map_strides", "needs_references", "num_queries", "num_logits", "prior_probability", "name"}
"""What the model gives a part, beside what an encoding is given."""


@dataclass(frozen=True)
class Key:
    """One key of the config: its full name, its default and what the source says beside it."""

    name: str
    default: Any
    comment: str


def find_keys() -> list[Key]:
    """All keys, in the order of the config."""
    source = Path(cpvt_det.config.__file__).read_text(encoding="utf-8")
    comments = _comments(source)
    cfg = cpvt_det.config.get_cfg()
    described = {}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            described |= {name: comments.get(line, "") for name, line in _assignments(function)}
    return [Key(name, _value(cfg, name), described[name]) for name in cpvt_det.config.key_names(cfg) if name in described]


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Full names of what a function sets in the config, and the line; ``cfg.MODEL = model = CfgNode()`` names a short form."""
    short = {"cfg": "", "model": "MODEL"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            names = [_dotted(target) for target in node.targets if isinstance(target, ast.Attribute)]
            full = [".".join(part for part in (short[base], rest) if part) for base, _, rest in names if base in short]
            short.update({target.id: name for target in node.targets if isinstance(target, ast.Name) for name in full})
            yield from ((name, node.end_lineno or node.lineno) for name in full)


def _dotted(node: ast.Attribute) -> tuple[str, str, str]:
    return ast.unparse(node).partition(".")


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _value(cfg: CfgNode, name: str) -> Any:
    for part in name.split("."):
        cfg = cfg[part]
    return cfg


def document() -> str:
    """The page: a list for each group of keys."""
    groups: dict[str, list[Key]] = {}
    for key in find_keys():
        groups.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = [HEAD]
    for group, keys in groups.items():
        lines = "\n".join(f"- `{key.name}` `{key.default!r}`: {key.comment}" for key in keys)
        parts.append(f"## {group or 'The run'}\n\n{lines}\n")
    return "\n".join([*parts, PARTS_HEAD, *_options_of_parts()])


def _options_of_parts() -> Iterator[str]:
    """For each node and part of ours, its options: name, default, and the sentence of its docstring."""
    shared = {key.lower() for key in cpvt_det.config.get_cfg().MODEL.BACKBONE} | {"checkpointing"}
    for node, registry, given in (
        ("DETECTOR", DETECTOR_REGISTRY, set()),
        ("BACKBONE", BACKBONE_REGISTRY, shared),
        ("NECK", NECK_REGISTRY, GIVEN | {"num_levels", "mask_padding", "channels"}),
        ("POSITION", POSITION_REGISTRY, set(FACTS)),
        ("QUERIES", QUERY_REGISTRY, GIVEN | {"channels"}),
        ("CRITERION.CLASSIFICATION", CLASSIFICATION_REGISTRY, GIVEN),
    ):
        takers: dict[str, list[str]] = {}
        for name in registry.names:
            for line in _options(registry, name, given) if "+" not in name and _is_ours(registry.find(name)) else ():
                takers.setdefault(line, []).append(f"`{name}`")
        lines = [f"- {line} ({', '.join(names[:2])}{', ...' * (len(names) > 2)})" for line, names in takers.items()]
        if lines:
            nodes = f"`MODEL.{node}`" + (" and `MODEL.BACKBONE.POSITION`" if node == "POSITION" else "")
            yield "\n".join([f"{nodes}:", "", *lines, ""])


def _is_ours(builder: Callable[..., Any]) -> bool:
    """Whether a part is of the package, and not of the studies, which tests import too."""
    parts = [builder.func, *builder.keywords.values()] if isinstance(builder, functools.partial) else [builder]
    return all(getattr(part, "__module__", "cpvt_det").startswith("cpvt_det") for part in parts)


def _options(registry: PartRegistry, name: str, given: set[str]) -> Iterator[str]:
    """Each option of a part: its key, its default, and what the docstring of its builder says of it."""
    builder = registry.find(name)
    texts = _arguments(builder)
    for option, parameter in inspect.signature(builder).parameters.items():
        if option in registry.parameters(name) - given and parameter.default is not parameter.empty:
            yield f"`{option.upper()}` {parameter.default!r}: {texts[option]}"
            if option == "denoising":  # the builder makes the module
                texts |= _arguments(ContrastiveDenoising)
                yield from (f"`{key.upper()}` {value!r}: {texts[key]}" for key, value in (("label_noise", 0.5), ("box_noise", 1.0)))


def _arguments(builder: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a class or function says of each of its arguments, those of ``as in`` another class too."""
    while isinstance(builder, functools.partial):
        builder = builder.func
    block = re.search(r"^Args:\n((?:    .*\n|\n)+)", (inspect.getdoc(builder) or "") + "\n", re.M)
    found = {}
    for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", block[1] if block else "", re.M):
        text = " ".join(text.split()).rstrip(".")
        inherited = _arguments(builder.__base__) if "as in :class:" in text and inspect.isclass(builder) else {}
        for name in names.split(", "):
            if name in inherited:
                found[name] = inherited[name]
            else:
                found[name] = re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"`\1`", text.partition("; ``None``")[0]).replace("``", "`")
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
