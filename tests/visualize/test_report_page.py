# SPDX-License-Identifier: Apache-2.0
"""``report.html``: what its slider counts is what the evaluation counts at that threshold, in Python and in a real browser."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import NARROW, Tab, overflows
from PIL import Image
from test_evaluation import CLASS_IDS, evaluator_of, random_world

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import load_coco
from cpvt_det.evaluation.confusion import confusion_matrix, worst_images
from cpvt_det.evaluation.ground_truth import ground_truth_of
from cpvt_det.evaluation.matching import pair_images
from cpvt_det.evaluation.outcomes import outcomes
from cpvt_det.evaluation.precision_recall import class_curve
from cpvt_det.visualize import report_page
from cpvt_det.visualize.report_page import step_of, write_report_page

NAMES = {7: "cat", 3: "<b>dog</b>", 90: "</script><script>window.broken = 1</script>"}


def confused_world(seed):
    """A random world, its evaluator, and in it every fifth detection with the next class."""
    truth, detected = random_world(seed)
    evaluator = evaluator_of(truth)
    for image_id, found in detected.items():
        found.labels[::5] = (found.labels[::5] + 1) % 3
        evaluator.add(image_id, found)
    return truth, evaluator


class World:
    """A random data set on disk, its detections, and its page."""

    def __init__(self, folder, seed=1):
        truth, evaluator = confused_world(seed)
        for number, image in enumerate(truth["images"]):
            image |= {"file_name": f"{number}.png", "width": 620, "height": 560}
            Image.new("RGB", (62, 56), (number, 120, 90)).save(folder / f"{number}.png")
        truth["categories"] = [{"id": key, "name": name} for key, name in NAMES.items()]
        (folder / "world.json").write_text(json.dumps(truth), encoding="utf-8")
        self.dataset = load_coco(DatasetFiles("world", folder / "world.json", folder))
        self.images = pair_images(
            ground_truth_of(self.dataset.records, self.dataset.classes.ids), evaluator.coco_results(), self.dataset.classes.ids
        )
        self.curves = [class_curve(self.images, label) for label in range(3)]
        self.figures = evaluator.evaluate()
        self.path = folder / "report.html"

    def write(self, threshold=0.3):
        write_report_page(self.dataset, self.images, self.curves, self.figures, self.path, threshold)
        return self

    @property
    def content(self):
        return json.loads(re.search(r'id="data">(.*?)</script>', self.path.read_text(encoding="utf-8")).group(1))

    def matrix(self, step):
        return confusion_matrix(self.images, 3, step / 1000)

    def class_figures(self, step):
        """Precision, recall and F1 of each class, as they are written."""
        rows = []
        for curve in self.curves:
            kept = int((curve.scores >= step / 1000).sum())
            hits = int(curve.right[:kept].sum())
            parts = (hits, kept), (hits, curve.num_objects), (2 * hits, kept + curve.num_objects)
            rows.append([f"{a / b:.3f}" if b else "n/a" for a, b in parts])
        return rows

    def missed(self, step):
        """Objects and missed ones of each size, by the area of the ground truth."""
        counts = np.zeros((3, 2), dtype=int)
        areas = {image.image_id: [] for image in self.images}
        for one in self.dataset.ground_truth["annotations"]:
            areas[one["image_id"]].append(one["area"])
        for image in self.images:
            for area, score, crowd in zip(areas[image.image_id], outcomes(image).found_at, image.crowd, strict=True):
                size = 0 if area < 1024 else 1 if area <= 9216 else 2
                counts[size] += (not crowd, not crowd and score < step / 1000)
        return counts.tolist()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world")).write()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_outcomes_are_those_of_every_threshold(seed, threshold):
    """The counts above a threshold are those of a matching of what passes it, with crowds and more than 100 of one class."""
    truth, evaluator = confused_world(seed)
    results = evaluator.coco_results()
    many = {"image_id": results[0]["image_id"], "category_id": CLASS_IDS[1], "score": 0.75}
    results += [many | {"bbox": [3 * n, n, 50, 60]} for n in range(120)]
    matrix = np.zeros((4, 4), dtype=int)
    mistakes = {}
    images = pair_images(ground_truth_of(truth, CLASS_IDS), results, CLASS_IDS)
    for image in images:
        found, passing = outcomes(image), image.scores >= threshold
        for label, same, other in zip(image.found_labels, found.same_class, found.any_class, strict=True):
            assert (same == -2) or (same == -1) or image.object_labels[same] == label
            assert other != same or other < 0 or not image.crowd[other]
        for label, other in zip(image.found_labels[passing], found.any_class[passing], strict=True):
            if other != -2:
                matrix[3 if other == -1 else image.object_labels[other], label] += 1
        taken = found.any_class[passing & (found.any_class >= 0)]
        free = np.setdiff1d(np.flatnonzero(~image.crowd), taken)
        np.add.at(matrix[:, 3], image.object_labels[free], 1)
        missed = int((~image.crowd & (found.found_at < threshold)).sum())
        mistakes[image.image_id] = missed, int((passing & (found.same_class == -1)).sum())
    assert matrix.tolist() == confusion_matrix(images, 3, threshold).tolist() and matrix.sum() > 100
    worst = worst_images(images, threshold, len(images))
    assert {one.image_id: (one.missed, one.false) for one in worst} == {key: two for key, two in mistakes.items() if any(two)}


def test_a_score_passes_its_own_step():
    assert [step_of(score) for score in (0, 0.29, 0.2999, 1.0, -1)] == [0, 290, 299, 1000, -1]


def test_the_page_is_one_file_of_limited_size(world, tmp_path, monkeypatch):
    page = world.path.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page.partition('id="data">')[0])
    assert page.count("</script>") == 5  # the data and four scripts: that in a class name ends none
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    small = World(tmp_path)
    for record in small.dataset.records:
        Image.fromarray(noise).save(record.file_name)
    monkeypatch.setattr(report_page, "MOST_BYTES", 300_000)
    assert 100_000 < small.write().path.stat().st_size < 300_000


def test_of_many_images_those_with_most_mistakes_are_shown(tmp_path, monkeypatch, world):
    monkeypatch.setattr(report_page, "MOST_IMAGES", 5)
    few = World(tmp_path).write().content
    worst = [one.image_id for one in worst_images(world.images, 0.3, 5)]
    assert [one["id"] for one in few["shown"]] == worst
    assert [few[name] for name in ("images", "objects", "false", "confusion")] == [
        world.content[name] for name in ("images", "objects", "false", "confusion")
    ]


@pytest.fixture
def tab(browser, world):
    opened = Tab(browser)
    opened.page.goto(world.path.as_uri())
    yield opened
    assert opened.errors == [] and opened.outside(world.path.as_uri()) == []
    opened.page.close()


def test_the_slider_counts_what_the_evaluation_counts(tab, world):
    for step in (0, 1, 299, 300, 301, 700, 1000):
        tab.slide("threshold", step)
        require_counts(tab, world, step)


def require_counts(tab, world, step):
    assert tab.texts("#score") == [f"{step / 1000:.3f}"]
    cells = [[cell.strip() for cell in row.split("\t")] for row in tab.texts("#confusion tbody tr")]
    expected = world.matrix(step).tolist()
    expected[3][3] = ""
    assert [row[1:] for row in cells] == [[str(count) for count in row] for row in expected]
    figures = [row.split("\t")[3:6] for row in tab.texts("#classes tbody tr")]
    assert figures == world.class_figures(step)
    sizes = [row.split("\t") for row in tab.texts("#sizes tbody tr")]
    assert [[int(row[1]), int(row[3])] for row in sizes] == world.missed(step)
    worst = worst_images(world.images, step / 1000, 12)
    shown = [re.search(r"id (\d+)\): (\d+) missed, (\d+) false", text).groups() for text in tab.texts("#gallery figcaption")]
    assert shown == [(str(one.image_id), str(one.missed), str(one.false)) for one in worst]


def test_cells_and_sizes_open_their_images(tab, world):
    """The hits of all images of a cell are its count; so are those of a size."""
    tab.slide("threshold", 100)
    count_hits = "[...document.querySelectorAll('#gallery .box:not(.faint)')].length"
    matrix = world.matrix(100)
    other_class = next((row, column) for row, column in np.argwhere(matrix[:3, :3]).tolist() if row != column)
    for row, column in ((0, 0), other_class, (1, 3), (3, 2)):
        tab.page.locator("#confusion tbody tr").nth(row).locator("td").nth(column).locator("button").click()
        while tab.page.locator("#more").is_visible():
            tab.page.locator("#more").click()
        assert tab.page.evaluate(count_hits) == matrix[row, column] > 0
    tab.page.locator("#sizes tbody tr").nth(2).locator("button").click()
    assert tab.texts("#gallery-title") == ["Missed large objects"]
    while tab.page.locator("#more").is_visible():
        tab.page.locator("#more").click()
    assert tab.page.evaluate(count_hits) == world.missed(100)[2][1] > 0


def test_names_are_text_and_classes_are_searched(tab):
    assert tab.page.evaluate("window.broken === undefined")
    tab.page.get_by_label("Search").fill("B>D")
    assert tab.texts("#classes tbody th") == ["<b>dog</b>"]
    assert tab.texts("#confusion tbody th") == ["<b>dog</b>", "on no object"]
    tab.page.get_by_role("button", name="<b>dog</b>", exact=True).click()
    assert tab.texts("#gallery-title") == ["Worst images of <b>dog</b>"]
    assert tab.page.locator("#classes button").get_attribute("aria-pressed") == "true"


def test_an_image_opens_by_keyboard(tab):
    tab.page.locator("#gallery button").first.focus()
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("#viewer").is_visible()
    first = tab.texts("#viewer-title")
    tab.page.keyboard.press("ArrowRight")
    assert tab.texts("#viewer-title") != first
    lines = tab.texts("#viewer-list li")
    assert lines and all(line.split(":")[0] in ("right", "false", "missed") for line in lines)
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator("#viewer").is_visible()


def test_boxes_lie_where_the_objects_are(tab, world):
    """On the screen, in parts of the picture; the first missed object of the first image."""
    first = world.content["shown"][0]
    missed = next(one for one in first["objects"] if not one[6] and one[7] < 950)
    tab.slide("threshold", 950)
    tab.page.locator("#gallery button", has=tab.page.locator(f"[alt='{Path(first['name']).name}']")).click()
    places = tab.page.evaluate(
        """() => { const at = (one) => { const r = one.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] };
        return { picture: at(document.querySelector('#viewer img')),
          boxes: [...document.querySelectorAll('#viewer .missed.box')].map(at) } }"""
    )
    x, y, width, height = places["picture"]
    parts = [((a - x) / width, (b - y) / height, w / width, h / height) for a, b, w, h in places["boxes"]]
    expected = np.array(missed[:4]) / [620, 560, 620, 560]
    assert min(np.abs(np.array(parts) - expected).max(1)) < 0.01
    assert width / height == pytest.approx(620 / 560, rel=0.01)


def test_a_narrow_window_is_enough(browser, world):
    tab = Tab(browser, NARROW)
    tab.page.goto(world.path.as_uri())
    assert not overflows(tab.page)
    tab.page.locator("#gallery button").first.click()
    assert not overflows(tab.page) and tab.page.locator("#viewer").bounding_box()["width"] <= NARROW[0]
    tab.page.close()
