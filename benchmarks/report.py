# SPDX-License-Identifier: Apache-2.0
"""The results: JSON for programs, a table for people, a chart of the ratios."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.harness import Case, Row, Spread
from benchmarks.machine import name_of_instructions

BESIDE_OTHER_WORK = "Measured with `--busy`: the machine may have had other work, see its load average."


@dataclass
class CaseResult:
    """One case: its rows, or the reason why there are none."""

    name: str
    about: dict[str, Any]
    counts: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, rows: list[Row], left_out: dict[str, str]) -> "CaseResult":
        return cls(case.name, case.about, case.counts, rows, left_out)


@dataclass
class Result:
    """One run of a suite.

    Args:
        suite: name of the suite.
        title: description of the timed work.
        command: command that repeats the run, with PATH for the paths of checkouts.
        device: ``cpu`` or ``cuda``.
        threads: threads per contender.
        versions: name -> version of libraries and peers.
        machine: processor, memory, GPU.
        limits: best rates of the machine, measured in this run.
        commit: short commit of this tree, ``+changes`` if files differ from it.
        busy: True: the run was allowed beside other work.
        cases: results of the cases, in their order.
    """

    suite: str
    title: str
    command: str
    device: str
    threads: int
    versions: dict[str, str]
    machine: dict[str, Any]
    limits: dict[str, float]
    commit: str = ""
    busy: bool = False
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def by_cpu_time(self) -> bool:
        """With one thread, the load of other processes does not count in CPU time; with several, waiting threads would."""
        return self.device == "cpu" and self.threads == 1

    def ratio(self, row: Row) -> Spread:
        return row.ratio_cpu if self.by_cpu_time and row.ratio_cpu else row.ratio_wall

    def over_peer(self, row: Row) -> Spread | None:
        return row.over_peer_cpu if self.by_cpu_time and row.over_peer_cpu else row.over_peer_wall

    def seconds(self, row: Row) -> float:
        return (row.cpu if self.by_cpu_time and row.cpu else row.wall).median


def write(result: Result, folder: Path) -> list[Path]:
    """The JSON, ``.md`` and ``.png``, named by :func:`file_stem`.

    Args:
        result: results of a run.
        folder: path of the folder; it is created if it does not exist.

    Returns:
        Paths of the files.
    """
    written = write_json(result, folder)
    table, chart = written.with_suffix(".md"), written.with_suffix(".png")
    table.write_text(as_markdown(result), encoding="utf-8")
    draw(result, chart)
    return [written, table, chart]


def write_json(result: Result, folder: Path) -> Path:
    """The JSON alone, so that an interrupted run keeps its finished cases."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(result.suite, result.device, result.threads, result.machine)}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return path


def file_stem(suite: str, device: str, threads: int, machine: dict[str, Any]) -> str:
    """``SUITE_DEVICE``, on a CPU with what differs from AVX-512, the C library's own settings and one thread:
    ``SUITE_cpu_avx2_malloc_2threads``."""
    if device != "cpu":
        return f"{suite}_{device}"
    malloc = "_malloc" if "c_library" in machine else ""
    return f"{suite}_{device}{name_of_instructions(machine)}{malloc}" + (f"_{threads}threads" if threads != 1 else "")


def as_table(result: Result, style: str = "simple") -> str:
    """A row for each contender, grouped by case."""
    lines, columns = [], list(result.cases[0].about) if result.cases else []
    share = any(row.limit for case in result.cases for row in case.rows)
    memory = any(row.peak_bytes is not None for case in result.cases for row in case.rows)
    for case in result.cases:
        limit = next((result.seconds(row) for row in case.rows if row.limit), None)
        for number, row in enumerate(case.rows):
            about = [case.about[name] for name in columns] if number == 0 else [""] * len(columns)
            over = None if row.peer or row.limit else result.over_peer(row)
            line = [*about, row.name, _ms(row.wall.median), _ms(row.cpu.median) if row.cpu else ""]
            line += [_times(result.ratio(row)), _times(over) if over else ""]
            line += [f"{limit / result.seconds(row):.0%}" if limit else ""] * share
            line += [f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes is not None else ""] * memory
            line.append(f"{row.difference:.1g}" if row.difference is not None and number else "")
            lines.append(line)
    headers = [*columns, "contender", "wall ms", "CPU ms", "times as fast", "as the fastest peer"]
    headers += ["share of limit"] * share + ["peak MB"] * memory + ["differs by"]
    text = {"disable_numparse": True, "colalign": ["left"] * (len(columns) + 1) + ["right"] * (len(headers) - len(columns) - 1)}
    return tabulate(lines, headers, tablefmt=style, **(text if lines else {}))


