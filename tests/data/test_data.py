# SPDX-License-Identifier: Apache-2.0
"""A data set's files and names: the rules for boxes and ids, and faults by name."""

import copy
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import coco_dict

from cpvt_det.builders import load_splits, load_tests, set_classes, training_records
from cpvt_det.common.class_names import require_same_classes
from cpvt_det.common.errors import ConfigError, DataError, UnknownNameError
from cpvt_det.common.structures import Detections
from cpvt_det.data import annotations
from cpvt_det.data.catalog import DatasetFiles, builtin_datasets, find_datasets
from cpvt_det.data.coco import load_coco
from cpvt_det.data.mapper import Mapper, train_transform
from cpvt_det.data.records import ImageRecord
from cpvt_det.data.validation.rules import CLIPPED, OUTSIDE, WITHOUT_AREA
from cpvt_det.evaluation.coco import CocoEvaluator

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
    crowds = [a for a in coco_dict(dataset)["annotations"] if a["iscrowd"]]
    assert [(a["image_id"], a["category_id"], a["bbox"]) for a in crowds] == [(12, 17, [0, 0, 48, 20])]


def test_boxes_outside_or_without_area_are_left_out_and_others_clipped_in_both(drawn_coco):
    """[80, -4, 20, 20] in an image of 33 x 90 leaves [80, 0, 10, 16], 160 pixels."""
    dataset = load_coco(drawn_coco.files)
    assert boxes_of(dataset, 30) == {0: [80, 0, 90, 16]}
    truth = [a for a in coco_dict(dataset)["annotations"] if a["image_id"] == 30]
    assert [(a["bbox"], a["area"], a["iscrowd"]) for a in truth] == [([80, 0, 10, 16], 160, 0)]
    assert not any(0 in a["bbox"][2:] for a in coco_dict(dataset)["annotations"])
    assert dataset.issues.counts() == {
        WITHOUT_AREA: 1,
        CLIPPED: 1,
        OUTSIDE: 1,
        "annotations with iscrowd 1, neither learned nor counted in evaluation": 1,
    }


def test_faults_are_told_in_one_line(drawn_coco):
    assert load_coco(drawn_coco.files).describe() == (
        "drawn: 5 images, 1 of them without objects, 5 boxes, 3 classes; annotations with iscrowd 1, neither learned nor "
        "counted in evaluation: 1; boxes outside the image, left out: 1; boxes partly outside the image, clipped: 1; "
        "boxes without area, left out: 1"
    )


@pytest.mark.parametrize(
    "box",
    [[0, 0, 0, 5], [0, 0, 5, 0], [3, 3, -2, 5], [3, 3, 5, -2], [20, 0, 5, 5], [-5, 0, 5, 5], [0, 10, 5, 5], [0, -7, 5, 7]],
)
def test_box_without_a_pixel_in_the_image_is_left_out_of_both(tmp_path, box):
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(bbox=box))
    assert boxes_of(dataset, 1) == {}
    assert coco_dict(dataset)["annotations"] == []
    assert sum(group.count for heading, group in dataset.issues.infos.items() if heading in (WITHOUT_AREA, OUTSIDE)) == 1


def test_box_up_to_the_border_is_not_clipped(tmp_path):
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(bbox=[0, 0, 20, 10]))
    assert boxes_of(dataset, 1) == {0: [0, 0, 20, 10]}
    assert CLIPPED not in dataset.issues.infos


def test_area_and_iscrowd_may_be_missing_or_null(tmp_path):
    for change in ({}, {"area": None, "iscrowd": None}):
        dataset = load_changed(tmp_path, lambda content, change=change: content["annotations"][0].update(change))
        (annotation,) = coco_dict(dataset)["annotations"]
        assert (annotation["area"], annotation["iscrowd"]) == (12, 0)
        assert len(dataset.records[0].labels) == 1


def test_area_of_the_file_is_kept_where_nothing_is_clipped(tmp_path):
    """COCO's area is the mask's, which is smaller than the box's, and AP by size goes by it."""
    dataset = load_changed(tmp_path, lambda content: content["annotations"][0].update(area=7.5))
    assert coco_dict(dataset)["annotations"][0]["area"] == 7.5


@pytest.mark.parametrize("ids", [[0, 1, 2], [1, 2, 3], [5, 90, 1000000]])
def test_category_ids_of_any_numbering_are_mapped_to_and_back(tmp_path, ids):
    def change(content):
        content["categories"] = [{"id": i, "name": f"class {i}"} for i in reversed(ids)]
        content["annotations"] = [{"image_id": 1, "category_id": i, "bbox": [i % 7, 1, 2, 2]} for i in ids]

    dataset = load_changed(tmp_path, change)
    assert dataset.records[0].labels.tolist() == [0, 1, 2]
    assert [dataset.classes.ids[label] for label in dataset.records[0].labels] == ids
    assert {a["category_id"] for a in coco_dict(dataset)["annotations"]} == set(ids)


def test_image_id_zero_is_an_id(tmp_path):
    def change(content):
        content["images"][0]["id"] = content["annotations"][0]["image_id"] = 0

    assert boxes_of(load_changed(tmp_path, change), 0) == {0: [1, 2, 4, 6]}


