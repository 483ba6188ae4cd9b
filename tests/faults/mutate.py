# SPDX-License-Identifier: Apache-2.0
"""Takes the guard of each row out of a copy of the package, and looks whether the row then fails.

As in::

    PYTHONPATH=tests python -m faults.mutate --write
    PYTHONPATH=tests python -m faults.mutate --write --row "images: half"

A row that passes without its guard proves nothing: such a row ends the run with exit code 1, unless it explains why it
survives. A mutant that does not even import proves nothing either, nor does a row that fails with its guard. ``--write`` keeps
how each row ended, with its guard, what it expects and the commit, in ``mutants.json``, and writes ``survivors.md`` from it.
Only the standard library is imported here: the processes that meet the rows import this file too, before they choose which
package they import.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from faults.case import Case, Cut

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "cpvt_det"
DOCUMENT = Path(__file__).with_name("survivors.md")
RECORD = Path(__file__).with_name("mutants.json")
PRELOADED = ["torch", "torchvision.transforms.v2", "scipy.optimize", "fvcore.common.checkpoint", "matplotlib.figure", "PIL.Image"]
SECONDS = 90  # of a row; the longest, which waits for a frozen process, takes fifteen
MEMORY = 16 << 30  # bytes of a row
BROKEN = re.compile(r"\b(NameError|SyntaxError|IndentationError|ImportError|UnboundLocalError|ModuleNotFoundError)\b")
HEAD = """\
# Rows that do not depend on a guard

Each row of `docs/reliability.md` names the guard that refuses or repairs its fault. `PYTHONPATH=tests python -m faults.mutate`
takes the guard out of a copy of the package, runs the row there, and looks whether it fails. With `--write` it keeps how each
row ended in [mutants.json](mutants.json), and writes this file. `tests/whole/test_mutants.py` does it for two rows, and looks
that all guards are where the rows say, and that the record is of these guards.
"""


class Result(NamedTuple):
    """How a row ended without its guard.

    Attributes:
        row: its area and name.
        why: what was wrong with its ending, with "." for the folder of the copy; empty where the row passed.
        verdict: "killed", or what is wrong with the row.
    """

    row: str
    why: str
    verdict: str


def all_rows() -> dict[str, "Case"]:
    """The rows of all areas, by area and name."""
    from faults.report import areas

    return {f"{area.__name__.rpartition('.')[2]}: {case.what}": case for area in areas() for case in area.CASES}


def cut_text(text: str, cut: "Cut") -> str:
    """The text of a file without a guard.

    Raises:
        ValueError: the guard does not stand there exactly once.
    """
    if text.count(cut.old) != 1:
        raise ValueError(f"cpvt_det/{cut.file} contains {text.count(cut.old)} times, not once: {cut.old}")
    return text.replace(cut.old, cut.new)


@contextlib.contextmanager
def without(cuts: Sequence["Cut"], root: Path) -> Iterator[None]:
    """Take guards out of the package below ``root`` within the block."""
    try:
        for cut in cuts:
            path = root / "cpvt_det" / cut.file
            path.write_text(cut_text(path.read_text(encoding="utf-8"), cut), encoding="utf-8")
        yield
    finally:
        for file in {cut.file for cut in cuts}:
            shutil.copy2(PACKAGE / file, root / "cpvt_det" / file)  # with its time, so that its compiled file is used again


def copy_package(root: Path) -> None:
    """Copy the package, with its compiled files, and link the configs, which it finds beside itself."""
    shutil.copytree(PACKAGE, root / "cpvt_det")
    (root / "configs").symlink_to(PACKAGE.parent / "configs")


def meet(row: str, root: Path, answer: Connection) -> None:
    """Run a row against the package below ``root``, in a process of its own, and send what was wrong with its ending."""
    os.setsid()  # what the row starts can be ended with it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(root / "output.txt", "w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # of data workers: they inherit what a row changes
    os.chdir(root)  # Python takes the current folder before all others, in what the row starts too
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True  # of a file that changes several times within a second, as its time in whole seconds decides
    os.environ.update(PYTHONPATH=os.pathsep.join((str(root), str(TESTS))), PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    try:
        import cpvt_det

        assert Path(cpvt_det.__file__).is_relative_to(root), f"another package: {cpvt_det.__file__}"
        area, _, what = row.partition(": ")
        (case,) = (case for case in importlib.import_module(f"faults.{area}").CASES if case.what == what)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            answer.send(case.contradiction(case.run(Path(folder))))
    except BaseException as error:  # an assertion of the row, or anything that the mutant raises
        answer.send(f"{type(error).__name__}: {error}")


def meet_apart(row: str, root: Path) -> str:
    """What was wrong with a row's ending, in a process of its own; empty where the row passed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=meet, args=(row, root, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(SECONDS) else f"took more than {SECONDS} seconds"
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        process.join(1)  # most have ended by themselves; then, or else, what they started is ended too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def judge(row: str, case: "Case", root: Path) -> Result:
    """Meet a row with its guard and without."""
    why = meet_apart(row, root)
    if why:
        return Result(row, why, "fails with its guard")
    with without(case.cuts, root):
        why = meet_apart(row, root).replace(str(root), ".")
    if BROKEN.search(why):
        return Result(row, why, "the mutant does not run")
    if why:
        return Result(row, why, "killed" if not case.survives else "was killed, though it explains why not")
    return Result(row, why, f"survives: {case.survives}" if case.survives else "survives, unexplained")


