# SPDX-License-Identifier: Apache-2.0
"""The suites loss, eval and data: what they draw, that contenders do the same work. Never a speed."""

import importlib.util
import io
import json
import re
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from benchmarks import criteria, mask_padding, models, peers, photos
from benchmarks.harness import Plan, UnequalWorkError, assert_equal_work
from benchmarks.peers import ROOT
from benchmarks.run import main
from benchmarks.suites import Options, data, eval, loss
from cpvt_det.common.errors import BadInputError
from cpvt_det.evaluation.coco import CocoEvaluator

pytestmark = pytest.mark.usefixtures("quiet_machine")

ONCE = Plan(warm_up=0, rounds=1, most_rounds=1, seconds=0)


@pytest.fixture
def small(monkeypatch, small_limits):
    """Every suite on very little, without peers."""
    monkeypatch.setattr(peers, "IMPORTED", ())
    monkeypatch.setattr(eval, "IMAGES", {"quick": 5})
    monkeypatch.setattr(data, "IMAGES", {"quick": 6})
    for suite in (loss, eval, data):
        monkeypatch.setattr(suite, "PLANS", {"quick": ONCE})


@pytest.mark.parametrize("name", ["loss", "eval", "data"])
def test_a_suite_runs_without_checkouts_and_says_who_is_missing(small, tmp_path, name):
    result = CliRunner().invoke(main, ["--suite", name, "--quick", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / f"{name}_cpu.json").read_text())
    assert all(case["rows"][-1]["name"].startswith("cpvt_det") for case in content["cases"])
    assert all(case["left_out"] for case in content["cases"])
    assert str(tmp_path) not in json.dumps(content)


@pytest.mark.parametrize("suite", [eval, data])
def test_suites_of_the_cpu_say_so_on_a_gpu(suite):
    assert all("--device cpu" in case.left_out for case in suite.cases(Options(device="cuda")))


# loss