def test_annotation_ids_do_not_matter(tmp_path):
    """Missing and zero ids occur; evaluation gets ids from 1, as 0 would count as unmatched there."""

    def change(content):
        box = {"image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]}
        content["annotations"] = [{**box, "id": 0}, {**box, "bbox": [2, 2, 3, 4]}, {**box, "bbox": [3, 2, 3, 4]}]

    assert [a["id"] for a in coco_dict(load_changed(tmp_path, change))["annotations"]] == [1, 2, 3]


def test_a_box_that_an_image_has_twice_is_there_once(tmp_path, monkeypatch):
    """In training and in evaluation; of another class, of another image, as a crowd or a hair wider it is another one."""

    def change(content):
        content["categories"].append({"id": 7, "name": "mite"})
        box = {"image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0}
        others = [{"bbox": [1, 2, 3, 4.000001]}, {"category_id": 7}, {"iscrowd": 1}, {"bbox": [2, 1, 3, 4]}, {"area": 11}]
        content["annotations"] = [{**box, **other, "id": number} for number, other in enumerate([{}, *others, {}])]

    for factor in (0x9E3779B97F4A7C15, 0):  # with 0 nearly all hashes are alike
        monkeypatch.setattr(annotations, "FACTOR", factor)
        dataset = load_changed(tmp_path, change)
        assert len(dataset.records.boxes()[1]) == 5
        assert dataset.issues.infos["boxes that repeat another one of the same image and class, left out"].examples == [
            "annotations[5] (id 5, image 1)",
            "annotations[6] (id 6, image 1)",
        ]


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
    "image is a number": (lambda content: content["images"].append(5), r"entries that are not objects: images\[1\]: 5"),
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
        r"\(id 5, image 7\): image_id 7, which is not an id in images",
    ),
    "image_id is a list": (set_in("annotations", image_id=[1]), r"\(id 5, image \[1\]\): image_id \[1\]"),
    "no image_id": (remove_from("annotations", "image_id"), r"\(id 5, image None\): image_id None"),
    "unknown category": (
        set_in("annotations", category_id=0),
        r"\(id 5, image 1\): category_id 0, which is not an id in categories",
    ),
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
    "id of 64 bits": (set_in("categories", id=2**63), "ids that are not whole numbers"),
    "bbox of huge numbers": (set_in("annotations", bbox=[0, 0, 10**400, 1]), "not finite"),
    "image_id is text": (set_in("annotations", image_id="1"), "image_id '1', .*; it is text, not a number"),
    "category name is a list": (set_in("categories", name=["a"]), "category names that are not text"),
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
        f"faulty ({tmp_path / 'faulty.json'}): annotations whose area is not a number: annotations[0] (id 5, image 1): area 'large'"
        "; DATASETS.ON_BAD drop leaves out these images and boxes"
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


def test_ground_truth_used_as_detections_scores_100(drawn_coco):
    """Also though the JSON has boxes outside, partly outside and without area, a crowd, and an image without objects."""
    dataset = load_coco(drawn_coco.files)
    evaluator = CocoEvaluator(dataset.records, dataset.classes)
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
        left_out.update(load_coco(DatasetFiles(split, root / "annotations" / f"{split}.json", root / "images")).issues.counts())
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
    with pytest.raises(ConfigError, match=r"DATASETS\.REGISTER must contain \[name, COCO JSON, image folder\] or .* triples, got"):
        find_datasets(["coco_2017_val"], [entry])


def test_number_of_classes_comes_from_the_data_and_is_checked(drawn_cfg):
    (dataset,) = load_tests(drawn_cfg)
    drawn_cfg.MODEL.NUM_CLASSES = 0
    set_classes(drawn_cfg, dataset.classes)
    assert drawn_cfg.MODEL.NUM_CLASSES == 3
    set_classes(drawn_cfg, dataset.classes)
    drawn_cfg.MODEL.NUM_CLASSES = 80
    with pytest.raises(ConfigError, match=r"NUM_CLASSES is 80, but the data has 3 classes \(red, green, blue\); set it to 0"):
        set_classes(drawn_cfg, dataset.classes)


def test_images_without_objects_are_kept_unless_the_config_says_so(drawn_cfg):
    datasets, _ = load_splits(drawn_cfg)
    assert [record.image_id for record in training_records(drawn_cfg, datasets)] == [7, 12, 30, 41, 5]
    drawn_cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = True
    assert [record.image_id for record in training_records(drawn_cfg, datasets)] == [7, 12, 30, 5]


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_split_without_any_object_is_refused(drawn_cfg, drawn_coco, split):
    path = drawn_coco.files.annotations.with_name("empty.json")
    path.write_text(json.dumps({**drawn_coco.content, "annotations": []}), encoding="utf-8")
    drawn_cfg.DATASETS.REGISTER.append(["empty", str(path), str(drawn_coco.files.image_root)])
    drawn_cfg.DATASETS[split] = ("empty",)
    with pytest.raises(DataError, match="empty: no image has an object"):
        load_splits(drawn_cfg)
    drawn_cfg.DATASETS.TRAIN = ("drawn", "empty")  # backgrounds beside others may be learned from
    drawn_cfg.DATASETS.TEST = ("drawn",)
    assert len(load_splits(drawn_cfg)[0]) == 2


@pytest.mark.parametrize("names", [(), "drawn"])
def test_split_without_data_sets_is_refused(drawn_cfg, names):
    drawn_cfg.DATASETS.TRAIN = names
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN must list the names of data sets, as in"):
        load_splits(drawn_cfg)
