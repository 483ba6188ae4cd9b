# SPDX-License-Identifier: Apache-2.0
"""Augmentations by name: rectangles are painted, augmented, and found again in the pixels, where their boxes say."""

import functools
import random
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import draw_coco
from PIL import Image
from test_loader import assert_same_batches
from tiny import coco_dict, overrides
from torch import Tensor

from cpvt_det.builders import build_train_loader, load_splits, training_records
from cpvt_det.builders.data import build_augmentations
from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.errors import ConfigError, DeadWorkerError
from cpvt_det.config import get_cfg, load_cfg
from cpvt_det.data import augmentation
from cpvt_det.data.augmentation import AUGMENTATION_REGISTRY, as_scene, clip_to_visible
from cpvt_det.data.loader import dead_workers_named
from cpvt_det.data.mapper import Mapper, train_transform
from cpvt_det.data.records import ImageRecord
from cpvt_det.training.tasks.task import build_task

COLOURS = torch.tensor([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255)])
"""One for each label, all far from black and from the mean of another one and black."""
BOXES = [(5, 10, 35, 30), (50, 20, 88, 55), (2, 40, 30, 58)]  # apart from each other, in 60 x 90 pixels
OPTIONS = {
    "CenterCrop": {"size": [40, 60]},
    "ColorJitter": {"brightness": 0.4, "hue": 0.1},
    "GaussianBlur": {"kernel_size": 5},
    "JPEG": {"quality": [50, 90]},
    "Pad": {"padding": [3, 5, 7, 9]},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 20, "translate": [0.3, 0.3], "scale": [0.5, 1.5], "shear": [-10, 10], "interpolation": "bilinear"},
    "RandomCrop": {"size": [40, 50]},
    "RandomPerspective": {"p": 1, "distortion_scale": 0.4, "interpolation": "bilinear"},
    "RandomPosterize": {"bits": 4},
    "RandomResizedCrop": {"size": [50, 70]},
    "RandomRotation": {"degrees": 25, "interpolation": "bilinear"},
    "RandomSolarize": {"threshold": 128},
    "RandomVerticalFlip": {"p": 0.5},
    "RandomZoomOut": {"p": 1, "side_range": [1, 2]},
    "ScaleJitter": {"target_size": [100, 100], "scale_range": [0.5, 1.5]},
    "RandomApply": {"transforms": [["RandomCrop", {"size": [40, 50]}], "RandomZoomOut"], "p": 0.9},
    "RandomChoice": {"transforms": [["RandomCrop", {"size": [40, 50]}], "RandomZoomOut"]},
    "RandomOrder": {"transforms": [["RandomCrop", {"size": [40, 50]}], ["RandomZoomOut", {"p": 1}]]},
    "Mosaic": {"p": 1},
    "MixUp": {"p": 1},
}
OURS = (*augmentation.COLOURS, *augmentation.PLACES, *augmentation.GROUPS, "RandomIoUCrop", "Mosaic", "MixUp")
LOSE_SOME = ("RandomAffine", "RandomCrop", "RandomResizedCrop", "RandomApply", "RandomChoice", "RandomOrder", "RandomIoUCrop")
TURN = ("RandomAffine", "RandomPerspective", "RandomRotation")


def paint(size, boxes, first=0):
    """A black scene with a rectangle of its own colour for each box; labels count from ``first``."""
    image = torch.zeros(3, *size, dtype=torch.uint8)
    labels = torch.arange(first, first + len(boxes))
    for (x0, y0, x1, y1), label in zip(boxes, labels, strict=True):
        image[:, y0:y1, x0:x1] = COLOURS[label].byte()[:, None, None]
    return as_scene(image, torch.tensor(boxes).reshape(-1, 4), labels)


def pixels_of(image, label, strength=1.0):
    """(h, w) bool: the pixels that are nearer to a label's colour, at a share of its brightness, than half of that."""
    colour = COLOURS[label] * strength
    return (image.float() - colour[:, None, None]).abs().amax(0) < 127 * strength


def extent(pixels):
    """xyxy of what is True, or ``None``."""
    rows, columns = pixels.nonzero(as_tuple=True)
    return torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)).float() if len(rows) else None


def steps_of(*entries, **keys):
    cfg = get_cfg()
    cfg.INPUT.AUGMENTATIONS = list(entries)
    cfg.INPUT.update(keys)
    return build_augmentations(cfg)


