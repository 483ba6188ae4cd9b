# SPDX-License-Identifier: Apache-2.0
"""COCO JSON, YAML configs, checkpoints and images with things wrong that nobody thought of: they work, or end in an error of ours.

The same inputs each time. ``faults/fuzz.py`` tries more of each, and counts them.
"""

import copy
import io
import json
import os
import pickle
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from faults.drawn import Drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny import MODEL, RUN

from cpvt_det import builders
from cpvt_det.checkpoint import load_weights
from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Detections
from cpvt_det.config import get_cfg, load_cfg, merge_overrides
from cpvt_det.data.images import read_header, read_image

EXAMPLES = int(os.environ.get("CPVT_FUZZ_EXAMPLES", "100"))
fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=60),  # none may hang
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(max(300, EXAMPLES))

# Mutations

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\0", "a\nb", "../x", "é", "1", "nan", "1e-4", "(1, 2)", "[[", "__import__('os')"]),
)
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=4), part, max_size=3))


def places(tree, path=()):
    """The paths of all parts of nested dicts and lists but the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


@st.composite
def mutated(draw, tree, values=VALUES):
    """A tree in which some parts are replaced, removed, repeated or swapped with others."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 4))):
        found = list(places(tree))
        if not found:
            break
        *parents, key = draw(st.sampled_from(found))
        parent = tree
        for step in parents:
            parent = parent[step]
        kind = draw(st.sampled_from(["replace", "remove", "repeat", "move"]))
        if kind == "replace":
            parent[key] = draw(values)
        elif kind == "remove":
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        else:
            other = tree
            for step in draw(st.sampled_from(found)):
                other = other[step] if _has(other, step) else other
            parent[key] = copy.deepcopy(other)
    return tree


def _has(tree, step) -> bool:
    return step in tree if isinstance(tree, dict) else isinstance(tree, list) and isinstance(step, int) and step < len(tree)


