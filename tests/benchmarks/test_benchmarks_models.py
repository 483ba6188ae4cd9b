# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of whole models: equal work of every peer, cases, profile, scaling. Never a speed."""

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks import models, peers, profile_step, scaling
from benchmarks.equal import difference
from benchmarks.harness import Plan
from benchmarks.run import main
from benchmarks.suites import Options, model
from cpvt_det.checkpoint import convert_state_dict

TINY_RECIPES = {name: models.Recipe(name, channels=32, layers=2, queries=5, classes=91) for name in ("DETR", "Deformable-DETR")}


@pytest.mark.parametrize(("name", "source"), [("DETR", "hf_detr"), ("Deformable-DETR", "hf_deformable_detr")])
def test_transformers_gets_our_weights_frozen_layers_and_dropout(name, source):
    pytest.importorskip("transformers")
    ours = models.our_model(TINY_RECIPES[name]).module
    theirs = models.hf_model(TINY_RECIPES[name], "cpu", ours.state_dict()).module
    state, converted = ours.state_dict(), convert_state_dict(theirs.state_dict(), source)
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], state[name]) for name in state)
    sizes = [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (ours, theirs)]
    assert sizes[0] == sizes[1]
    for module in (ours, theirs):
        models.set_dropout(module, 0.25)
        with models.without_dropout(module, 0.5):
            assert dropouts(module) == {0.0}
        assert dropouts(module) == {0.5}


def dropouts(module):
    found = {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)}
    names = ("dropout", "attention_dropout", "activation_dropout")
    values = [getattr(part, name, None) for part in module.modules() for name in names]
    return found | {value for value in values if isinstance(value, float)}


@pytest.mark.parametrize("name", TINY_RECIPES)
def test_models_of_one_recipe_do_the_same_work_and_peg_is_told_apart(name, tmp_path, small_limits, monkeypatch):
    monkeypatch.setattr(model, "IMAGES", {"quick": (64, 128)})
    monkeypatch.setattr(model, "SMALL", (TINY_RECIPES[name],))
    monkeypatch.setattr(model, "PLANS", {"quick": Plan(warm_up=0, rounds=1, most_rounds=1, seconds=0)})
    monkeypatch.setattr(peers, "IMPORTED", ())
    words = ["--suite", "model", "--quick", "--case", f"{name}*training step", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (case,) = json.loads((tmp_path / "model_cpu.json").read_text())["cases"]
    assert case["left_out"].keys() == {"official", "transformers"}
    differences = {row["name"]: row["difference"] for row in case["rows"]}
    assert differences["cpvt_det, padding masked"] < 1e-4
    assert differences["cpvt_det PEG"] is differences["cpvt_det PEG bf16"] is None
    assert model.PEG in result.output


def test_detr_of_transformers_does_our_work(small_limits, monkeypatch):
    """Its own loss over all layers, which are taken with hooks."""
    pytest.importorskip("transformers")
    shape = model.Shape(TINY_RECIPES["DETR"], (64, 128), 2, "training step")
    work = model.make_work(shape, shape.size, Options(peers={"transformers": None}))
    by_name = {contender.name: contender for contender in work.contenders}
    assert [name for name, contender in by_name.items() if contender.peer] == ["transformers"]
    assert difference(by_name["cpvt_det"].output(), by_name["transformers"].output()) < 1e-4


def test_steps_in_a_process_of_their_own_tell_their_time_and_output():
    case = model.make_kept_memory_case(model.Shape(model.DETR, (64, 64), 1, "training step"))
    run = case.build().contenders[1].call()
    assert run.sample.cpu > 0
    assert run.output.keys() == {"logits", "boxes", "loss", "gradient_norm"}


@pytest.mark.parametrize("passes", model.PASSES)
@pytest.mark.parametrize(("detector", "tokens"), [("DETR", 8), ("Deformable-DETR", 128 + 32 + 8 + 2)])
def test_models_and_their_encoders_are_timed_with_sine_and_with_peg(detector, tokens, passes):
    shape = model.Shape(TINY_RECIPES[detector], (64, 128), 1, passes)
    sine, peg = model.make_encoding_work(shape, "encoder of ", Options()).contenders
    assert sine.call().shape == peg.call().shape == (1, tokens, 32)
    assert peg.other_work
    assert not sine.other_work
    whole = model.make_encoding_work(shape, "", Options()).contenders
    assert whole[0].call()[0].shape == whole[1].call()[0].shape == (1, 5, 91 + (detector == "DETR"))
    for detectors in ([one.call.args[0] for one in (sine, peg)], [one.call.args[0].module for one in whole]):
        assert [any(True for _ in one.position.parameters()) for one in detectors] == [False, True]


def test_shares_of_two_processes_are_written_with_machine_and_versions(tmp_path, capsys):
    rows = [{"detector": name, "1": 2.0, "2": two} for name in scaling.QUERIES for two in (3.0, 3.8, 3.6)]
    scaling.write(tmp_path / "new" / "processes_cpu", "benchmarks/scaling.py --processes", rows, scaling.shares(rows))
    assert "| DETR            | 2.000                 | 3.600                   |" in (table := capsys.readouterr().out)
    assert table.count("0.75, 0.95, 0.90") == 2
    assert table.count("0.90 |") == 2
    content = json.loads((tmp_path / "new" / "processes_cpu.json").read_text())
    assert content["rows"] == rows
    assert {"command", "machine", "versions"} < content.keys()
    assert "cpvt_det" in (tmp_path / "new" / "processes_cpu.md").read_text()


def test_a_step_is_profiled_operation_by_operation(monkeypatch):
    monkeypatch.setattr(model, "IMAGES", {"cpu": (64, 64)})
    monkeypatch.setattr(model, "DETR", TINY_RECIPES["DETR"])
    monkeypatch.setattr(model, "DEFORMABLE", TINY_RECIPES["Deformable-DETR"])
    result = CliRunner().invoke(profile_step.main, ["--top", "3"])
    assert result.exit_code == 0, result.output
    assert result.output.count("| operation | calls | share |") == 2
    assert len(result.output.splitlines()) == 2 * 8


def test_cases_of_models_are_unique_and_default_is_a_part_of_all():
    for device in ("cpu", "cuda"):
        default, everything = ([shape.name for shape in model.shapes(size, device)] for size in ("default", "all"))
        assert len(set(everything)) == len(everything)
        assert set(default) <= set(everything)
        assert not any(shape.is_padded for shape in model.shapes("all", device) if shape.recipe.two_stage)
    for recipe in (model.DETR, model.DEFORMABLE):
        assert {shape.batch for shape in model.shapes("default", "cuda") if shape.recipe == recipe} == {1, 8}
