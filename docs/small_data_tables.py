# SPDX-License-Identifier: Apache-2.0
"""The tables of ``docs/small_data.md``, from the records of ``benchmarks/small_data.py``; they grow with the records.

``python docs/small_data_tables.py`` draws ``docs/pictures/small_data.png``.
"""

import json
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cpvt_det.cli.folder import Duration
from cpvt_det.visualize.figures import new_figure, save_figure

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "small_data.png"
RECORDS = ROOT / "benchmarks" / "results" / "small_data"
PEERS = ROOT / "benchmarks" / "results" / "small_data_peers"
"""Pairs of records of one machine, of about as many CPU seconds: ``benchmarks/small_data.py`` and ``benchmarks/dense_peer.py``."""
"""Trials on a fifth of the training images, of one seed each."""
DATA = {
    "bccd": ("BCCD", 205),
    "aquarium": ("Aquarium", 448),
    "cards": ("playing cards", 296),
    "raccoon": ("raccoons", 160),
    "deeppcb": ("DeepPCB", 1000),
}
"""Name of a data set in the records -> its name in the tables, and its number of training images."""
ENCODINGS = {"sine_offset": "sine", "peg": "PEG", "sine_offset+peg": "sine and PEG"}
"""``MODEL.POSITION.NAME`` -> what the tables call it."""
CHOSEN = "sine"
"""The encoding of the command."""
GOALS = {
    ("bccd", "10m"): 82,
    ("bccd", "1h"): 90,
    ("aquarium", "30m"): 45,
    ("aquarium", "2h"): 60,
    ("cards", "30m"): 90,
    ("raccoon", "15m"): 80,
}
"""AP50 that was aimed at before the rule was made."""
OF_ENCODING = ("", "sine")
"""Labels of records in which nothing but the encoding was replaced; the second is of the time when the command took PEG."""
Record = dict[str, Any]
Row = Sequence[str]


def read_records() -> list[Record]:
    """All records, by data set, then time, machine, encoding and seed."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(
        found, key=lambda record: (_place(record), _seconds(record), _setting(record)[2:], *_label(record), record["seed"])
    )


def _seconds(record: Record) -> float:
    return Duration().convert(record["budget"], None, None)


def _label(record: Record) -> tuple[int, str, str]:
    """The encoding's place among the encodings, its name, and what else was replaced."""
    label = "" if record["label"] in OF_ENCODING else record["label"]
    return _index(ENCODINGS.values(), _encoding(record)), _encoding(record), label


def _place(record: Record) -> int:
    return _index(DATA, name_of(record))


def _index(names: Iterable[str], name: str) -> int:
    """The place of a name; of an unknown one, that behind the last."""
    names = list(names)
    return names.index(name) if name in names else len(names)


def name_of(record: Record) -> str:
    """The data set, as it was named on the command line."""
    return shlex.split(record["command"])[2]


def as_trained() -> list[Row]:
    """Records of the command with nothing replaced but the encoding, and all training images."""
    rows = []
    for runs in _groups(lambda record: record["label"] in OF_ENCODING and not record.get("images")):
        rows.append(
            [
                _title(runs[0]),
                runs[0]["budget"],
                _encoding(runs[0]),
                _mean(runs, "AP"),
                _mean(runs, "AP50"),
                ", ".join(_curve(runs[0])),
                f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f}",
                f"{statistics.mean(run['cpu_seconds'] for run in runs):,.0f}",
                str(len(runs)),
            ]
        )
    head = [
        "data",
        "budget",
        "encoding",
        "AP",
        "AP50",
        "AP50 at each evaluation",
        "minutes",
        "CPU s",
        "seeds",
    ]
    return _table(head, rows)


def goals() -> list[Row]:
    """The goals beside what the command reaches; of several processors, on that with the most seeds."""
    rows = []
    for (name, budget), goal in GOALS.items():
        groups = [runs for runs in _as_it_is() if (name_of(runs[0]), runs[0]["budget"]) == (name, budget)]
        runs = max(groups, key=len, default=[])
        outcome = "no record yet"
        if runs:
            outcome = "reached" if statistics.mean(run["AP50"] for run in runs) >= goal else "missed"
        rows.append([DATA[name][0], budget, str(goal), _mean(runs, "AP50") if runs else "", outcome, str(len(runs))])
    return _table(["data", "budget", "AP50 aimed at", "AP50", "", "seeds"], rows)


