# SPDX-License-Identifier: Apache-2.0
"""An exported file in the place of a checkpoint: ``eval``, ``predict`` and ``Predictor`` find what its model finds."""

import contextlib
import importlib
import json
import math
import shutil
import sys

import forked
import pytest
import torch
from click.testing import CliRunner
from exports import kept_exports, shared_exports  # noqa: F401
from torch import nn

from benchmarks import exported_speed
from cpvt_det import Predictor
from cpvt_det.builders.trained import load_for_evaluation, load_trained
from cpvt_det.checkpoint import exported
from cpvt_det.checkpoint.exported import EXPORTED, INPUTS, ExportedModel, Program, open_program
from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError, ConfigError, DataError, MapSizeError, RunStoppedError, WeightsError
from cpvt_det.config import load_cfg
from cpvt_det.evaluation.answers import classify
from cpvt_det.export import quantize
from cpvt_det.training.tasks.task import build_task
from cpvt_det.training.train import run as run_config

FIXED = ("--dynamic", "none", "--batch", "2", "--size", "64x64")
export = importlib.import_module("cpvt_det.cli.export")  # the command has its name
NAMES = {"onnx": "detector.onnx", "openvino": "detector.xml"}


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run("detr")


@pytest.fixture(scope="module", params=list(NAMES))
def file(request, run, tmp_path_factory):
    """A program of two images of 64 x 64: batches of one are filled, others are taken in parts."""
    pytest.importorskip("onnxruntime" if request.param == "onnx" else "openvino")
    path = tmp_path_factory.mktemp("exported") / NAMES[request.param]
    result = call("export", run.weights, "--format", request.param, "--output", path, *FIXED)
    assert result.exit_code == 0, result.output
    return path


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def rows(path):
    return in_order(json.loads(path.read_text()))


def in_order(found):
    return sorted(found, key=lambda row: (row["image_id"], -row["score"]))


def assert_near(found, expected):
    """Detections of two runtimes: scores of random weights are nearly equal, so boxes are compared by score."""
    assert [(row["image_id"], row["category_id"]) for row in found] == [(row["image_id"], row["category_id"]) for row in expected]
    torch.testing.assert_close(
        torch.tensor([[row["score"], *row["bbox"]] for row in found]),
        torch.tensor([[row["score"], *row["bbox"]] for row in expected]),
        rtol=0,
        atol=0.02,
    )


def test_an_exported_file_is_evaluated_like_its_checkpoint(run, file, tmp_path):
    """By its own config, and by that of the run; the same detections in the same files."""
    result = call("eval", file, "--runner", "builtin", "OUTPUT_DIR", tmp_path / "eval")
    assert result.exit_code == 0, result.output
    assert_near(
        rows(tmp_path / "eval/inference/coco_instances_results.json"),
        in_order(run.found),
    )
    figures = json.loads((tmp_path / "eval/results.json").read_text())["bbox"]
    assert figures == pytest.approx(json.loads((run.folder / "results.json").read_text())["bbox"], abs=0.05, nan_ok=True)
    words = ["--config-file", run.folder / "config.yaml", "--sizes", "32,96", "OUTPUT_DIR", tmp_path / "sizes"]
    result = call("eval", file, "--runner", "builtin", *words)
    assert result.exit_code == 0, result.output
    sizes = json.loads((tmp_path / "sizes/sizes.json").read_text())
    assert "bbox" in sizes["32"] and "bbox" not in sizes["96"]  # larger than the program's canvas
    assert f"96: {file} has a fixed canvas of 64x64, but these images need" in (tmp_path / "sizes/sizes.md").read_text()


def test_an_exported_file_predicts_like_its_checkpoint(run, file, tmp_path):
    for weights, name in ((run.weights, "of"), (file, "like")):
        result = call(
            "predict", weights, "--input", run.drawn.files.image_root, "--output", tmp_path / name, "--threshold", 0, "--batch", 3
        )
        assert result.exit_code == 0, result.output
    assert_near(rows(tmp_path / "like/detections.json"), rows(tmp_path / "of/detections.json"))
    assert (tmp_path / "like/images.json").read_text() == (tmp_path / "of/images.json").read_text()