def step_of(name, **keys):
    return steps_of([name, OPTIONS[name]] if name in OPTIONS else name, **keys)[0]


def assert_boxes_are_those_of_the_pixels(scene, labels, strength=1.0, turned=False):
    """Each label has at most one box, around its pixels; returns the labels without a box.

    What is turned and then cut by the border may have a smaller extent than its box is cut to.
    """
    image, boxes, found = (part.as_subclass(Tensor) for part in scene)
    height, width = image.shape[1:]
    assert (image.dtype, boxes.dtype, found.dtype) == (torch.uint8, torch.float32, torch.int64)
    assert (boxes >= 0).all() and (boxes <= torch.tensor([width, height, width, height])).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    by_label = dict(zip(found.tolist(), boxes, strict=True))
    assert len(by_label) == len(found)
    for label, box in by_label.items():
        seen = extent(pixels_of(image, label, strength))
        if seen is None:  # a sliver that interpolation dims
            assert (box[2:] - box[:2]).min() <= 2
        elif turned and ((box[:2] == 0).any() or (box[2:] == torch.tensor([width, height])).any()):
            assert (seen[:2] >= box[:2] - 1.6).all() and (seen[2:] <= box[2:] + 1.6).all()
        else:
            assert (seen - box).abs().max() <= (2.6 if turned else 1.6), (label, seen, box)
    return set(labels) - set(by_label)


# One image


@pytest.mark.parametrize("name", [*augmentation.PLACES, *augmentation.GROUPS, "RandomIoUCrop"])
def test_boxes_follow_their_objects(name):
    step, scene, lost, places = step_of(name), paint((60, 90), BOXES), 0, set()
    for seed in range(25):
        torch.manual_seed(seed)
        found = step(*scene)
        lost += len(assert_boxes_are_those_of_the_pixels(found, range(3), turned=name in TURN))
        places.add(tuple(found[1].flatten().tolist()))
    assert (len(places) > 1) == (name not in ("CenterCrop", "Pad"))
    assert (lost > 0) == (name in LOSE_SOME)


