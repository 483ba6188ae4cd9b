# SPDX-License-Identifier: Apache-2.0
"""Every figure of the documents has a record: tables are written from the records, rows are those of a report, and what
decimals prose has are in the records that its document names. The first screens are in ``test_headlines.py``, word for word."""

import bisect
import contextlib
import functools
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import record_tables
import torch
from click.testing import CliRunner

from cpvt_det.cli import main as cpvt_det
from studies.engine.statistics import interval, paired

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
)
DECIMAL = re.compile(r"(?<![\w.,-])\d+\.\d+(?![\w.]*\d)")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
OF_A_RUN = ("AP", "AP50", "curve")
"""Keys of the record of a study's run, or of a run on a folder, that pages give single values of; a study with a report is
compared with that."""

ENCODINGS = ["studies/position_encodings"]
CLASSIFIERS = ["studies/classifiers"]
RECORDS = {
    "README.md": [
        "studies/mechanisms/results/pairs",
        "benchmarks/results/quickstart_time_cpu.json",
        "benchmarks/results/family_25/quickstart_time_cpu_avx2.json",
        "benchmarks/results/first_run_memory.json",
        "benchmarks/results/gpu_h100",
        "benchmarks/results/gpu_h200",
    ],
    "docs/results.md": [
        "benchmarks/results/quickstart_time_cpu.json",
        "studies/mechanisms/results",
        "studies/quickstart",
        "studies/quickstart/results",  # AP of single runs
        "studies/photographs",
        "studies/bccd/results",
    ],
    "docs/tutorial.md": ["studies/bccd/results"],
    "docs/train.md": ["benchmarks/results/learning_trials.json"],
    "docs/encodings.md": ENCODINGS,
    "docs/position_encodings.md": [*ENCODINGS, "studies/scramble"],
    "docs/which_encoding.md": ["studies/photo_encodings"],
    "docs/classifiers.md": CLASSIFIERS,
    "docs/claims.md": CLASSIFIERS,
    "docs/scaling.md": [
        "benchmarks/results/scaling_cpu.json",
        "benchmarks/results/scaling_cpu.md",
        "benchmarks/results/processes_cpu.json",
        "benchmarks/results/annotations_coco.json",
        "benchmarks/results/annotations_large.json",
    ],
    "docs/export.md": [
        "benchmarks/results/exported_speed_quickstart_cpu_avx2_2threads.json",
        "benchmarks/results/exported_speed_photos_cpu_avx2_2threads.json",
    ],
    "docs/processors.md": ["benchmarks/results/fast_paths_cpu_avx2.json", "benchmarks/results/fast_paths_cpu.json"],
    "docs/small_data.md": [
        "benchmarks/results/small_data",
        "benchmarks/results/small_data_peers",
        "benchmarks/results/learning_trials.json",
    ],
    "docs/speed.md": [
        "benchmarks/results/before_after.md",
        "benchmarks/results/before_after_cpu.md",
        "benchmarks/results/before_after_cpu_avx2.md",
        "benchmarks/results/model_cpu.json",
        "benchmarks/results/quickstart_beside_cpu.json",
        "benchmarks/results/start_up.json",
        "benchmarks/results/gpu_h100",
        "benchmarks/results/gpu_h200",
    ],
}
"""Document -> where its figures come from; the others have none but constants."""
ELSEWHERE = {"docs/config.md", "docs/parity.md", "docs/reliability.md"}
"""Documents that are written from code or records as a whole, and compared with them by tests of their own."""