def test_a_predictor_has_names_and_thresholds_of_the_file(run, file, tmp_path):
    original, exported = Predictor.from_checkpoint(run.weights, device="cpu"), Predictor.from_checkpoint(file)
    assert exported.classes == original.classes and exported.thresholds == original.thresholds
    images = [run.image(image_id) for image_id in (30, 7, 12)]
    for alone, together in zip(map(exported, images), exported(images, batch_size=3), strict=True):
        torch.testing.assert_close(together.scores, alone.scores, rtol=0, atol=1e-6)
        torch.testing.assert_close(together.boxes_xyxy, alone.boxes_xyxy, rtol=0, atol=1e-3)
    smaller = Predictor.from_checkpoint(file, overrides=["INPUT.MIN_SIZE_TEST", "24", "TEST.PICTURES", "3"])
    assert not torch.equal(smaller(images[1]).scores, exported(images[1]).scores)
    with pytest.raises(WeightsError, match=r"is an exported program and has no weights to save; load its checkpoint"):
        exported.save(tmp_path / "model")


@pytest.mark.parametrize("key", [["MODEL.DETR.NUM_OBJECT_QUERIES", "9"], ["TEST.DETECTIONS_PER_IMAGE", "9"], ["TEST.NMS", "0.5"]])
def test_what_is_fixed_in_a_program_cannot_be_set(run, file, tmp_path, key):
    said = (
        f"{file} is an exported program, in which {key[0]} is fixed; leave this key unchanged, or set it when you run cpvt-det "
        "export"
    )
    for command in (
        ["predict", file, "--input", run.image(7), "--output", tmp_path / "out"],
        ["eval", file, "--runner", "builtin"],
    ):
        result = call(*command, *key, "OUTPUT_DIR", tmp_path / "eval")
        assert result.exit_code == 2 and said in result.output, result.output


def test_an_image_larger_than_the_canvas_is_refused(run, file, tmp_path):
    words = ["--input", run.image(30), "--output", tmp_path / "out", "INPUT.MIN_SIZE_TEST", 64, "INPUT.MAX_SIZE_TEST", 999]
    result = call("predict", file, *words)
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1] == (
        f"error: {file} has a fixed canvas of 64x64, but these images need 64x176; export it again with a larger --size, or set a "
        "smaller image size in INPUT"
    )


def test_a_program_does_not_stand_for_weights(run, file, tmp_path):
    """Where tensors are needed: training, other exports, conversion, and pictures of attention."""
    said = f"{file} is an exported program, which works in predict and eval; here, give the checkpoint that it was exported from"
    commands = (
        ["export", file, "--format", "torch_export", "--output", tmp_path / "other.pt2"],
        ["convert-weights", file, tmp_path / "other.pth"],
        ["serve", file, "--port", "0"],
        ["show", "attention", file, "--input", run.image(7), "--output", tmp_path / "picture.png"],
    )
    for command in commands:
        result = call(*command)
        assert result.exit_code == 2 and said in result.output, (command, result.output)
    cfg = load_cfg(str(run.folder / "config.yaml"), ["MODEL.WEIGHTS", str(file), "OUTPUT_DIR", str(tmp_path / "run")])
    with pytest.raises(WeightsError, match="is an exported program, which works in predict and eval"):
        run_config(cfg)


def test_other_classes_and_devices_are_refused(run, file):
    cfg = load_cfg(str(run.folder / "config.yaml"), ["MODEL.WEIGHTS", str(file)])
    known = Predictor.from_checkpoint(run.weights, device="cpu").classes
    load_for_evaluation(cfg, known)
    with pytest.raises(DataError, match=r"and the data have different classes \(3 and 3; order\)"):
        load_for_evaluation(cfg, Classes(known.ids, known.names[::-1]))
    with pytest.raises(ConfigError, match=r"abacus"):
        Predictor.from_checkpoint(file, device="abacus")
    with pytest.raises(ConfigError, match=r"runs on the CPU here; leave out the device, or set it to cpu"):
        Predictor.from_checkpoint(file, device="meta")


