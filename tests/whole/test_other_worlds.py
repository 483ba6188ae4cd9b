# SPDX-License-Identifier: Apache-2.0
"""A run goes on with another number of processes, however these are started."""

import json

import pytest
import torch
from several import run_group
from tiny import overrides

MORE = {"MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN", "MODEL__DETR__DROPOUT": 0.0, "DATASETS__TEST": ()}
SLURM = {"RANK": "", "WORLD_SIZE": "", "SLURM_PROCID": "RANK", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
"""As srun sets them, with ``MASTER_ADDR`` and ``MASTER_PORT`` exported before it."""


@pytest.fixture
def train(drawn_coco, tmp_path):
    """Train in one process, or in two of srun; what the first printed."""
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")

    def call(processes, name, *options, **more):
        words = ["train", "--num-gpus", "0", *options, "--config-file", config, "--runner", "builtin"]
        words += overrides(drawn_coco.files, tmp_path / name, **{**MORE, **more})
        ended = run_group(tmp_path / f"{name}_printed", words, [""] * processes, **SLURM if processes == 2 else {})
        assert [one.code for one in ended] == [0] * processes, ended
        return (tmp_path / name / "log.txt").read_text()

    return call


def test_one_process_goes_on_as_two_and_two_as_one(train, tmp_path):
    """The same images in the same batches, so that nothing but the order of sums differs."""
    train(1, "whole")
    whole = torch.load(tmp_path / "whole/model_final.pth", weights_only=True)["model"]
    for before, after in ((1, 2), (2, 1)):
        name = f"{before}to{after}"
        assert f"{before} process(es)" in train(before, name, SOLVER__MAX_ITER=3)
        log = train(after, name, "--resume")
        assert (
            f"WARNING: The run to resume used {before} process(es), and there are now {after}: batches and their order stay" in log
        )
        final = torch.load(tmp_path / name / "model_final.pth", weights_only=True)["model"]
        for key, value in whole.items():
            torch.testing.assert_close(final[key], value, rtol=0, atol=1e-3, msg=key)
    weights = {"MODEL__WEIGHTS": tmp_path / "whole/model_final.pth", "DATASETS__TEST": ("drawn",), "TEST__DETECTIONS_PER_IMAGE": 3}
    for processes in (1, 2):
        train(processes, f"eval{processes}", "--eval-only", **weights)
    found = [json.loads((tmp_path / f"eval{n}/inference/coco_instances_results.json").read_text()) for n in (1, 2)]
    assert found[0] == found[1] and len(found[0]) == 15
    assert (tmp_path / "eval1/results.json").read_text() == (tmp_path / "eval2/results.json").read_text()
