# SPDX-License-Identifier: Apache-2.0
"""``report.html``: what its slider counts is what the evaluation counts at that threshold, in Python and in a real browser."""

import json
import re

import numpy as np
import pytest
import torch
from browser import NARROW, Tab, overflows
from PIL import Image
from test_evaluation import CLASS_IDS, evaluator_of, random_world
from test_report import matches_of

from cpvt_det.common.structures import Detections
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import load_coco
from cpvt_det.evaluation.thresholds import pooled_curve
from cpvt_det.visualize import report_page
from cpvt_det.visualize.report_page import step_of, write_report_page

NAMES = {7: "cat", 3: "<b>dog</b>", 90: "</script><script>window.broken = 1</script>"}


def confused_world(seed):
    """A random world and its evaluator; in it every fifth detection has the next class.

    One image has what counts in the confusion matrix alone: a detection in a crowd of its class, on an object of another one, and
    the last of 105 detections of one class.
    """
    truth, detected = random_world(seed)
    image_id = next(iter(detected))
    for category_id, box, crowd in ((CLASS_IDS[0], [300, 300, 200, 200], 1), (CLASS_IDS[1], [350, 350, 60, 60], 0)):
        annotation = {"id": len(truth["annotations"]), "image_id": image_id, "category_id": category_id, "bbox": box}
        truth["annotations"].append(annotation | {"area": box[2] * box[3], "iscrowd": crowd})
    boxes = torch.tensor([[352.0, 352, 412, 412], *([500.0 + n, 400, 505 + n, 420] for n in range(105))])
    labels, scores = torch.tensor([0] + 105 * [2]), torch.tensor([0.9] + 105 * [0.3])
    old = detected[image_id]
    detected[image_id] = Detections(
        torch.cat([boxes, old.boxes_xyxy]), torch.cat([scores, old.scores]), torch.cat([labels, old.labels])
    )
    evaluator = evaluator_of(truth)
    for image_id, found in detected.items():
        if found is not detected[image_id]:
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
        self.areas = [one["area"] for one in truth["annotations"]]
        (folder / "world.json").write_text(json.dumps(truth), encoding="utf-8")
        self.dataset = load_coco(DatasetFiles("world", folder / "world.json", folder))
        self.matches = matches_of(self.dataset.records, evaluator.coco_results(), self.dataset.classes.ids)
        self.curves = self.matches.curves(3)
        self.figures = evaluator.evaluate()
        self.path = folder / "report.html"

    def write(self, threshold=0.3):
        write_report_page(self.dataset, self.matches, self.curves, self.figures, self.path, threshold)
        return self

    @property
    def content(self):
        return json.loads(re.search(r'id="data">(.*?)</script>', self.path.read_text(encoding="utf-8")).group(1))

    def matrix(self, step):
        return self.matches.confusion(3, step / 1000)

    def class_figures(self, step):
        """Precision, recall and F1 of each class, as they are written."""
        return [["n/a" if np.isnan(value) else f"{value:.3f}" for value in figures_at(curve, step)] for curve in self.curves]

    def missed(self, step):
        """Objects and missed ones of each size, by the area of the ground truth."""
        counts = np.zeros((3, 2), dtype=int)
        for box, score in zip(self.matches.objects, self.matches.found_at, strict=True):
            size = 0 if self.areas[box["number"]] < 1024 else 1 if self.areas[box["number"]] <= 9216 else 2
            counts[size] += (not box["crowd"], not box["crowd"] and score < step / 1000)
        return counts.tolist()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world")).write()


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


def test_no_folder_and_no_key_is_in_the_page(world):
    """It is made to be sent."""
    assert str(world.path.parent) not in world.path.read_text(encoding="utf-8")
    assert {one["name"] for one in world.content["shown"]} == {f"{number}.png" for number in range(40)}
    assert report_page._base_name("https://host/of/a.jpg?token=secret") == "a.jpg"
    assert report_page._base_name("C:\\photos\\what?.jpg") == "what?.jpg"


