# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed or frozen in the middle of a step: what is saved, and how the run goes on."""

import re
import time

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


def test_after_a_killed_process_the_resumed_run_is_the_unhurt_one(words, tmp_path):
    """Each of two processes is killed once, after the gradients of step 4 have been exchanged, or before the other has them.

    Process 0 saves the last step if it lives; without it the run goes on from the last checkpoint, of which there is none here.
    """
    assert [one.code for one in run_group(tmp_path / "printed", words("whole", **SHARED))] == [0, 0]
    for killed in (0, 1):
        name, printed, other = f"killed{killed}", tmp_path / f"printed{killed}", 1 - killed
        ended = run_group(printed, words(name, **SHARED), [KILLED if rank == killed else "" for rank in (0, 1)])
        assert (ended[killed].code, ended[other].code) == (-9, 1), ended
        assert re.search(rf"stopped: process {other} of 2 has lost another one", ended[other].text), ended[other].text
        saved = re.search(r"Iteration ([34]) is saved; --resume continues after it", ended[other].text)
        assert bool(saved) is (killed == 1)
        left = [path.stem for path in (tmp_path / name).glob("model_*.pth")]
        assert left == ([f"model_000000{saved[1]}"] if saved else [])
        assert [one.code for one in run_group(printed, words(name, "--resume", **SHARED))] == [0, 0]
        assert_same_run(tmp_path / name, tmp_path / "whole")
        losses, whole = losses_of(tmp_path / name), losses_of(tmp_path / "whole")
        assert losses == {step: whole[step] for step in losses}
        assert whole.keys() - losses.keys() <= {3, 4}  # the means of the hurt step may not have come together


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_waited_for_as_long_as_the_key_says(words, tmp_path, frozen):
    """Then the other ends; process 0 saves the step before, with the running statistics that it had."""
    before = [FROZEN if rank == frozen else "" for rank in (0, 1)]
    start = time.monotonic()
    ended = run_group(tmp_path / "printed", words("run", SOLVER__COLLECTIVE_TIMEOUT=4.0), before)[1 - frozen]
    assert ended.code == 1 and time.monotonic() - start < 60
    assert re.search(r"stopped: process \d of 2 has lost another one, or waited for it for more than 4 s", ended.text), ended.text
    assert [path.stem for path in (tmp_path / "run").glob("model_*.pth")] == ["model_0000004"] * (frozen == 1)


def test_an_error_of_one_process_ends_the_other_which_saves(words, tmp_path):
    """In the middle of a step: process 0 has the step before, with its running statistics; the resumed run is the unhurt one."""
    assert [one.code for one in run_group(tmp_path / "printed", words("whole", **SHARED))] == [0, 0]
    fault = SIGNAL_IN_STEP.format(iteration=2, signum="SIGKILL").replace("os.kill(os.getpid(), signal.SIGKILL)", "1 / 0")
    first, second = run_group(tmp_path / "printed", words("run", **SHARED), ["", fault.replace("_clip", "_backward")])
    assert (first.code, second.code) == (1, 1)
    assert "failed: ZeroDivisionError: division by zero" in second.text
    assert "Iteration 1 is saved; --resume continues after it" in first.text
    assert [one.code for one in run_group(tmp_path / "printed", words("run", "--resume", **SHARED))] == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "whole")
