# SPDX-License-Identifier: Apache-2.0
"""What a record says of its run, and its two files: JSON for programs, Markdown for people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from benchmarks.peers import ROOT
from benchmarks.report import BESIDE_OTHER_WORK, file_stem
from cpvt_det.common.files import write_json


def about_run(words: str, threads: int, busy: bool, load_average: float | None) -> dict[str, Any]:
    """Command, threads, commit, machine and versions of a run on the CPU.

    Args:
        words: the command line behind ``python benchmarks/``, without ``--busy``.
        threads: threads of what is timed.
        busy: True: the run was allowed beside other work.
        load_average: load average before the run.
    """
    command = f"python benchmarks/{words}{' --busy' * busy}"
    about = {"command": command, "threads": threads, "busy": busy, "commit": commit_of(ROOT, short=True)}
    return about | {"machine": machine("cpu", load_average), "versions": versions()}


def write_record(folder: Path, name: str, about: dict[str, Any], content: dict[str, Any], parts: Sequence[str]) -> list[Path]:
    """``NAME_cpu.json`` and ``.md``, with the endings that the suites' files have.

    Args:
        folder: path of the folder; it is created if it does not exist.
        name: what was measured, as in names of files.
        about: outcome of :func:`about_run`.
        content: what was measured, by its keys in the JSON.
        parts: paragraphs and tables of the Markdown; the first is its title. What the run was stands behind it.

    Returns:
        Paths of both files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(name, 'cpu', about['threads'], about['machine'])}.json"
    write_json({**about, **content}, path, indent=1)
    run = [f"`{about['command']}`", f"Commit: {about['commit']}. {_listed(about['machine'])}."]
    run += [f"Versions: {_listed(about['versions'])}."]
    run += [BESIDE_OTHER_WORK] * about["busy"]
    path.with_suffix(".md").write_text("\n\n".join([f"# {parts[0]}", *run, *parts[1:]]) + "\n", encoding="utf-8")
    return [path, path.with_suffix(".md")]


def _listed(found: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in found.items())
