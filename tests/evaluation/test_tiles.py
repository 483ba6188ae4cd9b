# SPDX-License-Identifier: Apache-2.0
"""Large images in tiles: where they are cut, whose detections are one object, and that a small image is left as it is."""

import itertools
import json
import math
import random

import pytest
import torch
from click.testing import CliRunner
from tiny import overrides

from cpvt_det import Predictor
from cpvt_det.cli import main
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import Detections
from cpvt_det.config import load_cfg
from cpvt_det.data.images import read_image
from cpvt_det.evaluation.tiles import Tiling, Window, merge_windows
from cpvt_det.training.train import run

# Where images are cut


@pytest.mark.parametrize("overlap", [0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(("height", "width"), [(1, 300), (100, 101), (99, 640), (333, 250), (1000, 100)])
def test_tiles_cover_the_image_and_overlap_by_their_share(height, width, overlap):
    windows = Tiling(100, overlap, whole=False).windows(height, width)
    assert all(window.height == min(100, height) and window.width == min(100, width) for window in windows)
    assert {window.top + window.height for window in windows} >= {height} and {window.left for window in windows} >= {0}
    for starts, extent in (({window.top for window in windows}, height), ({window.left for window in windows}, width)):
        starts = sorted(starts)
        assert starts[0] == 0 and starts[-1] == max(0, extent - 100)
        assert all(100 - (later - earlier) >= 100 * overlap for earlier, later in itertools.pairwise(starts))
    assert len(windows) == len({window.top for window in windows}) * len({window.left for window in windows})


def test_tiles_by_hand():
    """100 pixels in tiles of 40 that share 8 at least: steps of 32, so 3 tiles at 0, 30 and 60; the whole image comes first."""
    assert Tiling(40, 0.2).windows(40, 100) == [Window(0, 0, 40, 100), *(Window(0, left, 40, 40) for left in (0, 30, 60))]
    assert Tiling(40, 0.2).windows(40, 40) == [Window(0, 0, 40, 40)]
    assert Tiling(40, 0.2).windows(13, 7) == [Window(0, 0, 13, 7)]
    assert len(Tiling(40, 0.0, whole=False).windows(80, 120)) == 6
    assert len(Tiling(100, 0.9, whole=False).windows(100, 300)) == 21  # steps of 10


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((31,), ValueError, "the side of a tile must be a whole number of at least 32 pixels, got 31"),
        ((640.0,), ValueError, "a whole number of at least 32 pixels, got 640.0"),
        ((True,), ValueError, "a whole number of at least 32 pixels, got True"),
        ((640, 1.0), ValueError, r"a fraction of their side, from 0 to below 1, got 1.0"),
        ((640, -0.1), ValueError, r"to below 1, got -0.1"),
        ((640, math.nan), ValueError, r"to below 1, got nan"),
        ((640, 0.2, "iou"), UnknownNameError, r"unknown way to merge tiles 'iou' .*known: ios, nms"),
    ],
)
def test_tiles_that_cannot_be_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        Tiling(*arguments)


# Whose detections are one object


def detections(*rows):
    """Rows of x0, y0, x1, y1, score, label."""
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return Detections(values[:, :4], values[:, 4], values[:, 5].long())


def slow_merge(found, windows, size, merge, limit):
    """One object at a time, in plain numbers."""
    everything = []
    for number, (one, (top, left, height, width)) in enumerate(zip(found, windows, strict=True)):
        for (x0, y0, x1, y1), score, label in zip(one.boxes_xyxy.tolist(), one.scores.tolist(), one.labels.tolist(), strict=True):
            cut = (left > 0 and x0 <= width / 100) or (top > 0 and y0 <= height / 100)
            cut = cut or (left + width < size[1] and x1 >= width - width / 100)
            cut = cut or (top + height < size[0] and y1 >= height - height / 100)
            everything.append(((x0 + left, y0 + top, x1 + left, y1 + top), score, label, cut, number))
    kept = []
    for one in sorted(everything, key=lambda row: -row[1] / (2 if row[3] else 1)):
        for other in kept:
            low, high = [max(one[0][i], other[0][i]) for i in (0, 1)], [min(one[0][i], other[0][i]) for i in (2, 3)]
            common = max(0, high[0] - low[0]) * max(0, high[1] - low[1])
            areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one[0], other[0])]
            whole = min(areas) if merge == "ios" and (one[3] or other[3]) else sum(areas) - common
            if one[2] == other[2] and one[4] != other[4] and common > whole / 2:
                break
        else:
            kept.append(one)
    kept.sort(key=lambda row: (-row[1], everything.index(row)))
    return kept[:limit]


