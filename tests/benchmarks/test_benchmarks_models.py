# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of whole models: equal work of every peer, cases, profile, scaling. Never a speed."""

import fnmatch
import functools
import json
import os

import pytest
import torch
from click.testing import CliRunner

from benchmarks import at_best, models, peers, profile_step, scaling
from benchmarks.equal import difference
from benchmarks.harness import Plan
from benchmarks.run import main
from benchmarks.suites import Options, model
from cpvt_det.checkpoint import convert_state_dict

pytestmark = pytest.mark.usefixtures("quiet_machine")

TINY_RECIPES = {name: models.Recipe(name, channels=32, layers=2, queries=5, classes=91) for name in ("DETR", "Deformable-DETR")}

TINY_DINO = models.Recipe("DINO", channels=32, layers=2, queries=5, two_stage=True, dropout=0.0)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A quarter of the ResNet's channels, ours and that of transformers: a full one has 94 MB, and there are up to seven."""
    load, width = models.load_cfg, ["MODEL.BACKBONE.WIDTH", "16"]
    monkeypatch.setattr(models, "load_cfg", lambda path, words: load(path, [*words, *width]))
    for name, value in {"embedding_size": 16, "hidden_sizes": [64, 128, 256, 512]}.items():
        monkeypatch.setitem(models.HF_RESNET, name, value)


def test_without_chance_a_step_of_dino_is_the_same_twice_and_its_noise_comes_back():
    shape = model.Shape(TINY_DINO, (64, 128), 2, "training step")
    batch, targets = model.make_inputs(shape, "cpu")
    ours = models.our_model(TINY_DINO)
    contender = model.make_contender(shape, batch, targets, "cpvt_det", ours)
    first, second = contender.check(), contender.check()
    assert all(torch.equal(first[name], second[name]) for name in ("logits", "boxes", "loss", "gradient_norm"))
    assert ours.module.queries.denoising.label_noise == 0.5 and ours.module.queries.denoising.box_noise == 1.0
    assert contender.call()[2] != contender.call()[2]
    heads = [head.state_dict() for head in ours.module.class_embed[: TINY_DINO.layers]]
    assert torch.equal(heads[0]["weight"], heads[1]["weight"])


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
        with models.without_chance(module, 0.5):
            assert dropouts(module) == {0.0}
        assert dropouts(module) == {0.5}


def dropouts(module):
    found = {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)}
    names = ("dropout", "attention_dropout", "activation_dropout")
    values = [getattr(part, name, None) for part in module.modules() for name in names]
    return found | {value for value in values if isinstance(value, float)}


