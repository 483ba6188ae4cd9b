# SPDX-License-Identifier: Apache-2.0
"""Processes that find each other in a store that others have used before."""

import json
import threading

import pytest
import torch.distributed as dist

from cpvt_det.errors import ConfigError, RunStoppedError
from cpvt_det.runner import rounds


def join_all(store, sizes, seconds=20, late=()):
    """What :func:`rounds.join` gives to each rank, or its error; ranks of ``late`` start when the first has called a round."""
    found = {}

    def one(rank):
        try:
            found[rank] = rounds.join(store, rank, sizes[rank], seconds)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(sizes))]
    for rank, thread in enumerate(threads):
        if rank not in late:
            thread.start()
    for rank in late:
        while not store.check(["cpvt_det/round"]):
            pass
        threads[rank].start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(sizes))]


@pytest.fixture
def used():
    """A store with a whole round of three processes that are dead."""
    store = dist.HashStore()
    join_all(store, [3, 3, 3])
    return store


def test_all_join_the_same_new_round_whatever_the_store_holds(used):
    before = used.get("cpvt_det/round")
    joined = join_all(used, [3, 3, 3])
    assert used.get("cpvt_det/round") != before
    tokens = [rounds.token_of(found.all_rounds, rank) for rank, found in enumerate(joined)]
    assert len(set(tokens)) == 3
    for found in joined:
        assert [member.token for member in found.members] == tokens
        found.store.set("seen", str(int(found.store.get("seen")) + 1) if found.store.check(["seen"]) else "1")
    assert joined[0].store.get("seen") == b"3"  # one store for all


def test_a_round_with_a_dead_process_is_given_up_when_the_new_one_comes(used):
    """The first calls a round with the token of the dead process, which never confirms it."""
    used.delete_key("cpvt_det/round")
    joined = join_all(used, [3, 3, 3], late=[1])
    assert len({found.members[1].token for found in joined}) == 1


def test_who_does_not_come_is_named():
    first, second = join_all(dist.HashStore(), [3, 3], seconds=0.5)
    assert isinstance(first, RunStoppedError) and "process(es) 2 did not join the 3 processes" in str(first)
    assert isinstance(second, RunStoppedError) and "process 0, or one that it waits for," in str(second)


def test_a_process_that_is_replaced_while_it_waits_ends():
    store = dist.HashStore()
    thread = threading.Timer(0.3, lambda: store.set("cpvt_det/member/1", json.dumps(rounds.this_process(2))))
    thread.start()
    with pytest.raises(RunStoppedError, match="process 1 of 2 has been replaced"):
        rounds.join(store, 1, 2, 20)


def test_processes_that_expect_different_numbers_are_refused_by_all():
    joined = join_all(dist.HashStore(), [2, 3])
    assert all(isinstance(error, ConfigError) and "process 1 on" in str(error) for error in joined), joined
    assert "expects 3 processes and process 0 on" in str(joined[0])


def test_processes_of_one_torchrun_have_the_same_agent(monkeypatch):
    def agent(path):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        return rounds.this_process(2).agent

    first = agent("logs/torchelastic_a/none_x/attempt_0/0/error.json")
    assert first and first == agent("logs/torchelastic_a/none_x/attempt_3/1/error.json")
    assert first != agent("logs/torchelastic_b/none_y/attempt_0/0/error.json")
    assert agent("") == ""