def draw_curves(path: Path = PICTURE) -> None:
    """Draw AP50 of the evaluations of each first seed; the minutes until then are in proportion to the steps."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for runs in _as_it_is():
        run = runs[0]
        points = sorted((int(at), value) for at, value in run["curve"].items())
        minutes = [run["seconds"] / 60 * at / run["iterations"] for at, _ in points]
        label = f"{_title(run)}, {run['budget']}"
        axes.plot(minutes, [value for _, value in points], marker="o", markersize=4, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="minutes of the command, in proportion to its steps", ylabel="AP50, %", ylim=(0, 100))
    axes.set_xticks(ticks := (2, 5, 10, 20, 60, 120), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save_figure(figure, path)


def _as_it_is() -> list[list[Record]]:
    """Records of the command with nothing replaced, by seed."""
    return _groups(lambda record: record["label"] in OF_ENCODING and not record.get("images") and _encoding(record) == CHOSEN)


def peers() -> list[Row]:
    """What the command reaches with and without its starter, and torchvision's FCOS, in about the same CPU seconds."""
    found: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for path in sorted(PEERS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        instructions = record["machine"]["instruction_set"]
        size = record["chosen"]["INPUT"]["MIN_SIZE_TEST"] if "chosen" in record else record.get("test_size", 224)
        found[_title(record), record["budget"], instructions, str(size), _detector(record)].append(record)
    rows = []
    for key, runs in sorted(found.items()):
        seconds = f"{statistics.mean(run['cpu_seconds'] for run in runs):,.0f}"
        rows.append([*key, seconds, _steps(runs), _mean(runs, "AP"), _mean(runs, "AP50"), str(len(runs))])
    return _table(["data", "budget", "instructions", "test size", "detector", "CPU s", "steps", "AP", "AP50", "runs"], rows)


def _detector(record: Record) -> str:
    if "chosen" not in record:
        return ", ".join(["FCOS", *filter(None, [record.get("label")])])
    model = record["chosen"]["MODEL"]
    ours = "D-FINE" if model.get("META_ARCHITECTURE") == "CPVTRealTimeDetr" else "ours"
    return f"{ours}, from {'the starter' if model.get('WEIGHTS') else 'ImageNet'}"


def by_size() -> list[Row]:
    """Records of parts of the training images, beside all of them in the same time and with the same encoding."""

    def place(record: Record) -> tuple[Any, ...]:
        return _place(record), *_apart_from_images(record), _encoding(record)

    parts = {place(record) for record in read_records() if record.get("images")}
    wanted = _groups(lambda record: record["label"] in OF_ENCODING and place(record) in parts)
    rows = []
    for runs in sorted(wanted, key=lambda runs: (place(runs[0]), _images(runs[0]))):
        figures = [_mean(runs, "AP"), _mean(runs, "AP50"), _steps(runs), str(len(runs))]
        rows.append([_title(runs[0]), runs[0]["budget"], str(_images(runs[0])), *figures])
    return _table(["data", "budget", "training images", "AP", "AP50", "steps", "seeds"], rows)


def one_at_a_time() -> list[Row]:
    """Records with one thing replaced, beside those with nothing replaced and the same encoding."""
    head = ["data", "budget", "encoding", "what is replaced", "AP without the change", "AP50 without", "AP with it", "AP50 with it"]
    rows = []
    for runs in _groups(lambda record: record["label"] not in OF_ENCODING):
        name = [_title(runs[0]), runs[0]["budget"], _encoding(runs[0]), _replaced(runs[0])]
        rows += _beside(name, runs, lambda run: (*_setting(run), run["seed"], _encoding(run)))
    return _table([*head, "steps without, with", "seeds"], rows)


def encodings() -> list[Row]:
    """Records with another encoding than PEG, beside those with PEG."""
    head = ["data", "budget", "encoding", "AP with PEG", "AP50 with PEG", "AP with this encoding", "AP50 with it"]
    rows = []
    for runs in _groups(lambda record: record["label"] in OF_ENCODING and _encoding(record) != "PEG"):
        name = [_title(runs[0]), runs[0]["budget"], _encoding(runs[0])]
        rows += _beside(name, runs, lambda run: (*_setting(run), run["seed"], "PEG"))
    return _table([*head, "steps with PEG, with it", "seeds"], rows)


def _beside(name: list[str], runs: Sequence[Record], partner: Callable[[Record], tuple[Any, ...]]) -> list[Row]:
    """A row of the runs that have a partner among those with nothing replaced, which ``partner`` names; none where no run has."""
    plain = {(*_setting(run), run["seed"], _encoding(run)): run for run in read_records() if run["label"] in OF_ENCODING}
    pairs = [(run, plain[partner(run)]) for run in runs if partner(run) in plain]
    if not pairs:
        return []
    changed, before = ([pair[side] for pair in pairs] for side in (0, 1))
    gains = [f"{statistics.mean(one[key] - other[key] for one, other in pairs):+.1f}" for key in ("AP", "AP50")]
    figures = [f"{_mean(changed, key)} ({gain})" for key, gain in zip(("AP", "AP50"), gains, strict=True)]
    steps = f"{_steps(before)}, {_steps(changed)}"
    return [[*name, _mean(before, "AP"), _mean(before, "AP50"), *figures, steps, str(len(pairs))]]


def _groups(wanted: Callable[[Record], bool]) -> list[list[Record]]:
    """Records that differ in their seed alone.

    Raises:
        ValueError: two of them have the same seed.
    """
    found: dict[tuple[Any, ...], dict[int, Record]] = defaultdict(dict)
    for record in filter(wanted, read_records()):
        group = (*_setting(record), *_label(record))
        if record["seed"] in found[group]:
            raise ValueError(f"two records of seed {record['seed']}: {group}")
        found[group][record["seed"]] = record
    return [list(group.values()) for group in found.values()]


def _encoding(record: Record) -> str:
    name = record["chosen"]["MODEL"]["POSITION"]["NAME"]
    return ENCODINGS.get(name, name)


def _steps(runs: Sequence[Record]) -> str:
    return f"{statistics.mean(run['iterations'] for run in runs):,.0f}"


def _setting(record: Record) -> tuple[Any, ...]:
    return *_apart_from_images(record), record.get("images") or 0


def _apart_from_images(record: Record) -> tuple[Any, ...]:
    machine = record["machine"]
    return name_of(record), record["budget"], machine["cpu"], machine["instruction_set"], record["cores"]


def _title(record: Record) -> str:
    return DATA[name_of(record)][0] if name_of(record) in DATA else name_of(record)


def _images(record: Record) -> int:
    """The number of training images: of the record, or of the whole data set; -1 where this is not known."""
    return record.get("images") or (DATA[name_of(record)][1] if name_of(record) in DATA else -1)


def _replaced(record: Record) -> str:
    words = " ".join(map(_quoted, record.get("words", ())))
    return record["label"].replace("_", " ") + (f": `{words}`" if words else "")


def _quoted(word: str) -> str:
    """A word as one would type it; of YAML's empty text, for which the shell's does as well, nothing more."""
    if word == "''":
        return word
    return f'"{word}"' if "'" in word else shlex.quote(word)


def _curve(record: Record) -> list[str]:
    return [f"{value:.1f}" for _, value in sorted((int(at), value) for at, value in record["curve"].items())]


def _mean(runs: Sequence[Record], key: str) -> str:
    """A figure, of several seeds their mean with the lowest and the highest."""
    values = [run[key] for run in runs]
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _table(head: Row, rows: Sequence[Row]) -> list[Row]:
    return [head, *(rows or [["no record yet", *[""] * (len(head) - 1)]])]


if __name__ == "__main__":
    draw_curves()