def constants(document):
    """Decimals of a document that are no figures of ours: settings, versions, and what a cited source says."""
    return {
        "README.md": {"3.10"},
        "docs/comparison.md": {"5.23", "1.6"},
        "docs/look.md": {"0.05"},  # a setting
        "docs/plug.md": {"2.15"},
        "docs/results.md": {"59.0", "60.9"}  # of records that were made again, before 1649921
        | {"0.34", "0.07"},  # unpaired p (test_headlines.py)
        "docs/processors.md": {"3.7", "3.12", "2.9", "2.14", "2.15"},
        "docs/position_encodings.md": {"68.6", "70.5", "70.6", "71.3", "72.4", "72.5", "73.4"}  # of the paper
        | {"0.875", "0.100"},  # p over the whole study (test_headlines.py)
        "docs/scaling.md": {"5.9"},  # million images, 50 times COCO's
        "docs/export.md": {"0.5"},  # a setting
        "docs/train.md": {
            "32.8",
            "33.7",
            "33.9",
            "0.2",
            "0.6",
            "0.7",
            "47.0",
            "49.0",
            "0.5",
            "0.00001",
            "0.001",
            "3.2",
            "3.3",
            "3.4",
            "1.5",
        }
        | {
            "3.5",
            "4.2",
            "1.1",
            "0.95",
            "2008.13367",
            "2201.12329",
            "2304.08069",  # RT-DETR, RT-DETRv2, D-FINE
            "2407.17140",
            "2410.13842",
            "2203.01305",
            "2203.03605",
            "2207.13080",
            "2304.07527",
            "2401.03989",
        }
        | {"2304.04742", "2412.04234"},  # papers' figures, sections and numbers; settings
        "docs/small_data.md": {"79.0", "82.2", "78.1", "91.2", "92.2", "92.7", "4.0"}  # Roboflow 100's figures; a licence
        | {"2.9", "3.6", "1.2", "3.9", "0.2", "1.5", "0.1", "3.5", "0.66"},  # of three seeds (test_headlines.py)
        "docs/tutorial.md": {"0.5"},  # a setting
        "docs/use.md": {"0.1", "0.2", "0.5", "0.7", "1.0"} | published_figures(),  # settings; AP of public weights
        "docs/which_encoding.md": {"0.55", "1.5"}  # of the plan, and a factor
        | {"0.1", "0.5", "0.6", "0.7", "0.8", "1.1", "1.2", "2.0", "2.2", "2.6", "3.3", "3.4", "3.7", "3.8", "3.9", "5.4"}
        | {"0.0", "1.4", "3.2"},  # test_study_answers.py
        "docs/classifiers.md": {"68.2", "70.5", "72.2", "72.4", "73.4"}  # of the paper
        | {"0.876", "0.193"},  # p over the whole study (test_headlines.py)
        "docs/classify.md": {"1.3"},  # million images of ImageNet
        "docs/clusters.md": {"2.14"},
        "docs/claims.md": articles_figures() | {"2.1", "2102.10882", "2103.00112"},  # a figure beside ours; addresses
    }.get(document, set())


