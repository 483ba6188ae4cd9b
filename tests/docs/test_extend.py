# SPDX-License-Identifier: Apache-2.0
"""Parts from outside the package, as docs/extend.md has them: trained by the command line, and loaded again from the checkpoint."""

import importlib.util
import json
import re
from pathlib import Path

import forked
import pytest
import torch
from conftest import OBJECTS
from PIL import Image
from test_augmentation import extent, paint, steps_of
from tiny import overrides

from cpvt_det.common import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
MODULES = {name: text for text, name in re.findall(r'```python\n("""(my_\w+)\.py.*?)```', PAGE, re.S)}
KEYS = {
    "my_encoding": {"MODEL__POSITION__NAME": "rings", "MODEL__POSITION__NUM_RINGS": 8},
    "my_backbone": {
        "MODEL__BACKBONE__NAME": "patches",
        "MODEL__BACKBONE__PATCH_WIDTH": 24,
        "MODEL__BACKBONE__STAGES": (5,),  # these three as they are by default: the backbone does not take them
        "MODEL__BACKBONE__NORM": "FrozenBN",
        "MODEL__BACKBONE__FREEZE_AT": 2,
    },
    "my_loss": {"MODEL__CRITERION__LOSSES": [["area", 0.5, {"floor": 0.01}]]},
    "my_detector": {"MODEL__META_ARCHITECTURE": "TiedDetr", "MODEL__DETECTOR__PERIOD": 2},
    "my_format": {},
    "my_augmentation": {"INPUT__AUGMENTATIONS": [["shadow", {"strength": 0.7}]]},
    "my_albumentations": {"INPUT__AUGMENTATIONS": [["weather", {"p": 0.7}]]},
    "my_callback": {"CALLBACKS": [["budget", {"minutes": 30}]]},
}


def run(folder, *words):
    """A command in a process of its own, in the folder of the user's module."""
    return forked.run(*words, cwd=folder)


def write_deeppcb(folder):
    """Images 7 and 5 in both splits of a folder as that of DeepPCB."""
    (folder / "pcb").mkdir()
    for image in (7, 5):
        Image.open(folder / "images" / "part" / f"{image:03d}.png").save(folder / f"pcb/{image}_test.jpg")
        boxes = [list(map(round, box)) for owner, _, box, _ in OBJECTS if owner == image]
        rows = [f"{x} {y} {x + w} {y + h} {number}\n" for number, (x, y, w, h) in enumerate(boxes, start=1)]
        (folder / f"pcb/{image}.txt").write_text("".join(rows))
    for split, images in (("trainval", (7, 5)), ("test", (5,))):
        (folder / f"pcb/{split}.txt").write_text("".join(f"{image}.jpg {image}.txt\n" for image in images))


@pytest.mark.parametrize("module", MODULES)
def test_a_part_of_ones_own_is_trained_and_loaded(module, drawn_coco, tmp_path):
    if module == "my_albumentations":
        pytest.importorskip("albumentations")
    (tmp_path / f"{module}.py").write_text(MODULES[module], encoding="utf-8")
    words = overrides(drawn_coco.files, "output", SOLVER__MAX_ITER=2, TEST__PICTURES=0, **KEYS[module])
    if module == "my_format":
        write_deeppcb(tmp_path)
        words += ["DATASETS.REGISTER", "[['drawn', 'pcb', 'trainval']]"]
        checked = run(tmp_path, "check-data", "pcb", "--import", module)  # as a folder; its splits overlap
        assert "pcb_train: 2 images" in checked.stdout and "in both training and validation: 1 image," in checked.stdout
        assert (
            "in both training and validation: 1 image," in run(tmp_path, "check-data", ".", "--import", module).stdout
        )  # as a clone has it
    ended = run(tmp_path, "train", "--import", module, "--runner", "builtin", "--config-file", "_detectron2.yaml", *words)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.json").read_text().splitlines()]
    assert len([line for line in lines if "total_loss" in line]) == 2
    assert ("loss_area" in lines[0]) == (module == "my_loss")
    log = (tmp_path / "output" / "log.txt").read_text()
    assert f"cpvt-det predict --import {module} output/" in log and f"cpvt-det train --import {module} --config-file" in log
    image = next((tmp_path / "images").rglob("*.png"))
    arguments = ("predict", "output/model_final.pth", "--input", image, "--output", "found")
    assert run(tmp_path, *arguments, "--import", module).returncode == 0
    without = run(tmp_path, *arguments)
    is_in_the_model = module in ("my_encoding", "my_backbone", "my_detector")
    assert without.returncode == (2 if is_in_the_model else 0)
    assert ("a module that registers it is imported with --import MODULE" in without.stderr) == is_in_the_model


def test_albumentations_repeats_itself_and_its_boxes_are_those_of_the_pixels(tmp_path):
    pytest.importorskip("albumentations")
    (tmp_path / "my_albumentations.py").write_text(MODULES["my_albumentations"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_albumentations", tmp_path / "my_albumentations.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    scene = paint((60, 90), [(5, 10, 35, 30), (50, 20, 88, 55)])
    (step,) = steps_of(["weather", {"p": 1}])
    for seed in range(10):
        torch.manual_seed(seed)
        image, boxes, labels = step(*scene)
        torch.manual_seed(seed)
        again = step(*scene)
        assert torch.equal(image, again[0]) and torch.equal(boxes, again[1])
        for label, box in zip(labels.tolist(), boxes.as_subclass(torch.Tensor), strict=True):
            strongest = image.as_subclass(torch.Tensor).int()
            seen = extent((strongest[label] - strongest[2] > 60) & (strongest[label] - strongest[1 - label] > 60))
            assert (seen[:2] >= box[:2] - 3).all() and (seen[2:] <= box[2:] + 3).all()
    assert not torch.equal(image, scene[0])


def test_every_example_of_the_page_is_run():
    assert sorted(MODULES) == sorted(KEYS)
    assert all(len([line for line in text.splitlines() if line.strip()]) <= 26 for text in MODULES.values())


def test_a_module_that_cannot_be_imported_is_one_line(tmp_path):
    ended = run(tmp_path, "check-data", "--import", "no_such_parts", "--config-file", "_detectron2.yaml")
    assert ended.returncode == 2
    assert ended.stderr == "error: --import no_such_parts: ModuleNotFoundError: No module named 'no_such_parts'\n"


def test_a_registry_builds_with_what_the_builder_names():
    parts = registry.PartRegistry("PART", "part")
    parts.register_as("pair")(lambda channels, size=1: (channels, size))
    assert parts.build("pair", {"channels": 3, "levels": 2}) == (3, 1)
    assert parts.build("pair", {"channels": 3}, {"size": 5}) == (3, 5)
    assert parts.names == ["pair"]
    with pytest.raises(
        registry.UnknownNameError, match=r"unknown option of part 'pair' 'sise' \(did you mean 'size'\?\); known: size$"
    ):
        parts.build("pair", {"channels": 3}, {"sise": 5})
    with pytest.raises(registry.UnknownNameError, match=r"unknown part 'other'; known: pair; a module .* --import MODULE$"):
        parts.build("other", {})
