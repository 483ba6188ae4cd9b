# SPDX-License-Identifier: Apache-2.0
"""ms_deform_attn against nested loops, value and gradient, in every implementation; and its borders, threads and operators."""

import multiprocessing
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch.export import Dim

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.ops import deformable_attention as module
from cpvt_det.ops import deformable_numba as numba_kernels
from cpvt_det.ops import numba_threads as kernels
from cpvt_det.ops.deformable_attention import ms_deform_attn

IMPLEMENTATIONS = ["numba", "eager", "export"]
OPERATOR = torch.ops.cpvt_det.ms_deform_attn
# level shapes, B, Q, M, D, P
CASES = {
    "one pixel": ([(1, 1)], 1, 1, 1, 32, 1),
    "wide and tall": ([(5, 7), (6, 2)], 3, 7, 2, 30, 4),
    "four levels": ([(6, 3), (3, 4), (2, 1), (1, 1)], 1, 7, 3, 71, 2),
    "one query": ([(4, 6), (2, 3), (1, 2)], 3, 1, 2, 64, 3),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def make_inputs(shapes, batch, queries, heads, width, points, dtype=torch.float64, seed=0):
    """Value, locations and weights. Locations are of every kind: inside, outside, far away, on pixel centres and borders."""
    generator = torch.Generator().manual_seed(seed)
    tokens, levels = sum(height * width for height, width in shapes), len(shapes)
    value = torch.randn(batch, tokens, heads, width, generator=generator, dtype=torch.float64)
    locations = torch.rand(batch, queries, heads, levels, points, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
    kinds = torch.randint(0, 8, locations.shape[:-1], generator=generator)
    for level, shape in enumerate(shapes):
        size = torch.tensor([shape[1], shape[0]], dtype=torch.float64)
        at, kind = locations[:, :, :, level], kinds[:, :, :, level]
        at[kind == 0] = ((at[kind == 0] * size).round() + 0.5) / size  # centres, also of pixels just outside
        at[kind == 1] = (at[kind == 1] * size).round() / size  # borders
        at[kind == 2] *= torch.tensor([1e6, -30.0])
        at[kind == 3] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    weights = torch.randn(locations.shape[:-1], generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (value, locations, weights)]


def slow_attention(value, shapes, locations, weights):
    """Every sum is a loop; every corner is read by its row and column."""
    batch, queries, heads, levels, points, _ = locations.shape
    rows = []
    for b in range(batch):
        for q in range(queries):
            for m in range(heads):
                total = torch.zeros_like(value[b, 0, m])
                for level in range(levels):
                    for p in range(points):
                        total = total + weights[b, q, m, level, p] * slow_sample(
                            value[b, :, m], shapes, level, locations[b, q, m, level, p]
                        )
                rows.append(total)
    return torch.stack(rows).view(batch, queries, -1)


def slow_sample(tokens, shapes, level, location):
    height, width = shapes[level]
    first = sum(h * w for h, w in shapes[:level])
    x, y = location[0] * width - 0.5, location[1] * height - 0.5
    left, top = int(x.detach().floor()), int(y.detach().floor())
    sample = torch.zeros_like(tokens[0])
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < height and 0 <= column < width:
                share_x = x - left if column > left else left + 1 - x
                share_y = y - top if row > top else top + 1 - y
                sample = sample + share_x * share_y * tokens[first + row * width + column]
    return sample


def with_gradients(function, inputs, seed=1):
    """[output, gradient of value, of locations, of weights] for a random gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def run(shapes, inputs, implementation):
    return with_gradients(lambda v, x, w: ms_deform_attn(v, shapes, x, w, implementation), inputs)


def assert_same_bits(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of torch's threads, for work however small."""
    before = torch.get_num_threads()
    monkeypatch.setattr(kernels, "SMALL_WORK", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_sum_of_the_loops_and_so_are_its_gradients(case, dtype, implementation):
    shapes, *sizes = CASES[case]
    inputs = make_inputs(shapes, *sizes, dtype=dtype)
    expected = with_gradients(lambda v, x, w: slow_attention(v, shapes, x, w), inputs)
    for actual, wanted in zip(run(shapes, inputs, implementation), expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * (1 + wanted.abs().max().item()))


@pytest.mark.parametrize("case", CASES)
def test_grid_sample_is_the_sum_of_the_loops(case):
    """Its gradients are not compared: on the borders between cells, where there are two, it takes the other one."""
    shapes, *sizes = CASES[case]
    inputs = make_inputs(shapes, *sizes, dtype=torch.float64)
    found = ms_deform_attn(inputs[0], shapes, *inputs[1:], "grid_sample")
    torch.testing.assert_close(found, slow_attention(inputs[0], shapes, *inputs[1:]), rtol=1e-10, atol=1e-10)


def test_gradients_are_the_differences_of_the_output(implementation):
    shapes = [(3, 4), (2, 1)]
    inputs = make_inputs(shapes, 1, 2, 2, 30, 2)
    inputs[1] = (torch.rand(inputs[1].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, x, w: ms_deform_attn(v, shapes, x, w, implementation), inputs)


def test_many_queries_read_a_copy_of_the_maps_with_the_same_result():
    """From half as many queries as tokens on, the kernels go head by head over a copy."""
    shapes = [(4, 3)]
    inputs = make_inputs(shapes, 2, 6, 3, 30, 2)
    few = [inputs[0], *(x[:, :5].detach().requires_grad_() for x in inputs[1:])]
    assert numba_kernels._is_head_major(inputs[0], 6) and not numba_kernels._is_head_major(inputs[0], 5)
    torch.testing.assert_close(run(shapes, inputs, "numba")[0][:, :5], run(shapes, few, "numba")[0], rtol=0, atol=0)
    for actual, wanted in zip(run(shapes, few, "numba"), run(shapes, few, "eager"), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_a_point_outside_reads_zero(implementation):
    value = torch.ones(1, 6, 1, 30)
    locations = torch.tensor([[-0.5, 0.5], [0.5, 1.5], [-1e30, 0.5], [1e30, -1e30]]).view(1, 1, 1, 1, 4, 2)
    out, *grads = run([(2, 3)], [value, locations, torch.ones(1, 1, 1, 1, 4)], implementation)
    assert not out.any() and not any(grad.any() for grad in grads)


def test_the_outer_border_reads_half_a_pixel_and_a_centre_reads_it_whole(implementation):
    """On a 1x2 map of 3 and 5: x = 0.25 is the centre of the first pixel, x = 0 its outer border, x = 0.5 the middle of both."""
    value = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    locations = torch.tensor([[0.25, 0.5], [0.0, 0.5], [0.5, 0.5], [0.25, 1.0]]).view(1, 4, 1, 1, 1, 2)
    out = ms_deform_attn(value, [(1, 2)], locations, torch.ones(1, 4, 1, 1, 1), implementation)
    assert out.flatten().tolist() == [3.0, 1.5, 4.0, 1.5]


@pytest.mark.parametrize("other", ["eager", "export"])
def test_location_gradients_agree_on_pixel_centres_where_they_jump(other):
    """In float32 a location on a centre lands on either side of it by rounding: every implementation must round alike."""
    for width in (3, 7, 10, 20, 41, 80, 100, 167):
        shapes = [(2, width)]
        centres = (torch.arange(width) + 0.5) / width
        locations = torch.stack([centres, torch.full_like(centres, 0.5)], -1).view(1, width, 1, 1, 1, 2)
        value = torch.randn(1, 2 * width, 1, 30, generator=torch.Generator().manual_seed(width))
        inputs = [value, locations, torch.ones(1, width, 1, 1, 1)]
        actual, wanted = run(shapes, inputs, "numba")[2], run(shapes, inputs, other)[2]
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_inputs_need_not_be_contiguous(implementation):
    shapes, *sizes = CASES["wide and tall"]
    inputs = make_inputs(shapes, *sizes)
    strided = [x.detach().transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert_same_bits(run(shapes, strided, implementation), run(shapes, inputs, implementation))


@pytest.mark.parametrize("empty", ["batch", "queries"])
def test_an_empty_batch_and_no_queries_give_empty_outputs_and_zero_gradients(empty, implementation):
    batch, queries = (0, 3) if empty == "batch" else (2, 0)
    inputs = make_inputs([(2, 3), (1, 1)], batch, queries, 2, 4, 2)
    out, *grads = run([(2, 3), (1, 1)], inputs, implementation)
    assert out.shape == (batch, queries, 8)
    assert [grad.shape for grad in grads] == [x.shape for x in inputs] and not any(grad.any() for grad in grads)


def test_results_do_not_depend_on_the_number_of_threads(threads):
    shapes, *sizes = CASES["four levels"]
    inputs = make_inputs(shapes, *sizes, dtype=torch.float32)
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(run(shapes, inputs, "numba"))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_two_python_threads_may_call_at_once(threads):
    threads(2)
    shapes, *sizes = CASES["wide and tall"]
    batches = [make_inputs(shapes, *sizes, dtype=torch.float32, seed=seed) for seed in range(2)]
    alone, together = [run(shapes, inputs, "numba") for inputs in batches], [None, None]

    def work(i):
        for _ in range(50):
            together[i] = run(shapes, batches[i], "numba")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(2):
        assert_same_bits(together[i], alone[i])


def _run_in_child(shapes, inputs, connection):
    connection.send([x.numpy() for x in run(shapes, inputs, "numba")])


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_has_threads_of_its_own():
    """In a fresh process: after some other tests autograd itself refuses to be forked."""
    parent = multiprocessing.get_context("spawn").Process(target=_fork_and_compare)
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def _fork_and_compare():
    torch.set_num_threads(2)
    kernels.SMALL_WORK = 1
    shapes, *sizes = CASES["wide and tall"]
    inputs = make_inputs(shapes, *sizes, dtype=torch.float32)
    expected = run(shapes, inputs, "numba")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run_in_child, args=(shapes, inputs, sender))
    child.start()
    assert receiver.poll(60)
    assert_same_bits([torch.from_numpy(x) for x in receiver.recv()], expected)
    child.join()
    assert child.exitcode == 0


def test_repeats_are_bit_equal_under_deterministic_algorithms(implementation):
    shapes, *sizes = CASES["four levels"]
    inputs = make_inputs(shapes, *sizes, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(run(shapes, inputs, implementation), run(shapes, inputs, implementation))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beside", ["half", "float32"])
def test_half_precision_is_the_rounded_result_of_float32(dtype, beside, implementation):
    shapes, *sizes = CASES["wide and tall"]
    value, locations, weights = (x.detach().clamp(-9, 9).to(dtype) for x in make_inputs(shapes, *sizes, dtype=torch.float32))
    if beside == "float32":
        locations, weights = locations.float(), weights.float()
    expected = ms_deform_attn(value.float(), shapes, locations.float(), weights.float(), implementation)
    out, *grads = run(shapes, [value, locations, weights], implementation)
    assert torch.equal(out, expected.to(dtype))
    assert [grad.dtype for grad in grads] == [dtype, locations.dtype, weights.dtype]
    assert all(grad.isfinite().all() for grad in grads)


def test_under_autocast_on_the_cpu_everything_is_float32(implementation):
    shapes, *sizes = CASES["wide and tall"]
    value, locations, weights = (x.detach() for x in make_inputs(shapes, *sizes, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = ms_deform_attn(value.bfloat16(), shapes, locations, weights.bfloat16(), implementation)
    expected = ms_deform_attn(value.bfloat16().float(), shapes, locations, weights.bfloat16().float(), implementation)
    assert out.dtype == torch.float32 and torch.equal(out, expected)


def test_a_second_derivative_is_refused():
    shapes = [(2, 3)]
    inputs = make_inputs(shapes, 1, 2, 1, 30, 1)
    out = ms_deform_attn(inputs[0], shapes, *inputs[1:], "numba")
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; use implementation='export'"):
        grad.sum().backward()


def test_both_operators_pass_the_checks_of_torch_library():
    shapes, *sizes = CASES["wide and tall"]
    value, locations, weights = make_inputs(shapes, *sizes, dtype=torch.float32)
    flat = [n for shape in shapes for n in shape]
    torch.library.opcheck(OPERATOR.default, (value, flat, locations, weights))
    detached = [x.detach() for x in (value, locations, weights)]
    grad = torch.ones_like(OPERATOR(detached[0], flat, *detached[1:]))
    torch.library.opcheck(torch.ops.cpvt_det.ms_deform_attn_backward.default, (grad, detached[0], flat, *detached[1:]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_a_break(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(ms_deform_attn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for case in ("wide and tall", "one query") if dynamic else ("wide and tall",):
        shapes, *sizes = CASES[case]
        inputs = make_inputs(shapes, *sizes, dtype=torch.float32)
        actual = with_gradients(lambda v, x, w, shapes=shapes: compiled(v, shapes, x, w), inputs)
        assert_same_bits(actual, run(shapes, inputs, "numba"))


class Exported(torch.nn.Module):
    """Two maps (B, M, D, H, W) in, so that level shapes are read from tensors."""

    def forward(self, fine, coarse, locations, weights):
        shapes = [(fine.shape[3], fine.shape[4]), (coarse.shape[3], coarse.shape[4])]
        value = torch.cat([x.flatten(3).permute(0, 3, 1, 2) for x in (fine, coarse)], 1)
        return ms_deform_attn(value, shapes, locations, weights)


def make_maps(batch, queries, fine, coarse):
    value, locations, weights = (x.detach() for x in make_inputs([fine, coarse], batch, queries, 2, 30, 3, dtype=torch.float32))
    maps = value.split([fine[0] * fine[1], coarse[0] * coarse[1]], 1)
    maps = [x.permute(0, 2, 3, 1).unflatten(3, shape) for x, shape in zip(maps, (fine, coarse), strict=True)]
    return *maps, locations, weights


def test_an_exported_program_holds_aten_alone_and_serves_every_size():
    batch, queries = Dim("batch", min=2, max=64), Dim("queries", min=2, max=10000)
    maps = [{0: batch, 3: Dim(f"height{i}", min=2, max=999), 4: Dim(f"width{i}", min=2, max=999)} for i in range(2)]
    shapes = (*maps, {0: batch, 1: queries}, {0: batch, 1: queries})
    program = torch.export.export(Exported(), make_maps(2, 5, (6, 8), (3, 4)), dynamic_shapes=shapes)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    foreign = {f for f in called if isinstance(f, torch._ops.OpOverload) and f.namespace != "aten"}
    assert not foreign
    for sizes in [(2, 5, (6, 8), (3, 4)), (3, 7, (5, 9), (2, 7)), (4, 2, (11, 4), (7, 3))]:
        inputs = make_maps(*sizes)
        torch.testing.assert_close(program.module()(*inputs), Exported()(*inputs), rtol=1e-5, atol=1e-5)


def good_call():
    """The arguments of a call that is right, to be spoilt: 9 tokens, 2 levels."""
    value, locations, weights = (x.detach() for x in make_inputs([(2, 3), (3, 1)], 2, 4, 2, 30, 3, dtype=torch.float32))
    return {
        "value": value,
        "level_shapes": [(2, 3), (3, 1)],
        "sampling_locations": locations,
        "attention_weights": weights,
    }


BAD_CALLS = {
    "integer value": ({"value": torch.ones(2, 9, 2, 30, dtype=torch.int64)}, TypeError, "value must be float64.*got torch.int64"),
    "locations of another dtype": (
        {"sampling_locations": torch.ones(2, 4, 2, 2, 3, 2).double()},
        TypeError,
        "sampling_locations must be torch.float32 if value is torch.float32, got torch.float64; convert",
    ),
    "half weights": (
        {"attention_weights": torch.ones(2, 4, 2, 2, 3).half()},
        TypeError,
        "attention_weights must be torch.float32 .* got torch.float16",
    ),
    "weights of the other half": (
        {"value": torch.ones(2, 9, 2, 30).half(), "attention_weights": torch.ones(2, 4, 2, 2, 3).bfloat16()},
        TypeError,
        "attention_weights must be torch.float16 or torch.float32 if value is torch.float16, got torch.bfloat16",
    ),
    "flat value": ({"value": torch.ones(2, 9, 10)}, ValueError, r"value must be \(B, N, M, D\), got \(2, 9, 10\)"),
    "no channels": ({"value": torch.ones(2, 9, 2, 0)}, ValueError, r"value must have at least one head .* got \(2, 9, 2, 0\)"),
    "flat locations": (
        {"sampling_locations": torch.ones(2, 4, 2, 6, 2)},
        ValueError,
        r"sampling_locations must be \(B, Q, M, L, P, 2\), got \(2, 4, 2, 6, 2\)",
    ),
    "another batch": (
        {"sampling_locations": torch.ones(3, 4, 2, 2, 3, 2)},
        ValueError,
        r"sampling_locations \(3, 4, 2, 2, 3, 2\) do not fit value \(2, 9, 2, 30\) and 2 levels; .* \(2, 4, 2, 2, 3, 2\)",
    ),
    "other heads": ({"sampling_locations": torch.ones(2, 4, 1, 2, 3, 2)}, ValueError, r"expected .* \(2, 4, 2, 2, 3, 2\)"),
    "other levels": ({"sampling_locations": torch.ones(2, 4, 2, 1, 3, 2)}, ValueError, r"expected .* \(2, 4, 2, 2, 3, 2\)"),
    "boxes for points": ({"sampling_locations": torch.ones(2, 4, 2, 2, 3, 4)}, ValueError, r"expected .* \(2, 4, 2, 2, 3, 2\)"),
    "other queries": (
        {"attention_weights": torch.ones(2, 5, 2, 2, 3)},
        ValueError,
        r"attention_weights \(2, 5, 2, 2, 3\) do not fit .* expected \(B, Q, M, L, P\) = \(2, 4, 2, 2, 3\)",
    ),
    "levels and points in one": ({"attention_weights": torch.ones(2, 4, 2, 6)}, ValueError, r"attention_weights \(2, 4, 2, 6\)"),
    "tokens that do not add up": (
        {"level_shapes": [(2, 3), (3, 2)]},
        ValueError,
        r"\[\(2, 3\), \(3, 2\)\] hold 12 tokens, value 9",
    ),
    "no levels": ({"level_shapes": []}, ValueError, "level_shapes is empty; give"),
    "a level without rows": ({"level_shapes": [(9, 1), (0, 4)]}, ValueError, r"level_shapes\[1\] must be .* got \(0, 4\)"),
    "a level of three numbers": (
        {"level_shapes": [(9, 1), (1, 1, 1)]},
        ValueError,
        r"level_shapes\[1\] must be .* got \(1, 1, 1\)",
    ),
    "level shapes in a tensor": (
        {"level_shapes": torch.tensor([[2, 3], [3, 1]])},
        TypeError,
        r"level_shapes must be a list of pairs of integers, got Tensor; use .tolist\(\)",
    ),
    "level shapes that are no pairs": (
        {"level_shapes": [6]},
        TypeError,
        r"level_shapes\[0\] must be \(H, W\), two integers, got 6",
    ),
    "level shapes of floats": (
        {"level_shapes": [(2.0, 3.0), (3, 1)]},
        TypeError,
        r"level_shapes\[0\] must be .* got \(2\.0, 3\.0\)",
    ),
    "no points": (
        {"sampling_locations": torch.zeros(2, 4, 2, 2, 0, 2), "attention_weights": torch.zeros(2, 4, 2, 2, 0)},
        ValueError,
        r"at least one point per head and level, got \(2, 4, 2, 2, 0, 2\)",
    ),
    "what is no tensor": ({"value": "maps"}, TypeError, "value must be a tensor, got str"),
    "another name": ({"implementation": "numbs"}, UnknownNameError, r"unknown implementation 'numbs' \(did you mean 'numba'\?\)"),
    "tensors of another device": (
        {"attention_weights": torch.ones(2, 4, 2, 2, 3, device="meta")},
        ValueError,
        "attention_weights is on meta, value on cpu; move",
    ),
    "triton on the CPU": (
        {"implementation": "triton"},
        ValueError,
        "implementation 'triton' supports only cuda tensors, got cpu; use 'auto' or 'eager'",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named_with_the_way_out(case):
    spoilt, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        ms_deform_attn(**good_call() | spoilt)


def test_numba_is_refused_away_from_the_cpu():
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in good_call().items()}
    with pytest.raises(ValueError, match="implementation 'numba' supports only cpu tensors, got meta"):
        ms_deform_attn(**call, implementation="numba")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_query_with_a_location_that_is_not_finite_is_nan_and_no_other(bad, implementation):
    """Image 1, query 2; its gradients are made without reading outside of the maps."""
    call = good_call()
    whole = ms_deform_attn(**call, implementation=implementation)
    call["sampling_locations"][1, 2, 0, 1, 2, 1] = bad
    call["value"].requires_grad_()
    out = ms_deform_attn(**call, implementation=implementation)
    (out * torch.nan).sum().backward()
    spoilt = out.isnan().any(-1)
    assert spoilt.nonzero().tolist() == [[1, 2]]
    assert torch.equal(out[~spoilt], whole[~spoilt])
    assert call["value"].grad.isnan().any()


def test_other_devices_are_served_by_torch_alone():
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in good_call().items()}
    assert ms_deform_attn(**call).shape == (2, 4, 60)


@pytest.mark.parametrize("fault", [ImportError("Numba needs NumPy 2.4 or less"), OSError("cannot open shared object file")])
def test_kernels_that_cannot_be_loaded_are_done_without_and_told(fault, monkeypatch, caplog):
    def refuse(name):
        raise fault

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    module._kernels.cache_clear()
    try:
        call = good_call()
        with caplog.at_level("WARNING", logger="cpvt_det"):
            assert torch.equal(ms_deform_attn(**call), ms_deform_attn(**call, implementation="eager"))
            ms_deform_attn(**call)
        (record,) = caplog.records  # once
        assert record.getMessage() == f"Deformable attention runs without its numba kernel, which is slower: {fault}"
        with pytest.raises(ImportError, match=rf"needs numba, which cannot be imported \({fault}\); use 'auto' or 'eager'"):
            ms_deform_attn(**call, implementation="numba")
    finally:
        module._kernels.cache_clear()


def test_a_kernel_whose_cache_is_broken_is_compiled_anew(monkeypatch, caplog):
    def broken(*args):
        raise pickle.UnpicklingError("pickle data was truncated")

    expected = ms_deform_attn(**good_call(), implementation="numba")
    monkeypatch.setattr(numba_kernels._forward, "compiled", broken)
    with caplog.at_level("WARNING", logger="cpvt_det"):
        assert torch.equal(ms_deform_attn(**good_call(), implementation="numba"), expected)
    assert "compiled again, because its cache cannot be read: pickle data was truncated" in caplog.text


def test_float64_stays_float64_under_autocast(implementation):
    call = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in good_call().items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = ms_deform_attn(**call, implementation=implementation)
    assert torch.equal(found, ms_deform_attn(**call, implementation=implementation))


WITHOUT_NUMBA = """
import sys, torch

class NoNumba:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoNumba())
from cpvt_det.ops.deformable_attention import ms_deform_attn
call = torch.ones(1, 6, 1, 4), [(2, 3)], torch.rand(1, 2, 1, 1, 3, 2), torch.ones(1, 2, 1, 1, 3)
assert torch.equal(ms_deform_attn(*call), ms_deform_attn(*call, "eager"))
try:
    ms_deform_attn(*call, "numba")
except ImportError as error:
    print(error)
"""

WITHOUT_A_CACHE_FOLDER = """
import sys, torch
import cpvt_det.ops.deformable_attention as module
assert "numba" not in sys.modules
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
call = torch.ones(1, 6, 1, 4), [(2, 3)], torch.rand(1, 2, 1, 1, 3, 2), torch.ones(1, 2, 1, 1, 3)
torch.testing.assert_close(module.ms_deform_attn(*call, "numba"), module.ms_deform_attn(*call, "eager"))
print("served")
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (
            WITHOUT_NUMBA,
            "implementation 'numba' needs numba, which cannot be imported (No module named 'numba'); use 'auto' or 'eager'",
        ),
        (WITHOUT_A_CACHE_FOLDER, "served"),
    ],
    ids=["numba", "cache folder"],
)
def test_it_works_without(program, printed):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed
