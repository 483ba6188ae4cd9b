# SPDX-License-Identifier: Apache-2.0
"""From files to batches: the rules for boxes and ids, faults by name, boxes that follow their objects, batches that repeat."""

import copy
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from cpvt_det.boxes import cxcywh_to_xyxy
from cpvt_det.build import build_test_loader, build_train_loader, load_splits, load_tests, set_classes, training_records
from cpvt_det.config import get_cfg
from cpvt_det.data.catalog import DatasetFiles, builtin_datasets, find_datasets
from cpvt_det.data.coco import ImageRecord, load_coco, require_same_classes
from cpvt_det.data.images import read_image
from cpvt_det.data.loader import MappedDataset, TrainBatches, TrainLoader, evaluation_loader
from cpvt_det.data.mapper import Mapper, evaluation_transform, train_transform
from cpvt_det.data.rules import CLIPPED, OUTSIDE, WITHOUT_AREA
from cpvt_det.errors import ConfigError, DataError, UnknownNameError
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.structures import Detections, PaddedBatch

evaluation_loader.__test__ = evaluation_transform.__test__ = False  # no tests, whatever pytest thinks of their names

ONE_IMAGE = {
    "images": [{"id": 1, "file_name": "a.png", "height": 10, "width": 20}],
    "annotations": [{"id": 5, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]}],
    "categories": [{"id": 3, "name": "cell"}],
}


def write_json(folder, content):
    path = folder / "faulty.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return DatasetFiles("faulty", path, folder)


def load_changed(folder, change):
    """Load a data set of one image and one box after a change to its content."""
    content = copy.deepcopy(ONE_IMAGE)
    change(content)
    return load_coco(write_json(folder, content))


def boxes_of(dataset, image_id):
    (record,) = (record for record in dataset.records if record.image_id == image_id)
    return dict(zip(record.labels.tolist(), record.boxes_xyxy.tolist(), strict=True))


# COCO JSON


def test_categories_become_labels_by_rising_id(drawn_coco):
    classes = load_coco(drawn_coco.files).classes
    assert classes.ids == (3, 17, 90)
    assert classes.names == ("red", "green", "blue")
    assert len(classes) == 3


def test_boxes_that_count_are_kept_as_corners(drawn_coco):
    """Image 7 has [10, 8, 30, 20] of category 17, label 1, and [50, 5, 12, 25] of category 3, label 0."""
    dataset = load_coco(drawn_coco.files)
    assert [record.image_id for record in dataset.records] == [7, 12, 30, 41, 5]
    assert boxes_of(dataset, 7) == {1: [10, 8, 40, 28], 0: [50, 5, 62, 30]}
    assert boxes_of(dataset, 5) == {1: [4.5, 6.25, 25, 37]}
    assert boxes_of(dataset, 41) == {}
    first = dataset.records[0]
    assert (first.height, first.width) == (40, 72)
    assert Path(first.file_name) == drawn_coco.files.image_root / "part" / "007.png"
    assert (first.boxes_xyxy.dtype, first.labels.dtype) == (np.float32, np.int64)
    assert dataset.records[3].boxes_xyxy.shape == (0, 4)


def test_crowds_are_left_out_of_training_and_kept_for_evaluation(drawn_coco):
    dataset = load_coco(drawn_coco.files)
    assert boxes_of(dataset, 12) == {2: [5, 30, 25, 55]}
    crowds = [a for a in dataset.ground_truth["annotations"] if a["iscrowd"]]
    assert [(a["image_id"], a["category_id"], a["bbox"]) for a in crowds] == [(12, 17, [0, 0, 48, 20])]


def test_boxes_outside_or_without_area_are_left_out_and_others_clipped_in_both(drawn_coco):
    """[80, -4, 20, 20] in an image of 33 x 90 leaves [80, 0, 10, 16], 160 pixels."""
    dataset = load_coco(drawn_coco.files)
    assert boxes_of(dataset, 30) == {0: [80, 0, 90, 16]}
    truth = [a for a in dataset.ground_truth["annotations"] if a["image_id"] == 30]
    assert [(a["bbox"], a["area"], a["iscrowd"]) for a in truth] == [([80, 0, 10, 16], 160, 0)]
    assert not any(0 in a["bbox"][2:] for a in dataset.ground_truth["annotations"])
    assert dataset.findings.counts() == {WITHOUT_AREA: 1, CLIPPED: 1, OUTSIDE: 1}


def test_faults_are_told_in_one_line(drawn_coco):
    assert load_coco(drawn_coco.files).describe() == (
        "drawn: 5 images, 1 of them without objects, 5 boxes, 3 classes; boxes outside the image, left out: 1; "
        "boxes partly outside the image, clipped: 1; boxes without area, left out: 1"
    )


