# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed or frozen in the middle of a step: what the others save, and how the run goes on."""

import re

import pytest
from several import SIGNAL_IN_STEP, run_group
from test_runner import assert_same_run, losses_of
from tiny import overrides

SHARED = {"MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN", "SOLVER__EMA__ENABLED": True}
KILLED, FROZEN = (SIGNAL_IN_STEP.format(iteration=4, signum=name) for name in ("SIGKILL", "SIGSTOP"))


@pytest.fixture
def words(drawn_coco, tmp_path):
    """The words of a training on the drawn data set, in a folder of the given name."""
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")

    def call(name, *options, **more):
        pairs = overrides(drawn_coco.files, tmp_path / name, DATASETS__TEST=(), SOLVER__CHECKPOINT_PERIOD=100, **more)
        return ["train", "--num-gpus", "0", *options, "--config-file", config, "--runner", "builtin", *pairs]

    return call


GONE = (
    r"the store of the run at \S+ in process 0 of 2 \(pid \d+ on .*\) is gone, and maybe its machine",
    r"process 1 of 2 \(pid \d+ on .*\) died or lost its machine",
)
"""What the other says where process 0 is killed, which has the store that tells who is gone, and where process 1 is."""


def test_survivors_save_the_step_and_the_resumed_run_is_the_unhurt_one(words, tmp_path):
    """Each of two processes is killed once, after the gradients of step 4 have been exchanged, or before the other has them."""
    assert [one.code for one in run_group(tmp_path / "printed", words("whole", **SHARED))] == [0, 0]
    for killed, gone in enumerate(GONE):
        name, printed, other = f"killed{killed}", tmp_path / f"printed{killed}", 1 - killed
        ended = run_group(printed, words(name, **SHARED), [KILLED if rank == killed else "" for rank in (0, 1)])
        assert (ended[killed].code, ended[other].code) == (-9, 1), ended
        told = re.search(rf"stopped: {gone}; iteration ([34]) is saved; --resume continues", ended[other].text)
        assert told and "Traceback" not in ended[other].text, ended[other].text
        assert [path.stem for path in (tmp_path / name).glob("model_*.pth")] == [f"model_000000{told[1]}"]
        assert [one.code for one in run_group(printed, words(name, "--resume", **SHARED))] == [0, 0]
        assert_same_run(tmp_path / name, tmp_path / "whole")
        losses, whole = losses_of(tmp_path / name), losses_of(tmp_path / "whole")
        assert losses == {step: whole[step] for step in losses}
        assert whole.keys() - losses.keys() <= {3, 4}  # the means of the hurt step may not have come together


def test_an_error_of_one_process_is_told_by_all(words, tmp_path):
    """In the middle of a step; both hold the step before, and one saves it."""
    fault = SIGNAL_IN_STEP.format(iteration=2, signum="SIGKILL").replace("os.kill(os.getpid(), signal.SIGKILL)", "1 / 0")
    first, second = run_group(tmp_path / "printed", words("run"), ["", fault.replace("_update", "_backward")])
    assert (first.code, second.code) == (1, 1)
    assert "failed: ZeroDivisionError: division by zero" in second.text
    told = r"stopped: process 1 of 2 \(pid \d+ on .*\) ended: ZeroDivisionError: .* by zero; iteration 1 is (saved|left to another)"
    assert re.search(told, first.text), first.text
    assert (tmp_path / "run/model_0000001.pth").is_file()