def published_figures():
    """The decimals of the column of AP in the table of public weights."""
    rows = [line.split("|") for line in (ROOT / "docs/use.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {decimal for row in rows if len(row) > 6 for decimal in DECIMAL.findall(row[2])}


def articles_figures():
    """The decimals of the columns of ``docs/claims.md`` that have the articles' claims and figures."""
    rows = [line.split("|") for line in (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {decimal for row in rows if row[1].strip().isdigit() for decimal in DECIMAL.findall("|".join(row[2:4]))}


@contextlib.contextmanager
def shapes_alone():
    """Operations are counted of tensors without numbers: those of large images take no memory, and no time."""
    autocast = torch.autocast
    with torch.device("meta"), mock.patch("torch.autocast", lambda device, *args, **more: autocast("cpu", *args, **more)):
        yield


def operations(document):
    """The numbers that ``cpvt-det analyze`` prints, but times and memory, for the document that shows them."""
    if document != "docs/look.md":
        return []
    words = ["analyze", "--config-file", "coco/detr_r50_peg_50ep.yaml", "--sizes", "480x480,800x1216", "MODEL.DEVICE", "meta"]
    with mock.patch("cpvt_det.cli.analyze._print_speed"), shapes_alone():
        return [float(decimal) for decimal in DECIMAL.findall(CliRunner().invoke(cpvt_det, words).output)]


def prose(text):
    """The text without tables that are written from records, code, and addresses."""
    for pattern in (r"<!-- table: .*?<!-- end -->", r"^ *```.*?^ *```", r"`[^`\n]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


def numbers_of(value):
    """All numbers of a record's JSON; of a run, what pages give of it."""
    if isinstance(value, dict):
        kept = [value[key] for key in OF_A_RUN if key in value] if {"run", "chosen"} & value.keys() else value.values()
        return [number for part in kept for number in numbers_of(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers_of(part)]
    return [float(value)] if isinstance(value, int | float) else []


@functools.cache
def known_to(document):
    """What a document may say: decimals as the reports of its studies write them; and of other records all numbers, in order."""
    texts, numbers = set(), operations(document)
    for path in (ROOT / name for name in RECORDS.get(document, [])):
        if (path / "report.md").is_file():
            written = set(DECIMAL.findall((path / "report.md").read_text(encoding="utf-8")))
            texts |= written | {f"{float(decimal):.2f}" for decimal in written if len(decimal.partition(".")[2]) == 3}
            continue
        for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
            text = file.read_text(encoding="utf-8")
            numbers += numbers_of(json.loads(text)) if file.suffix == ".json" else map(float, NUMBER.findall(text))
        for folder in {file.parent for file in path.rglob("[0-9].json")}:
            records = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
            values = [record["AP"] for record in records if "AP" in record]
            numbers += interval(values) if len(values) > 1 else ()
    in_gb = [number / 1000 for number in numbers] + [number / 1e9 for number in numbers if number > 1e8]  # of MB, and of bytes
    return texts, sorted([*numbers, *in_gb])


def is_rounded_from(decimal, known):
    """Whether one of the numbers, in order, rounds to a decimal as it is written."""
    half = 0.5 * 10.0 ** -len(decimal.partition(".")[2]) + 1e-9
    at = bisect.bisect_left(known, float(decimal) - half)
    return at < len(known) and known[at] <= float(decimal) + half


def strange_decimals(document, text):
    """Decimals of a part of a document's prose that no record has."""
    texts, numbers = known_to(document)
    fixed = texts | constants(document)
    return {decimal for decimal in DECIMAL.findall(text) if decimal not in fixed and not is_rounded_from(decimal, numbers)}


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document not in ELSEWHERE])
def test_decimals_of_prose_are_in_the_records(document):
    assert strange_decimals(document, prose((ROOT / document).read_text(encoding="utf-8"))) == set()


@pytest.mark.parametrize("document", record_tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_records(document):
    text = document.read_text(encoding="utf-8")
    assert record_tables.TABLE.search(text)
    with shapes_alone():
        assert record_tables.with_tables(text) == text, "out of date: python docs/record_tables.py"


def rows_of(path):
    """Rows of tables with a figure, but those that are written from records."""
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if any(DECIMAL.search(cell) or " ± " in cell for cell in row[1:])]


def is_part_of(cells, row):
    """Whether cells stand in a row in the same order."""
    rest = iter(row)
    return all(cell in rest for cell in cells)


def is_row_of(row, report):
    """Whether a row of a page is one of a report, or a part of it that begins with the same name."""
    return any(is_part_of([row[0].strip("`"), *filter(None, row[1:])], known) for known in report)


OF_A_REPORT = {
    "docs/position_encodings.md": ("position_encodings", 25),
    "docs/classifiers.md": ("classifiers", 20),
}
"""Page with rows of a study's report -> the study, and how many rows at least."""


@pytest.mark.parametrize("document", OF_A_REPORT)
def test_rows_of_a_study_s_page_are_those_of_its_report(document):
    study, at_least = OF_A_REPORT[document]
    rows, report = rows_of(document), rows_of(f"studies/{study}/report.md")
    assert len(rows) >= at_least
    assert [row for row in rows if not is_row_of(row, report)] == []


OF_PROBES = [
    ("longer_each_layer/sine+peg each layer", "longer/sine", "place", "after"),
    ("ablations/zero-initialised", "", "place", "after"),
    ("longer/learned", "longer/none", "translation", "score_std"),
    ("detr/learned", "detr/none", "translation", "score_std"),
    ("longer/sine+peg", "longer/sine", "translation", "score_std"),
]
"""What prose says of probes, which the report has by variant only: runs, runs they are compared with or none, probe, figure."""


def probed(runs, others, probe, figure, decimals):
    """Mean and half-width as written, of a figure or of its paired difference."""

    def values(name):
        files = (ROOT / "studies/position_encodings/results" / name).glob("*.json")
        return {path.stem: json.loads(path.read_text(encoding="utf-8"))["measured"]["probes"][probe][figure] for path in files}

    mean, half, *_ = paired(values(runs), values(others)) if others else interval(list(values(runs).values()))
    return [(f"{abs(mean):.{decimals}f}", f"{half:.{decimals}f}")]


PAIR = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")


@pytest.mark.parametrize("document", ["docs/classifiers.md", "docs/encodings.md", "docs/position_encodings.md"])
def test_differences_of_studies_are_those_of_their_reports(document):
    """Mean and half-width together, without the sign, as prose says "loses": a single decimal is among so many by chance."""
    reports = ((ROOT / study / "report.md").read_text(encoding="utf-8") for study in RECORDS[document])
    report = {pair for text in reports for pair in PAIR.findall(text)}
    if ENCODINGS[0] in RECORDS[document]:
        report |= {pair for decimals in (2, 3) for row in OF_PROBES for pair in probed(*row, decimals)}
    found = PAIR.findall((ROOT / document).read_text(encoding="utf-8"))
    assert found
    assert set(found) - report == set()


def test_every_claim_has_its_row():
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs/claims.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(map(int, rows)) == list(range(1, 45))


def test_a_figure_that_no_record_has_is_found():
    assert DECIMAL.findall(prose("AP 61.5, `1e-4` and `2.5` ([x](a/3.5.md))\n```\n9.9\n```\n| 7.25 |")) == ["61.5", "7.25"]
    assert is_rounded_from("61.5", [1.0, 61.46, 70.0])
    assert not is_rounded_from("61.5", [1.0, 61.44, 61.56])
    assert not is_part_of(["a", "2", "1"], ["a", "1", "2"])