@pytest.mark.parametrize(
    "box",
    [[0, 0, 0, 5], [0, 0, 5, 0], [3, 3, -2, 5], [3, 3, 5, -2], [20, 0, 5, 5], [-5, 0, 5, 5], [0, 10, 5, 5], [0, -7, 5, 7]],
)
def test_box_without_a_pixel_in_the_image_is_left_out_of_both(tmp_path, box):
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(bbox=box))
    assert boxes_of(dataset, 1) == {}
    assert dataset.ground_truth["annotations"] == []
    assert sum(group.count for heading, group in dataset.findings.notes.items() if heading in (WITHOUT_AREA, OUTSIDE)) == 1


def test_box_up_to_the_border_is_not_clipped(tmp_path):
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(bbox=[0, 0, 20, 10]))
    assert boxes_of(dataset, 1) == {0: [0, 0, 20, 10]}
    assert CLIPPED not in dataset.findings.notes


def test_area_and_iscrowd_may_be_missing_or_null(tmp_path):
    for change in ({}, {"area": None, "iscrowd": None}):
        dataset = load_changed(tmp_path, lambda content, change=change: content["annotations"][0].update(change))
        (annotation,) = dataset.ground_truth["annotations"]
        assert (annotation["area"], annotation["iscrowd"]) == (12, 0)
        assert len(dataset.records[0].labels) == 1


def test_area_of_the_file_is_kept_where_nothing_is_clipped(tmp_path):
    """COCO's area is the mask's, which is smaller than the box's, and AP by size goes by it."""
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(area=7.5))
    assert dataset.ground_truth["annotations"][0]["area"] == 7.5


@pytest.mark.parametrize("ids", [[0, 1, 2], [1, 2, 3], [5, 90, 1000000]])
def test_category_ids_of_any_numbering_are_mapped_to_and_back(tmp_path, ids):
    def change(content):
        content["categories"] = [{"id": i, "name": f"class {i}"} for i in reversed(ids)]
        content["annotations"] = [{"image_id": 1, "category_id": i, "bbox": [i % 7, 1, 2, 2]} for i in ids]

    dataset = load_changed(tmp_path, change)
    assert dataset.records[0].labels.tolist() == [0, 1, 2]
    assert [dataset.classes.ids[label] for label in dataset.records[0].labels] == ids
    assert {a["category_id"] for a in dataset.ground_truth["annotations"]} == set(ids)


def test_image_id_zero_is_an_id(tmp_path):
    def change(content):
        content["images"][0]["id"] = content["annotations"][0]["image_id"] = 0

    assert boxes_of(load_changed(tmp_path, change), 0) == {0: [1, 2, 4, 6]}


