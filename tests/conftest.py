# SPDX-License-Identifier: Apache-2.0
"""What the tests share: one thread, a small drawn data set, the real one beside the repository, and the detectron2 marker."""

import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dead_workers import pytest_configure, pytest_xdist_make_scheduler  # noqa: F401
from fvcore.common.config import CfgNode
from PIL import Image

from cpvt_det.common.memory import resident, trim_heap
from cpvt_det.config import get_cfg
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.visualize.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # another number: tests/matrix.py
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package
sys.path.extend(sorted({str(path.parent) for path in ROOT.glob("tests/*/test_*.py")}))  # some import from others, of another room
importlib.import_module("studies.ablations")  # contract tests run over these encodings too
# What tests start is to import the package of this tree too, whatever tree an environment was installed from.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


GROWTH, USUAL = 50e6, 0.9e9  # bytes
_resident = USUAL


LARGE_NETWORKS = (
    "test_parity_timm.py",
    "test_timm_transformer.py",
    "test_benchmarks_parity.py",
    "test_parity_transformers.py",
    "test_real_time_detr.py",
    "test_parity_real_time.py",
    "test_starts.py",
    "test_tuning.py",
    "test_graphs.py",
)
"""Files that need the most memory for a moment: they come first, while a process is small; then those with the most tests."""


@pytest.fixture(scope="module", autouse=True)
def memory_given_back(request):
    """What a file's tests have made once goes with them; and what the C library keeps: some hundred MB of the largest maps."""
    yield
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear") and function.__module__ == request.module.__name__:
            function.cache_clear()
    trim_heap()


@pytest.fixture(autouse=True)
def curves_not_drawn(request, monkeypatch):
    """Only tests marked ``curves`` draw the curves of their runs, which takes longer than most of the runs; the others read the
    metrics. Fixtures of modules and other processes still draw."""
    if request.node.get_closest_marker("curves") is None:
        monkeypatch.setattr("cpvt_det.training.evaluate.draw_curves", lambda metrics, output: read_metrics(metrics))


def pytest_collection_finish():
    """What is imported stays; the collector, which looks at everything, need not."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish():
    """Large networks are in cycles, which Python's collector, that counts objects, finds late."""
    global _resident
    if resident() > _resident + GROWTH:
        gc.collect()
        trim_heap()
        _resident = max(resident(), USUAL)


def pytest_collection_modifyitems(items):
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LARGE_NETWORKS, -sizes[item.path]))  # stable: a file's tests stay together
    marked = [item for item in items if item.get_closest_marker("detectron2")]
    for path in {item.path for item in marked}:
        assert "detectron2" in path.read_text(encoding="utf-8"), f"{path}: make test finds the files for detectron2 by this word"
    if importlib.util.find_spec("detectron2") is not None:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="detectron2 is not installed"))


@dataclass
class DrawnCoco:
    """A drawn data set on disk: its files and the JSON's content."""

    files: DatasetFiles
    content: dict[str, Any]


SIZES = {7: (40, 72), 12: (64, 48), 30: (33, 90), 41: (50, 70), 5: (56, 40)}  # image id -> (height, width)
COLOURS = {3: (220, 40, 40), 17: (40, 220, 40), 90: (40, 40, 220)}  # category id -> RGB
# image id, category id, bbox, iscrowd. Image 41 has no object.
OBJECTS = [
    (7, 17, [10, 8, 30, 20], 0),
    (7, 3, [50, 5, 12, 25], 0),
    (12, 90, [5, 30, 20, 25], 0),
    (12, 3, [3, 3, 0, 10], 0),  # without area
    (12, 17, [0, 0, 48, 20], 1),  # a crowd
    (30, 3, [80, -4, 20, 20], 0),  # partly outside: [80, 0, 10, 16] is left
    (30, 17, [100, 5, 10, 10], 0),  # outside
    (5, 17, [4.5, 6.25, 20.5, 30.75], 0),
]


@pytest.fixture
def drawn_coco(tmp_path) -> DrawnCoco:
    """:func:`draw_coco` in the test's own folder."""
    return draw_coco(tmp_path)


@pytest.fixture
def drawn_cfg(drawn_coco) -> CfgNode:
    """A config that trains and evaluates on :func:`drawn_coco`."""
    cfg = get_cfg()
    cfg.DATASETS.REGISTER = [["drawn", str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)]]
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("drawn",)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (32, 40), 96, 0
    cfg.INPUT.RESIZE_CROP.ENABLED = False
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


def draw_coco(folder: Path) -> DrawnCoco:
    """Five images of unequal size, three categories whose ids have gaps, and every kind of box that needs a rule."""
    rng = np.random.default_rng(0)
    images = []
    for image_id, (height, width) in SIZES.items():
        pixels = rng.integers(90, 130, (height, width, 3), dtype=np.uint8)
        for owner, category_id, (x, y, w, h), _ in OBJECTS:
            if owner == image_id:
                pixels[max(0, round(y)) : round(y + h), max(0, round(x)) : round(x + w)] = COLOURS[category_id]
        name = f"part/{image_id:03d}.png"
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
    annotations = [
        {"id": number, "image_id": image_id, "category_id": category_id, "bbox": box, "area": box[2] * box[3], "iscrowd": crowd}
        for number, (image_id, category_id, box, crowd) in enumerate(OBJECTS)
    ]
    categories = [{"id": 90, "name": "blue"}, {"id": 3, "name": "red"}, {"id": 17, "name": "green"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = folder / "drawn.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return DrawnCoco(DatasetFiles("drawn", path, folder / "images"), content)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real images beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A :class:`trained.TrainedRun` of "detr" or "deformable", once for all tests; they leave it as it is."""
    from trained import train_tiny

    return functools.cache(lambda detector: train_tiny(tmp_path_factory.mktemp("runs") / detector, detector))


@pytest.fixture(scope="module")
def browser():
    """A browser, :func:`browser.open_browser`."""
    from browser import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def train(drawn_coco, tmp_path):
    """Train in a folder of the given name, with more settings."""
    from tiny import overrides

    from cpvt_det.config import load_cfg
    from cpvt_det.training.train import run

    def call(name, resume=False, eval_only=False, **more):
        folder = tmp_path / name
        run(load_cfg("", overrides(drawn_coco.files, folder, **more)), resume=resume, eval_only=eval_only)
        return folder

    return call


@pytest.fixture
def small_limits(monkeypatch):
    """The machine's limits as a benchmark measures them, at sizes that take no time."""
    from benchmarks import machine

    monkeypatch.setattr(machine, "COPIES", dict.fromkeys(machine.COPIES, 1))
    monkeypatch.setattr(machine, "SIDES", {"cpu": 16})
    monkeypatch.setattr(machine, "SECONDS", 0)


@pytest.fixture
def quiet_machine(monkeypatch):
    """A load average without other work, which a machine that runs tests seldom has: a benchmark is refused on a busy one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 0.25, 0.25), raising=False)


@pytest.fixture(autouse=True)
def plain_names(request, monkeypatch):
    """Names of benchmarks' files are those of a processor whose instructions are all used, wherever their tests run."""
    if request.path.parent.name == "benchmarks" and "records" not in request.path.name:
        monkeypatch.setattr("benchmarks.report.name_of_instructions", lambda found: "")
