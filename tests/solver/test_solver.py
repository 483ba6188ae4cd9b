# SPDX-License-Identifier: Apache-2.0
"""Parameter groups, schedule, moving average and the training step."""

import copy

import pytest
import torch
from tiny import DINO, MODEL, random_config

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import Targets
from cpvt_det.config import get_cfg, merge_overrides
from cpvt_det.losses import TrainingModel
from cpvt_det.models.denoising import ContrastiveDenoising
from cpvt_det.solver.optimizer import LRSchedule, MovingAverage, TrainingSchedule, parameter_groups
from cpvt_det.solver.step import StepOptions, TrainStep


def tiny_cfg(**more):
    cfg = get_cfg()
    pairs = {**MODEL, "MODEL.NUM_CLASSES": 3, **{key.replace("__", "."): value for key, value in more.items()}}
    merge_overrides(cfg, [str(word) for pair in pairs.items() for word in pair])
    return cfg


def make_samples(count, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        height, width = 24 + 5 * number, 40 - 3 * number
        boxes = torch.rand(number % 3, 4, generator=generator) * 0.4 + 0.2  # some images have none
        labels = torch.randint(3, (number % 3,), generator=generator)
        image = torch.randint(256, (3, height, width), generator=generator).to(dtype)
        samples.append({"image": image, "targets": Targets(labels, boxes.to(torch.float64))})
    return samples


def make_step(cfg, detector, iterations=10, seed=5, **options):
    length = TrainingSchedule(iterations, (), 0, 0, "")
    optimizer = builders.build_optimizer(cfg, detector)
    model = TrainingModel(detector, builders.build_criterion(cfg))
    return TrainStep(model, optimizer, LRSchedule(length), StepOptions(**options), seed)


def test_groups_hold_every_trained_parameter_once_at_its_rate():
    cfg = tiny_cfg()
    detector = builders.build_detector(cfg)
    groups = parameter_groups(detector, 1e-4, 2e-5, 1e-4)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len({id(p) for p in grouped}) == len(grouped) == len(list(detector.parameters()))
    of_backbone = {id(p) for p in detector.backbone.parameters()}
    for group in groups:
        assert group["weight_decay"] == 1e-4  # the recipe: on all parameters
        for parameter in group["params"]:
            assert group["lr"] == (2e-5 if id(parameter) in of_backbone else 1e-4)


def test_the_key_for_norms_reaches_their_parameters_alone():
    detector = builders.build_detector(tiny_cfg())
    groups = parameter_groups(detector, 1.0, 1.0, 0.1, norm_weight_decay=0.0)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    peg = detector.position.pegs["0"][0]
    assert decay[id(peg.conv.weight)] == 0.1
    assert decay[id(peg.norm.weight)] == 0.0
    assert decay[id(detector.transformer.encoder.layers[0].norm1.bias)] == 0.0
    assert decay[id(detector.backbone.body.bn1.weight)] == 0.0
    assert decay[id(detector.class_embed.weight)] == 0.1


def test_biases_and_embeddings_have_a_weight_decay_of_their_own():
    """DeiT's: nothing for biases, norms, tokens and tables, all of which are named here; the rest are matrices and kernels."""
    vit = {"NAME": "tnt_small", "STAGES": (4,), "NORM": "FrozenBN", "FREEZE_AT": 2}
    vit |= {"EMBED_DIM": 16, "DEPTH": 1, "NUM_HEADS": 2, "NUM_TOKENS": 2}
    keys = {f"MODEL__BACKBONE__{key}": value for key, value in vit.items()}
    keys |= {f"SOLVER__WEIGHT_DECAY_{kind}": 0.0 for kind in ("NORM", "BIAS", "EMBED")}
    cfg = random_config(**keys, MODEL__POSITION__NAME="learned")
    detector = builders.build_detector(cfg)
    decay = {
        id(p): group["weight_decay"] for group in builders.build_optimizer(cfg, detector).param_groups for p in group["params"]
    }
    decayed = {name for name, p in detector.named_parameters() if decay[id(p)] == cfg.SOLVER.WEIGHT_DECAY}
    without = {name for name, p in detector.named_parameters() if decay[id(p)] == 0}
    assert decayed | without == {name for name, _ in detector.named_parameters()}
    embeddings = {name for name in without if dict(detector.named_parameters())[name].ndim > 1}
    own = ("special_tokens", "special_positions", "pixel_table", "position.table")
    queries = ("query_embed.weight", "position.row_embed.weight", "position.col_embed.weight")
    assert embeddings == {*(f"backbone.{name}" for name in own), *queries}
    assert all(dict(detector.named_parameters())[name].ndim > 1 for name in decayed)


def test_the_recipe_is_184823_iterations_of_coco():
    """50 x 118,287 / 32 = 184,823.4 and 40 x 118,287 / 32 = 147,858.75."""
    length = builders.build_schedule(get_cfg(), 118_287)
    assert (length.max_iter, length.steps) == (184_823, (147_859,))
    assert "118287 images" in length.arithmetic
    rate = LRSchedule(length)
    assert [rate.factor(i) for i in (0, 147_858, 147_859, 184_822)] == pytest.approx([1, 1, 0.1, 0.1])


def test_the_last_period_ends_with_the_run():
    """3 epochs of 10 images / 8 = 3.75 iterations: 4; 2 of 41 = 10.25: 11, since 10 twice ends before the run."""
    length = builders.build_schedule(tiny_cfg(SOLVER__EPOCHS=6.0, SOLVER__IMS_PER_BATCH=8, TEST__EVAL_EPOCHS=3.0), 10)
    assert (length.max_iter, length.eval_period) == (8, 4)
    longer = tiny_cfg(SOLVER__EPOCHS=4.0, SOLVER__IMS_PER_BATCH=8, TEST__EVAL_EPOCHS=2.0)
    assert builders.build_schedule(longer, 41).eval_period == 11


def test_iterations_count_where_epochs_are_zero():
    cfg = tiny_cfg(SOLVER__EPOCHS=0, SOLVER__MAX_ITER=70, SOLVER__STEPS=(50,), SOLVER__IMS_PER_BATCH=2)
    length = builders.build_schedule(cfg, num_images=20)
    assert (length.max_iter, length.steps) == (70, (50,))
    assert "7.0 epochs" in length.arithmetic


def test_keys_of_the_other_way_to_give_a_length_are_named(caplog):
    caplog.set_level("INFO", logger="cpvt_det")
    builders.build_schedule(tiny_cfg(SOLVER__EPOCHS=2.0, SOLVER__WARMUP_ITERS=3), num_images=20)
    assert caplog.messages == ["SOLVER.EPOCHS 2 sets the length; these keys are not used: SOLVER.WARMUP_ITERS 3"]


def test_warm_up_rises_linearly_and_cosine_ends_at_zero():
    rate = LRSchedule(TrainingSchedule(100, (), 3, 0, ""), "cosine")
    assert rate.factor(0) == pytest.approx(0.25)
    assert rate.factor(1) == pytest.approx(0.5, rel=1e-2)
    assert rate.factor(50) == pytest.approx(0.5, abs=1e-6)
    assert rate.factor(99) < 1e-3


@pytest.mark.parametrize("length", [TrainingSchedule(0, (), 0, 0, ""), TrainingSchedule(10, (5, 5), 0, 0, "")])
def test_a_length_without_sense_is_refused(length):
    with pytest.raises(ValueError, match=r"SOLVER\.EPOCHS or SOLVER\.MAX_ITER must be above 0|must be in ascending order"):
        LRSchedule(length)


def test_unknown_schedule_lists_the_known():
    with pytest.raises(UnknownNameError, match="cosine, step"):
        LRSchedule(TrainingSchedule(10, (), 0, 0, ""), "stair")


@pytest.mark.parametrize("position", ["sine", "learned"])
def test_accumulated_parts_give_the_step_of_the_whole(position):
    """With norms that do not look at the batch, five images in 1, 2 or 5 parts: the same losses and gradients in float64."""
    results = []
    for parts in (1, 2, 5):
        cfg = tiny_cfg(MODEL__POSITION__NAME=position, MODEL__BACKBONE__NORM="GN", MODEL__DETR__DROPOUT=0.0)
        torch.manual_seed(0)
        detector = builders.build_detector(cfg).double()
        step = make_step(cfg, detector, accumulate=parts, clip_norm=None)
        record = step(make_samples(5, torch.float64), 0)
        gradient = torch.cat([p.grad.flatten() for p in detector.parameters()])
        results.append((record["total_loss"], record["grad_norm"], gradient))
    for total, norm, gradient in results[1:]:
        torch.testing.assert_close(total, results[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm, results[0][1], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient, results[0][2], rtol=1e-8, atol=1e-10)


def test_the_gradient_is_clipped_by_the_norm_of_all_parameters():
    cfg = tiny_cfg()
    detector = builders.build_detector(cfg)
    record = make_step(cfg, detector, clip_norm=0.1)(make_samples(3), 0)
    norm = torch.cat([p.grad.flatten() for p in detector.parameters() if p.grad is not None]).norm()
    assert record["grad_norm"] > 0.1
    assert norm == pytest.approx(0.1, rel=1e-4)


def test_total_is_the_sum_of_the_losses_and_of_no_metric():
    cfg = tiny_cfg()
    record = make_step(cfg, builders.build_detector(cfg))(make_samples(4), 0)
    losses = record["loss_class"] + record["loss_l1"] + record["loss_giou"]
    assert record["total_loss"].item() == pytest.approx(losses.item(), rel=1e-6)
    assert {"metric_class_error", "metric_cardinality_error", "grad_norm"} <= record.keys()


def test_dropout_follows_from_seed_and_iteration_alone():
    cfg = tiny_cfg(MODEL__DETR__DROPOUT=0.5)
    detector = builders.build_detector(cfg)
    totals = []
    for waste, seed in ((0, 5), (3, 5), (0, 6)):
        torch.rand(waste)
        totals.append(make_step(cfg, copy.deepcopy(detector), seed=seed)(make_samples(3), 4)["total_loss"].item())
    assert totals[0] == totals[1] != totals[2]


def test_bf16_autocast_trains_and_keeps_boxes_in_float32():
    cfg = tiny_cfg()
    detector = builders.build_detector(cfg)
    plain = make_step(cfg, copy.deepcopy(detector))(make_samples(3), 0)["total_loss"]
    record = make_step(cfg, detector, amp_dtype=torch.bfloat16)(make_samples(3), 0)
    assert record["total_loss"].dtype == torch.float32
    assert record["total_loss"].item() == pytest.approx(plain.item(), rel=0.05)
    assert record["total_loss"] != plain


def test_ema_is_the_recurrence():
    model = torch.nn.Linear(2, 2)
    ema = MovingAverage(model, 0.9)
    expected = None
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(1.0)
        ema.update_parameters(model)
        weight = model.weight.detach().clone()
        expected = weight if expected is None else 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(ema.module.weight, expected)


def test_a_step_trains_every_parameter():
    cfg = tiny_cfg()
    torch.manual_seed(0)
    detector = builders.build_detector(cfg)
    before = {name: p.detach().clone() for name, p in detector.named_parameters()}
    step = make_step(cfg, detector)
    for iteration in range(2):
        step(make_samples(4), iteration)
    unchanged = [name for name, p in detector.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"SOLVER__BASE_LR": 2e-5}),  # the backbone's: one group instead of two
        ({"SOLVER__LR_MULTIPLIERS": [["class_embed", 3.0]]}, {"SOLVER__LR_MULTIPLIERS": [["bbox_embed", 3.0]]}),
        ({}, {"MODEL__BACKBONE__FREEZE_AT": 5}),
        ({"MODEL__BACKBONE__FREEZE_AT": 5}, {}),
    ],
)
def test_each_parameter_gets_its_own_state_back_whatever_its_group(first, then):
    torch.manual_seed(0)
    cfg = tiny_cfg(**first)
    before = make_step(cfg, builders.build_detector(cfg))
    before(make_samples(4), 0)
    cfg = tiny_cfg(**then)
    after = make_step(cfg, builders.build_detector(cfg))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    states = []
    for step in (before, after):
        parameters = dict(step.training_model.detector.named_parameters())
        states.append({name: step.optimizer.state[p]["exp_avg"] for name, p in parameters.items() if p in step.optimizer.state})
    common = states[0].keys() & states[1].keys()
    assert len(common) > 20 and all(torch.equal(states[0][name], states[1][name]) for name in common)
    after(make_samples(4), 1)
    trained = [p for p in after.training_model.detector.parameters() if p.requires_grad]
    assert len(after.optimizer.state) == len(trained)