def test_annotation_ids_do_not_matter(tmp_path):
    """Missing and zero ids occur; evaluation gets ids from 1, as 0 would count as unmatched there."""

    def change(content):
        box = {"image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]}
        content["annotations"] = [{**box, "id": 0}, box, box]

    assert [a["id"] for a in load_changed(tmp_path, change).ground_truth["annotations"]] == [1, 2, 3]


def test_byte_order_mark_is_no_fault(tmp_path):
    files = write_json(tmp_path, ONE_IMAGE)
    files.annotations.write_bytes(b"\xef\xbb\xbf" + files.annotations.read_bytes())
    assert len(load_coco(files).records) == 1


def test_data_set_without_annotations_may_be_evaluated(tmp_path):
    assert len(load_changed(tmp_path, lambda content: content.pop("annotations")).records) == 1


def set_in(section, **values):
    return lambda content: content[section][0].update(values)


def remove_from(section, key):
    return lambda content: content[section][0].pop(key)


def append_to(section, **values):
    return lambda content: content[section].append({**content[section][0], **values})


FAULTS = {
    "no categories": (lambda content: content.pop("categories"), "it has no 'categories'"),
    "empty categories": (lambda content: content.update(categories=[]), "it has no 'categories'"),
    "no images": (lambda content: content.pop("images"), "it has no 'images'"),
    "images are an object": (lambda content: content.update(images={"1": {}}), "it has no 'images'"),
    "image is a number": (lambda content: content["images"].append(5), r"entries that are no objects: images\[1\]: 5"),
    "image without id": (remove_from("images", "id"), r"images\[0\]: no 'id'"),
    "image without file name": (remove_from("images", "file_name"), r"images\[0\]: no 'file_name'"),
    "image without height": (remove_from("images", "height"), r"images\[0\]: no 'height'"),
    "file name is a number": (set_in("images", file_name=5), r"file_name 5"),
    "height is text": (set_in("images", height="10"), r"image 1 \(a\.png\) has size '10' x 20"),
    "height is zero": (set_in("images", height=0), r"image 1 \(a\.png\) has size 0 x 20"),
    "height is infinite": (set_in("images", height=float("inf")), r"image 1 \(a\.png\) has size inf x 20"),
    "category without name": (remove_from("categories", "name"), r"categories\[0\]: no 'name'"),
    "category id is null": (set_in("categories", id=None), r"categories\[0\]: id None"),
    "category ids of two kinds": (append_to("categories", id="x", name="y"), r"categories\[1\]: id 'x'"),
    "image id is a list": (set_in("images", id=[1]), r"images\[0\]: id \[1\]"),
    "double category id": (append_to("categories", name="other"), "category ids that are not unique: id 3"),
    "double category name": (append_to("categories", id=4), "category names that are not unique: name cell"),
    "double image id": (
        append_to("images", file_name="b.png"),
        r"image ids that are not unique: 2.*1 \(a\.png\).*1 \(b\.png\)",
    ),
    "annotations are null": (lambda content: content.update(annotations=None), "annotations"),
    "annotations are a number": (lambda content: content.update(annotations=5), "annotations"),
    "annotation is text": (
        lambda content: content.update(annotations=["box"]),
        r"annotations\[0\]: 'box'",
    ),
    "unknown image": (
        set_in("annotations", image_id=7),
        r"\(id 5, image 7\): image_id 7, which is not the id of one of",
    ),
    "image_id is a list": (set_in("annotations", image_id=[1]), r"\(id 5, image \[1\]\): image_id \[1\]"),
    "no image_id": (remove_from("annotations", "image_id"), r"\(id 5, image None\): image_id None"),
    "unknown category": (set_in("annotations", category_id=0), r"\(id 5, image 1\): category_id 0.*one of the categories"),
    "no box": (remove_from("annotations", "bbox"), r"\(id 5, image 1\): bbox None"),
    "three numbers": (
        set_in("annotations", bbox=[1, 2, 3]),
        r"\(id 5, image 1\): bbox \[1, 2, 3\]; expected \[x, y, width, height\]",
    ),
    "text in the box": (set_in("annotations", bbox=[1, 2, 3, "4"]), r"\(id 5, image 1\): bbox"),
    "NaN in the box": (set_in("annotations", bbox=[1, 2, float("nan"), 4]), r"not finite: .*\(id 5, image 1\): bbox"),
    "infinite box": (set_in("annotations", bbox=[1, 2, float("inf"), 4]), r"not finite: .*\(id 5, image 1\): bbox"),
    "double annotation id": (
        append_to("annotations"),
        r"annotations\[1\] \(id 5, image 1\): .*has the same id",
    ),
    "height is not whole": (set_in("images", height=10.5), "has size 10.5 x 20"),
    "id of 64 bits": (set_in("categories", id=2**63), "ids that are no whole numbers"),
    "bbox of huge numbers": (set_in("annotations", bbox=[0, 0, 10**400, 1]), "not finite"),
    "image_id is text": (set_in("annotations", image_id="1"), "image_id '1', .*; it is text"),
    "category name is a list": (set_in("categories", name=["a"]), "category names that are no text"),
    "area is text": (set_in("annotations", area="large"), r"\(id 5, image 1\): area 'large'"),
    "area is NaN": (set_in("annotations", area=float("nan")), r"\(id 5, image 1\): area nan"),
    "iscrowd is text": (set_in("annotations", iscrowd="no"), r"\(id 5, image 1\): iscrowd 'no'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_json_that_is_not_coco_names_file_and_entry(tmp_path, fault):
    change, message = FAULTS[fault]
    with pytest.raises(DataError, match=rf"(?s)faulty\.json.*{message}"):
        load_changed(tmp_path, change)


def test_one_fault_is_one_line_and_several_have_one_each(tmp_path):
    with pytest.raises(DataError) as caught:
        load_changed(tmp_path, set_in("annotations", area="large"))
    assert str(caught.value) == (
        f"faulty ({tmp_path / 'faulty.json'}): annotations whose area is no number: annotations[0] (id 5, image 1): area 'large'; "
        "DATASETS.ON_BAD drop leaves out these images and boxes"
    )

    def change(content):
        box = {**content["annotations"][0], "bbox": []}
        content["annotations"] = [{**box, "id": number} for number in range(23)]
        content["images"].append({"id": "\ud800\n"})

    with pytest.raises(DataError) as caught:
        load_changed(tmp_path, change)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("24 faults in the data; ")
    assert lines[1] == f"faulty ({tmp_path / 'faulty.json'}):"
    assert lines[2:4] == ["  entries without a field: 1", "    images[1]: no 'file_name'"]
    assert lines[4] == "  boxes that are not four numbers: 23"
    assert lines[24] == "    annotations[19] (id 19, image 1): bbox []; expected [x, y, width, height] in pixels"
    assert lines[25:] == ["    and 3 more"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: .*line 1"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "is not COCO: expected an object with images, annotations, categories, got a list"),
        (b"null", "is not COCO: .*got a NoneType"),
        (b'{"images": []}', "is not COCO: it has no 'categories'"),
    ],
)
def test_file_that_is_not_coco_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "faulty.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"faulty\.json {message}"):
        load_coco(DatasetFiles("faulty", path, tmp_path))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read annotations .*nowhere\.json: No such file or directory"):
        load_coco(DatasetFiles("faulty", tmp_path / "nowhere.json", tmp_path))


def test_classes_that_differ_are_told(tmp_path, drawn_coco):
    first = load_coco(drawn_coco.files).classes
    second = load_changed(tmp_path, lambda content: None).classes
    with pytest.raises(DataError, match=r"different classes \(3 and 1; only in the first: .*'red'.*second: \['cell'\]"):
        require_same_classes(first, second, "data sets a and b")
    require_same_classes(first, first, "data sets a and a")


@pytest.mark.parametrize("backend", ["faster_coco_eval", "pycocotools"])
def test_ground_truth_used_as_detections_scores_100(drawn_coco, backend):
    """Also though the JSON has boxes outside, partly outside and without area, a crowd, and an image without objects."""
    dataset = load_coco(drawn_coco.files)
    evaluator = CocoEvaluator(dataset.ground_truth, dataset.classes.ids, dataset.classes.names, backend)
    for record in dataset.records:
        boxes, labels = torch.from_numpy(record.boxes_xyxy), torch.from_numpy(record.labels)
        evaluator.add(record.image_id, Detections(boxes, torch.ones(len(labels)), labels))
    figures = evaluator.evaluate()["bbox"]
    assert figures["AP"] == pytest.approx(100)
    assert figures["AR100"] == pytest.approx(100)


# Names of data sets


def test_builtin_names_lie_below_the_variable(monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "/data/sets")
    train, val, shapes, _ = builtin_datasets()
    assert train == DatasetFiles(
        "coco_2017_train", Path("/data/sets/coco/annotations/instances_train2017.json"), Path("/data/sets/coco/train2017")
    )
    assert val.annotations == Path("/data/sets/coco/annotations/instances_val2017.json")
    assert shapes == DatasetFiles("shapes_train", Path("/data/sets/shapes/annotations/train.json"), Path("/data/sets/shapes/train"))
    monkeypatch.delenv("DETECTRON2_DATASETS")
    assert builtin_datasets()[0].image_root == Path("datasets/coco/train2017")


def test_real_coco_images_are_read_under_the_builtin_names(shared_data, monkeypatch):
    """Four images each, ids 1..90 with gaps, 80 classes."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(shared_data))
    for name in ("coco_2017_train", "coco_2017_val"):
        dataset = load_coco(find_datasets([name])[0])
        assert len(dataset.records) == 4
        assert len(dataset.classes) == 80
        assert (dataset.classes.ids[-1], dataset.classes.names[0]) == (90, "person")
        mapper = Mapper(train_transform([128], None), with_targets=True)
        for record in dataset.records:
            sample = mapper(record)
            assert len(sample["targets"]) > 0
            assert min(sample["image"].shape[1:]) == 128


@pytest.mark.parametrize("crop_sizes", [(), (60,)])
def test_a_box_of_less_than_a_pixel_is_trained_on_where_nothing_is_cropped(tmp_path, crop_sizes):
    """It counts in evaluation. After a crop it might be the rest of a larger one, and is left out."""
    Image.fromarray(np.zeros((60, 80, 3), np.uint8)).save(tmp_path / "a.png")
    boxes = np.array([[10, 10, 10.6, 40], [20, 10, 50, 40]], dtype=np.float32)
    record = ImageRecord(str(tmp_path / "a.png"), 1, 60, 80, boxes, np.array([0, 1]))
    mapper = Mapper(train_transform((60,), None, False, crop_sizes, (60, 80)), with_targets=True)
    counts = []
    for seed in range(20):
        torch.manual_seed(seed)
        counts.append(mapper(record)["targets"].labels.tolist())
    assert counts == [[0, 1]] * 20 if not crop_sizes else {1, 2} == {len(labels) for labels in counts}


def test_real_microscope_images_lose_their_two_boxes_without_area(shared_data):
    left_out = Counter()
    for split in ("train", "val", "test"):
        root = shared_data / "bccd"
        left_out.update(load_coco(DatasetFiles(split, root / "annotations" / f"{split}.json", root / "images")).findings.counts())
    assert left_out[WITHOUT_AREA] == 2


def test_registered_names_are_found_beside_the_builtin_ones():
    found = find_datasets(["mine", "coco_2017_val"], [["mine", "~/a.json", "images"]])
    assert [files.name for files in found] == ["mine", "coco_2017_val"]
    assert found[0] == DatasetFiles("mine", Path.home() / "a.json", Path("images"))


def test_unknown_data_set_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"data set.*'min' \(did you mean 'mine'\?\); known: .*_val, mine, shapes_train"):
        find_datasets(["min"], [["mine", "a.json", "images"]])


@pytest.mark.parametrize("entry", ["mine", ["mine", "a.json"], ["mine", "a.json", 5], 7])
def test_register_entry_that_is_no_triple_is_refused(entry):
    with pytest.raises(ConfigError, match=r"DATASETS\.REGISTER holds \[name, COCO JSON, image folder\] or .* triples, got"):
        find_datasets(["coco_2017_val"], [entry])


def drawn_cfg(drawn_coco, **solver):
    cfg = get_cfg()
    cfg.DATASETS.REGISTER = [["drawn", str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)]]
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("drawn",)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (32, 40), 96, 0
    cfg.INPUT.RESIZE_CROP.ENABLED = False
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


def test_number_of_classes_comes_from_the_data_and_is_checked(drawn_coco):
    cfg = drawn_cfg(drawn_coco)
    (dataset,) = load_tests(cfg)
    cfg.MODEL.NUM_CLASSES = 0
    set_classes(cfg, dataset.classes)
    assert cfg.MODEL.NUM_CLASSES == 3
    set_classes(cfg, dataset.classes)
    cfg.MODEL.NUM_CLASSES = 80
    with pytest.raises(ConfigError, match=r"NUM_CLASSES is 80, but the data has 3 classes \(red, green, blue\); leave it at 0"):
        set_classes(cfg, dataset.classes)


def test_images_without_objects_are_kept_unless_the_config_says_so(drawn_coco):
    cfg = drawn_cfg(drawn_coco)
    datasets, _ = load_splits(cfg)
    assert [record.image_id for record in training_records(cfg, datasets)] == [7, 12, 30, 41, 5]
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = True
    assert [record.image_id for record in training_records(cfg, datasets)] == [7, 12, 30, 5]


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_split_without_any_object_is_refused(drawn_coco, split):
    cfg = drawn_cfg(drawn_coco)
    path = drawn_coco.files.annotations.with_name("empty.json")
    path.write_text(json.dumps({**drawn_coco.content, "annotations": []}), encoding="utf-8")
    cfg.DATASETS.REGISTER.append(["empty", str(path), str(drawn_coco.files.image_root)])
    cfg.DATASETS[split] = ("empty",)
    with pytest.raises(DataError, match="empty: no image has an object"):
        load_splits(cfg)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("drawn", "empty"), ("drawn",)  # backgrounds beside others may be learned from
    assert len(load_splits(cfg)[0]) == 2


@pytest.mark.parametrize("names", [(), "drawn"])
def test_split_without_data_sets_is_refused(drawn_coco, names):
    cfg = drawn_cfg(drawn_coco)
    cfg.DATASETS.TRAIN = names
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN should list data sets, as in"):
        load_splits(cfg)


# Reading images


def test_image_is_read_as_it_was_written(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for name in ("a.png", "a.bmp", "a.tiff", "a.PNG", "ä ö.png"):
        Image.fromarray(pixels).save(tmp_path / name)
        image = read_image(str(tmp_path / name))
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 5, 7))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "gif"])
@pytest.mark.parametrize("mode", ["L", "P", "1"])
def test_grey_and_palette_images_become_rgb(tmp_path, mode, suffix):
    """A palette of 16 greys, or of black and white, written without loss."""
    grey = np.repeat(np.arange(0, 256, 17, dtype=np.uint8)[None], 3, axis=0)
    picture = Image.fromarray(grey).convert(mode)
    picture.save(tmp_path / f"a.{suffix}")
    expected = np.array(picture.convert("RGB"))
    assert np.array_equal(read_image(str(tmp_path / f"a.{suffix}")).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_is_dropped(tmp_path, mode):
    picture = Image.new(mode, (4, 3), (200, 128) if mode == "LA" else (200, 200, 200, 128))
    picture.save(tmp_path / "a.png")
    assert read_image(str(tmp_path / "a.png")).unique().tolist() == [200]


@pytest.mark.parametrize("suffix", ["jpg", "tiff"])
@pytest.mark.parametrize(
    ("inks", "expected"),
    [
        ((0, 0, 0, 0), (255, 255, 255)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 128, 255, 64), (191, 95, 0)),
        ((0, 0, 0, 255), (0, 0, 0)),
    ],
)
def test_cmyk_is_ink_on_white_paper(tmp_path, inks, expected, suffix):
    """Red is what neither cyan nor black takes: (255 - C) (255 - K) / 255. A JPEG holds them inverted, and loses a little."""
    Image.new("CMYK", (16, 8), inks).save(tmp_path / f"a.{suffix}", **({"quality": 100} if suffix == "jpg" else {}))
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert tuple(image.shape) == (3, 8, 16)
    np.testing.assert_allclose(image[:, 3, 5], expected, atol=3 if suffix == "jpg" else 1)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_become_eight(tmp_path, suffix):
    """The high byte counts: 0x80ff is 0x80."""
    values = np.array([[0, 0x0100, 0x80FF, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert image.dtype == torch.uint8
    assert image[:, 0].tolist() == [[0, 1, 128, 255]] * 3


def test_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.new("RGB", (7, 5), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    image = read_image(str(tmp_path / "a.gif"))
    assert tuple(image.shape) == (3, 5, 7)
    assert image[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_image_is_turned_as_exif_says(tmp_path, suffix):
    """Orientation 6: the camera was turned, the first row of the file is the right column of the picture."""
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", exif=exif, **options)
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert tuple(image.shape) == (3, 16, 8)
    assert image[:, :, 5:].min() > 200
    assert image[:, :, :3].max() < 50


def spoil_missing(path):
    path.unlink()


def spoil_text(path):
    path.write_text("no image")


def spoil_empty(path):
    path.write_bytes(b"")


def spoil_truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_text, spoil_empty, spoil_truncated])
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.webp"])
def test_image_that_cannot_be_read_names_itself(tmp_path, name, spoil):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    spoil(path)
    with pytest.raises(DataError, match=rf"cannot read image .*{name}: ") as caught:
        read_image(str(path))
    assert "\n" not in str(caught.value)


def test_image_of_another_size_than_annotated_names_itself(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    record = ImageRecord(str(tmp_path / "a.png"), 77, 20, 10, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    with pytest.raises(DataError, match=r"a\.png \(id 77\) is 20 x 10 pixels as EXIF turns it, its annotations say 10 x 20"):
        Mapper(evaluation_transform(0, None), with_targets=False)(record)


# Augmentation


def draw_rectangles(tmp_path, size, boxes):
    """A black image with rectangles in red, green, blue; label k has channel k."""
    height, width = size
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    for label, (x0, y0, x1, y1) in enumerate(boxes):
        pixels[y0:y1, x0:x1, label] = 255
    Image.fromarray(pixels).save(tmp_path / "rectangles.png")
    labels = np.arange(len(boxes), dtype=np.int64)
    return ImageRecord(str(tmp_path / "rectangles.png"), 1, height, width, np.array(boxes, np.float32).reshape(-1, 4), labels)


def find_rectangle(image, label):
    """xyxy of the pixels whose channel is more than half on, or ``None``."""
    rows, columns = (image[label] > 127).nonzero(as_tuple=True)
    if not len(rows):
        return None
    return torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)).float()


TRANSFORMS = {
    "nothing": train_transform((), None, flip=False),
    "flip": train_transform((), None, flip=True),
    "resize": train_transform((50, 90, 140), 150, flip=False),
    "crop": v2.Compose([train_transform((), None, flip=False, crop_sizes=(60, 90), crop_range=(40, 70))]),
    "all": train_transform((50, 90), 150, flip=True, crop_sizes=(60, 90), crop_range=(40, 70)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_follow_their_objects(tmp_path, name):
    """Rectangles are drawn, transformed, and found again by their colour, where the boxes say; 40 draws each."""
    record = draw_rectangles(tmp_path, (60, 90), [(5, 10, 35, 30), (50, 20, 88, 55), (2, 40, 30, 58)])
    mapper = Mapper(TRANSFORMS[name], with_targets=True)
    shapes, lefts, lost = set(), set(), 0
    for seed in range(40):
        torch.manual_seed(seed)
        sample = mapper(record)
        image, targets = sample["image"], sample["targets"]
        _, height, width = image.shape
        boxes = cxcywh_to_xyxy(targets.boxes_cxcywh) * torch.tensor([width, height, width, height])
        assert type(image) is type(targets.boxes_cxcywh) is torch.Tensor
        assert (image.dtype, targets.boxes_cxcywh.dtype, targets.labels.dtype) == (torch.uint8, torch.float32, torch.int64)
        assert targets.boxes_cxcywh.min() >= 0
        assert targets.boxes_cxcywh.max() <= 1
        by_label = dict(zip(targets.labels.tolist(), boxes, strict=True))
        for label in range(3):
            found = find_rectangle(image, label)
            if label not in by_label:
                lost += 1
                assert found is None or (found[2:] - found[:2]).min() <= 2
            elif found is None:  # a sliver at the border that interpolation dims
                assert (by_label[label][2:] - by_label[label][:2]).min() <= 2
            else:
                assert (found - by_label[label]).abs().max() <= 1.5
        shapes.add((height, width))
        lefts.update(round(float(box[0]), 1) for box in boxes)
    assert (len(shapes) > 1) == (name in ("resize", "crop", "all"))
    assert (len(lefts) > 3) == (name != "nothing")
    assert (lost > 0) == (name in ("crop", "all"))


def test_flip_by_hand(tmp_path):
    """Half the images are mirrored: [5, 35] of 90 columns becomes [55, 85]."""
    record = draw_rectangles(tmp_path, (60, 90), [(5, 10, 35, 30)])
    lefts = Counter()
    for seed in range(60):
        torch.manual_seed(seed)
        targets = Mapper(train_transform((), None, flip=True), with_targets=True)(record)["targets"]
        lefts[round(float(cxcywh_to_xyxy(targets.boxes_cxcywh)[0, 0]) * 90)] += 1
    assert set(lefts) == {5, 55}
    assert 18 <= lefts[5] <= 42


@pytest.mark.parametrize(
    ("size", "short", "longest", "expected"),
    [
        ((60, 90), 30, None, (30, 45)),
        ((90, 60), 30, None, (45, 30)),
        ((60, 90), 120, 150, (100, 150)),
        ((480, 640), 800, 1333, (800, 1067)),
        ((10, 1000), 800, 1333, (13, 1333)),
        ((1, 1000), 8, 100, (1, 100)),
        ((60, 90), 0, None, (60, 90)),
    ],
)
def test_test_size_is_the_short_side_bounded_by_the_long(tmp_path, size, short, longest, expected):
    record = draw_rectangles(tmp_path, size, [])
    sample = Mapper(evaluation_transform(short, longest), with_targets=False)(record)
    assert tuple(sample["image"].shape[1:]) == expected
    assert (sample["height"], sample["width"]) == size
    assert "targets" not in sample


def test_image_without_objects_has_targets_without_rows(tmp_path):
    record = draw_rectangles(tmp_path, (60, 90), [])
    targets = Mapper(TRANSFORMS["all"], with_targets=True)(record)["targets"]
    assert targets.boxes_cxcywh.shape == (0, 4)
    assert (targets.labels.shape, targets.labels.dtype) == ((0,), torch.int64)


# Batches


@pytest.fixture
def dataset(drawn_coco):
    records = load_coco(drawn_coco.files).records
    return MappedDataset(records, Mapper(train_transform((32, 40, 48), 90, crop_sizes=(40, 50), crop_range=(24, 40)), True), seed=3)


def make_loader(dataset, num_workers=0, batch_size=2, **options):
    return TrainLoader(dataset, TrainBatches(len(dataset), batch_size, seed=3, **options), num_workers)


def assert_same_batches(first, second):
    assert len(first) == len(second)
    for batch1, batch2 in zip(first, second, strict=True):
        assert [sample["image_id"] for sample in batch1] == [sample["image_id"] for sample in batch2]
        for sample1, sample2 in zip(batch1, batch2, strict=True):
            assert torch.equal(sample1["image"], sample2["image"])
            assert torch.equal(sample1["targets"].boxes_cxcywh, sample2["targets"].boxes_cxcywh)
            assert torch.equal(sample1["targets"].labels, sample2["targets"].labels)


def test_samples_do_not_depend_on_the_workers(dataset):
    alone = list(islice(make_loader(dataset), 7))
    torch.manual_seed(123)
    assert_same_batches(alone, list(islice(make_loader(dataset, num_workers=2), 7)))


def test_loader_continues_from_an_iteration(dataset):
    """Three epochs of 5 images in batches of 2, from batch 5 on: what an interrupted run still has to see."""
    whole = list(islice(make_loader(dataset), 8))
    for num_workers in (0, 2):
        continued = make_loader(dataset, num_workers).from_iteration(5)
        assert_same_batches(whole[5:], list(islice(continued, 3)))
    restarted = make_loader(dataset).from_iteration(5).from_iteration(0)
    assert_same_batches(whole, list(islice(restarted, 8)))


def test_slices_of_two_processes_make_up_the_batch(dataset):
    whole = list(islice(make_loader(dataset, batch_size=4), 4))
    slices = [list(islice(make_loader(dataset, batch_size=4, rank=rank, world_size=2), 4)) for rank in range(2)]
    assert all(len(batch) == 2 for part in slices for batch in part)
    assert_same_batches(whole, [first + second for first, second in zip(*slices, strict=True)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_state_of_the_process_is_untouched(dataset, num_workers):
    """Dropout draws the same numbers whatever the loader did in between."""
    torch.manual_seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(islice(make_loader(dataset, num_workers), 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_random_state_of_gpus_is_untouched(dataset, monkeypatch):
    """``torch.manual_seed`` would reseed them for each image, and every step's dropout there would be drawn from it."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    list(islice(make_loader(dataset), 2))
    assert seeds == []


def test_sample_depends_on_seed_epoch_and_image_alone(dataset):
    def draw(seed, epoch, index):
        return tuple(MappedDataset(dataset.records, lambda record: torch.rand(3), seed)[epoch, index].tolist())

    assert draw(3, 1, 2) == draw(3, 1, 2)
    draws = [draw(seed, epoch, index) for seed in (3, 4) for epoch in range(4) for index in range(5)]
    assert len(set(draws)) == 2 * 4 * 5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**40), st.booleans())