def judge_all(rows: dict[str, "Case"], jobs: int = 1) -> list[Result]:
    """Judge the rows that have a guard, and print how each ended."""
    roots: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(row: str) -> Result:
        root = roots.get()
        try:
            result = judge(row, rows[row], root)
        finally:
            roots.put(root)
        print(f"{result.verdict}: {row}: {' '.join(result.why.split())[:150]}", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copy_package(Path(folder) / str(number))
            roots.put(Path(folder) / str(number))
        return list(pool.map(one, [row for row, case in rows.items() if case.cuts]))


def read_record() -> dict[str, dict[str, Any]]:
    """How each row ended the last time: its verdict, why, its guard, what it expected, and the commit."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def terms_of(case: "Case") -> dict[str, Any]:
    """What a row was killed by and for, as the record has it.

    Returns:
        Each cut of its guard as file, what stands there, and what is put in its place; and the exit code and the message without
        which the row fails, so that a row that comes to expect less has to be tried again.
    """
    return {"guard": [[cut.file, cut.old, cut.new] for cut in case.cuts], "expects": [case.code, case.says]}


def is_of(ended: dict[str, Any], case: "Case") -> bool:
    """Whether a row of the record is of the row that there is now."""
    terms = terms_of(case)
    return terms == {key: ended[key] for key in terms}


def write_record(results: Sequence[Result], rows: dict[str, "Case"], commit: str) -> None:
    """Put results into the record, and leave out rows that there are no longer."""
    found = read_record()
    for row, why, verdict in results:
        found[row] = {"verdict": verdict, "why": " ".join(why.split())[:150], **terms_of(rows[row]), "commit": commit}
    kept = {row: found[row] for row, case in rows.items() if row in found and case.cuts}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def killed_rows(rows: dict[str, "Case"]) -> list[str]:
    """The rows that, by the record, failed without the guard that they have now, as they expect it now."""
    record = read_record()
    same = [row for row, case in rows.items() if row in record and is_of(record[row], case)]
    return [row for row in same if record[row]["verdict"] == "killed"]


def document(rows: dict[str, "Case"]) -> str:
    """The text of ``survivors.md``: how many rows fail without their guard, and all the others."""
    record, killed = read_record(), killed_rows(rows)
    guarded = [row for row, case in rows.items() if case.cuts]
    lines = [f"| {row} | {rows[row].survives or record.get(row, {}).get('verdict')} |" for row in guarded if row not in killed]
    plain = [f"| {row} | {case.guard} |" for row, case in rows.items() if not case.cuts]
    head = "| row | reason |\n|:--|:--|\n"
    commits = ", ".join(f"{count} at {commit}" for commit, count in Counter(record[row]["commit"] for row in killed).most_common())
    return "\n".join(
        [
            HEAD,
            f"{len(rows)} rows; {len(guarded)} have a guard, and {len(killed)} of them failed without it: {commits}.\n",
            "## Rows that pass without their guard\n",
            head + "\n".join(lines) + "\n" if lines else "None.\n",
            "## Rows that need no guard\n",
            head + "\n".join(plain) + "\n",
        ]
    )


def is_good(result: Result) -> bool:
    """Whether a row was killed, or explains why it survives."""
    return result.verdict == "killed" or result.verdict.startswith("survives: ")


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Take the guards of rows out, and look whether the rows fail.")
    parser.add_argument("--row", action="append", help="part of rows' names, as 'images: ' for an area; may be given several times")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep how the rows ended in mutants.json, and write survivors.md")
    options = parser.parse_args()
    known = all_rows()
    rows = {row: case for row, case in known.items() if any(part in row for part in options.row or [""])}
    results = judge_all(rows, options.jobs)
    bad = [result for result in results if not is_good(result)]
    print(f"{len(rows)} rows, {len(results)} with a guard, {len(results) - len(bad)} as they should be")
    for result in bad:
        print(f"{result.verdict}: {result.row}: {result.why[:2000]}")
    if options.write:
        from benchmarks.origin import commit_of

        write_record(results, known, commit_of(PACKAGE.parent, short=True))
        DOCUMENT.write_text(document(known), encoding="utf-8")
    return int(bool(bad) or not results)


if __name__ == "__main__":
    sys.exit(main())
