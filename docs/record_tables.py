# SPDX-License-Identifier: Apache-2.0
"""Tables of the documents that are written from records, between ``<!-- table: NAME -->`` and ``<!-- end -->``:
``python docs/record_tables.py`` writes them again."""

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import small_data_tables
from scipy import stats

from benchmarks import budget

ROOT = Path(__file__).resolve().parent.parent
WITH_TABLES = ("look", "parity", "results", "scaling", "small_data", "speed", "train", "use")
DOCUMENTS = [ROOT / "docs" / f"{name}.md" for name in WITH_TABLES]
TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = Sequence[str]

PASSES = ("inference", "training step")
MODELS = {
    "AVX2": ("padded/model_cpu_avx2", "model_cpu_avx2"),
    "AVX-512": ("model_cpu",),
    "AVX-512, family 25": ("family_25/detr/model_cpu", "family_25/deformable/model_cpu"),
    "AVX-512, Intel": ("intel/model_cpu",),
}
"""What was measured -> its records; of a case that several have, the first one's."""
WITH_PADDING = ("AVX2", "AVX-512")  # the others' padded batches are of earlier commits
BATCHES = {
    "DETR-R50": {
        "none": "DETR-R50 640x640 b2 {}",
        "29 %": "DETR-R50 640x640 b2, 29 % padded, {}",
    },
    "Deformable-DETR-R50": {
        "none": "Deformable-DETR-R50 640x640 b1 {}",
        "29 %": "Deformable-DETR-R50 640x640 b2, 29 % padded, {}",
    },
}
"""Model -> padding -> name of the case."""


def read_bench(name: str) -> dict[str, Any] | None:
    """A record of the benchmarks; ``None`` if it has not been made."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_runs(study: str, group: str, variant: str = "peg") -> list[dict[str, Any]]:
    """The records of a study's variant, by seed."""
    folder = ROOT / "studies" / study / "results" / group / variant
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def photographs() -> list[Row]:
    rows = [["model", "config", "AP at 100 iterations", "at 200", "at the end", "AP50", "AP75", "CPU s"]]
    for label, group, config in (
        ("DETR", "coco_detr", "coco/overfit_detr_r18_peg.yaml"),
        ("Deformable-DETR, two stages", "coco_deformable", "coco/overfit_deformable_r18_peg.yaml"),
        ("DETR on a CPVT-Ti", "coco_detr_cpvt", "coco/overfit_detr_cpvt_tiny.yaml"),
        ("Deformable-DETR, two stages, on a CPVT-Ti", "coco_deformable_cpvt", "coco/overfit_deformable_cpvt_tiny.yaml"),
    ):
        for run in read_runs("photographs", group):
            values = [run["curve"]["100"], run["curve"]["200"], run["AP"], run["AP50"], run["AP75"]]
            rows.append([label, f"`{config}`", *(f"{value:.1f}" for value in values), f"{run['cpu_seconds']:,.0f}"])
    return rows


def quickstart() -> list[Row]:
    """The quickstart as it is shipped, and without what it took of today's recipes; for the same CPU time."""
    rows = [["", "iterations", "AP", "by seed", "AP50", "AP at half of the time", "duplicates, % of detections above 0.4"]]
    for label, group, arm in (
        ("as shipped, 40 pairs", "pairs", "40 pairs"),
        ("before, 20 pairs", "quickstart", "taken"),
        ("without the four mechanisms and NMS", "mechanisms", "today"),
    ):
        runs = read_runs("mechanisms", group, arm)
        half, mean, seeds = by_seed(runs)
        rows.append([label, f"{runs[0]['iterations']:,}", mean, seeds, mean_of(runs, "AP50"), half, duplicates(runs)])
    return rows


def mean_of(runs: Sequence[dict[str, Any]], key: str) -> str:
    """The mean of a figure."""
    return f"{statistics.mean(run[key] for run in runs):.1f}"


