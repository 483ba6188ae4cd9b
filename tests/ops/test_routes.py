# SPDX-License-Identifier: Apache-2.0
"""Ways are chosen by instruction set, can be left out by name, and are taken by plain float32 tensors on a CPU alone."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cpvt_det.common.errors import ConfigError
from cpvt_det.fast.resnet import FastResNetBackbone
from cpvt_det.ops import deformable_attention, routes

EVERYWHERE = {"dropout", "deformable", "canvases", "packing", "openmp"}
WIDE = {"linear", "pointwise", *EVERYWHERE}
NARROW = {"pointwise", "rows", "winograd", *EVERYWHERE}


@pytest.fixture(autouse=True)
def forgotten():
    cached = routes.is_on
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.mark.parametrize(
    ("instructions", "flags", "taken"),
    [
        ("AVX512", "", WIDE),
        ("AVX512", "avx512bf16 avxvnni", WIDE),
        ("AVX512", "avx512bf16 avx512fp16", WIDE),
        ("AVX512", "avx512bf16 avx512vp2intersect", WIDE),
        ("AVX512", "avxvnni", WIDE),
        ("AVX512", "avx512bf16", WIDE | NARROW),
        ("AVX2", "", NARROW),
        ("AVX2", "avx512bf16", NARROW),
        ("DEFAULT", "avx512bf16", EVERYWHERE),
    ],
)
def test_instructions_choose(instructions, flags, taken, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(routes, "_flags", lambda: dict.fromkeys(flags.split(), True))
    assert {route for route in routes.ROUTES if routes.is_on(route)} == taken


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="another kind of processor")
def test_the_processor_s_flags_have_the_names_that_are_asked_for():
    assert {"avx512bf16", *routes.OF_WIDE_UNITS} <= routes._flags().keys()
    fewer = "import sys; sys.modules['llvmlite.binding'] = None; from cpvt_det.ops import routes; print(routes._flags())"
    ended = subprocess.run([sys.executable, "-c", fewer], capture_output=True, text=True, timeout=200)
    assert ended.stdout == "{}\n", ended.stderr


def test_a_way_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv(routes.SWITCH, "winograd, rows")
    assert {route for route in routes.ROUTES if routes.is_on(route)} == NARROW - {"winograd", "rows"}


def test_an_unknown_way_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(routes.SWITCH, "winogard")
    with pytest.raises(ConfigError, match=r"CPVT_DET_WITHOUT names the unknown route 'winogard'; known: linear, pointwise, rows"):
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


def test_without_canvases_a_padded_batch_is_computed_at_once(monkeypatch):
    """To the same features; the parts of a batch are not even asked for."""
    torch.manual_seed(0)
    backbone = FastResNetBackbone("resnet10", "FrozenBN", (3, 4)).eval()
    images, mask = torch.randn(2, 3, 96, 96), torch.zeros(2, 96, 96, dtype=torch.bool)
    images[1, :, 32:], mask[1, 32:] = 0, True
    in_parts = backbone(images, mask)
    routes.is_on.cache_clear()
    monkeypatch.setenv(routes.SWITCH, "canvases")
    monkeypatch.setattr("cpvt_det.fast.resnet.parts_of", lambda *_: pytest.fail("parts"))
    for one, other in zip(backbone(images, mask), in_parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("left_out", "chosen"), [("", "numba"), ("deformable", "eager")])
def test_without_the_kernel_deformable_attention_is_torch_s_own(left_out, chosen, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv(routes.SWITCH, left_out)
    assert deformable_attention._choose("cpu") == chosen
