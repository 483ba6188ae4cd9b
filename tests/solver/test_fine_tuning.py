# SPDX-License-Identifier: Apache-2.0
"""Parts that are frozen, and learning rates of parts."""

import pytest
import torch
from test_solver import make_samples, make_step, tiny_cfg

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.models.image_model import belongs_to_part
from cpvt_det.solver.optimizer import parameter_groups


def detector_of(**more):
    torch.manual_seed(0)
    cfg = tiny_cfg(**more)
    return cfg, builders.build_detector(cfg)


@pytest.mark.parametrize("architecture", ["CPVTDetr", "CPVTDeformableDetr"])
@pytest.mark.parametrize("parts", [["backbone"], ["encoder", "position"], ["transformer.decoder", "class_embed"]])
def test_training_leaves_frozen_parts_as_they_were_to_the_bit(architecture, parts):
    """Weights and the statistics of batch norms alike; all other weights move."""
    more = {"MODEL__DETECTOR__NUM_LEVELS": 1} if architecture == "CPVTDeformableDetr" else {}
    cfg, detector = detector_of(MODEL__META_ARCHITECTURE=architecture, MODEL__FREEZE=parts, **more)
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    step = make_step(cfg, detector.train())
    for iteration in range(2):
        step(make_samples(4), iteration)
    trained = {name for name, _ in detector.named_parameters()}
    changed = {name for name, value in detector.state_dict().items() if not torch.equal(value, before[name])}
    frozen = {name for name in before if any(belongs_to_part(name, part) for part in parts)}
    assert frozen and changed & frozen == set()
    assert trained - frozen - changed - {"transformer.level_embed"} == set()  # met by weights that start at 0, and here stay


def test_frozen_batch_norms_stay_in_evaluation_through_changes_of_mode():
    detector = detector_of(MODEL__FREEZE=["backbone"])[1]
    assert detector.backbone.body.bn1.training is False
    detector.eval().train()
    assert detector.backbone.body.bn1.training is False
    assert detector.transformer.encoder.training is True


def test_a_part_is_a_whole_name_and_what_is_in_it():
    assert belongs_to_part("transformer.encoder.layers.0.norm1.weight", "encoder.layers.0")
    assert belongs_to_part("transformer.encoder.layers.0.norm1.weight", "transformer.encoder")
    assert not belongs_to_part("transformer.encoder.layers.10.norm1.weight", "encoder.layers.1")
    assert not belongs_to_part("decoder_position.weight", "position")


def test_unknown_parts_list_those_there_are():
    with pytest.raises(UnknownNameError, match=r"'encode' \(did you mean 'encoder'\?\).*backbone.*class_embed.*encoder"):
        detector_of(MODEL__FREEZE=["encode"])
    cfg, detector = detector_of(SOLVER__LR_MULTIPLIERS=[["heads", 2.0]])
    with pytest.raises(UnknownNameError, match=r"part of the model \(learning rate\) 'heads'"):
        builders.build_optimizer(cfg, detector)


def test_factors_of_parts_in_parts_are_multiplied():
    detector = detector_of()[1]
    factors = [("encoder", 0.5), ("encoder.layers.0.norm1", 0.1), ("backbone.body.conv1", 0.0), ("class_embed", 3)]
    groups = parameter_groups(detector, 1e-4, 2e-5, 1e-4, lr_multipliers=factors)
    rate = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    layer = detector.transformer.encoder.layers[0]
    assert rate[id(layer.norm1.weight)] == pytest.approx(5e-6)
    assert rate[id(layer.norm2.weight)] == pytest.approx(5e-5)
    assert rate[id(detector.backbone.body.conv1.weight)] == 0
    assert rate[id(detector.backbone.body.bn1.weight)] == 2e-5
    assert rate[id(detector.class_embed.bias)] == pytest.approx(3e-4)
    assert rate[id(detector.bbox_embed.layers[0].bias)] == 1e-4


@pytest.mark.parametrize("entry", ["encoder", ["encoder"], ["encoder", "fast"], [0.1, "encoder"], ["encoder", -1.0]])
def test_factors_that_are_no_pairs_are_refused(entry):
    cfg, detector = detector_of(SOLVER__LR_MULTIPLIERS=[entry])
    with pytest.raises(ConfigError, match="SOLVER.LR_MULTIPLIERS must contain pairs"):
        builders.build_optimizer(cfg, detector)


def test_nothing_to_train_is_refused():
    parts = ["backbone", "input_proj", "position", "transformer", "query_embed", "class_embed", "bbox_embed"]
    cfg, detector = detector_of(MODEL__FREEZE=parts)
    with pytest.raises(ConfigError, match="SOLVER"):
        builders.build_optimizer(cfg, detector)
