# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: the cases of ``triton_interpreter_cases`` in Triton's interpreter and on a GPU, and what they compile to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_interpreter_cases as cases

from cpvt_det.ops import deformable_triton

TESTS = Path(__file__).resolve().parents[1]
TARGETS = [
    f"{kernel}_sm{capability}" for kernel in ("forward", "backward", "deterministic_backward", "gather") for capability in (80, 90)
]

needs_triton = pytest.mark.skipif(not deformable_triton.is_available(), reason="triton is not installed")


def run_script(name: str, **environment: str) -> dict:
    """The JSON object that a script of the tests prints, in a process whose Triton has seen only ``environment``."""
    inherited = {name: x for name, x in os.environ.items() if not name.startswith("TRITON_")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, str(TESTS / name)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    return run_script("triton_interpreter_cases.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    triton = pytest.importorskip("triton")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this triton has no compiler for NVIDIA GPUs")
    return run_script("triton_compile.py", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


@needs_triton
@pytest.mark.parametrize("name", cases.CASES)
def test_in_the_interpreter_the_kernels(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_gpu_the_kernels(name):
    cases.CASES[name]("cuda")


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_compiles_to_vector_reads_and_almost_no_spills(target, compiled):
    """D = 32, so a pixel is eight reads of 16 bytes; 8 bytes of stack is a pointer kept outside the loops."""
    found = compiled[target]
    corners = {"gather": 1}.get(target.split("_")[0], 4)
    assert found["reads_of_16_bytes"] >= corners
    assert found.get("stack_bytes", 0) <= 16


@needs_triton
def test_gradients_of_values_are_added_four_channels_at_a_time_where_the_gpu_can(compiled):
    """Two levels with four corners each: one vector addition a corner on sm_90, four scalar ones on sm_80."""
    assert compiled["backward_sm90"]["float_atomics"] == 8
    assert compiled["backward_sm80"]["float_atomics"] == 32


@needs_triton
@pytest.mark.parametrize("target", ["deterministic_backward_sm80", "deterministic_backward_sm90", "gather_sm80", "gather_sm90"])
def test_the_deterministic_backward_has_no_float_atomics(target, compiled):
    assert compiled[target]["float_atomics"] == 0


@needs_triton
def test_threads_do_not_wait_for_each_other_while_they_sample(compiled):
    """Tiles stay where they were read; only finished gradients may change threads, once. On sm_80 scalar additions need more."""
    assert compiled["forward_sm80"]["barriers"] == compiled["forward_sm90"]["barriers"] == 0
    assert compiled["backward_sm90"]["barriers"] <= 1


def test_the_module_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; from cpvt_det.ops import deformable_triton as m; assert not m.is_available()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=TESTS.parent, timeout=120)
