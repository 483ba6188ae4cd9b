# SPDX-License-Identifier: Apache-2.0
"""What the first screens of the documents say of encodings is what the committed records say, with the correction that is named."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from cpvt_det.training.choose import COSTS
from studies.engine.corrections import all_comparisons, corrected, values_at
from studies.engine.plan import load_plan
from studies.engine.report import curves_of, iterations_to, read_group
from studies.engine.statistics import Values, holm, interval, paired, unpaired

ROOT = Path(__file__).resolve().parents[2]
EACH = "longer_each_layer/sine+peg each layer"
ALONE = "longer_each_layer/peg each layer"


class Study:
    """The records of a study, and their corrections over all of it."""

    def __init__(self, name: str):
        self.plan = load_plan(ROOT / "studies" / name / "plan.yaml")
        self.groups = {group.name: read_group(self.plan, group) for group in self.plan.groups}
        of_ap, on_sweeps = all_comparisons(self.plan, self.groups)
        self.of_ap, self.on_sweeps = list(corrected(of_ap)), list(corrected(on_sweeps))

    def values(self, name: str, *path: str) -> Values:
        group, _, variant = name.partition("/")
        return values_at(self.groups[group][variant], path or [self.plan.figures_of(self.plan.group(group))[0]])

    def difference(self, one: str, other: str, *path: str) -> str:
        mean, half, _ = paired(self.values(one, *path), self.values(other, *path))
        return f"{abs(mean):.1f} ± {half:.1f}"

    def on_size(self, one: str, other: str, data: str) -> str:
        return self.difference(one, other, "measured", "sweeps", "size", data)

    def p_over_study(self, one: str, other: str, data: str = "") -> tuple[float, float]:
        """p by Holm's correction for all comparisons of the study: of the paired test, and of Welch's."""
        found = self.on_sweeps if data else self.of_ap
        ((by_seed, by_welch),) = (ps for c, *ps in found if {c.variant, c.baseline} == {one, other} and c.data == data)
        return by_seed, by_welch


@pytest.fixture(scope="module")
def encodings() -> Study:
    return Study("position_encodings")


@pytest.fixture(scope="module")
def quickstart() -> Study:
    return Study("quickstart")


@pytest.fixture(scope="module")
def mechanisms() -> Study:
    return Study("mechanisms")


@pytest.fixture(scope="module")
def bccd() -> Study:
    return Study("bccd")


@pytest.fixture(scope="module")
def classifiers() -> Study:
    return Study("classifiers")


def part_of(document: str, start: str = "", end: str = "") -> str:
    """The text between two strings of a document, with single spaces."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert start in text and end in text
    text = text[text.index(start) :] if start else text
    return " ".join((text[: text.index(end, len(start))] if end else text).split())


def require(text: str, phrases: Iterable[str]) -> None:
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_the_first_screen_of_the_study_s_page_is_that_of_the_records(encodings):
    text = part_of("docs/position_encodings.md", end="\n## What is compared")
    to_peg, to_sine = encodings.p_over_study(EACH, "longer/peg"), encodings.p_over_study(EACH, "longer/sine")
    without_zero = sum(paired(one.values, one.others)[2] < 0.05 for one, *_ in encodings.of_ap)
    growth = [
        interval(list(encodings.values(f"longer/{name}").values()))[0]
        / interval(list(encodings.values(f"detr/{name}").values()))[0]
        for name in ("none", "sine", "learned", "peg", "sine+peg")
    ]
    phrases = [
        f"{encodings.difference('longer/sine+peg', 'longer/sine')} AP above sine's",
        f"{encodings.p_over_study('longer/sine+peg', 'longer/sine')[0]:.3f} after correction over the whole study",
        f"second evaluation set {encodings.on_size('longer/sine+peg', 'longer/sine', 'size_1')}",
        encodings.difference(EACH, "longer/peg"),
        f"{to_peg[0]:.3f}; unpaired {to_peg[1]:.3f})",
        f"({to_sine[0]:.3f}; unpaired {to_sine[1]:.3f})",
        encodings.difference(EACH, "longer/sine"),
        f"{encodings.on_size(EACH, 'longer/sine', 'size_1')} on the second set",
        encodings.on_size("longer/learned", "longer/sine", "size_2"),
        encodings.on_size(ALONE, "longer/sine", "size_2"),
        f"all {len(encodings.on_sweeps)} differences",
        f"One PEG loses {encodings.on_size('longer/peg', 'longer/sine', 'size_2')}",
        f"Of {len(encodings.of_ap)} AP differences at the training sizes, {without_zero} have a paired p below 0.05",
        f"{min(growth):.1f} to {max(growth):.1f} from 4,000 to 8,000 iterations",
    ]
    require(text, phrases)