@pytest.mark.parametrize("merge", ["nms", "ios"])
@pytest.mark.parametrize("seed", range(6))
def test_merging_is_that_of_a_slow_form(merge, seed):
    """Random objects as every window sees them, some displaced, some twice; a window without any is among them."""
    draw = random.Random(seed)
    size = (90, 170)
    windows = Tiling(64, 0.25, whole=seed % 2 == 0).windows(*size)
    objects = [
        (draw.uniform(0, 150), draw.uniform(0, 70), draw.uniform(4, 60), draw.uniform(4, 40), draw.randrange(2)) for _ in range(25)
    ]
    found = []
    for number, (top, left, height, width) in enumerate(windows):
        rows = []
        for x, y, w, h, label in objects if number != 1 else ():
            corners = [x - left + draw.gauss(0, 1), y - top + draw.gauss(0, 1), x + w - left, y + h - top]
            box = [min(max(corner, 0), extent) for corner, extent in zip(corners, (width, height, width, height), strict=True)]
            if box[2] - box[0] > 1 and box[3] - box[1] > 1:
                rows.append((*box, draw.choice((0.25, 0.5, draw.random())), label))
        found.append(detections(*sorted(rows, key=lambda row: -row[4])))
    merged, expected = merge_windows(found, windows, size, merge, 40), slow_merge(found, windows, size, merge, 40)
    assert 5 < len(expected) == len(merged.scores)
    assert merged.labels.tolist() == [row[2] for row in expected] and merged.scores.tolist() == [row[1] for row in expected]
    torch.testing.assert_close(merged.boxes_xyxy, torch.tensor([row[0] for row in expected]))


PAIR = [Window(0, 0, 40, 60), Window(0, 40, 40, 60)]  # of a 40 x 100 image; they share 20 columns


def merged(left, right, merge="ios", limit=10):
    return merge_windows([detections(*left), detections(*right)], PAIR, (40, 100), merge, limit)


def test_an_object_that_a_tile_cuts_is_kept_once_and_whole():
    """It reaches from column 42 to 78: the first tile sees half of it, with the higher score."""
    found = merged([(42, 5, 60, 30, 0.75, 0)], [(2, 5, 38, 30, 0.5, 0)])
    assert found.boxes_xyxy.tolist() == [[42, 5, 78, 30]] and found.scores.tolist() == [0.5]
    assert len(merged([(42, 5, 60, 30, 0.75, 0)], [(2, 5, 38, 30, 0.5, 0)], "nms").scores) == 2  # they overlap by 0.5, not more


def test_a_piece_with_more_than_twice_the_score_is_believed():
    assert merged([(42, 5, 60, 30, 0.75, 0)], [(2, 5, 38, 30, 0.25, 0)]).boxes_xyxy.tolist() == [[42, 5, 60, 30]]


def test_objects_of_two_classes_or_of_one_tile_are_two():
    assert len(merged([(42, 5, 58, 30, 0.75, 0)], [(2, 5, 18, 30, 0.5, 1)]).scores) == 2
    assert len(merged([(10, 5, 30, 30, 0.75, 0), (10, 5, 30, 31, 0.5, 0)], []).scores) == 2
    assert len(merged([(42, 5, 58, 30, 0.75, 0)], [(2, 5, 18, 30, 0.5, 0)]).scores) == 1


def test_a_small_object_in_a_large_one_stays_one_unless_a_tile_cuts_it():
    """Both are whole: the intersection over the smaller one does not count."""
    assert len(merged([(22, 0.5, 59.5, 40, 0.75, 0)], [(5, 10, 15, 20, 0.5, 0)]).scores) == 1  # the large one is cut
    assert len(merged([(22, 0.5, 59.5, 40, 0.75, 0)], [(5, 10, 15, 20, 0.5, 0)], "nms").scores) == 2
    assert len(merged([(22, 0.5, 58, 40, 0.75, 0)], [(5, 10, 15, 20, 0.5, 0)]).scores) == 2


def test_borders_of_the_image_cut_nothing():
    """An object at the left and one at the right border: were a score halved, the whole image's smaller boxes would be kept."""
    whole = Window(0, 0, 40, 100)
    left = [detections((0, 5, 30, 30, 0.75, 0)), detections((0, 5, 20, 30, 0.5, 0))]
    right = [detections((30, 5, 60, 30, 0.75, 0)), detections((80, 5, 100, 30, 0.5, 0))]
    for found, tile in ((left, PAIR[0]), (right, PAIR[1])):
        assert merge_windows(found, [tile, whole], (40, 100), "ios", 10).scores.tolist() == [0.75]


