# SPDX-License-Identifier: Apache-2.0
"""A resumed run is the run never interrupted, bit for bit: the parts that ``test_runner.py`` leaves out."""

import pytest
from test_runner import assert_same_run, losses_of, metrics_of, weights_of
from tiny import DFINE, RTDETR, overrides

from cpvt_det.config import load_cfg
from cpvt_det.training.train import run


@pytest.mark.parametrize("workers", [0, 2])
def test_scaler_best_metric_and_counts_go_on_with_any_number_of_workers(drawn_coco, tmp_path, workers):
    """float16 with its scaler, whose first steps are left out because they overflow; an evaluation after every second step."""
    more = {"SOLVER__AMP__ENABLED": True, "SOLVER__AMP__DTYPE": "float16", "SOLVER__EMA__ENABLED": True, "SOLVER__EMA__DECAY": 0.5}
    more |= {"SOLVER__ACCUMULATE": 2, "TEST__EVAL_PERIOD": 2, "SOLVER__CHECKPOINT_KEEP": 6, "DATALOADER__NUM_WORKERS": workers}

    def train(name, resume=False, **changes):
        run(load_cfg("", overrides(drawn_coco.files, tmp_path / name, **{**more, **changes})), resume=resume)
        return tmp_path / name

    whole = train("whole")
    cut = train("cut", SOLVER__MAX_ITER=3)
    train("cut", resume=True)
    assert_same_run(whole, cut)
    one, two = (weights_of(folder / "model_final.pth") for folder in (whole, cut))
    for node in ("grad_scaler", "bad_steps"):
        assert one["trainer"]["_trainer"][node] == two["trainer"]["_trainer"][node]
    assert one["trainer"]["_trainer"]["grad_scaler"]["scale"] > 0
    assert one["cpvt_det"]["best"]["figure"] == two["cpvt_det"]["best"]["figure"]
    assert losses_of(whole) == losses_of(cut)
    aps = [{line["iteration"]: line["bbox/AP"] for line in metrics_of(folder) if "bbox/AP" in line} for folder in (whole, cut)]
    assert {iteration: aps[1][iteration] for iteration in aps[0]} == aps[0]


@pytest.mark.parametrize("detector", [DFINE, RTDETR], ids=["dfine", "rtdetr"])
def test_a_real_time_detector_goes_on_with_its_denoising_and_its_statistics(drawn_coco, tmp_path, detector):
    for name, iterations, resume in (("whole", 6, False), ("cut", 3, False), ("cut", 6, True)):
        words = overrides(drawn_coco.files, tmp_path / name, **detector, SOLVER__MAX_ITER=iterations, DATASETS__TEST=())
        run(load_cfg("", words), resume=resume)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")