@pytest.mark.parametrize("name", augmentation.COLOURS)
def test_colours_leave_boxes_as_they_are(name):
    """Also a box that is thinner than a pixel."""
    image = torch.randint(40, 200, (3, 60, 90), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([*BOXES, [7.0, 3.0, 7.25, 9.0]])
    scene = as_scene(image, boxes, torch.tensor([0, 1, 2, 2]))
    step = step_of(name)
    torch.manual_seed(0)
    changed = [step(*scene) for _ in range(12)]
    assert all(torch.equal(found[1], boxes) and torch.equal(found[2], scene[2]) for found in changed)
    assert any(not torch.equal(found[0], scene[0]) for found in changed)


@pytest.mark.parametrize("name", OURS)
def test_an_image_without_objects_stays_one(name):
    step, scene = step_of(name), paint((60, 90), [])
    for seed in range(5):
        torch.manual_seed(seed)
        image, boxes, labels = step(*scene, lambda: scene)
        assert image.dtype == torch.uint8 and image.shape[0] == 3 and image.shape[1] >= 1
        assert (boxes.shape, labels.shape, labels.dtype) == ((0, 4), (0,), torch.int64)
        assert not image[:].any() or name in augmentation.COLOURS


def test_clip_to_visible_by_hand():
    """On 10 x 20 pixels: whole, half, a quarter less a bit, outside, thin but whole, cut to 0.5 pixels, empty, beyond all sides."""
    boxes = torch.tensor(
        [
            [2, 3, 6, 8],
            [16, 2, 24, 4],
            [19.1, 0, 23.1, 10],
            [20, 0, 30, 10],
            [5, 5, 5.5, 9],
            [19.5, 0, 20.5, 10],
            [4, 4, 4, 9],
            [-5, -5, 25, 15],
        ]
    )
    clipped, kept = clip_to_visible(boxes, (10, 20), 0.25)
    assert kept.tolist() == [True, True, False, False, True, False, False, True]  # the last one: 200 of 600 square pixels
    assert clipped[kept].tolist() == [[2, 3, 6, 8], [16, 2, 20, 4], [5, 5, 5.5, 9], [0, 0, 20, 10]]
    assert clip_to_visible(boxes, (10, 20), 0.5)[1].tolist() == [True, True, False, False, True, False, False, False]
    assert clip_to_visible(boxes, (10, 20), 0.0)[1].tolist() == [True, True, False, False, True, False, False, True]


@pytest.mark.parametrize("name", ["RandomCrop", "RandomIoUCrop"])
@pytest.mark.parametrize("min_visible", [0.0, 0.25, 0.6])
def test_a_crop_removes_the_boxes_of_which_too_few_pixels_are_left(name, min_visible):
    """Counted in the pixels: a crop without resizing leaves whole ones."""
    step, scene, counts = step_of(name, MIN_VISIBLE=min_visible), paint((60, 90), BOXES), [0, 0]
    for seed in range(40):
        torch.manual_seed(seed)
        image, _, labels = step(*scene)
        for label, (x0, y0, x1, y1) in enumerate(BOXES):
            left = int(pixels_of(image.as_subclass(Tensor), label).sum()) / ((x1 - x0) * (y1 - y0))
            assert (label in labels.tolist()) == (left > 0 and left >= min_visible)
            counts[label in labels.tolist()] += 1
    assert min(counts) > 10


def test_an_image_that_loses_all_boxes_is_empty():
    """A box in the corner, and a crop of the middle."""
    image, boxes, labels = step_of("CenterCrop")(*paint((60, 90), [(0, 0, 12, 9)]))
    assert (image.shape, boxes.shape, labels.shape) == ((3, 40, 60), (0, 4), (0,))


def test_iou_crop_ends_for_every_image():
    message = r"'RandomIoUCrop': sampler_options must contain 1, which keeps the image whole, got \[0\.5, 0\.9\]"
    with pytest.raises(ConfigError, match=message):
        steps_of(["RandomIoUCrop", {"sampler_options": [0.5, 0.9]}])
    scene = paint((60, 90), [])
    assert step_of("RandomIoUCrop")(*scene)[0].shape == scene[0].shape


# Several images


@pytest.mark.parametrize("size", [(60, 90), (91, 47)])
def test_a_mosaic_has_the_objects_of_four_images(size):
    """Each in its corner: pixels of every colour, where its box is; a corner is filled, whatever an image's shape."""
    others = [paint((40, 100), [(5, 5, 40, 35)], 3), paint((80, 50), [(10, 20, 40, 70)], 4), paint((64, 64), [(8, 8, 56, 56)], 5)]
    others = [(torch.where((image > 0).any(0), image, 60), boxes, labels) for image, boxes, labels in others]
    step, scene = step_of("Mosaic"), paint(size, [(10, 10, 40, 40)])
    lost, centres = 0, set()
    for seed in range(25):
        torch.manual_seed(seed)
        found = step(*scene, iter(others).__next__)
        assert found[0].shape == scene[0].shape
        lost += len(assert_boxes_are_those_of_the_pixels(found, (0, 3, 4, 5)))
        plain = found[0].as_subclass(Tensor)
        first = (plain[1:] == 0).all(0)  # the only image of black and red
        y0, x0, y1, x1 = extent(first)[[1, 0, 3, 2]].tolist()
        corner = y0 if y0 else y1, x0 if x0 else x1
        centres.add(corner)
        assert all(0.29 * side <= at <= 0.71 * side for at, side in zip(corner, size, strict=True))
    assert len(centres) > 15
    assert 0 < lost < 50


def test_a_mosaic_keeps_boxes_by_the_rule_for_all():
    """Where all of an object has to be seen, boxes of 30 x 15 pixels are twice as wide as high, in whatever window."""
    scenes, counts = [paint((60, 90), [(5, 5, 35, 20), (55, 40, 85, 55)], first) for first in (0, 2, 4, 0)], []
    for min_visible in (0.0, 1.0):
        (step,) = steps_of(["Mosaic", {"p": 1, "zoom": [1, 2]}], MIN_VISIBLE=min_visible)
        found = []
        for seed in range(10):
            torch.manual_seed(seed)
            boxes = step(*scenes[0], iter(scenes[1:]).__next__)[1].as_subclass(Tensor)
            found += ((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1])).tolist()
        counts.append(len(found))
    assert all(1.8 < ratio < 2.2 for ratio in found)
    assert 4 < counts[1] < 0.8 * counts[0]