def test_the_best_are_kept_and_none_is_an_answer():
    rows = [(10, 5, 20, 30, score, 0) for score in (0.9, 0.5, 0.25)]
    assert merged(rows, [(50, 5, 58, 30, 0.75, 0)], limit=2).scores.tolist() == pytest.approx([0.9, 0.75])
    empty = merged([], [])
    assert empty.boxes_xyxy.shape == (0, 4) and len(empty.scores) == len(empty.labels) == 0


# In prediction and evaluation


@pytest.fixture(scope="module")
def trained(tiny_run):
    return tiny_run("deformable")


@pytest.fixture(scope="module")
def predictor(trained):
    return Predictor.from_checkpoint(trained.weights, device="cpu", overrides=["TEST.DETECTIONS_PER_IMAGE", "500"])


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("boxes_xyxy", "scores", "labels"))


def test_an_image_no_larger_than_a_tile_is_found_as_without(trained, predictor):
    path = trained.image(30)  # 33 x 90
    assert same(predictor(path, tiles=90), predictor(path))
    assert not same(predictor(path, tiles=89), predictor(path))
    assert same(predictor(path, tiles=0), predictor(path))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_is_found_in_tiles_is_what_is_found_in_each(trained, predictor, batch_size):
    """In an image of 33 x 90 pixels; other sizes are in the same batch. Nothing is merged, as no two windows share a class."""
    tiling = Tiling(40, 0.2)
    images = [read_image(str(trained.image(image_id))) for image_id in (30, 7)]
    found = predictor(images, tiles=tiling, batch_size=batch_size)
    for image, one in zip(images, found, strict=True):
        windows = tiling.windows(*image.shape[1:])
        assert len(windows) > 2
        parts = [predictor(image[:, y : y + h, x : x + w]) for y, x, h, w in windows]
        expected = merge_windows(parts, windows, tuple(image.shape[1:]), "ios", 500)
        torch.testing.assert_close(one.boxes_xyxy, expected.boxes_xyxy, rtol=0, atol=1e-3)
        torch.testing.assert_close(one.scores, expected.scores, rtol=0, atol=1e-5)
        assert len(one) > len(parts[0]) and (one.scores.diff() <= 0).all()
        assert (one.boxes_xyxy <= torch.tensor([*image.shape[:0:-1]] * 2)).all() and one.boxes_xyxy.min() >= 0


def test_evaluation_command_and_python_find_the_same(trained, tmp_path):
    """One of the images has no object. The command line writes what the evaluation wrote, and a kept config is used again."""
    words = overrides(trained.drawn.files, tmp_path / "eval", TEST__TILES__OVERLAP=0.5)
    options = ["--config-file", str(trained.folder / "config.yaml"), "--runner", "builtin", "--tiles", "48"]
    result = CliRunner().invoke(main, ["eval", str(trained.weights), *options, *words])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "eval/inference/coco_instances_results.json").read_text())
    predictor = Predictor.from_checkpoint(trained.weights, device="cpu")
    paths = {image["id"]: trained.drawn.files.image_root / image["file_name"] for image in trained.drawn.content["images"]}
    found = {key: predictor(path, tiles=Tiling(48, 0.5)) for key, path in paths.items()}
    assert written == [row for key, one in found.items() for row in one.to_coco(key)] and written != trained.found
    words = ["--output", tmp_path / "out", "--device", "cpu", "--threshold", 0, "--tiles", 48, "--overlap", 0.5]
    result = CliRunner().invoke(main, list(map(str, ["predict", trained.weights, "--input", paths[30], *words])))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out/detections.json").read_text()) == found[30].to_coco(1)
    kept = Predictor.from_checkpoint(trained.weights, device="cpu", config_file=str(tmp_path / "eval/config.yaml"))
    assert kept.tiling == Tiling(48, 0.5) and same(kept(paths[30]), found[30])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["TEST.TILES.SIZE", "-1"], "TEST.TILES: the side of a tile must be a whole number of at least 32 pixels, got -1"),
        (["TEST.TILES.SIZE", "64", "TEST.TILES.OVERLAP", "1.5"], "TEST.TILES: the overlap of tiles must be"),
        (["TEST.TILES.SIZE", "64", "TEST.TILES.MERGE", "iou"], "unknown way to merge tiles 'iou'"),
    ],
)
def test_keys_that_cannot_apply_are_refused(trained, tmp_path, words, match):
    with pytest.raises(ConfigError, match=match):
        Predictor.from_checkpoint(trained.weights, device="cpu", overrides=words)
    more = {key.replace(".", "__"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    with pytest.raises(ConfigError, match=match):
        run(load_cfg("", overrides(trained.drawn.files, tmp_path / "run", **more)))
    assert not list(tmp_path.rglob("model_*"))
