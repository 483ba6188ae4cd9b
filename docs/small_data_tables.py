# SPDX-License-Identifier: Apache-2.0
"""The tables of ``docs/small_data.md``, from the records of ``benchmarks/small_data.py``; they grow with the records."""

import json
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "small_data"
DATA = {
    "bccd": ("BCCD", 205),
    "aquarium": ("Aquarium", 448),
    "cards": ("playing cards", 296),
    "raccoon": ("raccoons", 160),
    "deeppcb": ("DeepPCB", 1000),
}
"""Name of a data set in the records -> its name in the tables, and its number of training images."""
ENCODINGS = {"sine": "sine", "sine_offset": "sine"}
"""Labels of records that differ in the position encoding alone -> the encoding; without a label it is PEG."""
Record = dict[str, Any]
Row = Sequence[str]


def read_records() -> list[Record]:
    """All records, by data set, then time, then seed."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(found, key=lambda record: (_place(record), record["cpu_seconds"] // 60, record["label"], record["seed"]))


def _place(record: Record) -> int:
    return list(DATA).index(name_of(record)) if name_of(record) in DATA else len(DATA)


def name_of(record: Record) -> str:
    """The data set, as it was named on the command line."""
    return shlex.split(record["command"])[2]


def as_trained() -> list[Row]:
    """Records of the command as it is: nothing replaced, and all training images."""
    rows = []
    for runs in _groups(lambda record: not record["label"] and not record.get("images")):
        machine = runs[0]["machine"]
        rows.append(
            [
                _title(runs[0]),
                f"`cpvt-det train FOLDER --budget {runs[0]['budget']}`",
                _mean(runs, "AP"),
                _mean(runs, "AP50"),
                ", ".join(_curve(runs[0])),
                f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f}",
                f"{statistics.mean(run['cpu_seconds'] for run in runs):,.0f}",
                f"{machine['cpu']}, {machine['instruction_set']}",
                str(runs[0]["cores"]),
                str(len(runs)),
            ]
        )
    head = ["data", "command", "AP", "AP50", "AP50 at each evaluation", "minutes", "CPU s", "processor", "cores", "seeds"]
    return _table(head, rows)


def by_size() -> list[Row]:
    """Records of parts of the training images, beside all of them in the same time."""
    parts = {(name_of(record), record["budget"]) for record in read_records() if record.get("images")}
    wanted = _groups(lambda record: not record["label"] and (name_of(record), record["budget"]) in parts)
    rows = []
    for runs in sorted(wanted, key=lambda runs: (_place(runs[0]), runs[0]["budget"], _images(runs[0]))):
        figures = [_mean(runs, "AP"), _mean(runs, "AP50"), str(len(runs))]
        rows.append([_title(runs[0]), runs[0]["budget"], str(_images(runs[0])), *figures])
    return _table(["data", "budget", "training images", "AP", "AP50", "seeds"], rows)


def one_at_a_time() -> list[Row]:
    """Records with one thing replaced, but the encoding."""
    return _changes(lambda record: record["label"] not in ENCODINGS, "what is replaced", _replaced)


def encodings() -> list[Row]:
    """Records with sine in the place of PEG."""
    return _changes(lambda record: record["label"] in ENCODINGS, "encoding", lambda record: ENCODINGS[record["label"]])


def _changes(wanted: Callable[[Record], bool], title: str, name: Callable[[Record], str]) -> list[Row]:
    """Labelled records beside those of the same data, time, images, processor and seeds without a label."""
    whole = {(*_setting(record), record["seed"]): record for record in read_records() if not record["label"]}
    rows = []
    for runs in _groups(lambda record: record["label"] and wanted(record)):
        pairs = [(run, whole[key]) for run in runs if (key := (*_setting(run), run["seed"])) in whole]
        if not pairs:
            continue
        changed, plain = ([pair[side] for pair in pairs] for side in (0, 1))
        gains = [f"{statistics.mean(one[key] - other[key] for one, other in pairs):+.1f}" for key in ("AP", "AP50")]
        figures = [f"{_mean(changed, key)} ({gain})" for key, gain in zip(("AP", "AP50"), gains, strict=True)]
        before = [_mean(plain, "AP"), _mean(plain, "AP50")]
        steps = [f"{statistics.mean(run['iterations'] for run in side):,.0f}" for side in (plain, changed)]
        rows.append([_title(runs[0]), runs[0]["budget"], name(runs[0]), *before, *figures, ", ".join(steps), str(len(pairs))])
    head = [
        "data",
        "budget",
        title,
        "AP without the change",
        "AP50 without",
        "AP with it",
        "AP50 with it",
        "steps without, with",
        "seeds",
    ]
    return _table(head, rows)


def _groups(wanted: Callable[[Record], bool]) -> list[list[Record]]:
    """Records that differ in their seed alone."""
    found = defaultdict(list)
    for record in filter(wanted, read_records()):
        found[(*_setting(record), record["label"])].append(record)
    return list(found.values())


def _setting(record: Record) -> tuple[Any, ...]:
    machine = record["machine"]
    return name_of(record), record["budget"], record.get("images"), machine["cpu"], machine["instruction_set"], record["cores"]


def _title(record: Record) -> str:
    return DATA[name_of(record)][0] if name_of(record) in DATA else name_of(record)


def _images(record: Record) -> int:
    return record.get("images") or DATA[name_of(record)][1]


def _replaced(record: Record) -> str:
    words = shlex.join(record.get("words", ()))
    return record["label"].replace("_", " ") + (f": `{words}`" if words else "")


def _curve(record: Record) -> list[str]:
    return [f"{value:.1f}" for _, value in sorted((int(at), value) for at, value in record["curve"].items())]


def _mean(runs: Sequence[Record], key: str) -> str:
    """A figure, of several seeds their mean with the lowest and the highest."""
    values = [run[key] for run in runs]
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _table(head: Row, rows: Sequence[Row]) -> list[Row]:
    return [head, *(rows or [["no record yet", *[""] * (len(head) - 1)]])]