def test_what_one_section_says_of_p_is_that_of_the_records(encodings):
    text = part_of("docs/position_encodings.md", start="Added to sine, a PEG after each layer has", end="\n## Smaller")
    by_seed, by_welch = encodings.p_over_study(EACH, "longer/sine")
    require(text, [f"after correction over the whole study (unpaired {by_welch:.3f}, paired {by_seed:.3f})"])


def test_what_a_headline_says_remains_does_remain(encodings):
    """Two differences of AP remain with the paired test and four unpaired; those at larger sizes remain with both."""
    by_seed = {(one.variant, one.baseline) for one, p, _ in encodings.of_ap if p < 0.05}
    by_welch = {(one.variant, one.baseline) for one, _, p in encodings.of_ap if p < 0.05}
    assert by_seed == {(EACH, "longer/peg"), (ALONE, "longer/peg")}
    assert len(by_welch) == 4 and (EACH, "longer/peg") in by_welch and (ALONE, "longer/peg") not in by_welch
    for name in ("longer/learned", ALONE):
        assert max(encodings.p_over_study(name, "longer/sine", "size_2")) < 0.05
    assert max(encodings.p_over_study("longer/learned", "longer/sine", "size_1.5")) < 0.05
    assert min(encodings.p_over_study("longer/peg", "longer/sine", "size_2")) > 0.05
    deformable = [one for one, *_ in encodings.of_ap if {one.variant[:11], one.baseline[:11]} == {"deformable/"}]
    ends = [abs(mean) + half for mean, half, _ in (paired(one.values, one.others) for one in deformable)]
    assert len(ends) == 7 and max(ends) < 2.15  # both baselines' tables have eight rows, one of them twice


def test_the_first_screen_of_the_results_is_that_of_the_records(quickstart, mechanisms, bccd):
    text = part_of("docs/results.md", end="\n## Overfitting")
    earlier = interval(list(quickstart.values("encodings/peg").values()))[0]
    names = ["peg", "sine_offset", "sine_offset+peg", "learned", "none"]
    runs = sorted(mechanisms.values("pairs/40 pairs").values())
    means = [interval(list(quickstart.values(f"encodings/{name}").values()))[0] for name in names]
    largest = max(abs(paired(quickstart.values(f"encodings/{name}"), quickstart.values("encodings/peg"))[0]) for name in names[1:])
    cells, before = (interval(list(bccd.values(f"tutorial/{arm}").values())) for arm in ("small together", "before"))
    phrases = [
        f"[AP {interval(runs)[0]:.1f}](#the-quickstart)",
        f"on average over three seeds ({runs[0]:.1f} to {runs[-1]:.1f}, one thread)",
        f"the earlier quickstart** (PEG: AP {earlier:.1f})",
        f"[{min(means):.1f} to {max(means):.1f}]",
        f"exceeds {largest:.1f} AP",
        f"[AP {cells[0]:.1f} ± {cells[1]:.1f}](#bccd-205-blood-cell-images)",
        f"A larger model without the new mechanisms reached {before[0]:.1f} ± {before[1]:.1f} in the same time",
    ]
    require(text, phrases)
    require(part_of("README.md"), [f"AP {interval(runs)[0]:.1f} (one thread, mean of 3 seeds: {runs[0]:.1f} to {runs[-1]:.1f})"])


def test_the_quickstart_s_table_by_encoding_is_that_of_the_records(quickstart):
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    text = text[text.index("### AP by encoding") : text.index("### One mechanism at a time")]
    rows = re.findall(r"^\| (`[^|]*) \| ([\d.]+) \| ([\d., ]+) \| ([\d.]+) \| (.*) \|$", text, flags=re.MULTILINE)
    names = {"`peg`, bf16": "peg_bf16"}
    assert len(rows) == 6
    for label, *cells in rows:
        name = f"encodings/{names.get(label, label.strip('`'))}"
        values = quickstart.values(name)
        means = [quickstart.values(name, "curve", str(at)) for at in (1500, 2000, 2500, 3000)]
        expected = [
            _mean(values),
            ", ".join(f"{values[seed]:.1f}" for seed in sorted(values)),
            _mean(quickstart.values(name, "AP50")),
            " | ".join(_mean(found) for found in means),
        ]
        assert cells == expected, label