def test_a_mixup_has_the_objects_of_both_images():
    """The second one is resized to fit: 45 x 30 pixels into 60 x 90 makes 60 x 40."""
    step, scene, other = step_of("MixUp"), paint((60, 90), BOXES[:1]), paint((45, 30), [(3, 6, 15, 24), (20, 30, 29, 44)], 1)
    lefts = set()
    for seed in range(20):
        torch.manual_seed(seed)
        image, boxes, labels = step(*scene, lambda: other)
        assert labels.tolist() == [0, 1, 2]
        plain = image.as_subclass(Tensor)
        for label in (0, 1, 2):
            seen = extent(plain[label] > 50)  # at least 0.4 * 255 / 2
            assert (seen - boxes[label].as_subclass(Tensor)).abs().max() <= 1.6
        sides = (boxes[1:, 2:] - boxes[1:, :2]).as_subclass(Tensor)
        assert torch.allclose(sides, torch.tensor([[16.0, 24.0], [12.0, 56 / 3]]), atol=1e-4)
        assert plain[0].amax() == 255 or plain[0].amax() in range(100, 156)  # outside of the other one it keeps its colour
        lefts.add(float(boxes[1, 0]))
    assert len(lefts) > 10


def test_other_images_went_through_the_augmentations_before(tmp_path):
    """Zoomed out to at least twice the side before they are mixed in: a full object has half the side at most."""
    record = write(tmp_path, "full", (40, 60), [(0, 0, 60, 40)])
    steps = steps_of(["RandomZoomOut", {"p": 1, "side_range": [2, 2.0001]}], ["MixUp", {"p": 1}])
    for seed in range(5):
        torch.manual_seed(seed)
        targets = Mapper(train_transform((), None, flip=False), True, steps, [record])(record)["targets"]
        assert torch.allclose(targets.boxes_cxcywh[:, 2:], torch.full((2, 2), 0.5), atol=0.01)


def test_the_size_of_the_canvas_is_the_first_image_s():
    """So that a wide image stays wide for its batch; a canvas of one pixel holds no four images."""
    others = [paint((100, 30), [(5, 5, 25, 95)], 1)] * 3
    for name in ("Mosaic", "MixUp"):
        assert step_of(name)(*paint((33, 90), []), iter(others).__next__)[0].shape == (3, 33, 90)
        assert step_of(name)(*paint((1, 1), []), iter(others).__next__)[0].shape == (3, 1, 1)


# In a run


def write(folder, name, size, boxes, mode="RGB"):
    image, _, labels = paint(size, boxes)
    Image.fromarray(image.permute(1, 2, 0).numpy()).convert(mode).save(folder / f"{name}.png")
    return ImageRecord(str(folder / f"{name}.png"), 1, *size, np.array(boxes, np.float32).reshape(-1, 4), labels.numpy())


ALL = [
    ["Mosaic", {"p": 0.5}],
    "RandomPhotometricDistort",
    ["RandomZoomOut", {"side_range": [1, 2]}],
    ["RandomApply", {"transforms": ["RandomIoUCrop"], "p": 0.8}],
    ["RandomRotation", {"degrees": 10}],
    ["MixUp", {"p": 0.5}],
    "noisy",
]


@AUGMENTATION_REGISTRY.register_as("noisy")
def noisy():
    """One's own, with the generators that are at hand."""

    def augment(image, boxes, labels):
        noise = np.random.randint(0, 5, (3, *image.shape[1:]), dtype=np.uint8)
        return image // 2 + torch.from_numpy(noise) + random.randrange(100), boxes, labels

    return augment


@pytest.fixture
def augmented_cfg(drawn_cfg):
    drawn_cfg.INPUT.AUGMENTATIONS = ALL
    drawn_cfg.SOLVER.EPOCHS = 3.0
    return drawn_cfg


def loader_of(cfg, num_workers=0):
    cfg.DATALOADER.NUM_WORKERS = num_workers
    return build_train_loader(cfg, training_records(cfg, load_splits(cfg)[0]), seed=3)


def test_batches_repeat_with_workers_and_after_a_resume(augmented_cfg):
    whole = list(islice(loader_of(augmented_cfg), 8))
    torch.manual_seed(123)
    np.random.seed(5)
    random.seed(7)
    assert_same_batches(whole, list(islice(loader_of(augmented_cfg, num_workers=2), 8)))
    assert_same_batches(whole[5:], list(islice(loader_of(augmented_cfg).from_iteration(5), 3)))
    images = [sample["image"] for batch in whole for sample in batch]
    assert not any(torch.equal(images[0], other) for other in images[1:])


