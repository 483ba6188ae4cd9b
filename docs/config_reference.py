# SPDX-License-Identifier: Apache-2.0
"""``docs/config.md``, from the defaults in ``cpvt_det/config.py`` and the comments beside them."""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from tabulate import tabulate

import cpvt_det.config

DOCUMENT = Path(__file__).resolve().parent / "config.md"
HEAD = """\
# Every config key

A config is YAML; `_BASE_` names a file that it starts from, by its path from this one or by its name among the package's, and
KEY VALUE pairs on the command line override it. Names and meanings are detectron2's where detectron2 has the key. A key that
cannot apply to what the config chooses, such as `FOCAL_ALPHA` under softmax, is refused unless it has its default (those of our
ResNets are ignored by another backbone, with a warning); in the config of an earlier run or model it is ignored, with a
warning. This page is written by `python docs/config_reference.py` from `cpvt_det/config.py`.
"""


COPIED = "MODEL.POSITION."
"""Keys that MODEL.BACKBONE has too, with the same meanings."""


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
    described = {**{f"MODEL.BACKBONE.{name[6:]}": text for name, text in described.items() if name.startswith(COPIED)}, **described}
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
    """The page: a table for each group of keys."""
    groups: dict[str, list[Key]] = {}
    for key in find_keys():
        groups.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = [HEAD]
    for group, keys in groups.items():
        rows = [(f"`{key.name}`", f"`{key.default!r}`", key.comment.replace("|", "\\|")) for key in keys]
        parts.append(f"## {group or 'The run'}\n\n" + tabulate(rows, ("key", "default", "meaning"), tablefmt="pipe") + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