def test_a_resumed_run_has_the_weight_decay_of_its_config():
    before, after = (make_step(cfg, builders.build_detector(cfg)) for cfg in (tiny_cfg(), tiny_cfg(SOLVER__WEIGHT_DECAY=0.5)))
    before(make_samples(4), 0)
    after.load_state_dict(before.state_dict())
    assert {group["weight_decay"] for group in after.optimizer.param_groups} == {0.5}


def test_optimizer_steps_as_plain_adamw():
    """One fused step against the formula: with the first step m/sqrt(v) = sign(g), w - lr * wd * w - lr * sign(g)."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.load_state_dict({"weight": torch.tensor([[1.0, -2.0]])})
    optimizer = builders.build_optimizer(tiny_cfg(SOLVER__BASE_LR=0.1, SOLVER__WEIGHT_DECAY=0.5), model)
    assert optimizer.defaults["fused"]
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1 - 0.05 - 0.1, -2 + 0.1 + 0.1]]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"SOLVER__CLIP_NORM": -1.0}, "0 for no clipping"),
        ({"SOLVER__AMP__DTYPE": "int8"}, "bfloat16, float16"),
        ({"SOLVER__ACCUMULATE": 0}, "at least 1"),
        ({"SOLVER__SCHEDULE": "stair"}, "cosine"),
        ({"SOLVER__EPOCHS": 0, "SOLVER__MAX_ITER": 0}, "nothing to train"),
    ],
)
def test_settings_that_cannot_be_had_name_the_key(more, match):
    cfg = tiny_cfg(**more)
    detector = builders.build_detector(cfg)
    model = TrainingModel(detector, builders.build_criterion(cfg))
    with pytest.raises(ConfigError, match=match):
        builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), builders.build_schedule(cfg, 10), 0)


def test_noise_of_denoising_follows_seed_iteration_and_process(monkeypatch):
    """And nothing else: not what was drawn before a step."""
    drawn = []
    draw = ContrastiveDenoising.draw_noise
    monkeypatch.setattr(ContrastiveDenoising, "draw_noise", lambda *args: drawn.append(draw(*args)) or drawn[-1])

    def noise(seed, iteration, rank=0):
        torch.manual_seed(1)
        detector = builders.build_detector(tiny_cfg(**DINO)).train()
        torch.manual_seed(len(drawn))
        monkeypatch.setattr("cpvt_det.common.distributed.rank", lambda: rank)
        make_step(tiny_cfg(**DINO), detector, seed=seed)(make_samples(3), iteration)
        return drawn[-1][2]

    first = noise(5, 3)
    assert first.numel() > 8
    assert torch.equal(noise(5, 3), first)
    assert not any(torch.equal(noise(*other), first) for other in ((6, 3), (5, 4), (5, 3, 1)))
