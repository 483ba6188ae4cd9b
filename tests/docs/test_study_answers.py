# SPDX-License-Identifier: Apache-2.0
"""The answers of the reports of studies, computed again from plan and records, by least squares and without the engine."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

STUDIES = Path(__file__).resolve().parents[2] / "studies"
ANSWERED = [
    path.parent
    for path in sorted(STUDIES.glob("*/report.md"))
    if "\nquestions:" in (path.parent / "plan.yaml").read_text(encoding="utf-8")
]


def value_of(record, weights):
    """AP, or the named sums of AP on the data sets of sweeps; ``None`` if one is missing."""
    on = {name: ap for sweep in record["measured"]["sweeps"].values() for name, ap in sweep.items()} | {"": record["AP"]}
    numbers = [(weight, on.get(name)) for name, weight in (weights or {"": 1.0}).items()]
    return None if any(ap is None for _, ap in numbers) else sum(weight * ap for weight, ap in numbers)


def fitted(study, question, questions):
    """Difference and half of its interval, from a fit of ``value = variant + seed + rest`` to all runs of the group."""
    folders = sorted((study / "results" / question["group"]).iterdir())
    runs = {(one.name, path.stem): json.loads(path.read_text()) for one in folders for path in one.glob("*.json")}
    values = {key: value_of(record, question.get("value")) for key, record in runs.items()}
    variants = [one.name for one in folders]
    seeds = sorted({seed for _, seed in values})
    seeds = [seed for seed in seeds if all(values.get((name, seed)) is not None for name in variants)]
    cells = list(itertools.product(variants, seeds))
    design = np.array(
        [[*(name == one for one in variants), *(seed == one for one in seeds[1:])] for name, seed in cells], dtype=float
    )
    observed = np.array([values[cell] for cell in cells])
    part, residue, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
    freedom = len(cells) - rank
    contrast = np.zeros(design.shape[1])
    contrast[variants.index(question["variant"])], contrast[variants.index(question["baseline"])] = 1.0, -1.0
    error = np.sqrt(residue[0] / freedom * contrast @ np.linalg.inv(design.T @ design) @ contrast)
    return contrast @ part, error * stats.t.ppf(1 - 0.025 / questions, freedom)


@pytest.mark.parametrize("study", ANSWERED, ids=lambda path: path.name)
def test_the_answers_of_a_report_are_those_of_its_records(study):
    questions = yaml.safe_load((study / "plan.yaml").read_text(encoding="utf-8"))["questions"]
    rows = re.findall(r"^\|.*\| \S+ less \S+ .*\|$", (study / "report.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(questions) > 0
    for row, question in zip(rows, questions, strict=True):
        text, group, pair, difference, answer, _ = (cell.strip() for cell in row.strip("|").split("|"))
        mean, half = fitted(study, question, len(questions))
        assert (text, group) == (question["text"], question["group"])
        assert pair == f"{question['variant']} less {question['baseline']}"
        assert difference == f"{mean:+.1f} ± {half:.1f}"
        seen = "better" if mean > 0 else "worse"
        assert answer == (seen if abs(mean) > half else f"no further apart than {abs(mean) + half:.1f}")


def test_the_page_on_photographs_says_what_its_records_say():
    """Also the table of its report, in other words, is computed from the records."""
    study, page = STUDIES / "photo_encodings", (STUDIES.parent / "docs/which_encoding.md").read_text(encoding="utf-8")
    questions = yaml.safe_load((study / "plan.yaml").read_text(encoding="utf-8"))["questions"]
    asked = questions
    found = [fitted(study, question, len(questions)) for question in asked]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.* less .*\|$", page, re.MULTILINE)]
    expected = []
    for question, (mean, half) in zip(asked, found, strict=True):
        pair = f"{question['variant']} less {question['baseline']}"
        assert abs(mean) < half
        expected.append([question["text"], pair, f"{mean:+.1f} ± {half:.1f}", f"no further apart than {abs(mean) + half:.1f}"])
    assert rows == expected
    sines, _, peg, _, _, kept_peg, kept_rope, _, _, peg_in_dino = (f"{mean:+.1f} ± {half:.1f}" for mean, half in found)
    alone, runs = fitted(study, asked[0], 1), {}
    for path in (study / "results/dfine").glob("*/*.json"):
        record = json.loads(path.read_text())
        runs.setdefault(path.parent.name, []).append((record["AP"], record["measured"]["sweeps"]["size"]["size_2"]))
    in_dino = [json.loads(path.read_text())["AP"] for path in (study / "results/dino/sine_offset").glob("*.json")]
    lost = sorted(np.mean([ap - at_twice for ap, at_twice in values]) for values in runs.values())
    spread = found[0][1] / stats.t.ppf(1 - 0.025 / len(questions), 14) * math.sqrt(3 / 2)
    text = " ".join(page.split())
    for phrase in (
        f"PEG differs from sines by {peg_in_dino} AP in DINO (AP {np.mean(in_dino):.1f}) and, at half the sines' learning rate",
        f"in D-FINE, by {peg} (AP {np.mean(runs['sine_grid'], 0)[0]:.1f}) and by ",
        f"encodings lose {lost[0]:.1f} to {lost[-1]:.1f} AP at twice the size",
        f"PEG keeps {kept_peg} AP more than sines, and rotary positions {kept_rope}.",
        f"sines lead `none` by {sines.removeprefix('+')}, ",
        f"it is {spread:.1f}, so that only {found[0][1]:.1f} AP can be seen",
    ):
        assert phrase in text, phrase
    in_cells = {
        name: fitted(study, {"group": "cells", "variant": name, "baseline": "sine_grid"}, 10)
        for name in ("none", "sine_scrambled", "peg", "peg_ffn")
    }
    said = {name: f"`{name}`{' has' * (name == 'none')} {mean:+.1f} ± {half:.1f}" for name, (mean, half) in in_cells.items()}
    said["peg_ffn"] = said["peg_ffn"].replace("` ", "`, a convolution in the feed-forward network, ")
    (half,) = {f"{half:.1f}" for _, half in in_cells.values()}
    ap = {
        (path.parents[1].name, path.parent.name, path.stem): json.loads(path.read_text())["AP"]
        for path in (study / "results").glob("cells*/*/*.json")
    }
    minutes = [
        np.median([json.loads(path.read_text())["cpu_seconds"] for path in (study / "results" / group).glob("*/*.json")]) / 60
        for group in ("dfine", "cells", "dino")
    ]
    assert [round(number) for number in minutes] == [6, 9, 10]  # six CPU minutes each, nine on blood cells, ten in DINO
    sines_in_cells = np.mean([ap["cells", "sine_grid", str(seed)] for seed in range(3)])
    lower = ap["cells", "sine_grid", "0"] - ap["cells_rates", "sine_grid low", "0"]
    higher = ap["cells_rates", "peg high", "0"] - ap["cells", "peg", "0"]
    for phrase in (
        f"Less `sine_grid` (AP {sines_in_cells:.1f}), {said['none']} AP, {said['sine_scrambled']},",
        f"{said['peg']}, and {said['peg_ffn']}; the plan",
        f"by {in_cells['peg'][0]:+.1f} ± {half} on [blood cells]",
        f"Smaller differences than {found[-1][1]:.1f}, {found[0][1]:.1f} and {half} AP remain undecided",
        f", {-in_cells['none'][0]:.1f} ± {half} (blood cells) and {found[-2][0]:.1f} ± {found[-2][1]:.1f} AP (DINO)",
        f"In one seed, sines lose {lower:.1f} AP at that rate, and PEG gains {higher:.1f} at the sines'",
    ):
        assert phrase in text, phrase
    assert [name for name, (mean, half) in in_cells.items() if abs(mean) > half] == ["peg", "peg_ffn"]
    others = [fitted(study, {**asked[0], "baseline": name}, len(questions)) for name in runs if name != "sine_grid"]
    assert all(abs(mean) < half for mean, half in others)  # none of the seven is known to differ
    assert len(runs) == 8 and {len(values) for values in runs.values()} == {3} and abs(alone[0]) < alone[1]


def test_the_appendix_s_answers_on_the_scrambled_sines_are_those_of_its_report():
    text = " ".join((STUDIES.parent / "docs/position_encodings.md").read_text(encoding="utf-8").split())
    questions = yaml.safe_load((STUDIES / "scramble/plan.yaml").read_text(encoding="utf-8"))["questions"]
    found = [fitted(STUDIES / "scramble", question, len(questions)) for question in questions]
    kept, on_squares, scramble, sines, peg, _ = (f"{mean:+.1f} ± {half:.1f}" for mean, half in found)
    assert f"PEG is {peg[1:]} AP better than sine; sine is not better than no encoding ({sines})" in text
    assert f"difference from correct sines is {scramble} AP, and {kept} in what is kept" in text
    assert f"it is {on_squares} there" in text
