# SPDX-License-Identifier: Apache-2.0
"""Work for numba's kernels is cut into pieces, and every piece is done once, in torch's threads or in a pool."""

import os
import sys
import threading

import pytest
import torch

from cpvt_det.ops import numba_threads as kernels
from cpvt_det.ops import routes

TEAM = "torch's"
needs_team = pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux", reason="torch computes in other threads here"
)


@pytest.fixture(params=[pytest.param(TEAM, marks=needs_team), "a pool"])
def threads(request):
    """A parallel map, with two threads for torch; torch's of the parent, a pool as in a forked child."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield kernels._map_in_threads(os.getpid() if request.param == TEAM else -1)
    torch.set_num_threads(before)


@needs_team
def test_the_threads_are_torch_s_where_it_has_openmp():
    assert isinstance(kernels._map_in_threads(os.getpid()).__self__, kernels.TorchThreads)


def test_the_switch_leaves_torch_s_threads_out(monkeypatch):
    monkeypatch.setenv(routes.SWITCH, "openmp")
    for cached in (routes.is_on, kernels._map_in_threads):
        cached.cache_clear()
    try:
        assert not isinstance(getattr(kernels._map_in_threads(os.getpid()), "__self__", None), kernels.TorchThreads)
    finally:
        for cached in (routes.is_on, kernels._map_in_threads):
            cached.cache_clear()


def test_a_library_without_openmp_is_told():
    with pytest.raises((OSError, AttributeError)):
        kernels.TorchThreads("no such library")


def test_pieces_cover_the_whole_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert kernels.cut(10, kernels.SMALL_WORK) == [(0, 10)]
    assert kernels.cut(10, 2 * kernels.SMALL_WORK) == [(0, 5), (5, 10)]
    assert kernels.cut(10, 9 * kernels.SMALL_WORK) == [(0, 3), (3, 6), (6, 10)]
    assert kernels.cut(2, 9 * kernels.SMALL_WORK) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_results_come_in_the_order_of_the_items(threads, count):
    taken = []
    assert threads(lambda item: taken.append(item) or item * 10, list(range(count))) == [10 * item for item in range(count)]
    assert sorted(taken) == list(range(count))


def test_two_items_are_worked_on_at_once(threads):
    both = threading.Barrier(2, timeout=60)
    assert len(set(threads(lambda _: both.wait() * 0 + threading.get_ident(), [0, 1]))) == 2


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_any_item_is_raised(threads, kind):
    for bad in range(4):

        def work(item, bad=bad):
            if item == bad:
                raise kind("bad item")

        with pytest.raises(kind, match="bad item"):
            threads(work, list(range(4)))
    assert threads(str, [1, 2]) == ["1", "2"]


def test_several_threads_may_ask_at_once(threads):
    results = {}

    def ask(name):
        torch.set_num_threads(2)
        results[name] = [threads(lambda item: (name, item), list(range(5))) for _ in range(50)]

    askers = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert results == {name: [[(name, item) for item in range(5)]] * 50 for name in "ab"}


@needs_team
def test_what_no_thread_took_is_done_all_the_same():
    """As after a signal that came before a thread's first step."""
    team = kernels.TorchThreads(torch._C.__file__)
    team._parallel = lambda *_: None
    assert team.map(str, [1, 2, 3]) == ["1", "2", "3"]
