# SPDX-License-Identifier: Apache-2.0
"""How a process ends beside its main thread: whatever else does not answer."""

import time

import pytest
import torch.distributed as dist
from forked import Forked
from nodes import wait_for

from cpvt_det.runner import peers
from cpvt_det.runner.rounds import Member, Round


def one_of_two(rank=1, agent=""):
    """What process ``rank`` knows of the other."""
    members = [Member("token", "host", 4 + number, agent, 2) for number in (0, 1)]
    return peers.Peers(Round(dist.HashStore(), dist.HashStore(), members), rank, "host-a:29500")


@pytest.fixture
def ended(monkeypatch):
    """Exit codes that this process would have had."""
    codes = []
    monkeypatch.setattr(peers.os, "_exit", codes.append)
    return codes


def test_a_disk_that_does_not_answer_is_not_waited_for(ended, capfd):
    mine = one_of_two()
    mine.wait_at_most(0.2)
    mine.rescue, start = lambda: time.sleep(20), time.monotonic()
    mine._end(peers.End("process 0 is silent", 0.0))
    assert ended == [1] and time.monotonic() - start < 10
    assert "process 0 is silent; the last step could not be saved within 0 s: OUTPUT_DIR does not answer" in capfd.readouterr().err


def test_what_was_saved_in_time_is_told(ended, capfd):
    mine = one_of_two()
    mine.rescue = lambda: "iteration 7 is saved"
    mine._end(peers.End("process 0 is silent", 0.0))
    assert capfd.readouterr().err == "stopped: process 0 is silent; iteration 7 is saved\n"


@pytest.mark.parametrize(("of_torchrun", "where"), [("True", ""), ("False", " in process 0 of 2 (pid 4 on host)")])
def test_who_had_the_store_is_told(monkeypatch, of_torchrun, where):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", of_torchrun)
    assert one_of_two()._without_store() == f"the store of the run at host-a:29500{where} is gone, and maybe its machine"


@pytest.mark.parametrize(
    ("told", "is_theirs"),
    [
        ("DistBackendError: NCCL error", True),
        ("RuntimeError: [gloo/transport/tcp] Connection closed by peer", True),
        ("RuntimeError: cannot load /usr/lib/python3/dist-packages/x.so", False),
        ("ValueError: the distance is negative", False),
    ],
)
def test_errors_that_another_process_may_have_caused_are_recognised(told, is_theirs):
    assert bool(peers.OF_OTHERS.search(told)) is is_theirs


TORCHRUN = """
import os, signal, time
from cpvt_det.runner import peers
import test_peers
peers.UNSEEN = 1
if os.fork():
    if {waits}:
        time.sleep(100)
    os.wait()
    time.sleep({after})
    raise SystemExit(5)
mine = test_peers.one_of_two(agent="torchrun")
mine._end(peers.End("the store does not answer", 0.0, 3))
"""
"""A process that starts another, as torchrun does, and sees its end or not."""


@pytest.mark.parametrize(("waits", "code"), [(True, -9), (False, 5)], ids=["hangs", "is well"])
def test_a_torchrun_that_does_not_see_the_end_of_its_process_is_ended(tmp_path, waits, code):
    """It waits for a store on a frozen machine, without a limit; one that sees it goes on as long as it likes."""
    process = Forked(before=TORCHRUN.format(waits=waits, after=2.5), printed=tmp_path / "printed")
    try:
        wait_for(lambda: process.returncode is not None, 60)
        assert process.returncode == code
        said = f"torchrun (pid {process.pid}) has not seen for 1 s that its process has ended, and is killed"
        assert (said in (tmp_path / "printed").read_text()) is waits
    finally:
        process.end()