def test_shapes_of_losses():
    assert [shape.name for shape in loss.shapes("quick")] == ["softmax b8 q100", "focal b8 q100", "denoising b8 q100"]
    assert len({shape.name for shape in loss.shapes("default")}) == 12
    logits, _, targets = loss.make_inputs(loss.Shape("denoising", 8, 100), "cpu")
    most = max(map(len, targets))
    assert logits.shape == (6, 8, 100 + 2 * most * (100 // most), 91)
    logits, boxes, targets = loss.make_inputs(loss.Shape("focal", 8, 100), "cpu")
    assert (logits.shape, boxes.shape) == ((6, 8, 100, 91), (6, 8, 100, 4))
    assert all(loss.FEWEST <= len(target) <= loss.MOST for target in targets)
    for values in (boxes, *(target.boxes_cxcywh for target in targets)):
        low, high = values[..., :2] - values[..., 2:] / 2, values[..., :2] + values[..., 2:] / 2
        assert float(low.min()) > -1e-6
        assert float(high.max()) < 1 + 1e-6


@pytest.mark.parametrize("kind", ["softmax", "focal"])
def test_our_loss_is_that_of_transformers_and_another_weight_is_told(kind, monkeypatch):
    pytest.importorskip("transformers")
    shape, options = loss.Shape(kind, 2, 40), Options(peers={"transformers": None})
    work = loss.make_work(shape, options)
    assert [contender.name for contender in work.contenders] == ["transformers", "cpvt_det"]
    assert assert_equal_work(work)["cpvt_det"] < 1e-5
    outcome = work.contenders[1].output()
    assert (outcome["assigned"] >= 0).sum(-1).tolist() == [[len(t) for t in loss.make_inputs(shape, "cpu")[2]]] * 6
    monkeypatch.setattr(criteria, "GIOU", 2.01)
    changed = loss.make_work(shape, Options())
    with pytest.raises(UnequalWorkError):
        assert_equal_work(type(work)([work.contenders[0], changed.contenders[0]], work.tolerance))


def test_targets_of_queries_by_hand():
    """One layer, two images, three queries: 2 got target 0; 0 and 1 got 1 and 0."""
    pairs = [[(torch.tensor([2]), torch.tensor([0])), (torch.tensor([0, 1]), torch.tensor([1, 0]))]]
    assert criteria.target_of_query(pairs, 3).tolist() == [[[-1, -1, 0], [1, 0, -1]]]


# eval


def test_detections_are_many_and_partly_near():
    inputs = eval.make_inputs(60)
    assert {len(found.scores) for found in inputs.found.values()} == {eval.DETECTIONS}
    assert 4 < len(inputs.ground_truth["annotations"]) / 60 < 11
    labels = Counter(label for found in inputs.found.values() for label in found.labels.tolist())
    assert set(labels) <= set(range(eval.CLASSES))
    figures = eval.our_whole_path(inputs)
    assert 0.1 < figures["AP"] < figures["AP50"] < 0.9
    assert all(0 <= value <= 1 for value in figures.values())


def test_we_and_faster_coco_eval_itself_give_the_figures_of_pycocotools():
    for case in eval.CASES:
        work = eval.make_work(case, 20, Options())
        assert [contender.name for contender in work.contenders if contender.peer] == ["pycocotools", "faster_coco_eval"]
        assert all(gap < 1e-12 for gap in assert_equal_work(work).values())


def test_a_step_can_be_repeated_on_what_was_collected():
    evaluator = eval.filled(eval.make_inputs(5))
    assert isinstance(evaluator, CocoEvaluator)
    assert eval.our_evaluate(evaluator) == eval.our_evaluate(evaluator)
    with redirect_stdout(io.StringIO()) as printed:
        eval.make_work("evaluate", 5, Options()).contenders[0].call()
    assert printed.getvalue() == ""


# data


def test_photos_are_of_the_size_of_photographs():
    drawn = photos.draw_photos(6)
    assert 80e3 < drawn.mean_bytes < 130e3
    assert photos.draw_photos(6) is drawn
    for record in drawn.records:
        with Image.open(record.file_name) as picture:
            assert picture.size == (record.width, record.height) == (640, 480)
        assert (record.boxes_xyxy[:, 2:] > record.boxes_xyxy[:, :2]).all()


def test_draws_use_every_side_and_both_ways(monkeypatch):
    monkeypatch.setattr(data, "draw_photos", lambda images: photos.Photos([None] * images, 0))
    draws = data.make_draws(400)
    assert {draw.side for draw in draws} == set(range(480, 801, 32))
    assert 100 < sum(draw.mirrored for draw in draws) < 300


def test_our_samples_and_batches_are_what_the_draws_say():
    draws = data.make_draws(6)
    pipeline = data.our_pipeline()
    for draw, (image, boxes) in zip(draws, data.contents(pipeline, draws), strict=True):
        assert image.shape == (3, draw.side, round(draw.side * 4 / 3))
        x = torch.from_numpy(draw.record.boxes_xyxy)[:, [0, 2]].mean(1) / 640
        assert torch.allclose(boxes[:, 0], 1 - x if draw.mirrored else x, atol=1e-5)
    same = [data.Draw(draw.record, 480, draw.mirrored) for draw in draws]
    for canvas, (image, _) in zip(data.canvases(pipeline, same), data.contents(pipeline, same), strict=True):
        mean, std = (torch.tensor(values)[:, None, None] for values in (data.MEAN, data.STD))
        assert torch.allclose(canvas, (image - mean) / std, atol=1e-5)


def test_our_pixels_are_those_of_detectron2():
    pytest.importorskip("detectron2.data")
    work = data.make_work("samples", 6, Options(peers={"detectron2": None}))
    assert assert_equal_work(work)["cpvt_det"] <= data.TOLERANCE["samples"]


# peers


def test_detectron2_is_a_library_or_a_checkout(tmp_path, monkeypatch):
    path = tmp_path / peers.CHECKOUTS["detectron2"][1]
    path.parent.mkdir(parents=True)
    path.touch()
    assert peers.find_peers([f"detectron2={tmp_path}"])["detectron2"] == tmp_path
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"--peer detectron2=PATH"):
        peers.find_peers(["detectron2"])
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no fvcore")))
    with pytest.raises(BadInputError, match="peer detectron2: its mapper cannot be imported: no fvcore"):
        peers.detectron2_data(tmp_path)
    assert peers.detectron2_coco_eval() is None


def test_padding_changes_an_image_where_it_is_not_masked(tmp_path, monkeypatch):
    """With a quarter of the ResNet's channels."""
    load = models.load_cfg
    monkeypatch.setattr(models, "load_cfg", lambda path, words: load(path, [*words, "MODEL.BACKBONE.WIDTH", "16"]))
    result = CliRunner().invoke(mask_padding.main, ["--quick", "--rounds", "2", "--busy", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (record,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("mask_padding_cpu*.json"))
    assert record["printed"] in result.output and record["busy"] and record["command"].endswith("--quick --busy")
    numbers = [[float(number) for number in re.findall(r"\d\.\de[-+]\d+", line)] for line in result.output.splitlines()]
    assert min(numbers[0]) > 1e-4 > 1e-5 > max(numbers[1])
    assert re.search(r"^CPU time with over without: \d\.\d{3} \(.*\), 2 rounds$", result.output, re.M)


def test_what_the_document_says_of_masked_padding_is_its_record():
    record = json.loads((ROOT / "benchmarks/results/mask_padding_cpu_avx2.json").read_text(encoding="utf-8"))
    assert f"```text\n{record['printed']}\n```" in (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
