# SPDX-License-Identifier: Apache-2.0
"""What the README and the LazyConfigs of version 0.1 imported goes on working, until version 1.0."""

import importlib

import pytest

import cpvt_det.build
import cpvt_det.builders
import cpvt_det.layers


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("cpvt_det.build", "cpvt_det.builders", ["build_criterion", "build_detector", "build_train_loader", "load_splits"]),
        ("cpvt_det.build", "cpvt_det.checkpoint.trained", ["load_trained", "Trained"]),
        ("cpvt_det.layers", "cpvt_det.position", ["PEGDetection", "POSITION_REGISTRY", "register_position", "build_position"]),
        ("cpvt_det.layers", "cpvt_det.ops", ["ms_deform_attn"]),
        ("cpvt_det.layers.position", "cpvt_det.position", ["build_position", "SineEncoding", "PEGEncoding", "LearnedEncoding"]),
        (
            "cpvt_det.models",
            "cpvt_det.models",
            ["DETR", "DeformableDETR", "DeformableTransformer", "ResNetBackbone", "Transformer"],
        ),
    ],
)
def test_old_names_are_the_new_things(old, new, names):
    for name in names:
        assert getattr(importlib.import_module(old), name) is getattr(importlib.import_module(new), name)


def test_the_old_name_of_build_schedule():
    assert cpvt_det.build.build_length is cpvt_det.builders.build_schedule


def test_a_name_that_never_was_is_refused():
    with pytest.raises(AttributeError, match=r"module 'cpvt_det.layers' has no attribute 'PEG'"):
        cpvt_det.layers.PEG  # noqa: B018
