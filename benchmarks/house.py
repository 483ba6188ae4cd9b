#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Length of the walk through the code, direction of its imports, and its docstrings: ``python benchmarks/house.py``.

Counts any checkout, ``--root``; ``--beside`` puts the JSON of another one into the same table. How each row is counted:

- **Functions / files** on a road: functions of the package that a profiler sees entered, and their files; comprehensions, lambdas
  and generator expressions are no functions. A tiny model (BatchNorm, PEG), drawn images, one process, no data workers, no backward
  pass. Data sets, loader and model are made before. The road is taken twice, and the second time counts; "first time" includes
  what loads and compiles kernels. "Above the kernels" leaves ``ops/`` out: products, convolutions, dropout and deformable attention
  on a CPU, where other code bases call torch.
- **Hops**, by a rule and not by reading: functions of the road that enter another one, and each of the detector's parts (``PARTS``
  in ``house_road.py``) once, with nothing that is entered inside it. Functions of the rooms in ``HELPERS`` are no hops.
- **Deepest stack**: the longest chain of nested calls of the road's functions.
- **Import circles**: groups of modules that import each other. The ``__init__`` that the import of a submodule runs is left out.
- **Imports of a room above**: by ``ORDER``. "Anywhere" includes imports in functions, for typing only, and by ``import_module``.
- **Arguments without a noun**: rows under ``Args:`` and ``Attributes:`` whose description begins with a preposition, a relative
  pronoun or a verb form (``HEADLESS``). A reference, as in ":class:`X`", is allowed. Several names in one row are one row.
- **Functions**: lines from ``def`` to the end, docstring included. Public: also the methods of public classes, no nested functions.
- **Code lines**: lines without blanks, comments and docstrings.
- **Arrows between rooms**: pairs of rooms of which one imports the other, anywhere.
- **CPU seconds** (``--timings``): user and system time of a process, one thread, median of three after one that is not counted.