def test_of_many_images_those_with_most_mistakes_are_shown(tmp_path, monkeypatch, world):
    monkeypatch.setattr(report_page, "MOST_IMAGES", 5)
    few = World(tmp_path).write().content
    worst = world.matches.image_ids[world.matches.worst(0.3, 5)].tolist()
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
    worst = world.matches.worst(step / 1000, 12)
    counts = world.matches.mistakes(step / 1000)[worst].tolist()
    ids = world.matches.image_ids[worst].tolist()
    shown = [re.search(r"id (\d+)\): (\d+) missed, (\d+) false", text).groups() for text in tab.texts("#gallery figcaption")]
    assert shown == [(str(image_id), str(missed), str(false)) for image_id, (missed, false) in zip(ids, counts, strict=True)]


def test_cells_and_sizes_open_their_images(tab, world):
    """The hits of all images of a cell are its count; so are those of a size."""
    tab.slide("threshold", 100)
    count_hits = "[...document.querySelectorAll('#gallery .box:not(.faint)')].length"
    matrix = world.matrix(100)
    for row, column in np.argwhere(matrix).tolist():
        tab.page.locator("#confusion tbody tr").nth(row).locator("td").nth(column).locator("button").click()
        while tab.page.locator("#more").is_visible():
            tab.page.locator("#more").click()
        assert tab.page.evaluate(count_hits) == matrix[row, column], (row, column)
    tab.page.locator("#sizes tbody tr").nth(2).locator("button").click()
    assert tab.texts("#gallery-title") == ["Missed large objects"]
    while tab.page.locator("#more").is_visible():
        tab.page.locator("#more").click()
    assert tab.page.evaluate(count_hits) == world.missed(100)[2][1] > 0


def figures_at(curve, step):
    """Precision, recall and F1 at a step; NaN where one is not defined."""
    kept = int((curve.scores >= step / 1000).sum())
    hits = int(curve.right[:kept].sum())
    parts = (hits, kept), (hits, curve.num_objects), (2 * hits, kept + curve.num_objects)
    return [a / b if b else np.nan for a, b in parts]


def on_chart(pairs):
    """Values from 0 to 1 -> places in the charts' 460 x 320."""
    return np.array(pairs) * [404, -256] + [44, 282]


def test_curves_marks_and_the_best_f1_are_those_of_the_evaluation(tab, world):
    """Of all classes, and of one that is chosen; the slider goes to the highest F1."""
    lines = "(at) => [...document.querySelectorAll(`${at} polyline`)].map((one) => one.getAttribute('points'))"
    mark = "([at, names]) => names.map((name) => Number(document.querySelector(`${at} .mark`).getAttribute(name)))"
    best = pooled_curve(world.curves).best()
    tab.page.locator("#best").click()
    assert tab.texts("#score") == [f"{step_of(best.threshold) / 1000:.3f}"]
    assert tab.texts("#overall") == [f"all classes: precision {best.precision:.3f}, recall {best.recall:.3f}, F1 {best.f1:.3f}"]
    for curve in (pooled_curve(world.curves), world.curves[0]):
        if curve is world.curves[0]:
            tab.page.locator("#classes tbody button").first.click()
        rows = [(step / 1000, *figures_at(curve, step)) for step in range(1000, -1, -1)]
        expected = [
            [(recall, precision) for _, precision, recall, _ in rows],
            *([(row[0], row[column]) for row in rows] for column in (3, 1, 2)),
        ]
        drawn = tab.page.evaluate(lines, "#precision-recall") + tab.page.evaluate(lines, "#f1")
        for line, pairs in zip(drawn, expected, strict=True):
            places = np.array([[float(value) for value in place.split(",")] for place in line.split()])
            assert places == pytest.approx(on_chart([pair for pair in pairs if not np.isnan(pair).any()]), abs=0.06)
        precision, recall, _ = figures_at(curve, step_of(best.threshold))
        dot, upright = (tab.page.evaluate(mark, at) for at in (["#precision-recall", ["cx", "cy"]], ["#f1", ["x1"]]))
        assert dot == pytest.approx(on_chart([(recall, precision)])[0])
        assert upright == pytest.approx(on_chart([(step_of(best.threshold) / 1000, 0)])[0, :1])


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
    """On the screen, in parts of the picture; the first missed object of the gallery's first image."""
    tab.slide("threshold", 950)
    button = tab.page.locator("#gallery button").first
    name = button.locator("img").get_attribute("alt")
    first = next(one for one in world.content["shown"] if one["name"] == name)
    missed = next(one for one in first["objects"] if not one[6] and one[7] < 950)
    button.click()
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
