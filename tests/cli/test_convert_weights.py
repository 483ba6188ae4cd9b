# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det convert-weights``: what it writes, from which files and folders, and what it refuses."""

import argparse
import re

import safetensors.torch
import torch
from click.testing import CliRunner
from test_checkpoint import detector, hf_folder, same, to_facebook

from cpvt_det.checkpoint import load_weights
from cpvt_det.checkpoint.weights import read_weights
from cpvt_det.cli.convert_weights import convert_weights
from cpvt_det.common.class_names import COCO_ROWS
from cpvt_det.common.errors import RunStoppedError, WeightsError


def convert(*arguments):
    return CliRunner().invoke(convert_weights, [str(argument) for argument in arguments])


def test_the_command_writes_a_checkpoint_that_tells_its_classes(tmp_path):
    official = detector(num_classes=91)
    args = argparse.Namespace(lr=1e-4)
    torch.save({"model": to_facebook(official.state_dict()), "args": args, "epoch": 3}, tmp_path / "official.pth")
    result = convert(tmp_path / "official.pth", tmp_path / "ours.pth")
    assert result.exit_code == 0, result.output
    assert "of facebook_detr, 91 class rows" in result.output
    written = torch.load(tmp_path / "ours.pth", weights_only=True)
    assert same(written["model"], official.state_dict())
    assert written["cpvt_det"]["classes"] == {"ids": list(COCO_ROWS.ids), "names": list(COCO_ROWS.names)}
    model = detector(num_classes=91, seed=1)
    assert not load_weights(model, tmp_path / "ours.pth").is_partial
    assert same(model.state_dict(), official.state_dict())
    again, source = read_weights(tmp_path / "ours.pth"), read_weights(tmp_path / "official.pth")
    assert (again.source, again.project, source.source, source.project) == (None, *3 * ["facebook_detr"])


def test_the_command_takes_a_folder_and_writes_bare_safetensors(tmp_path):
    model = detector()
    folder = hf_folder(tmp_path / "hub", model, None)
    result = convert(folder, tmp_path / "ours.safetensors")
    assert result.exit_code == 0, result.output
    assert "of hf_detr, classes unknown" in result.output
    written = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert same(dict(sorted(written.items())), dict(sorted(model.state_dict().items())))


def test_the_command_says_what_it_cannot_do(tmp_path):
    torch.save(detector().state_dict(), tmp_path / "ours.pth")
    torch.save(to_facebook(detector().state_dict()), tmp_path / "theirs.pth")
    cases = {
        ("ours.pth", "out.pth"): "is not a cpvt_det checkpoint",
        ("absent.pth", "out.pth"): "no weights file",
        ("theirs.pth", "no/folder/out.pth"): "cannot write",
    }
    for (source, output), message in cases.items():
        result = convert(tmp_path / source, tmp_path / output)
        assert isinstance(result.exception, (WeightsError, RunStoppedError))
        assert re.search(message, str(result.exception))
    assert not (tmp_path / "out.pth").exists()


def test_the_command_takes_the_average_out_of_a_run_with_one(tmp_path):
    plain, averaged = detector(), detector(seed=1)
    ema = {"n_averaged": torch.tensor(3), **{f"module.{name}": tensor for name, tensor in averaged.state_dict().items()}}
    node = {"classes": {"ids": [1, 2, 3], "names": ["a", "b", "c"]}, "ema": ema}
    torch.save({"model": plain.state_dict(), "cpvt_det": node}, tmp_path / "run.pth")
    result = convert(tmp_path / "run.pth", tmp_path / "averaged.pth")
    assert result.exit_code == 0, result.output
    assert same(torch.load(tmp_path / "averaged.pth", weights_only=True)["model"], averaged.state_dict())


def test_the_command_has_an_example_in_its_help():
    assert "cpvt-det convert-weights detr-r50" in convert("--help").output