def as_markdown(result: Result) -> str:
    """The table, with everything needed to read it and to repeat the run."""
    facts = [f"{name} {value}" for name, value in result.versions.items()]
    machine = [f"{name.replace('_', ' ')} {_plain(value)}" for name, value in result.machine.items()]
    limits = [f"{name.replace('_per_', '/').replace('_', ' ')} {value}" for name, value in result.limits.items()]
    clock = "CPU time" if result.by_cpu_time else "wall time"
    parts = [
        f"# {title(result)}",
        f"`{result.command}`",
        f"Commit: {result.commit}. Machine: {'; '.join(machine)}.",
        *([BESIDE_OTHER_WORK] if result.busy else []),
        f"Limits measured in this run: {'; '.join(limits)}.",
        f"Versions: {'; '.join(facts)}.",
        f"Ratios are of {clock}, paired by round: median (quartiles). `times as fast` refers to the first row of each case; "
        "`differs by` is the largest difference of what was compared with that row's, of its largest value.",
        as_table(result, "github"),
        *counted(result),
    ]
    for words, reasons in (("Timed, not compared:", not_compared(result)), ("Left out:", left_out(result))):
        if reasons:
            parts += [words, "\n".join(f"- {text}" for text in reasons)]
    return "\n\n".join(parts) + "\n"


def counted(result: Result) -> list[str]:
    """The computed bytes and operations of each case, and the rate that ours and the limit reached."""
    cases = [case for case in result.cases if case.rows and case.counts]
    if not cases:
        return []
    lines, names = [], list(cases[0].counts)
    for case in cases:
        chosen = [row for row in case.rows if not row.peer and not row.limit][:1] + [row for row in case.rows if row.limit]
        for number, row in enumerate(chosen):
            amounts = [f"{case.counts[name] / 1e6:.0f}" if number == 0 else "" for name in names]
            rates = [f"{case.counts[name] / result.seconds(row) / 1e9:.1f}" for name in names]
            lines.append([case.name if number == 0 else "", *amounts, row.name, *rates])
    words = [name.replace("_", " ") for name in names]
    headers = ["case", *(f"{word} (10^6)" for word in words), "contender", *(f"{word} (10^9 / s)" for word in words)]
    return ["Counted on paper, and the rate at which it went:", tabulate(lines, headers, tablefmt="github", disable_numparse=True)]


def title(result: Result) -> str:
    return f"{result.title}, {result.device}, {result.threads} thread{'s' if result.threads > 1 else ''}"


def left_out(result: Result) -> list[str]:
    """One line per reason, with its cases."""
    return _grouped(result, [(case.name, case.left_out) for case in result.cases])


def not_compared(result: Result) -> list[str]:
    """One line per contender that does other work on purpose, with a description of it."""
    reasons = [{row.name: row.other_work for row in case.rows if row.other_work} for case in result.cases]
    return _grouped(result, [(case.name, found) for case, found in zip(result.cases, reasons, strict=True)])


def _grouped(result: Result, reasons_by_case: list[tuple[str, dict[str, str]]]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for case, reasons in reasons_by_case:
        for name, reason in reasons.items():
            found.setdefault((name, reason), []).append(case)
    everywhere = len(result.cases) if len(result.cases) > 1 else None
    return [
        f"{name}: {reason}" + ("" if len(cases) == everywhere else f" ({', '.join(cases)})")
        for (name, reason), cases in found.items()
    ]


def draw(result: Result, path: Path) -> None:
    """Bars that show how many times as fast as the first contender each one is, with quartiles, on a logarithmic scale."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    cases = [case for case in result.cases if case.rows]
    names = list(dict.fromkeys(row.name for case in cases for row in case.rows[1:] if not row.limit))
    many = colormaps["tab20"].colors
    colours = {name: many[number % len(many)] if len(names) > 10 else f"C{number}" for number, name in enumerate(names)}
    height = 1.2 + sum(0.16 * sum(not row.limit for row in case.rows[1:]) + 0.18 for case in cases)
    figure = Figure(figsize=(9, max(2.5, height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, y, ticks = figure.add_subplot(), 0.0, []
    for case in cases:
        begin = y
        for row in case.rows[1:]:
            if row.limit:
                continue
            ratio = result.ratio(row)
            ends = [[ratio.median - ratio.q1], [ratio.q3 - ratio.median]]
            axes.barh(y, ratio.median, 0.9, xerr=ends, color=colours[row.name], error_kw={"lw": 0.7})
            axes.text(ratio.q3, y, f" {_figure(ratio.median)}", va="center", fontsize=6)
            y += 1
        ticks.append(((begin + y - 1) / 2, case.name))
        y += 1
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.axvline(1, color="black", lw=0.8)
    for name in names:
        axes.barh([math.nan], [math.nan], color=colours[name], label=name)
    baselines = ", ".join(dict.fromkeys(case.rows[0].name for case in cases))
    axes.set_xlabel(f"times as fast as: {baselines} ({'CPU' if result.by_cpu_time else 'wall'} time)")
    axes.set_title(title(result))
    if names:
        figure.legend(loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=120)


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value)


def _ms(seconds: float) -> str:
    return _figure(seconds * 1000)


def _times(spread: Spread) -> str:
    return f"{_figure(spread.median)} ({_figure(spread.q1)}-{_figure(spread.q3)})"


def _figure(value: float) -> str:
    """A number with three digits and without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