def test_two_processes_share_the_batches_of_one(augmented_cfg, monkeypatch):
    augmented_cfg.SOLVER.IMS_PER_BATCH = 4
    whole, shares = list(islice(loader_of(augmented_cfg), 3)), []
    records = training_records(augmented_cfg, load_splits(augmented_cfg)[0])
    monkeypatch.setattr("cpvt_det.common.distributed.world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr("cpvt_det.common.distributed.rank", functools.partial(int, rank))
        shares.append(list(islice(build_train_loader(augmented_cfg, records, seed=3), 3)))
    assert_same_batches(whole, [first + second for first, second in zip(*shares, strict=True)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_of_the_process_go_on_as_if_nothing_was_drawn(augmented_cfg, num_workers):
    torch.manual_seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(islice(loader_of(augmented_cfg, num_workers), 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_the_last_epochs_are_not_mixed(drawn_cfg):
    """In 3.2 epochs with the last 1.2 closed: from epoch 2 on samples are those of a config without mixing."""
    drawn_cfg.SOLVER.EPOCHS = 3.2
    plain = loader_of(drawn_cfg).dataset
    drawn_cfg.INPUT.AUGMENTATIONS, drawn_cfg.INPUT.CLOSE_EPOCHS = [["Mosaic", {"p": 1}]], 1.2
    mixed = loader_of(drawn_cfg).dataset
    drawn_cfg.INPUT.AUGMENTATIONS, drawn_cfg.INPUT.CLOSE_EPOCHS = [["Mosaic", {"p": 1}]], 0.0
    always = loader_of(drawn_cfg).dataset
    for index in range(5):
        for epoch in range(4):
            is_plain = torch.equal(mixed[epoch, index]["image"], plain[epoch, index]["image"])
            is_mixed = torch.equal(mixed[epoch, index]["image"], always[epoch, index]["image"])
            assert (is_plain, is_mixed) == (epoch >= 2, epoch < 2)


def test_epochs_of_a_run_in_iterations(drawn_cfg):
    """30 iterations of 2 of 5 images are 12 epochs."""
    drawn_cfg.SOLVER.EPOCHS, drawn_cfg.SOLVER.MAX_ITER = 0.0, 30
    drawn_cfg.INPUT.AUGMENTATIONS, drawn_cfg.INPUT.CLOSE_EPOCHS = ["MixUp"], 3.0
    start, mapper = loader_of(drawn_cfg).dataset.closing
    assert (start, mapper.mixes) == (9, False)


def test_a_run_that_is_all_closed_is_warned_of(drawn_cfg, caplog):
    drawn_cfg.SOLVER.EPOCHS = 3.0
    drawn_cfg.INPUT.AUGMENTATIONS, drawn_cfg.INPUT.CLOSE_EPOCHS = ["MixUp"], 3.0
    load_splits(drawn_cfg)
    assert "INPUT.CLOSE_EPOCHS 3 covers the whole run, so no images are mixed" in caplog.text
    caplog.clear()
    drawn_cfg.INPUT.CLOSE_EPOCHS = 2.0
    load_splits(drawn_cfg)
    assert "CLOSE_EPOCHS" not in caplog.text


def test_crowds_are_not_learned(tmp_path):
    """Image 12 of the drawn data has one object and a crowd of another class."""
    drawn = draw_coco(tmp_path)
    cfg = get_cfg()
    cfg.DATASETS.REGISTER = [["drawn", str(drawn.files.annotations), str(drawn.files.image_root)]]
    cfg.DATASETS.TRAIN = ("drawn",)
    (data,), _ = load_splits(cfg)
    (record,) = (record for record in data.records if record.image_id == 12)
    before = [dict(annotation) for annotation in coco_dict(data)["annotations"]]
    steps = steps_of(["Mosaic", {"p": 0.5}], ["MixUp", {"p": 0.5}])
    mapper, labels = Mapper(train_transform((), None), True, steps, [record]), []
    for seed in range(10):
        torch.manual_seed(seed)
        labels += mapper(record)["targets"].labels.tolist()
    assert set(labels) == set(record.labels.tolist()) == {2}
    assert len(labels) > 20
    assert coco_dict(data)["annotations"] == before  # areas and crowds of the evaluation are those of the files
    assert sum(annotation["iscrowd"] for annotation in before) == 1


def test_grey_images_are_mixed_with_coloured_ones(tmp_path):
    records = [write(tmp_path, "grey", (60, 90), BOXES, "L"), write(tmp_path, "colour", (90, 60), [(5, 5, 30, 40)])]
    steps = steps_of(["Mosaic", {"p": 1}], "RandomPhotometricDistort", ["MixUp", {"p": 1}])
    for number in range(6):
        torch.manual_seed(number)
        sample = Mapper(train_transform((40, 50), 90), True, steps, records)(records[number % 2])
        boxes = cxcywh_to_xyxy(sample["targets"].boxes_cxcywh)
        assert sample["image"].shape[0] == 3 and min(sample["image"].shape[1:]) in (40, 50)
        assert (boxes >= -1e-6).all() and (boxes <= 1 + 1e-6).all() and (boxes[:, 2:] > boxes[:, :2]).all()


# What is refused


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            ["RandomRotate"],
            r"^unknown augmentation 'RandomRotate' \(did you mean 'RandomRotation'\?\); known: CenterCrop, .*--import",
        ),
        (["RandomErasing"], r"^unknown augmentation 'RandomErasing'"),
        ([["RandomRotation", {"angle": 3}]], r"unknown option of augmentation 'RandomRotation' 'angle'.*; known: center, degrees"),
        ([["Mosaic", {"min_visible": 0.5}]], r"unknown option of augmentation 'Mosaic' 'min_visible'; known: center, p, zoom"),
        (["RandomRotation"], r"INPUT\.AUGMENTATIONS: 'RandomRotation': .*missing 1 required positional argument: 'degrees'"),
        ([["RandomRotation", {"degrees": "ten"}]], r"INPUT\.AUGMENTATIONS: 'RandomRotation'"),
        ([["RandomRotation", {"degrees": 5, "interpolation": "soft"}]], r"unknown interpolation 'soft'; known: .*bilinear"),
        (
            [["RandomPhotometricDistort", {"p": 1.5}]],
            r"p of 'RandomPhotometricDistort' must be a probability .*, got 1\.5",
        ),
        ([["Mosaic", {"p": "often"}]], r"p of 'Mosaic' must be a probability from 0 to 1, got 'often'"),
        ([["Mosaic", {"center": [0.7, 0.3]}]], r"'Mosaic': center must be a range \[low, high\] from at least 0 to at most 1"),
        ([["Mosaic", {"zoom": [0.5, 1]}]], r"'Mosaic': zoom must be a range \[low, high\] from at least 1, got"),
        ([["MixUp", {"share": [0.5]}]], r"'MixUp': share must be a range"),
        (
            [["RandomApply", {"p": 0.5}]],
            r"'RandomApply' needs transforms, a list in the same form as INPUT\.AUGMENTATIONS, got None",
        ),
        ([["RandomChoice", {"transforms": ["MixUp"]}]], r"'MixUp' mixes images, so it cannot be inside 'RandomChoice'"),
        ([["RandomChoice", {"transforms": ["Mixup"]}]], r"unknown augmentation 'Mixup' \(did you mean 'MixUp'"),
        (
            [["RandomCrop", {"size": [500, 500]}]],
            r"'RandomCrop' failed on a black image, 90 x 33 pixels and 1 boxes: Required",
        ),
        (["Mosaic", 3], r"must contain names and \[name, \{option: value\}\] pairs, got 3"),
        ([["RandomRotation", 10]], r"must contain names and \[name, \{option: value\}\] pairs, got \['RandomRotation', 10\]"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_run(drawn_cfg, entries, message):
    drawn_cfg.INPUT.AUGMENTATIONS = entries
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message):
        load_splits(drawn_cfg)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"CLOSE_EPOCHS": 2.0}, r"INPUT\.CLOSE_EPOCHS is 2\.0, but no augmentation of INPUT\.AUGMENTATIONS mixes images"),
        ({"CLOSE_EPOCHS": -1.0}, r"INPUT\.CLOSE_EPOCHS must be at least 0, got -1"),
        ({"MIN_VISIBLE": 1.5}, r"INPUT\.MIN_VISIBLE must be a fraction from 0 to 1, got 1\.5"),
    ],
)
def test_keys_beside_the_list_that_cannot_apply_are_refused(drawn_cfg, keys, message):
    drawn_cfg.INPUT.update({"AUGMENTATIONS": ["RandomPhotometricDistort"], **keys})
    with pytest.raises(ConfigError, match=message):
        load_splits(drawn_cfg)


