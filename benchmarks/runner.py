# SPDX-License-Identifier: Apache-2.0
"""One run of a suite: case after case, then its table, JSON and chart."""

import fnmatch
import gc
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click

from benchmarks import machine, report
from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import Case, Plan, UnequalWorkError, compare, without_failures
from benchmarks.memory import peak_bytes
from benchmarks.origin import commit_of
from benchmarks.peers import ROOT, peer_versions
from benchmarks.suites import Options
from cpvt_det.common.errors import BadInputError


def run_suite(name: str, suite: ModuleType, options: Options, output: Path, pattern: str = "*", memory: bool = True) -> list[str]:
    """Run the cases of a suite and write its files.

    Args:
        name: name of the suite.
        suite: module of the suite.
        options: options of the run.
        output: folder for the files.
        pattern: glob pattern of the names of cases to run.
        memory: True: measure peak memory in the cases that are marked for it.

    Returns:
        One message per case whose contenders have different outputs; the other cases still run.

    Raises:
        BadInputError: a pattern that matches no case.
    """
    cases = suite.cases(options)
    fitting = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    if not fitting:
        raise BadInputError(f"no case of suite {name} matches {pattern!r}; known: {', '.join(case.name for case in cases)}")
    plan = suite.PLANS["quick" if options.size == "quick" else "full"]
    unequal: list[str] = []
    with fixed_threads(options.threads):
        result = _empty_result(name, suite.TITLE, options, pattern, memory)
        for number, case in enumerate(fitting, 1):
            click.echo(f"[{number}/{len(fitting)}] {name}: {case.name}", err=True)
            try:
                result.cases.append(run_case(name, case, options, plan, memory))
            except UnequalWorkError as error:
                unequal.append(f"{case.name}: {error}")
                result.cases.append(report.CaseResult.of(case, [], {"all contenders": str(error)}))
            report.write_json(result, output)
            gc.collect()
    click.echo(report.as_table(result))
    for text in report.not_compared(result):
        click.echo(f"timed, not compared: {text}")
    for text in report.left_out(result):
        click.echo(f"left out: {text}")
    click.echo(f"written: {', '.join(str(path) for path in report.write(result, output))}")
    return unequal


def _empty_result(name: str, title: str, options: Options, pattern: str, memory: bool) -> report.Result:
    """The record of a run before its first case: what was asked for, of which code, on which machine."""
    return report.Result(
        suite=name,
        title=title,
        command=command_of(name, options, pattern, memory),
        device=options.device,
        threads=options.threads,
        versions=machine.versions() | peer_versions(options.peers),
        machine=machine.machine(options.device, options.load_average),
        limits=machine.limits(options.device),
        commit=commit_of(ROOT, short=True),
        busy=options.busy,
    )


def run_case(name: str, case: Case, options: Options, plan: Plan, memory: bool) -> report.CaseResult:
    """Time one case, then measure its contenders' memory.

    Raises:
        UnequalWorkError: contenders with different outputs.
    """
    if case.left_out:
        return report.CaseResult.of(case, [], {"all contenders": case.left_out})
    work = without_failures(case.build())
    rows = compare(work, plan, clock_of(options.device))
    contenders, left_out = work.contenders, dict(work.left_out)
    if memory and case.memory:
        for number, contender in enumerate(contenders):
            try:
                rows[number] = replace(rows[number], peak_bytes=peak_bytes(name, case, contender, options))
            except RuntimeError as error:  # the times, which took long to measure, are still valid
                left_out[f"{contender.name}'s peak memory"] = str(error)
    return report.CaseResult.of(case, rows, left_out)


def command_of(name: str, options: Options, pattern: str = "*", memory: bool = True) -> str:
    """The command line that repeats a run, with PATH for the paths of checkouts."""
    words = ["python benchmarks/run.py --suite", name]
    words += [f"--peer {peer}=PATH" for peer, folder in options.peers.items() if folder is not None]
    words += [f"--device {options.device} --threads {options.threads}"]
    words += {"quick": ["--quick"], "all": ["--all"]}.get(options.size, [])
    words += [f"--case '{pattern}'"] if pattern != "*" else []
    return " ".join([*words, *["--busy"] * options.busy, *([] if memory else ["--no-memory"])])