def test_files_of_others_and_halves_of_files_are_refused(file, tmp_path):
    format = "onnx" if file.suffix == ".onnx" else "openvino"
    with pytest.raises(WeightsError, match=f"there is no file {tmp_path}/none"):
        open_program(tmp_path / f"none{file.suffix}", format)
    spoilt = tmp_path / file.name
    spoilt.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(
        WeightsError, match=r"there is no file .*\.bin, which belongs to" if format == "openvino" else "cannot load"
    ):
        Predictor.from_checkpoint(spoilt)
    (tmp_path / "detector.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=f"(onnxruntime|openvino) cannot load {spoilt}: "):
        Predictor.from_checkpoint(spoilt)


def test_an_onnx_file_of_another_project_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    torch.onnx.export(nn.Identity(), (torch.zeros(1),), tmp_path / "other.onnx", dynamo=True, verbose=False)
    with pytest.raises(WeightsError, match=r"other.onnx was not written by cpvt-det export: .*; export it again"):
        Predictor.from_checkpoint(tmp_path / "other.onnx")


@pytest.mark.parametrize(("name", "extra"), [("onnxruntime", "export"), ("openvino", "openvino")])
def test_a_missing_runtime_is_named_with_the_way_to_install_it(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(exported, "openvino_core", exported.openvino_core.__wrapped__)
    for suffix in (".onnx", ".xml", ".bin"):
        (tmp_path / f"detector{suffix}").write_bytes(b"")
    format = "onnx" if name == "onnxruntime" else name
    with pytest.raises(WeightsError, match=rf"needs {name}: pip install 'cpvt-det\[{extra}\]'"):
        open_program(tmp_path / ("detector.onnx" if format == "onnx" else "detector.xml"), format)


def program(answer, **fixed):
    """A program that counts its calls, and checks the sizes of what it gets."""
    calls = []

    def run(images, padding_mask):
        assert images.shape[0] == padding_mask.shape[0] and images.shape[2:] == padding_mask.shape[1:]
        calls.append(tuple(images.shape))
        return (answer(images, padding_mask),)

    return ExportedModel(Program(run, {"stride": 8, "fixed": fixed, "inputs": INPUTS}), "the program"), calls


def test_a_program_of_one_shape_takes_batches_of_others():
    """Each image is seen at its place with its own mask; what fills the last batch is all padding, and is not returned."""
    model, calls = program(
        lambda images, mask: torch.stack(((images * ~mask[:, None]).sum((1, 2, 3)), (~mask).sum((1, 2)).float()), 1),
        batch=2,
        height=24,
        width=16,
    )
    batch = model.preprocess([torch.full((3, 5, 9), 1, dtype=torch.uint8), torch.full((3, 8, 7), 2), torch.full((3, 3, 3), 3)])
    (found,) = model(batch.images, batch.padding_mask)
    assert calls == [(2, 3, 24, 16)] * 2
    assert found.tolist() == [[3 * 45.0, 45.0], [3 * 2 * 56.0, 56.0], [3 * 3 * 9.0, 9.0]]
    with pytest.raises(MapSizeError, match="the program has a fixed canvas of 24x16, but these images need 8x24"):
        model(torch.zeros(1, 3, 8, 24), torch.zeros(1, 8, 24, dtype=torch.bool))
    free, calls = program(lambda images, mask: images.sum((1, 2, 3)))
    assert len(free(batch.images, batch.padding_mask)[0]) == 3 and calls == [(3, 3, 8, 16)]


@pytest.mark.parametrize("inputs", [INPUTS, INPUTS[:1]])
def test_int8_is_calibrated_with_the_inputs_of_the_program(inputs):
    facts = {"stride": 8, "fixed": {"height": 16, "width": 24}, "inputs": inputs}
    (feed,) = quantize._feeds([torch.full((3, 8, 20), 7)], facts)
    assert tuple(feed) == inputs and feed["images"].shape == (1, 3, 16, 24)
    assert (feed["images"] == 7).all() == (inputs == INPUTS[:1])  # stretched, or with zeros around


def test_a_program_of_a_classifier_gives_scores():
    model, _ = program(lambda images, mask: torch.tensor([[0.25, 0.75]]).expand(len(images), -1))
    assert [scores.tolist() for scores in classify(model, [{"image": torch.zeros(3, 8, 8)}] * 2)] == [[0.25, 0.75]] * 2


TWO = """
import gc, os, signal
import numpy, openvino
from openvino import opset13 as operators
from cpvt_det.checkpoint.exported import open_program

start = operators.parameter([1], numpy.float32)
openvino.save_model(openvino.Model([operators.relu(start)], [start]), "relu.xml")
first, second = (open_program("relu.xml", "openvino") for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGCHLD, lambda *_: print("heard"))
os.kill(os.getpid(), signal.SIGCHLD)
raise SystemExit
"""


def test_signals_are_heard_after_two_openvino_programs(tmp_path):
    pytest.importorskip("openvino")
    ended = forked.run(before=TWO, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "heard\n"


# int8


def copied(file, folder, name):
    """The file, and its weights where these are a second one, in another folder under another name."""
    for part in file.parent.glob("detector.*"):
        shutil.copy(part, folder / f"{name}{part.suffix}")
    return folder / f"{name}{file.suffix}"


def test_layers_with_weights_compute_in_int8_and_the_rest_as_before(run, file, tmp_path):
    format = EXPORTED[file.suffix]
    if format == "openvino":
        pytest.importorskip("nncf")
    path = copied(file, tmp_path, "int8")
    images = [
        torch.randint(0, 256, (3, 40, 50 + number), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        for number in range(8)
    ]
    facts = open_program(path, format).facts
    quantize.quantize(path, format, iter(images), facts)
    names = {f"int8{part.suffix}" for part in file.parent.iterdir()}
    assert {part.name for part in tmp_path.iterdir()} == names
    assert open_program(path, format).facts == facts
    if format == "openvino":
        quantized = {
            taker.get_node()
            for operator in exported.openvino_core().read_model(path).get_ops()
            if operator.get_type_name() == "FakeQuantize"
            for taker in operator.output(0).get_target_inputs()
        }
        assert {operator.get_type_name() for operator in quantized} == {"Convolution", "MatMul"}
        for operator in quantized:  # of the two factors one is measured, and one is made of constants
            assert [value.get_node().get_type_name() == "FakeQuantize" for value in operator.input_values()].count(True) == 1
    else:
        assert b"QuantizeLinear" in path.read_bytes()
    before, after = Predictor.from_checkpoint(file), Predictor.from_checkpoint(path)
    scores = [predictor(run.image(7)).scores for predictor in (before, after)]
    assert not torch.equal(*scores)
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0.1)


def test_depthwise_convolutions_and_attention_stay_in_float():
    onnx = pytest.importorskip("onnx")
    shapes = {"usual": (8, 4, 3, 3), "grouped": (8, 2, 3, 3), "depthwise": (4, 1, 3, 3), "of_one": (4, 1, 1, 1)}
    groups = {"usual": 1, "grouped": 2, "depthwise": 4, "of_one": 1}
    make = onnx.helper
    nodes = [make.make_node("Conv", ["x", name], [f"y_{name}"], name=name, group=group) for name, group in groups.items()]
    shapes |= {"linear": (4, 4), "keys": (1, 2, 4, 4)}
    nodes += [make.make_node("MatMul", ["x", name], [f"y_{name}"], name=name) for name in ("linear", "keys", "activation")]
    weights = [make.make_tensor(name, 1, shape, [0.0] * math.prod(shape)) for name, shape in shapes.items()]
    assert quantize._kept(make.make_graph(nodes, "graph", [], [], weights)) == ["depthwise", "keys"]


def test_only_a_matrix_is_a_weight_for_nncf():
    """D-FINE multiplies its distributions with a vector of steps, which stays in float."""
    openvino = pytest.importorskip("openvino")
    constants = [openvino.opset13.constant(torch.ones(shape).numpy()) for shape in ((4, 4), (4,), (1, 4, 4))]
    assert [quantize._is_weight(constant.output(0)) for constant in constants] == [True, False, False]


@pytest.mark.parametrize(
    ("after", "allowed", "refused"), [(48.5, 1.0, True), (48.5, 2.0, False), (51.0, 0.0, False), (math.nan, 9.0, True)]
)
def test_a_file_that_loses_more_is_refused(run, file, monkeypatch, after, allowed, refused):
    figures = iter((50.0, after))
    monkeypatch.setattr(export, "evaluate", lambda *_: {"bbox": {"AP": next(figures)}})
    trained = load_trained(run.weights, "cpu")
    with (
        pytest.raises(RunStoppedError, match=r"loses (1\.50|nan) bbox/AP, but --max-loss allows only .*; no file was written")
        if refused
        else contextlib.nullcontext()
    ):
        export._report_loss(trained, build_task(trained.cfg).load_tests(), file, allowed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "torch_export", "--int8"], "--int8 is for --format onnx and openvino"),
        (["--format", "onnx", "--int8", "--half"], "--int8 and --half exclude each other: leave one out"),
        (["--format", "onnx", "--max-loss", "-1"], "--max-loss must be 0 or more, got -1"),
        (["--format", "torch_export", "--max-loss", "1"], "with --int8 or --max-loss, its name must end in .onnx or .xml"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(run, tmp_path, words, said):
    result = call("export", run.weights, "--output", tmp_path / ("detector.onnx" if "onnx" in words else "detector.pt2"), *words)
    assert result.exit_code == 2 and said in result.output, result.output


def test_too_few_images_to_calibrate_on_are_refused(run):
    with pytest.raises(BadInputError, match="--int8 needs at least 8 images for calibration, but DATASETS.TRAIN has 5"):
        export._calibration_images(load_trained(run.weights, "cpu"))


def test_images_to_calibrate_on_are_spread_over_all(run, monkeypatch):
    """Four of five are not the first four."""
    monkeypatch.setattr(export, "FEWEST", 1)
    found = {}
    for number in (4, 5, 9):
        monkeypatch.setattr(export, "CALIBRATION", number)
        found[number] = list(export._calibration_images(load_trained(run.weights, "cpu")))
    assert [len(images) for images in found.values()] == [4, 5, 5]
    assert all(torch.equal(found[4][end], found[5][end]) for end in (0, -1))


def test_images_of_another_set_are_refused(run):
    trained = load_trained(run.weights, "cpu")
    trained.classes = Classes(trained.classes.ids, ("a", "b", "c"))
    with pytest.raises(DataError, match="the weights and DATASETS.TRAIN have different classes"):
        export._calibration_images(trained)


def test_the_benchmark_has_a_row_for_the_checkpoint_and_each_file(run, file, tmp_path):
    words = [run.weights, file, "--rounds", "1", "--images", "2", "--busy", "--output", tmp_path]
    result = CliRunner().invoke(exported_speed.main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    eager, other = record["rows"]
    assert (eager["name"], other["name"]) == ("checkpoint", f"{EXPORTED[file.suffix]}, detector")
    assert other["AP"] == pytest.approx(eager["AP"], abs=0.05)
    assert eager["times_as_fast"]["median"] == 1
    parts = file.parent.glob("detector.*")
    assert other["MB"] == pytest.approx(sum(part.stat().st_size for part in parts) / 1e6)
    assert (
        f"| {EXPORTED[file.suffix]}, detector |" in result.output
        and "# A checkpoint and its exported files" in next(tmp_path.glob("*.md")).read_text()
    )