def test_a_crop_that_only_fits_after_zooming_out_is_refused_where_that_is_left_to_chance(drawn_cfg):
    """They are tried one after the other, as in the run; the narrowest image has 33 x 90 pixels."""
    zoomed, crop = {"side_range": [2, 3]}, ["RandomCrop", {"size": [60, 60]}]
    drawn_cfg.INPUT.AUGMENTATIONS = [["RandomZoomOut", {**zoomed, "p": 1}], crop]
    assert load_splits(drawn_cfg)
    for chance in ({}, {"p": 0.9}):  # half of the images by default
        drawn_cfg.INPUT.AUGMENTATIONS = [["RandomZoomOut", {**zoomed, **chance}], crop]
        with pytest.raises(ConfigError, match="'RandomCrop' failed on a black image, 90 x 33 pixels"):
            load_splits(drawn_cfg)


WRONG = {
    "None": (lambda i, b, n: None, r"returned NoneType"),
    "two": (lambda i, b, n: (i, b), r"returned Image, BoundingBoxes"),
    "floats": (lambda i, b, n: (i / 255, b, n), r"the image is torch\.float32 of shape \(3, 60, 90\) and not uint8"),
    "rows": (lambda i, b, n: (i.permute(1, 2, 0), b, n), r"the image is torch\.uint8 of shape \(60, 90, 3\)"),
    "flat": (lambda i, b, n: (i, b.flatten(), n), r"the boxes are torch\.float32 of shape \(12,\)"),
    "fewer": (lambda i, b, n: (i, b[:2], n), r"the labels are torch\.int64 of shape \(3,\) and not int64 of shape \(2,\)"),
    "xywh": (lambda i, b, n: (i, b[:, [2, 3, 0, 1]], n), r"a box is not \[x0, y0, x1, y1\] with x0 <= x1"),
    "nan": (lambda i, b, n: (i, b * float("nan"), n), r"a box is not"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_one_s_own_that_returns_something_else_is_named(kind, tmp_path, monkeypatch):
    augment, message = WRONG[kind]
    AUGMENTATION_REGISTRY._do_register(f"wrong {kind}", lambda: augment)
    try:
        record = write(tmp_path, "a", (60, 90), BOXES)
        mapper = Mapper(train_transform((), None), True, steps_of(f"wrong {kind}"))
        with pytest.raises(
            ConfigError, match=rf"'wrong {kind}' failed on image .*a\.png \(id 1\), 90 x 60 pixels and 3 .*{message}"
        ):
            mapper(record)
    finally:
        AUGMENTATION_REGISTRY._obj_map.pop(f"wrong {kind}")


def test_no_other_name_is_known_without_an_import():
    command = "import cpvt_det.data.augmentation as a; print(*sorted(a.AUGMENTATION_REGISTRY.names))"
    listed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert listed.split() == sorted(OURS)


def test_a_worker_that_died_may_have_read_an_image_to_mix_in(augmented_cfg):
    dataset = loader_of(augmented_cfg).dataset
    dataset.at_work = torch.tensor([[1234, 2]])
    message = r"while reading .*\.png or an image that is mixed with it; --resume"
    with pytest.raises(DeadWorkerError, match=message), dead_workers_named(dataset):
        raise RuntimeError("DataLoader worker (pid(s) 1234) exited unexpectedly")


@pytest.mark.detectron2
def test_both_runners_make_the_same_batches(drawn_coco, tmp_path):
    from cpvt_det.d2.run import load_cfg as load_d2_cfg

    words = overrides(drawn_coco.files, tmp_path, INPUT__AUGMENTATIONS=ALL, INPUT__CLOSE_EPOCHS=1.0)
    batches = []
    for load in (load_cfg, load_d2_cfg):
        task = build_task(load("", words))
        records = task.training_records(task.load_splits()[0])
        batches.append(list(islice(task.build_train_loader(records, seed=3), 7)))
    assert_same_batches(*batches)