def by_seed(runs: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """Mean AP at the second of four evaluations, mean AP at the end, and that by seed."""
    half = statistics.mean(sorted((int(at), value) for at, value in run["curve"].items())[1][1] for run in runs)
    return f"{half:.1f}", mean_of(runs, "AP"), ", ".join(f"{run['AP']:.1f}" for run in runs)


def duplicates(runs: Sequence[dict[str, Any]]) -> str:
    """Mean percentage of detections that find an object again."""
    return f"{statistics.mean(run['measured']['probes']['duplicates']['percent'] for run in runs):.1f}"


def mechanisms() -> list[Row]:
    """The arms of the study by AP at the end; means over the seeds that have a record."""
    head = ["arm", "iterations", "AP at half of the CPU time", "AP at its end", "by seed"]
    rows = [[*head, "duplicates, % of detections above 0.4"]]
    folders = (ROOT / "studies" / "mechanisms" / "results" / "mechanisms").iterdir()
    arms = {folder.name: read_runs("mechanisms", "mechanisms", folder.name) for folder in folders}
    for name in sorted(arms, key=lambda name: statistics.mean(run["AP"] for run in arms[name]), reverse=True):
        runs = arms[name]
        rows.append([f"`{name}`", f"{runs[0]['iterations']:,}", *by_seed(runs), duplicates(runs)])
    return rows


def blood_cells() -> list[Row]:
    """The arms of the study on blood cells; means over the seeds that have a record."""
    rows = [["arm", "iterations", "AP at half of the CPU time", "AP at its end", "by seed", "AP50"]]
    for name in ("before", "together", "small", "small together"):
        runs = read_runs("bccd", "tutorial", name)
        rows.append([f"`{name}`", f"{runs[0]['iterations']:,}", *by_seed(runs), mean_of(runs, "AP50")])
    return rows


def quickstart_time() -> list[Row]:
    head = [
        "processor",
        "ms per step, one thread",
        "ms, two threads",
        "two threads are faster by",
        "training and evaluation, minutes",
    ]
    rows = [[*head, "AP of that run", "record"]]
    for name, label in (
        ("family_25/quickstart_time_cpu_avx2", "AVX-512, family 25, limited to AVX2"),
        ("quickstart_time_cpu", "AVX-512, family 25"),
    ):
        record = read_bench(name)
        if record:
            times = [f"{statistics.median(record['ms'][threads]):.0f}" for threads in ("1", "2")]
            whole = [f"{record['whole'][key]:.1f}" for key in ("minutes", "AP")]
            rows.append([label, *times, _times(record["times_as_fast"]), *whole, f"[JSON](../benchmarks/results/{name}.json)"])
    return rows


def cases_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> case, of several records; of a case that several have, the first one's."""
    records = [record for record in map(read_bench, names) if record]
    return {case["name"]: case for record in reversed(records) for case in record["cases"]}


def whole_models() -> list[Row]:
    """How many times as fast ours is on one thread: the same work as the official code's, and what ours ships."""
    same, ships = "same work", "as it ships"
    rows = [
        [
            "instructions",
            "model",
            "pass",
            "padding",
            f"{same}, theirs as it comes",
            f"{same}, theirs at its best",
            f"{ships}, theirs at its best",
        ]
    ]
    for label, names in MODELS.items():
        cases = cases_of(names)
        for model, of_model in BATCHES.items():
            for passes in PASSES:
                for padding, case_name in of_model.items():
                    case = cases.get(case_name.format(passes))
                    if case and (padding == "none" or label in WITH_PADDING):
                        of = {row["name"]: row for row in case["rows"]}
                        rows.append([label, model, passes, padding, *_beside_official(of)])
    return rows


def _beside_official(of: dict[str, dict[str, Any]]) -> Row:
    """The same work beside theirs as it comes; it, and ours as it ships, beside theirs at its best."""
    ours, shipped = of["cpvt_det"], of["cpvt_det PEG"]
    return [_times(ours["ratio_cpu"]), *(_times(row["over_peer_cpu"]) for row in (ours, shipped))]


DINO_RECORDS = {"IDEA-Research/DINO": ("dino/model_cpu", "DINO-R50"), "detrex": ("detrex/model_cpu", "detrex DINO-R50")}
"""Code -> its record, and the beginning of the cases' names."""


def dino() -> list[Row]:
    """How many times as fast ours is on one thread, beside each code."""
    theirs = ["same work, theirs as it comes", "same work, theirs at its best", "as it ships, theirs at its best"]
    rows = [["code", "pass", "padding", *theirs]]
    for code, (record, name) in DINO_RECORDS.items():
        cases = {case["name"]: case for case in read_bench(record)["cases"]}
        for passes, (padding, between) in itertools.product(PASSES, (("none", " "), ("29 %", ", 29 % padded, "))):
            if case := cases.get(f"{name} 640x640 b2{between}{passes}"):
                of = {row["name"]: row for row in case["rows"]}
                ours, shipped = of["cpvt_det"], of["cpvt_det PEG"]
                figures = [ours["ratio_cpu"], ours["over_peer_cpu"], shipped["over_peer_cpu"]]
                rows.append([code, passes, padding, *map(_times, figures)])
    return rows


def waiting() -> list[Row]:
    """The quickstart's step with threads that wait in three ways."""
    times = read_bench("quickstart_beside_cpu")["ms"]
    rows = [["waiting threads", "ms on free cores", "ms if other programs keep both cores busy"]]
    for way, name in (("spin briefly", "our commands"), ("spin", "torch's default"), ("sleep", "`OMP_WAIT_POLICY=PASSIVE`")):
        rows.append([name, *(f"{statistics.median(times[f'{way}, {where}']):.0f}" for where in ("alone", "beside"))])
    return rows


def real_time() -> list[Row]:
    """How many times as fast RT-DETRv2 and D-FINE are as transformers'."""
    head = ["model", "pass", "image", "theirs as it comes", "theirs at its best", "two threads, as it comes"]
    rows = [[*head, "both as ONNX files", "ONNX files, two threads"]]
    alone = read_bench("real_time_cpu")["cases"]
    others = [
        {case["name"]: _times(of_contender(case, name)[f"ratio_{clock}"]) for case in read_bench(record)["cases"]}
        for record, name, clock in (
            ("real_time_cpu_2threads", "cpvt_det", "wall"),
            ("real_time_exported_cpu", "cpvt_det, onnxruntime", "cpu"),
            ("real_time_exported_cpu_2threads", "cpvt_det, onnxruntime", "wall"),
        )
    ]
    for case in alone:
        about, padded, ours = case["about"], " padded" in case["name"], of_contender(case, "cpvt_det")
        image = f"{about['image']}{', ' + about['padded'] + ' padded' if padded else ''}"
        figures = [_times(ours["ratio_cpu"]), _times(ours["over_peer_cpu"])]
        rows.append([about["model"], about["pass"], image, *figures, *(times.get(case["name"], "") for times in others)])
    return rows


def of_contender(case: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = (row for row in case["rows"] if row["name"] == name)
    return row


def dino_memory() -> list[Row]:
    record, name = DINO_RECORDS["IDEA-Research/DINO"]
    of = rows_of(record, f"{name} 640x640 b2 training step")
    least = min(row["peak_bytes"] for row in of.values() if row["peer"])
    rows = [["", "peak memory over IDEA-Research/DINO's", "times as fast as it"]]
    for label, ours in (("as it ships", "cpvt_det PEG"), ("with `MODEL.CHECKPOINTING`", "cpvt_det PEG, checkpointing")):
        rows.append([label, f"{of[ours]['peak_bytes'] / least:.2f}", _times(of[ours]["over_peer_cpu"])])
    return rows


def _times(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['q1']:.2f}-{spread['q3']:.2f})"


OLDER = "model_cpu_2threads"
OLDER_CASES = {"DETR-R50": "DETR 640x640 b2 {}", "Deformable-DETR-R50": "Deformable-DETR 640x640 b1 {}"}


def rows_of(record: str, case: str) -> dict[str, dict[str, Any]]:
    """Contender -> its row, of a case of a record."""
    (found,) = [one for one in read_bench(record)["cases"] if one["name"] == case]
    return {row["name"]: row for row in found["rows"]}


def _half_precision(of: dict[str, dict[str, Any]], clock: str) -> float:
    """The fastest peer's time over that of ours with PEG, all in bf16; a quotient of medians."""
    peers = [row[clock]["median"] for name, row in of.items() if name.endswith(" bf16") and "cpvt" not in name]
    return min(peers) / of["cpvt_det PEG bf16"][clock]["median"]


def half_precision() -> list[Row]:
    rows = [["instructions", "pass", "bf16 on both sides", "our bf16 against float32 peers"]]
    labels = ("AVX-512", "AVX-512, Intel")
    for label, passes in itertools.product(labels, PASSES):
        of = rows_of(MODELS[label][0], BATCHES["DETR-R50"]["none"].format(passes))
        times = _times(of["cpvt_det PEG bf16"]["over_peer_cpu"])
        rows.append([label, passes, f"{_half_precision(of, 'cpu'):.2f}", times])
    return rows


def memory() -> list[Row]:
    columns = []
    for name in OLDER_CASES.values():
        of = rows_of(OLDER, name.format(PASSES[1]))
        least = min(row["peak_bytes"] for row in of.values() if row["peer"])
        ours, frugal = of["cpvt_det PEG"], of["cpvt_det PEG, checkpointing"]
        slower = frugal["wall"]["median"] / ours["wall"]["median"]
        columns.append([f"{ours['peak_bytes'] / least:.2f}", f"{frugal['peak_bytes'] / least:.2f}", f"{slower:.2f}"])
    labels = ["peak memory over the smaller peer's", "with `MODEL.CHECKPOINTING`", "time with it over the step without"]
    return [["", *OLDER_CASES], *([label, *values] for label, values in zip(labels, zip(*columns, strict=True), strict=True))]


def peg_beside_sine() -> list[Row]:
    parts = {"whole model": "", "encoder": "encoder of "}
    rows = [["", *(f"{label}, {passes}" for label in parts for passes in PASSES)]]
    for model, name in OLDER_CASES.items():
        names = [f"{part}{name.format(passes)}, sine and PEG" for part in parts.values() for passes in PASSES]
        rows.append([model, *(_times(rows_of(OLDER, case)["cpvt_det PEG"]["ratio_wall"]) for case in names)])
    return rows


def classifiers() -> list[Row]:
    """Ours with timm's weights, beside timm's."""
    rows = [["processor", "model", "pass", "times as fast as timm's", "outputs differ by"]]
    records = {"AVX2": "classifier_cpu_avx2", "AVX-512": "classifier_cpu"}
    for (processor, record), model, passes in itertools.product(records.items(), ("DeiT-S", "TNT-S"), PASSES):
        ours = rows_of(record, f"{model} b8 {passes}")["cpvt_det"]
        rows.append([processor, model, passes, _times(ours["ratio_cpu"]), f"{ours['difference']:.0e}"])
    return rows


def parts() -> list[Row]:
    """Everything but whole models: times against the fastest peer. Records before instruction sets were kept are of AVX-512."""

    def line(label: str, record: str, cases: Sequence[str], timed: str = "wall") -> Row:
        spreads = [rows_of(record, case)["cpvt_det"][f"over_peer_{timed}"] for case in cases]
        text = ", ".join(_times(spread) for spread in spreads)
        instructions = {"AVX512": "AVX-512"}.get(made := read_bench(record)["machine"].get("instruction_set", "AVX512"), made)
        threads = "two threads" if record.endswith("_2threads") else "one thread"
        return [label, text, f"{instructions}, {threads}", f"[{record.partition('_')[0]}](../benchmarks/results/{record}.md)"]

    op, both = "op_cpu_2threads", "near forward+backward"
    kinds = ("softmax", "focal", "denoising")
    softmax, focal, denoising = ([f"{kind} b{b} q{q}" for b in (8, 32) for q in (100, 300)] for kind in kinds)
    return [
        ["work", "times as fast", "measured with", "record"],
        line(
            "deformable attention, all tokens, 640x640, 1, 2, 4, 8 images", op, [f"640x640 b{b} qall {both}" for b in (1, 2, 4, 8)]
        ),
        line("the same for 300 queries", op, [f"640x640 b{b} q300 {both}" for b in (1, 2, 4, 8)]),
        line("one image of 800x1333: all tokens, 300 queries", op, [f"800x1333 b1 {q} {both}" for q in ("qall", "q300")]),
        line("matcher and losses, softmax: batch 8 and 32, 100 and 300 queries each", "loss_cpu", softmax, "cpu"),
        line("the same, focal", "loss_cpu", focal, "cpu"),
        line("the same, focal, with DINO's denoising queries of 100 pairs", "loss_cpu", denoising, "cpu"),
        line("JPEG to augmented bytes", "data_cpu_avx2", ["samples"], "cpu"),
        line("JPEG to normalised, padded batches", "data_cpu_avx2", ["batches"], "cpu"),
    ]


def first_boxes() -> list[Row]:
    record = read_bench("browser_cpu_2threads")
    rows = [
        ["", "s to the address", "s from the drop to boxes", "s from the command to boxes", "CPU s of the command", "slider, ms"]
    ]
    for config, found in record["page"].items():
        seconds = [f"{found[key]:.1f}" for key in ("to_the_address_s", "from_the_drop_s", "from_the_command_s", "cpu_s")]
        rows.append([f"`{config}`", *seconds, _slider(found)])
    report = record["report"]
    rows.append([f"`report.html` of {report['images']} images, {report['megabytes']:.1f} MB", *[""] * 4, _slider(report)])
    return rows


def _slider(found: dict[str, Any]) -> str:
    return f"{found['slider_median_ms']:.1f} (at most {found['slider_longest_ms']:.1f})"


def tiles(record: str) -> list[Row]:
    rows = [["", "AP small", "AP medium", "AP", "AP50", "CPU s per image"]]
    for name, found in read_bench(record)["ways"].items():
        rows.append([name, *(f"{found[key]:.1f}" for key in ("APs", "APm", "AP", "AP50")), f"{found['cpu_seconds']:.2f}"])
    return rows


def timm_networks() -> list[Row]:
    """Times of a training step over timm's, by network and norm; a column for each share of padding."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in read_bench("timm_backbone_cpu")["rows"]:
        cells.setdefault((row["network"], row["norm"]), []).append(_times(row["cpu_ratio"]))
    return [["network", "norms", "no padding", "29 % padded"], *([*names, *values] for names, values in cells.items())]


def shards() -> list[Row]:
    record = read_bench("shards_cpu")
    rows = [["images per CPU second", "files", "tar files", "webdataset's reader, in sequence"]]
    for key, label in (("bytes", "bytes"), ("headers", "headers"), ("samples", "decoded and augmented")):
        rates = [record[key].get(name, {}).get("images_per_second") for name in ("files", "tar files", "webdataset, in sequence")]
        rows.append([label, *("" if rate is None else f"{rate:,.0f}" for rate in rates)])
    return rows


CODES = {"dino": "IDEA-Research/DINO", "hdetr": "HDETR/H-Deformable-DETR", "detrex": "detrex"}
CODES |= {"dfine": "Peterande/D-FINE", "deim": "ShihuaHuang95/DEIM"}
LOSSES_OF = {"varifocal": "D-FINE and RT-DETR", "mal": "DEIM", "ia_bce": "Align-DETR"}


def foreign_weights() -> list[Row]:
    rows = [["code", "model", "config", "tensors loaded", "logits", "boxes", "losses", "gradients"]]
    for row in read_bench("foreign_weights")["rows"]:
        figures = [f"{row[key]:.1e}" if key in row else "-" for key in ("logits", "boxes", "losses", "gradients")]
        rows.append([CODES[row["code"]], row["model"], f"`{Path(row['config']).stem}`", str(row["loaded"]), *figures])
    return rows


def foreign_losses() -> list[Row]:
    rows = [["code", "model", "loss", "gradient"]]
    for row in read_bench("foreign_losses")["rows"]:
        of = row["loss of"]
        rows.append([CODES[row["code"]], f"{LOSSES_OF[of]}, `{of}`", *(f"{row[key]:.1e}" for key in ("loss", "gradient"))])
    return rows


STARTS = {"": "backbone", "start": "detector, 1e-4", "start_new_heads": "detector, its own rates"}
"""Label of a record of fine-tuning -> what the run starts from."""


def fine_tuning() -> list[Row]:
    """AP from each start, and what the last one gains over the others, paired by data, photographs and seed."""
    found: dict[tuple[str, int], dict[tuple[str, int], float]] = {}
    for path in (ROOT / "benchmarks/results/fine_tuning").glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        cell = found.setdefault((small_data_tables.name_of(run), run["images"]), {})
        cell[run["label"], run["seed"]] = run["AP"]
    rows = [["data", "photographs", *STARTS.values(), "more than from the backbone", "more than at 1e-4", "seeds"]]
    gains: list[list[float]] = [[], []]
    for (name, images), cell in sorted(found.items()):
        seeds = sorted({seed for _, seed in cell if all((label, seed) in cell for label in STARTS)})
        means = [f"{statistics.mean(cell[label, seed] for seed in seeds):.1f}" for label in STARTS]
        own = [[cell["start_new_heads", seed] - cell[label, seed] for seed in seeds] for label in ("", "start")]
        for every, more in zip(gains, own, strict=True):
            every += more
        rows.append([name, str(images), *means, *(f"{statistics.mean(more):+.1f}" for more in own), str(len(seeds))])
    return [*rows, ["all runs", "", "", "", "", *map(_with_interval, gains), str(len(gains[0]))]]


def _with_interval(differences: Sequence[float]) -> str:
    """Mean and 95 % interval, by Student's t."""
    half = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    return f"{statistics.mean(differences):+.1f} ± {half:.1f}"


TABLES: dict[str, Callable[[], list[Row]]] = {
    "photographs": photographs,
    "quickstart": quickstart,
    "mechanisms": mechanisms,
    "blood cells": blood_cells,
    "quickstart time": quickstart_time,
    "whole models": whole_models,
    "dino": dino,
    "dino memory": dino_memory,
    "waiting": waiting,
    "real time": real_time,
    "half precision": half_precision,
    "memory": memory,
    "PEG beside sine": peg_beside_sine,
    "classifiers": classifiers,
    "parts": parts,
    "first boxes": first_boxes,
    "fine tuning": fine_tuning,
    "tiles": partial(tiles, "tiles_shapes_val"),
    "tiles of boards": partial(tiles, "tiles_deeppcb_folder_val"),
    "shards": shards,
    "timm": timm_networks,
    "foreign weights": foreign_weights,
    "foreign losses": foreign_losses,
    "budget": budget.rows,
    "small data": small_data_tables.as_trained,
    "small data goals": small_data_tables.goals,
    "small data peers": small_data_tables.peers,
    "small data by size": small_data_tables.by_size,
    "small data one at a time": small_data_tables.one_at_a_time,
    "small data encodings": small_data_tables.encodings,
}


def as_markdown(rows: Sequence[Row]) -> str:
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return head + "|---" * len(rows[0]) + "|\n" + "".join(rest)


def with_tables(text: str) -> str:
    """A document with its tables from the records."""
    return TABLE.sub(lambda found: found[1] + as_markdown(TABLES[found[2]]()) + found[3], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