@st.composite
def damaged(draw, content: bytes):
    """Bytes of which some are changed, cut out, put in, repeated, or cut off at the end."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.integers(1, 12))
        kind = draw(st.sampled_from(["change", "flip", "insert", "remove", "repeat", "cut"]))
        if kind == "change":
            content[start : start + length] = draw(st.binary(min_size=1, max_size=length))
        elif kind == "flip" and content:
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            content[start:start] = draw(st.binary(min_size=1, max_size=length))
        elif kind == "remove":
            del content[start : start + length]
        elif kind == "repeat":
            content[start:start] = content[start : start + length] * draw(st.integers(1, 20))
        elif kind == "cut":
            del content[start + 1 :]
    return bytes(content)


def ours(call, *arguments):
    """What a call returns, or ``None`` where it ends in an error of ours."""
    try:
        return call(*arguments)
    except BadInputError:
        return None


# COCO JSON


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Drawn:
    return Drawn(tmp_path_factory.mktemp("fuzz") / "data")


def content_of_two_images() -> dict:
    boxes = [(1, 3, [4, 5, 20, 12]), (1, 7, [15, 8, 16.5, 24.25]), (2, 3, [0, 0, 48, 48])]
    annotations = [
        {"id": number, "image_id": image_id, "category_id": category_id, "bbox": box, "area": 9.5, "iscrowd": 0}
        for number, (image_id, category_id, box) in enumerate(boxes)
    ]
    images = [
        {"id": 1, "file_name": "1.png", "height": 40, "width": 60},
        {"id": 2, "file_name": "2.png", "height": 48, "width": 48},
    ]
    return {"images": images, "annotations": annotations, "categories": [{"id": 3, "name": "cell"}, {"id": 7, "name": "mite"}]}


@pytest.mark.parametrize("on_bad", ["error", "drop"])
@fuzzed
@given(tree=mutated(content_of_two_images()))
def test_coco_json_of_any_content(drawn, on_bad, tree):
    check_coco(drawn, on_bad, json.dumps(tree).encode())


@fuzzed
@given(text=damaged(json.dumps(content_of_two_images()).encode()))
def test_coco_json_of_any_bytes(drawn, text):
    check_coco(drawn, "drop", text)


def check_coco(drawn: Drawn, on_bad: str, text: bytes) -> None:
    """What is accepted scores 100 with its ground truth as detections."""
    drawn.files.annotations.write_bytes(text)
    cfg = get_cfg()
    cfg.DATASETS.REGISTER = [["drawn", str(drawn.files.annotations), str(drawn.files.image_root)]]
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("drawn",)
    cfg.DATASETS.ON_BAD = on_bad
    loaded = ours(builders.load_splits, cfg)
    if loaded is None:
        return
    (dataset,) = loaded[1]
    evaluator = builders.build_evaluator(dataset)
    for record in dataset.records:
        boxes, labels = torch.from_numpy(record.boxes_xyxy), torch.from_numpy(record.labels)
        evaluator.add(record.image_id, Detections(boxes, torch.ones(len(labels)), labels))
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


# YAML configs


def tree_of_config() -> dict:
    cfg = get_cfg()
    merge_overrides(cfg, [str(word) for pair in {**MODEL, **RUN, "MODEL.NUM_CLASSES": 3}.items() for word in pair])
    return yaml.safe_load(cfg.dump())


SMALL_VALUES = SCALARS.filter(lambda value: not isinstance(value, (int, float)) or abs(value) <= 40 or value != value)


@fuzzed
@given(tree=mutated(tree_of_config()))
def test_yaml_of_any_content(tmp_path_factory, tree):
    ours(load_cfg, _yaml_file(tmp_path_factory, yaml.safe_dump(tree, allow_unicode=False).encode()))


@fuzzed
@given(text=damaged(yaml.safe_dump(tree_of_config()).encode()))
def test_yaml_of_any_bytes(tmp_path_factory, text):
    ours(load_cfg, _yaml_file(tmp_path_factory, text))


@fuzzed
@given(tree=mutated(tree_of_config(), SMALL_VALUES))
def test_config_that_loads_builds_or_is_refused(tmp_path_factory, tree):
    cfg = ours(load_cfg, _yaml_file(tmp_path_factory, yaml.safe_dump(tree).encode()))
    if cfg is not None:
        ours(_build, cfg)


@fuzzed
@given(words=st.lists(st.text(max_size=20) | st.sampled_from([*MODEL, *RUN]) | SCALARS.map(str), max_size=4))
def test_overrides_of_any_words(words):
    ours(load_cfg, "", words)


def _build(cfg) -> None:
    """What a run builds before its first iteration, but for the data."""
    detector = builders.build_detector(cfg).to(builders.build_device(cfg))
    builders.build_criterion(cfg)
    builders.check_evaluation(cfg)
    builders.build_optimizer(cfg, detector)
    builders.build_schedule(cfg, 4)


def _yaml_file(tmp_path_factory, text: bytes) -> str:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(text)
    return str(path)


# Checkpoints


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def checkpoint() -> dict:
    classes = {"ids": [3, 7], "names": ["cell", "mite"]}
    return {"model": dict(tiny_model().state_dict()), "iteration": 5, "cpvt_det": {"classes": classes, "seed": 1, "ema": None}}


def file_bytes(suffix: str) -> bytes:
    """The checkpoint in one of the formats that are read."""
    buffer = io.BytesIO()
    if suffix == ".safetensors":
        return safetensors.torch.save(checkpoint()["model"])
    if suffix == ".pkl":
        arrays = {name: tensor.numpy() for name, tensor in checkpoint()["model"].items()}
        return pickle.dumps({"model": arrays, "scale": np.float32(2)}, protocol=2)
    torch.save(checkpoint(), buffer, _use_new_zipfile_serialization=suffix == ".pth")
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", [".pth", ".legacy", ".safetensors", ".pkl"])
@fuzzed
@given(data=st.data())
def test_checkpoint_of_any_bytes(tmp_path_factory, suffix, data):
    path = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    path.write_bytes(data.draw(damaged(file_bytes(suffix))))
    before = sorted(path.parent.iterdir())
    model = tiny_model()
    ours(read_checkpoint, path)
    ours(load_weights, model, path)
    assert sorted(path.parent.iterdir()) == before
    path.unlink()


TENSORS = st.sampled_from([torch.zeros(2, 2), torch.zeros(0), torch.ones(4, dtype=torch.int8), torch.full((4,), float("nan"))])


@fuzzed
@given(tree=mutated(checkpoint(), VALUES | TENSORS))
def test_checkpoint_of_any_content(tmp_path_factory, tree):
    path = Path(tmp_path_factory.getbasetemp()) / "fuzzed.pth"
    torch.save(tree, path)
    ours(load_weights, tiny_model(), path, ["cell", "tick"])


# Images


def image_bytes(suffix: str) -> bytes:
    """A ramp of colours in one of the formats that are read."""
    y, x = np.mgrid[0:20, 0:30]
    buffer = io.BytesIO()
    Image.fromarray(np.stack((x * 8, y * 12, x + y), -1).astype(np.uint8)).save(buffer, suffix)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", ["jpeg", "png", "bmp", "gif", "tiff", "webp", "ppm"])
@fuzzed
@given(data=st.data())
def test_image_of_any_bytes(tmp_path_factory, suffix, data):
    path = tmp_path_factory.getbasetemp() / f"fuzzed.{suffix}"
    path.write_bytes(data.draw(damaged(image_bytes(suffix))))
    header, image = ours(read_header, str(path)), ours(read_image, str(path))
    if image is not None:
        assert header is not None
        assert image.shape == (3, header.height, header.width)
