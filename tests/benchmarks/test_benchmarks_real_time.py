# SPDX-License-Identifier: Apache-2.0
"""The suite real_time: transformers' models and ours do the same work. Never a speed."""

import pytest
import torch

from benchmarks.harness import UnequalWorkError, assert_equal_work
from benchmarks.suites import Options, real_time
from cpvt_det.checkpoint import load_weights


def test_every_model_has_an_image_an_oblong_one_a_step_and_a_padded_step():
    cases = real_time.cases(Options(peers={"transformers": None}))
    assert [case.name for case in cases[:4]] == [
        "RT-DETRv2-R18 640x640 b1 inference",
        "RT-DETRv2-R18 640x480 b1 inference",
        "RT-DETRv2-R18 640x640 b2 training step",
        "RT-DETRv2-R18 640x640 b2, 29 % padded, training step",
    ]
    assert len({case.name for case in cases}) == len(cases) == 4 * len(real_time.SIZES)
    assert not any(case.left_out for case in cases)
    assert all("not installed" in case.left_out for case in real_time.cases(Options()))


@pytest.mark.parametrize("name", real_time.SIZES)
def test_ours_has_every_weight_of_transformers_model(name):
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    theirs = real_time.their_model(name, "cpu")
    ours = real_time.our_model(name, theirs.module, "sine", "cpu")
    report = load_weights(ours.module, theirs.module.state_dict())
    assert report.loaded and not report.is_partial, report.table()


def test_both_do_the_same_work_and_another_weight_is_found(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    monkeypatch.setattr(real_time, "compiled", lambda model: model)  # a minute
    shape = real_time.shapes("quick")[1]
    models = {}
    make = real_time.our_model
    monkeypatch.setattr(real_time, "our_model", lambda *words: models.setdefault(words[2], make(*words)))
    work = real_time.make_work("D-FINE-N", shape, Options())
    assert [contender.name for contender in work.contenders] == ["transformers", "cpvt_det", "cpvt_det PEG"]
    assert assert_equal_work(work)["cpvt_det"] < 1e-5
    logits, boxes, loss = work.contenders[1].call()
    assert logits.shape[0] == boxes.shape[0] == 2 and loss > 0
    assert all(parameter.grad is not None for parameter in models["sine"].module.class_embed.parameters())
    with torch.no_grad():
        models["sine"].module.class_embed[2].bias[3] += 1.0
    with pytest.raises(UnequalWorkError):
        assert_equal_work(work)