def test_every_image_comes_once_an_epoch(num_records, batch_size, seed, grouped):
    """Counted over three epochs: each draw (epoch, image) at most once, and none left behind but what waits."""
    wide = [index % 3 == 0 for index in range(num_records)] if grouped else None
    batches = TrainBatches(num_records, batch_size, seed, wide)
    draws = [draw for batch in islice(batches, 3 * num_records // batch_size + 2) for draw in batch]
    assert len(set(draws)) == len(draws)
    groups = 2 if grouped else 1
    by_epoch = Counter(epoch for epoch, _ in draws)
    for epoch in range(max(by_epoch) - 1 - batch_size * groups // num_records):
        assert by_epoch[epoch] >= num_records - groups * (batch_size - 1)
    counts = Counter(index for _, index in draws)
    if not grouped:
        assert max(counts.values()) - min(counts.get(index, 0) for index in range(num_records)) <= 1


def test_epochs_have_different_orders():
    batches = list(islice(TrainBatches(20, 20, seed=0), 3))
    orders = [[index for _, index in batch] for batch in batches]
    assert [sorted(order) for order in orders] == [list(range(20))] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [index for _, index in next(iter(TrainBatches(20, 20, seed=1)))] != orders[0]


def test_grouped_batches_are_all_wide_or_all_tall():
    wide = [index % 3 == 0 for index in range(31)]
    kinds = [{wide[index] for _, index in batch} for batch in islice(TrainBatches(31, 4, 0, wide), 60)]
    assert all(len(kind) == 1 for kind in kinds)
    assert {kind.pop() for kind in kinds} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_records": 0}, "no image to train on"),
        ({"batch_size": 0}, "batch of 0 images"),
        ({"batch_size": 3, "world_size": 2}, "batch of 3 images must be a positive multiple of the 2 processes"),
    ],
)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainBatches(**{"num_records": 5, "batch_size": 2, "seed": 0, **arguments})


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_sees_every_image_once(drawn_coco, world_size):
    """Over all processes, also where there are more of them than images."""
    records = load_coco(drawn_coco.files).records
    dataset = MappedDataset(records, Mapper(evaluation_transform(0, None), with_targets=False))
    seen = []
    for rank in range(world_size):
        for batch in evaluation_loader(dataset, 2, 0, rank, world_size):
            assert 1 <= len(batch) <= 2
            seen += [sample["image_id"] for sample in batch]
    assert sorted(seen) == [5, 7, 12, 30, 41]


def test_loaders_of_the_config_give_batches_a_detector_takes(drawn_coco):
    cfg = drawn_cfg(drawn_coco)
    (data,), _ = load_splits(cfg)
    for batch in islice(build_train_loader(cfg, training_records(cfg, [data]), seed=0), 5):
        sizes = {sample["image"].shape[1] < sample["image"].shape[2] for sample in batch}
        assert len(sizes) == 1  # grouped by aspect ratio
        padded = PaddedBatch.from_images([sample["image"].float() for sample in batch])
        assert padded.image_sizes == [tuple(sample["image"].shape[1:]) for sample in batch]
        assert all(32 <= min(size) <= 40 and max(size) <= 96 for size in padded.image_sizes)
    tested = [sample for batch in build_test_loader(cfg, data.records) for sample in batch]
    assert [tuple(sample["image"].shape[1:]) for sample in tested] == [(40, 72), (64, 48), (33, 90), (50, 70), (56, 40)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("SOLVER.IMS_PER_BATCH", 0, "batch of 0 images"),
        ("INPUT.FORMAT", "BGR", r"INPUT\.FORMAT is 'BGR'; our loader reads RGB"),
        ("INPUT.RANDOM_FLIP", "vertical", r"unknown INPUT\.RANDOM_FLIP 'vertical'; known: horizontal, none"),
    ],
)
def test_settings_of_the_loader_that_cannot_be_had_are_config_errors(drawn_coco, key, value, message):
    cfg = drawn_cfg(drawn_coco)
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=message):
        build_train_loader(cfg, training_records(cfg, load_splits(cfg)[0]), seed=0)
