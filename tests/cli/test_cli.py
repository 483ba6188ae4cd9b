# SPDX-License-Identifier: Apache-2.0
"""The command line: help, exit codes, one line an error."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny import overrides

import cpvt_det
from cpvt_det.cli import COMMANDS, main
from cpvt_det.cli import train as train_module
from cpvt_det.training import launch as launching

ROOT = Path(__file__).resolve().parents[2]


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def train_words(drawn_coco, tmp_path, *words, **more):
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")
    return [
        "train",
        "--config-file",
        config,
        "--runner",
        "builtin",
        *words,
        *overrides(drawn_coco.files, tmp_path / "out", **more),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = call(command, "--help")
    assert result.exit_code == 0, result.output
    assert f"cpvt-det {command}" in result.output.split("Example")[1]


def test_version_and_list_of_commands():
    assert cpvt_det.__version__ in call("--version").output
    assert all(command in call("--help").output for command in COMMANDS)


def test_help_does_not_import_torch():
    code = "import sys; from cpvt_det.cli import main; main(['--help'], standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_train_then_eval(drawn_coco, tmp_path):
    result = call(*train_words(drawn_coco, tmp_path, "--num-gpus", 0))
    assert result.exit_code == 0, result.output
    words = ["--config-file", tmp_path / "out/config.yaml", "--runner", "builtin", "OUTPUT_DIR", tmp_path / "eval"]
    result = call("eval", tmp_path / "out/model_final.pth", *words)
    assert result.exit_code == 0, result.output
    results = [json.loads((tmp_path / folder / "results.json").read_text()) for folder in ("out", "eval")]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ((), {"MODEL__NUM_CLASSES": 9}, "the data has 3 classes"),
        ((), {"MODEL__NUM_CLASES": 9}, "did you mean 'MODEL.NUM_CLASSES'"),
        ((), {"SOLVER__BASE_LR": "fast"}, "SOLVER.BASE_LR"),
        (("--num-gpus", 64), {}, "--num-gpus 64"),
        (("--resum",), {}, "unknown option --resum"),
        (("--eval-only",), {"MODEL__WEIGHTS": "missing.pth"}, "missing.pth"),
        (("--eval-only", "--resume"), {}, "nothing to resume"),
    ],
)
def test_bad_input_is_one_line_and_code_2(drawn_coco, tmp_path, words, more, said):
    result = call(*train_words(drawn_coco, tmp_path, *words, **more))
    assert result.exit_code == 2
    line = result.stderr.strip().splitlines()[-1]
    assert said in line
    assert line.startswith("error: ")
    assert "Traceback" not in result.output


def test_a_missing_config_is_bad_input():
    result = call("train", "--config-file", "nowhere.yaml")
    assert result.exit_code == 2
    assert "no config file 'nowhere.yaml'" in result.output


def test_a_failed_run_is_one_line_and_code_1(drawn_coco, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck\nsecond line")

    monkeypatch.setattr(launching, "launch", fail)
    result = call(*train_words(drawn_coco, tmp_path))
    assert result.exit_code == 1
    assert result.output.strip() == "failed: RuntimeError: out of luck (--debug shows the traceback)"


def test_an_interrupted_run_exits_with_130(drawn_coco, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "launch", interrupt)
    assert call(*train_words(drawn_coco, tmp_path)).exit_code == 130


def test_debug_shows_the_traceback():
    command = [sys.executable, "tools/train_net.py", "--config-file", "nowhere.yaml"]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True, cwd=ROOT)
    assert plain.returncode == debug.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_debug_may_stand_anywhere(command):
    assert "--debug" in call(command, "--help").output
    assert "--debug" in call("--help").output


def test_the_detectron2_runner_without_detectron2_says_what_to_do(monkeypatch):
    monkeypatch.setattr(train_module.importlib.util, "find_spec", lambda name: None)
    result = call("train", "--config-file", "quickstart/deformable_peg.yaml", "--runner", "detectron2")
    assert result.exit_code == 2
    assert "README" in result.output
    assert train_module.choose_runner("auto") == "builtin"


def test_the_tool_and_the_command_are_one_function():
    tool = subprocess.run([sys.executable, "tools/train_net.py", "--help"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert tool.stdout.startswith("Usage: train_net.py [OPTIONS]")
    options = [re.findall(r"--[a-z-]+", text) for text in (tool.stdout, call("train", "--help").output)]
    assert len(options[0]) > 5 and options[0] == options[1]


def test_shapes_are_drawn_by_command(tmp_path):
    result = call("shapes", tmp_path / "shapes", "--train", 3, "--val", 2, "--processes", 1)
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "shapes/annotations/train.json").read_text())["images"]) == 3


def test_no_network_for_named_weights_is_bad_input(drawn_coco, tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    words = {"MODEL__BACKBONE__NAME": "resnet18", "MODEL__BACKBONE__WEIGHTS": "IMAGENET1K_V1"}
    result = call(*train_words(drawn_coco, tmp_path, **words))
    assert result.exit_code == 2
    assert "network" in result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"]], ids=" ".join)
def test_help_does_not_wait_for_torch(words):
    code = "import sys; from cpvt_det.cli import main; main(standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("Usage:") and done.stdout.endswith("False\n")
