# SPDX-License-Identifier: Apache-2.0
"""The suite classifier: timm's models and ours do the same work. Never a speed."""

from functools import partial

import pytest
import torch

from benchmarks.harness import UnequalWorkError, assert_equal_work
from benchmarks.suites import Options, classifier


def test_shapes():
    names = [shape.name for shape in classifier.shapes("default")]
    assert (
        len(names) == len(set(names)) == 8
        and names[0] == "DeiT-S b8 inference"
        and names[-1] == "TNT-S b8, unequal sizes, training step"
    )
    batch, labels = classifier.make_inputs(classifier.Shape("DeiT-S", 4, "inference", unequal=True), "cpu")
    assert batch.images.shape == (4, 3, 224, 224) and labels.shape == (4,)
    assert float(batch.padding_mask.float().mean()) == pytest.approx(0.21, abs=0.01)


@pytest.fixture
def shallow(monkeypatch):
    """Three layers of the twelve, of both: all, with gradients, have 350 MB."""
    timm = pytest.importorskip("timm")
    create, load = timm.create_model, classifier.load_cfg
    monkeypatch.setattr(timm, "create_model", partial(create, depth=3))
    monkeypatch.setattr(classifier, "load_cfg", lambda name, words: load(name, [*words, "MODEL.BACKBONE.DEPTH", "3"]))


@pytest.mark.parametrize("model", classifier.MODELS)
def test_ours_with_timm_s_weights_does_its_work_and_another_weight_is_found(model, shallow, monkeypatch):
    shape = classifier.Shape(model, 1, "training step")
    theirs, ours = classifier.make_models(model, "cpu")
    monkeypatch.setattr(classifier, "make_models", lambda *_: (theirs, ours))
    work = classifier.make_work(shape, Options())
    assert [contender.name for contender in work.contenders if contender.peer] == ["timm"]
    assert assert_equal_work(work)["cpvt_det"] < 1e-5
    assert set(work.contenders[0].output()) == {"loss", "logits", "gradient"}
    with torch.no_grad():
        ours.class_embed.bias[3] += 1.0
    with pytest.raises(UnequalWorkError):
        assert_equal_work(work)


def test_unequal_sizes_are_ours_alone(shallow):
    work = classifier.make_work(classifier.Shape("DeiT-S", 2, "inference", unequal=True), Options())
    assert [contender.name for contender in work.contenders] == ["cpvt_det, full canvas", "cpvt_det"] and "timm" in work.left_out
    full, padded = (contender.output() for contender in work.contenders)
    assert full.shape == padded.shape == (2, 1000) and not torch.allclose(full, padded)
