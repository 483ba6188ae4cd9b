# SPDX-License-Identifier: Apache-2.0
"""What two processes of a run share: looking at the images, evaluation, and waiting for data."""

import json
import re

import pytest
from several import run_group
from tiny import overrides

NOTE = """
import cpvt_det.data.images as images, cpvt_det.data.validation.check as check, cpvt_det.common.distributed as distributed
real = check.read_header
check.read_header = lambda path, *rest: print(f"LOOKED {path}\\n", end="", flush=True) or real(path, *rest)  # one write
gather, to_first = distributed.gather_objects, distributed.gather_to_first
def noted(name, call):
    def collective(value):
        found = call(value)
        print("COLLECTIVE", name, type(value).__name__, len(found), flush=True)
        return found
    return collective
distributed.gather_objects = noted("all", gather)
distributed.gather_to_first = noted("first", to_first)
"""
"""Python that prints which images a process looks at, and what it gets in a collective of objects."""


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """One run of two processes, with an image that has something to note in each half; what both printed, and its folder."""
    from conftest import draw_coco
    from PIL import Image

    folder = tmp_path_factory.mktemp("shared")
    drawn = draw_coco(folder / "data")
    for number in (0, -1):
        path = drawn.files.image_root / drawn.content["images"][number]["file_name"]
        Image.open(path).convert("L").save(path)
    (folder / "run.yaml").write_text("VERSION: 2\n")
    words = ["train", "--num-gpus", "0", "--config-file", folder / "run.yaml", "--runner", "builtin"]
    words += overrides(drawn.files, folder / "out", SOLVER__MAX_ITER=2)
    ended = run_group(folder / "printed", words, [NOTE, NOTE])
    assert [one.code for one in ended] == [0, 0], ended
    return [one.text for one in ended], folder / "out", drawn


def test_every_image_is_looked_at_by_one_process(shared_run):
    texts, _, drawn = shared_run
    looked = [re.findall(r"LOOKED .*/(part/\d+\.png)", text) for text in texts]
    names = [image["file_name"] for image in drawn.content["images"]]
    assert [sorted(part) for part in looked] == [sorted(names[:2]), sorted(names[2:])]


def test_what_both_have_found_is_told_once_and_in_order(shared_run):
    _, output, _ = shared_run
    log = (output / "log.txt").read_text()
    assert log.count("images of mode L, converted to RGB: 2") == 2  # of the training set, and of the same set as a test set


def test_only_the_process_that_writes_gets_the_detections_of_others(shared_run):
    texts, output, drawn = shared_run
    got = [re.findall(r"COLLECTIVE first dict (\d)", text) for text in texts]
    assert got == [["2"], ["0"]]
    assert not any(re.search(r"COLLECTIVE all (?!Looked|str)", text) for text in texts)
    written = json.loads((output / "inference/coco_instances_results.json").read_text())
    assert {found["image_id"] for found in written} == {image["id"] for image in drawn.content["images"]}


def test_metrics_have_the_seconds_that_steps_waited_for_data(shared_run):
    _, output, _ = shared_run
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    waited = [line["data_time"] for line in lines if "total_loss" in line]
    assert len(waited) == 2 and all(0 < seconds < 60 for seconds in waited)