@pytest.mark.parametrize(("capability", "has_bf16"), [("AVX2", False), ("AVX512", True), ("AVX512_VNNI", True), ("DEFAULT", False)])
def test_bf16_is_measured_where_the_processor_has_its_products(capability, has_bf16, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert model.has_bf16("cpu") is has_bf16
    assert model.has_bf16("cuda")


@pytest.mark.parametrize(("name", "has_bf16"), [("DETR", True), ("Deformable-DETR", False)])
def test_models_of_one_recipe_do_the_same_work_and_peg_is_told_apart(name, has_bf16, tmp_path, small_limits, monkeypatch):
    monkeypatch.setattr(model, "has_bf16", lambda device: has_bf16)
    monkeypatch.setattr(model, "IMAGES", {"quick": (64, 128)})
    monkeypatch.setattr(model, "SMALL", (TINY_RECIPES[name],))
    monkeypatch.setattr(model, "PLANS", {"quick": Plan(warm_up=0, rounds=1, most_rounds=1, seconds=0)})
    monkeypatch.setattr(peers, "IMPORTED", ())
    words = ["--suite", "model", "--quick", "--case", f"{name}-R50*training step", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (case,) = json.loads((tmp_path / "model_cpu.json").read_text())["cases"]
    assert case["left_out"].keys() == {"official", "transformers"} | ({"bf16"} if not has_bf16 else set())
    differences = {row["name"]: row["difference"] for row in case["rows"]}
    assert differences["cpvt_det"] == 0
    assert "cpvt_det, padding masked" not in differences  # nothing is padded
    assert differences["cpvt_det PEG"] is None
    assert ("cpvt_det PEG bf16" in differences) is has_bf16
    assert differences.get("cpvt_det PEG bf16") is None
    assert model.PEG in result.output


def test_detr_of_transformers_does_our_work(small_limits, monkeypatch):
    """Its own loss over all layers, which are taken with hooks."""
    pytest.importorskip("transformers")
    shape = model.Shape(TINY_RECIPES["DETR"], (64, 128), 2, "training step")
    work = model.make_work(shape, Options(peers={"transformers": None}))
    by_name = {contender.name: contender for contender in work.contenders}
    assert [name for name, contender in by_name.items() if contender.peer] == ["transformers", "transformers, channels last"]
    for name in ("cpvt_det", "transformers, channels last"):
        assert difference(by_name[name].output(), by_name["transformers"].output()) < 1e-4


@pytest.mark.parametrize("passes", model.PASSES)
@pytest.mark.parametrize("name", TINY_RECIPES)
def test_padded_batches_are_equal_work_and_our_default_is_other_work(name, passes, small_limits, monkeypatch):
    """With peers that are ours again: the public ones are not everywhere."""
    monkeypatch.setattr(model, "has_bf16", lambda device: True)
    recipe = TINY_RECIPES[name]
    for sizes, padded in zip(model.PADDED, ("29 %", "50 %"), strict=True):
        shape = model.Shape(recipe, model.CANVAS, 2, passes, sizes)
        assert shape.canvas == model.CANVAS
        assert shape.name == f"{name}-R50 640x640 b2, {padded} padded, {passes}"
        small = shape.at((128, 128))
        assert (small.canvas, small.image) == ((128, 128), "128x128")
        batch, _ = model.make_inputs(small, "cpu")
        assert float(batch.padding_mask.float().mean()) == pytest.approx(small.padding)
        assert small.padding == pytest.approx(shape.padding, abs=0.01)
        by_name = {contender.name: contender for contender in model.make_work(small, Options()).contenders}
        halves = {"cpvt_det bf16", "cpvt_det PEG bf16"} if padded == "29 %" else set()
        assert by_name.keys() == {"cpvt_det", "cpvt_det, padding masked", "cpvt_det PEG"} | halves
        shipped = by_name["cpvt_det, padding masked"]
        assert shipped.other_work == model.MASKED
        assert difference(shipped.output(), by_name["cpvt_det"].output()) > 1e-3


@pytest.mark.parametrize("name", TINY_RECIPES)
def test_transformers_does_our_work_on_padded_batches(name):
    pytest.importorskip("transformers")
    shape = model.Shape(TINY_RECIPES[name], model.CANVAS, 2, "inference", model.PADDED[0]).at((128, 128))
    work = model.make_work(shape, Options(peers={"transformers": None}))
    by_name = {contender.name: contender for contender in work.contenders}
    for other in ("cpvt_det", "transformers, channels last"):
        assert difference(by_name[other].output(), by_name["transformers"].output()) < work.tolerance


class Attentive(torch.nn.Module):
    """A convolution and attention that asks for weights, as in the official code."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, stride=2)  # weights of all pairs of cells, at stride 1, have 240 MB
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.seen = []

    def forward(self, images):
        x = self.convolution(images)
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        tokens = x.flatten(2).permute(2, 0, 1)
        attended, weights = self.attention(tokens, tokens, tokens)
        self.seen.append(weights is None)
        return attended, attended


def test_switches_of_a_peer_change_its_calls_and_not_its_answers():
    torch.manual_seed(0)
    module = Attentive()
    plain = models.Model(module, lambda batch: module(batch.images), None)
    batch, _ = model.make_inputs(model.Shape(TINY_RECIPES["DETR"], (64, 64), 2, "inference"), "cpu")
    expected = plain.predict(batch)
    fused = at_best.fused_attention(plain)
    answers = [fused.predict(batch), plain.predict(batch)]
    answers.append(at_best.fused_attention(at_best.channels_last(plain)).predict(batch))
    assert module.seen == [False, False, False, True, False, False, True, True]
    assert all(difference(answer, expected) < 1e-5 for answer in answers)
    assert "forward" not in vars(module.attention)


def test_rows_of_a_peer_at_its_best(monkeypatch):
    """Of the float32 ones all are peers: the fastest of them is what ours is compared with."""
    compiled = []
    monkeypatch.setattr(at_best, "compiled", lambda peer: compiled.append(peer) or peer)
    shape = model.Shape(TINY_RECIPES["DETR"], (64, 64), 1, "inference")

    def build():
        module = Attentive()
        return models.Model(module, lambda batch: module(batch.images), None)

    for everything, bf16 in ((False, True), (True, True), (True, False)):
        compiled.clear()
        make = functools.partial(model.make_contender, shape, *model.make_inputs(shape, "cpu"))
        found = at_best.at_best("official", build(), build, make, everything, bf16)
        names = ["official, channels last", "official, fused attention", "official at its best"]
        names += ["official, compiled"] * everything
        assert [one.name for one in found if one.peer] == names
        assert [one.name for one in found if not one.peer] == ["official bf16", "official at its best bf16"] * bf16
        assert [one.name for one in found if one.attempt] == ["official, compiled"] * everything
        assert len(compiled) == everything


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


def test_shares_of_two_processes_are_written_with_machine_and_versions(monkeypatch, tmp_path):
    rows = [{"detector": name, "1": 2.0, "2": two} for name in scaling.QUERIES for two in (3.0, 3.8, 3.6)]
    monkeypatch.setattr(scaling, "compare_processes", lambda rounds: rows)
    result = CliRunner().invoke(scaling.main, ["--processes", "--busy", "--output", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert "| DETR            | 2.000                 | 3.600                   |" in result.output
    assert result.output.count("0.75, 0.95, 0.90") == 2
    assert result.output.count("0.90 |") == 2
    (path,) = (tmp_path / "new").glob("processes_cpu*.json")
    content = json.loads(path.read_text())
    assert content["rows"] == rows
    assert content["command"] == "python benchmarks/scaling.py --processes --busy"
    assert {"busy", "commit", "machine", "versions"} < content.keys()
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# Two processes with DDP against one, cpu, 1 thread each\n\n`python benchmarks/scaling.py")
    assert "Measured with `--busy`" in text


@pytest.mark.parametrize("script", [profile_step, scaling])
def test_a_machine_with_other_work_is_refused(script, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    result = CliRunner().invoke(script.main, ["--output", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "the load average of the last minute is 1.5" in result.output
    assert not (tmp_path / "new").exists()


def test_a_step_is_profiled_operation_by_operation(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "IMAGES", {"cpu": (64, 64)})
    monkeypatch.setattr(model, "CANVAS", (64, 64))
    monkeypatch.setattr(model, "PADDED", (((64, 48), (48, 64)),))
    monkeypatch.setattr(model, "DETR", TINY_RECIPES["DETR"])
    monkeypatch.setattr(model, "DEFORMABLE", TINY_RECIPES["Deformable-DETR"])
    monkeypatch.setattr(model, "DINO", TINY_DINO)
    result = CliRunner().invoke(profile_step.main, ["--top", "3", "--busy", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.count("| operation | calls | share |") == 6
    assert len(result.output.splitlines()) == 6 * 8 - 1
    assert result.output.count("25 % padded, training step: ") == 3
    (path,) = tmp_path.glob("profile_cpu*.json")
    for case in json.loads(path.read_text())["cases"]:
        assert case["cpu_seconds"] > 0
        assert sum(row["share"] for row in case["rows"]) == pytest.approx(1)
        shares = [row["share"] for row in case["rows"]]
        assert shares == sorted(shares, reverse=True)
    assert result.output.strip() in path.with_suffix(".md").read_text()


def test_cases_of_models_are_unique_and_default_is_a_part_of_all():
    for device in ("cpu", "cuda"):
        default, everything = ([shape.name for shape in model.shapes(size, device)] for size in ("default", "all"))
        assert len(set(everything)) == len(everything)
        assert set(default) <= set(everything)
        assert not any(shape.padding for shape in model.shapes("all", device) if shape.recipe.two_stage)
    for recipe in (model.DETR, model.DEFORMABLE):
        assert {shape.batch for shape in model.shapes("default", "cuda") if shape.recipe == recipe} == {1, 8}


def test_cases_can_be_chosen_by_detector_and_by_padding():
    names = [case.name for case in model.cases(Options())]
    assert len(set(names)) == len(names)
    for pattern, count in (("*29 %*", 6), ("*50 %*", 6), ("DETR-R50*", 9), ("DETR-R50*50 %*inference", 1), ("DINO*", 7)):
        assert len(fnmatch.filter(names, pattern)) == count, pattern
    assert all(case.about.keys() == model.cases(Options())[0].about.keys() for case in model.cases(Options()))
    assert not model.padded_shapes("quick")
    with_detrex = [case.name for case in model.cases(Options(peers={"detrex": None}))]
    assert len(with_detrex) == len(names) + 3
    assert [name for name in with_detrex if name not in names] == fnmatch.filter(with_detrex, "detrex DINO-R50*")


def test_a_tiny_image_has_a_proposal_for_each_query():
    for shape in [*model.shapes("all", "cpu"), *model.padded_shapes("all")]:
        height, width = shape.tiny.canvas
        assert shape.tiny.recipe.queries <= sum(height // stride * (width // stride) for stride in (8, 16, 32, 64))