def test_who_is_first_in_the_quickstart_is_that_of_the_records(quickstart):
    group = quickstart.plan.group("encodings")
    reached = iterations_to(curves_of(quickstart.plan, group, quickstart.groups["encodings"])["iteration"])
    first = [level for level in reached["peg"] if _first(reached, level) == "peg"]
    require(part_of("docs/results.md", end="\n## Overfitting"), ["the first to reach 35, 40, 45 and 50 AP"])
    assert first == [35, 40, 45, 50]
    pairs = {
        (name, level): (found, reached["peg"][level])
        for name, along in reached.items()
        if name != "peg"
        for level, found in along.items()
    }
    by_seed = dict(zip(pairs, holm([paired(*pair)[2] for pair in pairs.values()]), strict=True))
    remain = {name: p for name, p in by_seed.items() if p < 0.05}
    text = part_of("docs/results.md", start="- **Whether PEG learns faster is not settled.**", end="- Learning rate")
    assert set(remain) == {("sine_offset+peg", 40), ("none", 35)} and min(unpaired(*pair) for pair in pairs.values()) > 0.05
    phrases = [
        f"Of {len(pairs)} differences in the time to five levels of AP, two stay significant",
        "if paired by seed, and none if unpaired",
        f"after {_mean(reached['peg'][40.0], ',.0f')} iterations",
    ]
    require(text, phrases)


def test_what_is_said_of_the_mechanisms_is_what_the_records_say(mechanisms):
    """The order that the text gives them, with its bound of 5 AP, and the figures of each sentence."""
    text = part_of("docs/results.md", start="Each arm has three seeds. With twelve comparisons", end="[studies/README.md]")
    runs = {name: mechanisms.values(f"mechanisms/{name}") for name in mechanisms.groups["mechanisms"]}
    means = {name: sum(values.values()) / len(values) for name, values in runs.items()}
    shipped = mechanisms.values("quickstart/taken")
    further = {name: found[0]["AP"] for name, found in mechanisms.groups["further"].items()}
    assert [name for name, found in further.items() if found > shipped[0]] == ["40 pairs"]
    best = ("denoising", "together")
    behind = {name for name, mean in means.items() if mean < means["today"] - 5}
    assert behind == {"varifocal", "without_proposal_matches", "class_proposals"}
    assert sorted(means, key=means.get)[-2:] == list(best)
    assert sum(value > max(runs["today"].values()) for name in best for value in runs[name].values()) == 5
    gains = [means[name] - means["today"] for name in best]
    phrases = [
        f"by seed it has {_listed(runs['together'])}, and with NMS {_listed(shipped)}",
        f"{gains[0]:.1f} and {gains[1]:.1f} above `today`",
        f"with 20 pairs (AP {shipped[0]:.1f}), only 40 pairs of denoising queries helped ({further['40 pairs']:.1f}",
    ]
    require(text, phrases)


def _listed(values: Values) -> str:
    return ", ".join(f"{values[seed]:.1f}" for seed in sorted(values))


def _mean(values: Values, digits: str = ".1f") -> str:
    return f"{interval(list(values.values()))[0]:{digits}}"


def _first(reached: Mapping[str, Mapping[float, Values]], level: float) -> str:
    """The encoding, in float32, that reaches an AP after the fewest iterations on average."""
    return min((name for name in reached if name != "peg_bf16"), key=lambda name: interval(list(reached[name][level].values()))[0])


def test_the_first_screen_of_the_classifiers_page_is_that_of_the_records(classifiers):
    text = part_of("docs/classifiers.md", end="\n## How to read")
    top1 = {name: _mean(classifiers.values(f"main/{name}")) for name in classifiers.plan.group("main").variants}
    at_twice = {name: _mean(classifiers.values(f"main/{name}", "measured", "sweeps", "zoom", "zoom_64")) for name in top1}
    by_itself = paired(classifiers.values("main/peg"), classifiers.values("main/table"))[2]
    of_one, of_five = (classifiers.p_over_study(f"main/{name}", "main/table") for name in ("peg", "5 pegs"))
    remain = {(one.variant, one.baseline) for one, p, _ in classifiers.of_ap if p < 0.05}
    on_sweeps = [(one.variant, one.baseline, one.data) for one, p, _ in classifiers.on_sweeps if p < 0.05]
    phrases = [
        f"(top-1 {top1['sine']}, {top1['rope']} and {top1['5 pegs']}), then one PEG ({top1['peg']})",
        f"learned table ({top1['table']}) and no encoding ({top1['none']})",
        f"leads by {classifiers.difference('main/peg', 'main/table')} (p {by_itself:.3f}, or",
        f"or {of_one[0]:.3f} after correction for the {len(classifiers.of_ap)} comparisons of the study). Five PEGs",
        f"Five PEGs lead by {classifiers.difference('main/5 pegs', 'main/table')} ({of_five[0]:.3f} after correction)",
        f"sines {at_twice['sine']}, five PEGs {at_twice['5 pegs']}, table {at_twice['table']}, one PEG {at_twice['peg']}, rotary",
        f"rotary positions {at_twice['rope']}",
        f"Of {len(classifiers.of_ap)} differences of top-1, {len(remain)} remain",
        f"five PEGs ({of_five[1]:.3f}), sines and rotary positions",
        f"Of {len(classifiers.on_sweeps)} differences at other sizes, {len(on_sweeps)} remain: ",
        f"{len(on_sweeps)} remain: {len(on_sweeps) - 1} are from no encoding",
    ]
    require(text, phrases)
    helped = {(f"main/{name}", "main/none") for name in ("sine", "rope", "peg", "5 pegs", "table+peg")}
    assert remain == helped | {("gap/table", "main/peg")}
    to_table = {one.variant for one, _, p in classifiers.of_ap if p < 0.05 and one.baseline == "main/table"}
    assert to_table == {"main/5 pegs", "main/sine", "main/rope"}
    assert [one for one in on_sweeps if one[1] != "main/none"] == [("gap/table", "main/peg", "canvas_28")]


