# SPDX-License-Identifier: Apache-2.0
"""Ways are chosen by instruction set, can be left out by name, and are taken by plain float32 tensors on a CPU alone."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cpvt_det.errors import ConfigError
from cpvt_det.ops import routes


@pytest.fixture(autouse=True)
def forgotten():
    cached = routes.is_on
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.mark.parametrize(
    ("instructions", "taken"),
    [
        ("AVX512", {"linear", "pointwise", "blocks", "dropout", "openmp"}),
        ("AVX2", {"pointwise", "rows", "winograd", "blocks", "dropout", "openmp"}),
        ("DEFAULT", {"blocks", "dropout", "openmp"}),
    ],
)
def test_instructions_choose(instructions, taken, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert {route for route in routes.ROUTES if routes.is_on(route)} == taken


def test_a_way_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv(routes.SWITCH, "winograd, rows")
    assert {route for route in routes.ROUTES if routes.is_on(route)} == {"pointwise", "blocks", "dropout", "openmp"}


def test_an_unknown_way_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(routes.SWITCH, "winogard")
    message = (
        r"CPVT_DET_WITHOUT names the unknown way 'winogard'; known: linear, pointwise, rows, winograd, blocks, dropout, openmp"
    )
    with pytest.raises(ConfigError, match=message):
        routes.is_on("rows")


def test_only_plain_float32_on_a_cpu_takes_a_way(monkeypatch):
    monkeypatch.setattr(routes, "is_on", lambda route: True)
    x = torch.ones(2, 3)
    assert routes.takes("winograd", x)
    for other in (x.double(), x.bfloat16(), x[:0], x.to("meta")):
        assert not routes.takes("winograd", other)
    with FakeTensorMode() as fake:
        faked = fake.from_tensor(x)
    assert not routes.takes("winograd", faked)
    seen = []
    torch.func.grad(lambda x: seen.append(routes.takes("winograd", x)) or x.sum())(x)
    torch.jit.trace(lambda x: seen.append(routes.takes("winograd", x)) or x + 1, x, check_trace=False)
    assert seen == [False, False]
    with torch.autocast("cpu", torch.bfloat16):
        assert not routes.takes("winograd", x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not routes.takes("winograd", x)
    with FlopCounterMode(display=False):
        assert not routes.takes("winograd", x)

    @torch.compile(backend="eager")
    def compiled(x):
        return x + (1 if routes.takes("winograd", x) else 2)

    assert torch.equal(compiled(x), x + 2)


@pytest.mark.parametrize("left_out", sorted(routes.ROUTES))
def test_the_switch_leaves_out_what_it_names(left_out, monkeypatch):
    monkeypatch.setenv(routes.SWITCH, left_out)
    assert not routes.is_on(left_out)


def test_a_process_reads_the_switch_from_its_environment():
    names = sorted(routes.ROUTES)
    program = f"from cpvt_det.ops import routes; print([name for name in {names} if routes.is_on(name)])"
    environment = {**os.environ, routes.SWITCH: ",".join(names)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.stdout == "[]\n", ended.stderr
