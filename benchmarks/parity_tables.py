# SPDX-License-Identifier: Apache-2.0
"""Figures of the parity comparisons, the figures in docs/parity.md, and the tables of the record."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LABELS = ("model", "dtype", "code", "loss", "what")
"""Columns of the tables in docs/parity.md that name a row."""
FORMATS = {
    "matchings": "d",
    "tensors": "d",
    "with gradient": "d",
    "largest value": ".3g",
    "largest logit": ".2f",
    "total loss": ".2f",
}
FORMATS |= {"norm of all": ".2f", "spread": ".1e"}


LEGEND = """`difference` is the largest absolute one of ours to the peer's; `relative` is it over the largest value of the peer's,
for gradients over the norm of all; `docs/parity.md` is what stood there when this was run. Differences that are deliberate, and
explained there, are marked *. Shapes are layers, images, queries, classes; of losses, layers; of gradients and matchings, their
number."""


@dataclass
class Figure:
    """One figure.

    Args:
        peer: heading of the section of docs/parity.md.
        labels: cells that name its row there.
        column: heading of its column there.
        value: largest absolute difference; for a size, the size.
        shape: shape of the compared tensor; ``None`` for a size.
        relative: difference divided by the largest value of the peer; for gradients, by the norm of all of them.
        deliberate: True for a difference that docs/parity.md explains.
        stated: figure in docs/parity.md; empty if there is none.
    """

    peer: str
    labels: dict[str, str]
    column: str
    value: float
    shape: list[int] | None = None
    relative: float | None = None
    deliberate: bool = False
    stated: str = ""

    @property
    def dtype(self) -> str:
        """``float64`` or ``float32``, from the labels, or else from the model's name."""
        return "float32" if "float32" in " ".join(self.labels.values()) else "float64"

    @property
    def text(self) -> str:
        """The figure as text for the tables."""
        found = next((form for start, form in FORMATS.items() if self.column.startswith(start)), ".1e")
        return format(int(self.value) if found == "d" else self.value, found)


@dataclass
class Cell:
    """A cell of a table in a document: its position, and the labels that name it."""

    line: int
    number: int
    section: str
    labels: dict[str, str]
    column: str
    text: str


def read_cells(document: str) -> Iterator[Cell]:
    """All cells except labels, in all Markdown tables below second-level headings."""
    section, header = "", []
    for line, text in enumerate(document.splitlines()):
        if text.startswith("## "):
            section = text[3:].strip()
        cells = [part.strip() for part in text.strip("|").split("|")] if text.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif not set(text) <= set("|-: "):
            labels = {name: cell for name, cell in zip(header, cells, strict=False) if name in LABELS}
            for number, (column, cell) in enumerate(zip(header, cells, strict=False)):
                if column not in LABELS:
                    yield Cell(line, number, section, labels, column, cell)


def is_of(figure: Figure, cell: Cell) -> bool:
    """Whether a cell belongs to a figure; a table without a column of dtypes is for float64."""
    wanted = {"dtype": "float64", **figure.labels}
    return (cell.section, cell.column) == (figure.peer, figure.column) and {"dtype": "float64", **cell.labels} == wanted


def look_up(figures: Iterable[Figure], document: str) -> None:
    """Set what a document states for each figure."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell in read_cells(document):
        cells.setdefault((cell.section, cell.column), []).append(cell)
    for figure in figures:
        found = [cell.text for cell in cells.get((figure.peer, figure.column), ()) if is_of(figure, cell)]
        figure.stated = found[0] if found else ""


def written_into(figures: list[Figure], document: str) -> str:
    """The document with each figure in its cell; cells without a figure, and cells that contain no number, do not change."""
    lines = document.splitlines()
    for cell in read_cells(document):
        found = next((figure for figure in figures if is_of(figure, cell)), None)
        if found is not None and re.match(r"[\d.]+", cell.text):
            cells = lines[cell.line].split("|")  # an empty one before the first
            cells[cell.number + 1] = f" {found.text} "
            lines[cell.line] = "|".join(cells)
    return "\n".join(lines) + "\n"


# The record


def summary(figures: list[Figure]) -> str:
    """The largest relative differences by peer, dtype and kind, deliberate ones left out."""
    kinds = {"predictions": r"(proposals' )?(logits|boxes)$", "losses": r"loss_|total", "gradients": r".*gradient"}
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for figure in figures:
        what = figure.labels.get("what", figure.column)
        if figure.relative is None or figure.deliberate or "code" in figure.labels:
            continue
        row = rows.setdefault((figure.peer, figure.dtype), {})
        for kind, pattern in kinds.items():
            if re.match(pattern, what.replace("total loss", "total")):
                row[kind] = max(row.get(kind, 0.0), figure.relative)
        if what.startswith("matchings"):
            row["matchings that differ"] = row.get("matchings that differ", 0) + figure.value
    head = ["peer", "dtype", *kinds, "matchings that differ"]
    body = []
    for (peer, dtype), row in rows.items():
        parts = [format(row[kind], ".1e") if kind in row else "-" for kind in kinds]
        body.append([peer, dtype, *parts, row.get("matchings that differ", "-")])
    return _table(body, head)


def record(figures: list[Figure], about: dict[str, Any], left_out: dict[str, str]) -> str:
    """The Markdown file: how it was made, the summary, then every figure beside what docs/parity.md states."""
    parts = ["# Parity, made again", f"`{about['command']}`"]
    parts += ["; ".join(f"{key} {value}" for key, value in about[name].items()) for name in ("machine", "versions")]
    parts += ["Each peer in one row per dtype: the largest relative differences of ours to it.", summary(figures)]
    parts.append(LEGEND)
    for peer in dict.fromkeys(figure.peer for figure in figures):
        parts += [f"## {peer}", *_section([figure for figure in figures if figure.peer == peer])]
    parts += [f"Left out: {name}: {why}" for name, why in left_out.items()]
    return "\n\n".join(parts) + "\n"


def _section(figures: list[Figure]) -> list[str]:
    own = [figure for figure in figures if "code" in figure.labels]
    rest = [figure for figure in figures if not {"code", "loss"} & figure.labels.keys()]
    body = [
        [*_named(figure), _shape(figure), figure.text + "*" * figure.deliberate, f"{figure.relative:.1e}", figure.stated]
        for figure in rest
        if figure.relative is not None
    ]
    parts = [_table(body, ["model", "dtype", "what", "shape", "difference", "relative", "docs/parity.md"])]
    if own:
        parts.append("Each code's own float32 against its own float64:")
        body = [[*_named(figure), figure.text, f"{figure.relative:.1e}", figure.stated] for figure in own]
        parts.append(_table(body, ["model", "code", "what", "difference", "relative", "docs/parity.md"]))
    sizes = [figure for figure in rest if figure.relative is None]
    if sizes:
        parts.append("What the differences are to be compared with:")
        parts.append(_table([[*_named(f), f.text, f.stated] for f in sizes], ["model", "dtype", "what", "size", "docs/parity.md"]))
    return parts


def _named(figure: Figure) -> list[str]:
    labels = figure.labels
    return [labels["model"], labels.get("code", labels.get("dtype", "")), labels.get("what", figure.column)]


def _shape(figure: Figure) -> str:
    return " x ".join(str(side) for side in figure.shape) if figure.shape else "-"


def _table(body: list[list[Any]], head: list[str]) -> str:
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in (head, ["---"] * len(head), *body))


def write_record(path: Path, figures: list[Figure], about: dict[str, Any], left_out: dict[str, str]) -> None:
    """``.json`` with all figures, ``.md`` with all but the losses of single layers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(figure)) for figure in figures)  # one per line, so that a change is visible in one line
    head = json.dumps({**about, "left_out": left_out}, indent=1).removesuffix("\n}")
    path.with_suffix(".json").write_text(f'{head},\n "figures": [\n{lines}\n]\n}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(record(figures, about, left_out), encoding="utf-8")