def test_what_is_said_of_the_mean_of_the_patches_is_what_the_records_say(classifiers):
    text = part_of("docs/classifiers.md", start="\n## Mean of the patches", end="\n## Where PEG is")
    by_token = {name: classifiers.p_over_study(f"gap/{name}", f"main/{name}")[0] for name in ("peg", "table")}
    phrases = [
        f"{classifiers.difference('gap/peg', 'main/peg')} below the class token with PEG",
        f"over the study p is {by_token['peg']:.3f})",
        f"{classifiers.difference('gap/table', 'main/table')} below with the table ({by_token['table']:.3f})",
        f"({_mean(classifiers.values('gap/peg'))} and {_mean(classifiers.values('gap/table'))};",
    ]
    require(text, phrases)


def test_peg_is_above_the_table_beyond_the_interval(classifiers):
    """The goal of the classifiers' study, with the comparison that its plan names."""
    mean, half, _ = paired(classifiers.values("main/peg"), classifiers.values("main/table"))
    assert len(classifiers.values("main/peg")) == 5 and mean > half > 0


def test_what_is_said_of_sine_on_photographs_is_that_of_the_records():
    def values(name: str, encoding: str, figure: str) -> Values:
        paths = (ROOT / f"benchmarks/results/small_data/{name}_{encoding}_{seed}.json" for seed in range(3))
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        assert len({(record["machine"]["cpu"], record["commit"]) for record in records}) == 1
        return {str(record["seed"]): record[figure] for record in records}

    def difference(name: str, figure: str) -> tuple[str, float]:
        mean, half, p = paired(values(name, "sine", figure), values(name, "peg", figure))
        return f"{mean:+.1f} ± {half:.1f}", p

    of_sine, of_peg = (values("aquarium_30m", encoding, "AP50") for encoding in ("sine", "peg"))
    assert min(of_sine.values()) > max(of_peg.values())
    on_fish, p = difference("aquarium_30m", "AP50")
    on_cells, p_on_cells = difference("bccd_10m", "AP50")
    phrases = [
        f"{on_fish}, so three seeds do not settle it (p {p:.2f}; unpaired {unpaired(of_sine, of_peg):.2f})",
        f"in AP it is {difference('aquarium_30m', 'AP')[0]}",
        f"**On the blood cells neither leads**: {on_cells} AP50 (p {p_on_cells:.2f}), {difference('bccd_10m', 'AP')[0]} AP.",
    ]
    assert on_cells.startswith("+") and p_on_cells > 0.05
    require(part_of("docs/small_data.md", start="## PEG or sine"), phrases)


def test_what_random_weights_cost_is_that_of_the_records():
    paths = (ROOT / f"benchmarks/results/small_data/aquarium_10m_sine_{name}0.json" for name in ("without_weights_", ""))
    without, with_them = (json.loads(path.read_text(encoding="utf-8"))["AP50"] for path in paths)
    network = "a pretrained EfficientNet-Lite0"
    assert f"AP50 after ten minutes was {without:.0f} with a small ResNet and {with_them:.0f} with {network}" in COSTS


def test_what_the_readme_says_of_small_data_is_that_of_the_records():
    def reached(name: str) -> str:
        paths = (ROOT / "benchmarks/results/small_data").glob(f"{name}_sine_[0-9].json")
        return f"{statistics.mean(json.loads(path.read_text(encoding='utf-8'))['AP50'] for path in paths):.0f}"

    said = (
        f"one core reaches AP50 {reached('bccd_10m')} on 205 images of blood cells in ten minutes, {reached('cards_30m')} on 296 "
        f"of playing cards in half an hour, and {reached('aquarium_2h')} on 448 of fish tanks in two hours"
    )
    require(part_of("README.md", start="## Your data"), [said])