An earlier count of d2401b0, by other scripts: 127 / 22 for DETR (the first time, every batch padded; one without padding enters two
functions more), 132 / 25 for Deformable-DETR (one stage, eager op), 130 / 26 for AP (FrozenBN); 24 hops, by reading; 203 of 780
arguments, by a rule that is not known: 26 % of them, as here.
"""

import ast
import io
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.house_road import PACKAGE, ROADS

ROOT = Path(__file__).resolve().parent.parent
ORDER = (
    "cli __main__",
    "runner training d2 predict serve study studies",
    "tasks",
    "visualize show export plug",
    "builders build",
    "fast checkpoint",
    "models losses solver evaluation inference tiles postprocess",
    "position",
    "layers data",
    "ops",
    "common structures boxes class_names errors files distributed config defaults registry seeding garbage memory "
    "own_modules __init__",
)
"""Rooms of the package from top to bottom, old names beside new ones; an import points down or stays on its floor."""
FLOORS = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms.split()}
HEADLESS = re.compile(
    r"(?:above|after|at|before|below|between|beyond|by|for|from|in|of|on|over|to|under|with|within|without"
    r"|that|whose|when|where|how|why|which|they|likewise|but|not|as(?! (?:in|of) [:`])"
    r"|is|are|was|were|has|holds|gives|takes|writes|knows|builds|multiplies|stays|called|changed|made|added|set|open)\b",
    re.IGNORECASE,
)
ROW = re.compile(r"    (\*{0,2}\w[\w*, `.]*): +(\S.*)")
LONG = 50
QUICKSTART = ["--config-file", "quickstart/deformable_peg.yaml"]
CHECKPOINT = "output/quickstart/model_final.pth"
ONE_STEP = ["--runner", "builtin", "SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "1", "DATASETS.TEST", "()"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Graph = dict[str, set[str]]
"""Names of modules by the module that imports them."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--root", default=ROOT, type=click.Path(path_type=Path, exists=True), help="The checkout to count.  [default: this one]"
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for house.json and house.md.")
@click.option("--beside", type=click.Path(path_type=Path, exists=True), help="JSON of another checkout, for a column of its own.")
@click.option("--timings", is_flag=True, help="Time four commands too, for two minutes more.")
@click.option("--list-arguments", is_flag=True, help="Print the arguments without a noun, and nothing else.")
@click.option("--list-functions", is_flag=True, help="Print the functions of every road, and nothing else.")
@click.option("--draw", is_flag=True, help="Print the drawing of docs/architecture.md, and nothing else.")
def main(
    root: Path, output: Path | None, beside: Path | None, timings: bool, list_arguments: bool, list_functions: bool, draw: bool
) -> None:
    """Print the counts of a checkout as a Markdown table."""
    root = root.resolve()
    trees = read_package(root / PACKAGE)
    if list_arguments:
        click.echo("\n".join(headless_arguments(root / PACKAGE)[0]))
        return
    if draw:
        click.echo("\n".join(drawing(trees)))
        return
    with tempfile.TemporaryDirectory() as folder:
        run(root, folder, "-m", PACKAGE, "shapes", "datasets/shapes", "--train", "128", "--val", "32")
        roads = trace_roads(root, folder)
        if list_functions:
            click.echo("\n".join(f"{title}: {line}" for title, road in roads.items() for line in road["entered"]))
            return
        rows = road_rows(roads) | import_rows(trees) | text_rows(root / PACKAGE, trees)
        rows |= time_rows(root, folder) if timings else {}
    record = {"command": " ".join(["python benchmarks/house.py", *["--timings"] * timings]), "commit": commit(root)}
    record |= {"machine": describe_machine(), "rows": rows}
    text = table(record, json.loads(beside.read_text(encoding="utf-8")) if beside else None)
    click.echo(text)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        (output / "house.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (output / "house.md").write_text(f"`{record['command']}`\n\n{text}\n", encoding="utf-8")


def table(record: dict[str, Any], beside: dict[str, Any] | None) -> str:
    """Rows of a record as Markdown, with those of another one to their left."""
    records = [record] if beside is None else [beside, record]
    lines = [["", *(one["commit"] for one in records)], ["---"] * (len(records) + 1)]
    lines += [[name, *(one["rows"].get(name, "") for one in records)] for name in record["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commit(root: Path) -> str:
    """Short name of the commit of a checkout, with a plus where tracked files differ from it."""
    options = {"capture_output": True, "text": True, "cwd": root}
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options).stdout.strip()
    changes = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options).stdout
    return (name or "no commit") + ("+" if changes else "")


def describe_machine() -> dict[str, Any]:
    """Versions and processor."""
    from benchmarks.machine import machine, versions

    return {**versions(), **machine("cpu")}


def run(root: Path, folder: str, *words: str, left_out: str = "") -> str:
    """Standard output of Python with the package of a checkout, in a working folder; with ``CPVT_DET_WITHOUT``.

    Raises:
        ClickException: the process failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CPVT_DET_WITHOUT": left_out}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"python {' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def trace_roads(root: Path, folder: str) -> dict[str, dict[str, Any]]:
    """Counts of each road by its title, as built on this processor and without fast paths; in processes, so that no road finds what
    another one loaded."""
    script = str(Path(__file__).resolve().with_name("house_road.py"))
    return {
        f"{title}, {how}": json.loads(run(root, folder, script, str(root / PACKAGE), str(i), left_out=left_out))
        for how, left_out in (("fast paths switched off", "all"), ("as built", ""))
        for i, title in enumerate(ROADS)
    }


def road_rows(roads: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Table rows of traced roads."""
    rows = {
        f"functions / files, {title}": "{functions} / {files} (first time {first_time})".format(**road)
        for title, road in roads.items()
    }
    return rows | {f"hops; deepest stack, {title}": "{hops}; {deepest}".format(**road) for title, road in roads.items()}


def import_rows(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Table rows of circles and of imports of a room above."""
    rows = {}
    for where, anywhere in (("at import", False), ("anywhere", True)):
        graph = import_graph(trees, anywhere)
        rows[f"import circles, {where}"] = counted(" <-> ".join(circle) for circle in circles(graph))
        rows[f"imports of a room above, {where}"] = counted(f"{one} -> {other}" for one, other in upward(graph))
    arrows = room_arrows(import_graph(trees, True))
    return rows | {"rooms": str(len({room_of(name) for name in trees})), "arrows between rooms": str(len(arrows))}


def room_of(module: str) -> str:
    """The folder or file directly below the package that a module is in."""
    return [*module.split("."), "__init__"][1]


def room_arrows(graph: Graph) -> set[tuple[str, str]]:
    """Pairs of rooms, of which the first imports the second."""
    pairs = {(room_of(name), room_of(other)) for name, others in graph.items() for other in others}
    return {pair for pair in pairs if pair[0] != pair[1]}


def drawing(trees: dict[str, ast.Module]) -> list[str]:
    """A line for each room: its floor, which is the longest way down, what it is, and the rooms below that it imports.

    The description is the beginning of the room's docstring. A room that another one of the line imports anyhow is left out.
    """
    below: Graph = {room_of(name): set() for name in trees if room_of(name) not in ("__init__", "__main__")}
    for room, other in room_arrows(import_graph(trees, True)):
        if room in below and other in below:
            below[room].add(other)
    floors: dict[str, int] = {}
    reached: Graph = {}
    while left := [room for room in below if room not in floors]:
        ready = [room for room in left if below[room] <= floors.keys()]
        if not ready:
            raise click.ClickException(f"rooms that import each other: {', '.join(left)}")
        for room in ready:
            floors[room] = 1 + max((floors[other] for other in below[room]), default=-1)
            reached[room] = below[room].union(*(reached[other] for other in below[room]))
    lines = []
    for room in sorted(below, key=lambda room: (-floors[room], room)):
        what = re.split(r"[:;,] |\.(?:\s|$)", ast.get_docstring(trees[f"{PACKAGE}.{room}"]) or "")[0].replace("``", "")
        direct = below[room].difference(*(reached[other] for other in below[room]))
        lines.append(f"{floors[room]:>2} {room:<11} {what:<56} {'-> ' * bool(direct)}{' '.join(sorted(direct))}".rstrip())
    return lines


def code_lines(path: Path) -> int:
    """Lines of a module without blanks, comments and docstrings."""
    text, lines = path.read_text(encoding="utf-8"), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def counted(items: Iterable[str]) -> str:
    """Number of items, and the items where there are any."""
    items = list(items)
    return f"{len(items)}: {'; '.join(items)}" if items else "0"


def read_package(package: Path) -> dict[str, ast.Module]:
    """Syntax trees of the modules of a package by dotted name."""
    paths = {path.relative_to(package.parent).with_suffix(""): path for path in sorted(package.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text("utf-8")) for name, path in paths.items()}


def import_graph(trees: dict[str, ast.Module], anywhere: bool) -> Graph:
    """Imports between the modules of a package; with ``anywhere`` also those that importing a module does not run."""
    return {name: set(imported(tree, set(trees), anywhere)) - {name} for name, tree in trees.items()}


def imported(tree: ast.Module, known: set[str], anywhere: bool) -> Iterator[str]:
    """Names of the known modules that a module imports, by their full names."""
    for node in ast.walk(tree) if anywhere else at_import(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name if name in known else node.module for name in inner)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (word.value for word in node.args if isinstance(word, ast.Constant) and word.value in known)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        for_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_typing and not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            yield node
            yield from at_import(node)


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Groups of at least two modules, each of which imports the others in some number of steps."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(group for group in groups if len(group) > 1)


def reachable(graph: Graph, start: str) -> set[str]:
    """Modules that a module imports in one step or more."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def upward(graph: Graph) -> list[tuple[str, str]]:
    """(importing module, imported module), where the imported one is in a room above.

    Raises:
        KeyError: a room that ``ORDER`` does not name.
    """
    floors = {name: FLOORS[room_of(name)] for name in graph}
    return [(name, other) for name, others in graph.items() for other in sorted(others) if floors[other] < floors[name]]


def text_rows(package: Path, trees: dict[str, ast.Module]) -> dict[str, str]:
    """Table rows of arguments, lengths and docstrings."""
    lines, count = headless_arguments(package)
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    lengths = sorted(((node.end_lineno - node.lineno + 1, f"{name}.{node.name}") for name, node in nodes), reverse=True)
    public = [documented for tree in trees.values() for documented in public_functions(tree)]
    return {
        "code lines": str(sum(map(code_lines, package.rglob("*.py")))),
        "files": str(len(trees)),
        "functions": str(len(nodes)),
        "arguments without a noun": f"{len(lines)} of {count}",
        "longest function": str(lengths[0][0]),
        f"functions over {LONG} lines": counted(f"{name} {length}" for length, name in lengths if length > LONG),
        "public functions with a docstring": f"{sum(public)} of {len(public)}",
    }


def headless_arguments(package: Path) -> tuple[list[str], int]:
    """``path:line: name: description`` of each argument without a noun, and the number of all arguments."""
    found = []
    for path in sorted(package.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [(path.relative_to(package.parent), *row) for node in nodes for row in described(node)]
    return [f"{path}:{line}: {name}: {text}" for path, line, name, text in found if HEADLESS.match(text)], len(found)


def described(node: ast.AST) -> list[tuple[int, str, str]]:
    """Line, name and description of the arguments and attributes in the docstring of a function or class."""
    text = ast.get_docstring(node) if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else None
    section, found = "", []
    for number, line in enumerate((text or "").splitlines()):
        row = ROW.fullmatch(line)
        if line and not line.startswith(" "):
            section = line
        elif section in ("Args:", "Attributes:") and row:
            found.append((node.body[0].lineno + number, row[1], row[2]))
        elif found and line.startswith("     "):
            found[-1] = (*found[-1][:2], f"{found[-1][2]} {line.strip()}")
    return found


def public_functions(tree: ast.AST) -> Iterator[bool]:
    """Whether there is a docstring, for each public function and each public method of a public class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield ast.get_docstring(node) is not None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)


def time_rows(root: Path, folder: str) -> dict[str, str]:
    """CPU seconds of four processes, in a folder with the drawn images."""
    run(root, folder, "-m", PACKAGE, "train", *QUICKSTART, *ONE_STEP)
    image = str(min((Path(folder) / "datasets/shapes/val").iterdir()))
    commands = {
        "import torch": ["-c", "import torch"],
        "train --help": ["-m", PACKAGE, "train", "--help"],
        "check-data of 160 images": ["-m", PACKAGE, "check-data", *QUICKSTART],
        "predict of one image": ["-m", PACKAGE, "predict", CHECKPOINT, "--input", image, "--output", "found"],
    }
    return {f"CPU seconds, {name}": f"{cpu_seconds(root, folder, words):.1f}" for name, words in commands.items()}


def cpu_seconds(root: Path, folder: str, words: list[str]) -> float:
    """Median CPU time of three runs, after one that fills caches."""
    seconds = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(root, folder, *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
