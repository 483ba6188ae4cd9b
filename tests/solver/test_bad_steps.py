# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite: nothing moves, they are counted and told, and too many in a row end the run."""

import copy
import logging

import pytest
import torch
from test_solver import make_samples, make_step, tiny_cfg
from tiny import DETECTORS

from cpvt_det import builders
from cpvt_det.common.errors import RunStoppedError
from cpvt_det.solver.optimizer import MovingAverage

KINDS = ("image", "gradient")
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "bfloat16": {"amp_dtype": torch.bfloat16},
    "float16": {"amp_dtype": torch.float16},
}


def named_samples(count=4):
    """With the image ids 100, 101, ..."""
    return [{**sample, "image_id": 100 + number} for number, sample in enumerate(make_samples(count, torch.float32))]


def spoilt_samples():
    """Image 102 has one pixel that is no number."""
    samples = named_samples()
    samples[2]["image"][0, 3, 3] = torch.nan
    return samples


def make_run(detector="detr", **options):
    """A step with a moving average, after two good steps."""
    cfg = tiny_cfg(**DETECTORS[detector])
    torch.manual_seed(0)
    step = make_step(cfg, builders.build_detector(cfg), **options)
    if step.scaler.is_enabled():
        step.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step.ema = MovingAverage(step.training_model.detector, 0.5)
    for iteration in range(2):
        step(named_samples(), iteration)
    return step


def take_bad(step, kind, iteration=2):
    """A step with a pixel that is no number, or with one gradient that is infinite while the loss is finite."""
    if kind == "image":
        return step(spoilt_samples(), iteration)
    hook = step.training_model.detector.query_embed.weight.register_hook(lambda gradient: gradient + torch.inf)
    record = step(named_samples(), iteration)
    hook.remove()
    return record


def state_of(step):
    """All that a step may move, but the counts of bad steps and of a norm's batches, which nothing is computed from."""
    state = {"weights": step.training_model.detector.state_dict(), "ema": step.ema.state_dict(), **step.state_dict()}
    del state["bad_steps"], state["grad_scaler"], state["parameters"]
    for part in ("weights", "ema"):
        state[part] = {name: value for name, value in state[part].items() if not name.endswith("num_batches_tracked")}
    return copy.deepcopy(state)


def assert_bit_equal(one, two):
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_moves_nothing_and_the_next_goes_on_as_if_it_had_not_been(kind, options):
    step, plain = make_run(**OPTIONS[options]), make_run(**OPTIONS[options])
    before = state_of(step)
    record = take_bad(step, kind)
    assert record["skipped"] == 1
    assert_bit_equal(state_of(step), before)
    assert step.bad_steps.state_dict() == {"in_a_row": 1, "total": 1}
    records = [each(named_samples(), 3) for each in (step, plain)]
    assert records[0]["skipped"] == 0
    if options != "float16":  # where the scale has been halved
        assert_bit_equal(*records)
        assert_bit_equal(state_of(step), state_of(plain))
    assert step.bad_steps.state_dict() == {"in_a_row": 0, "total": 1}


@pytest.mark.parametrize("implementation", ["numba", "eager"])
def test_deformable_attention_hands_on_what_is_not_finite(implementation):
    step = make_run("deformable")
    for module in step.training_model.detector.modules():
        if hasattr(module, "implementation"):
            module.implementation = implementation
    offsets = step.training_model.detector.transformer.encoder.layers[0].self_attn.sampling_offsets.bias.data
    before, first = state_of(step)["optimizer"], offsets[0].clone()
    offsets[0] = torch.nan
    assert step(named_samples(), 2)["skipped"] == 1
    offsets[0] = first
    assert_bit_equal(step.state_dict()["optimizer"], before)


def test_the_scale_of_float16_losses_is_halved_by_a_bad_step():
    step = make_run(amp_dtype=torch.float16)
    scale = step.scaler.get_scale()
    take_bad(step, "image")
    assert step.scaler.get_scale() == scale / 2


def test_the_images_of_a_bad_step_are_named(caplog):
    step = make_run()
    take_bad(step, "image", 7)
    take_bad(step, "gradient", 8)
    with caplog.at_level(logging.WARNING, logger="cpvt_det"):
        step.bad_steps.report()
        step.bad_steps.report()  # each is told once
    expected = [
        # batch norms of the backbone look at all images of a batch
        "Iteration 7 is skipped: the predictions are not finite for images 100, 101, 102, 103",
        "Iteration 8 is skipped: the loss or a gradient is not finite; the images of the batch are 100, 101, 102, 103",
    ]
    assert [record.getMessage() for record in caplog.records] == expected


def test_an_image_is_named_alone_where_norms_keep_images_apart(caplog):
    cfg = tiny_cfg(MODEL__BACKBONE__NORM="GN", MODEL__POSITION__NAME="sine")
    step = make_step(cfg, builders.build_detector(cfg))
    with caplog.at_level(logging.WARNING, logger="cpvt_det"):
        step(spoilt_samples(), 0)
        step.bad_steps.report()
    assert caplog.messages == ["Iteration 0 is skipped: the predictions are not finite for images 102"]


def test_too_many_in_a_row_end_the_run_and_nothing_moves_after_them():
    step = make_run(max_bad_steps=3)
    before = state_of(step)
    for iteration in range(2, 4):
        take_bad(step, "image", iteration)
    step.bad_steps.report()
    take_bad(step, "image", 4)
    assert step(named_samples(), 5)["skipped"] == 1  # nobody has read yet that the run is over
    assert_bit_equal(state_of(step), before)
    with pytest.raises(RunStoppedError, match=r"4 steps in a row were not finite \(SOLVER\.MAX_BAD_STEPS 3"):
        step.bad_steps.report()


def test_a_good_step_between_bad_ones_starts_the_count_anew():
    step = make_run(max_bad_steps=2)
    for iteration, samples in enumerate([spoilt_samples(), named_samples(), spoilt_samples()], start=2):
        step(samples, iteration)
    step.bad_steps.report()
    assert step.bad_steps.state_dict() == {"in_a_row": 1, "total": 2}


def test_an_average_takes_no_share_of_a_bad_step():
    """Decay 0.9: first onto the weights, then 0.9 of the old and 0.1 of the new; where the step is bad it stays."""
    model = torch.nn.BatchNorm1d(1)
    ema = MovingAverage(model, 0.9)
    found = []
    for value, good in ((7.0, False), (1.0, True), (5.0, False), (2.0, True)):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update_parameters(model, torch.tensor(good))
        found.append(ema.module.weight.item())
    assert found == pytest.approx([1.0, 1.0, 1.0, 1.1])
    assert ema.n_averaged == 2
