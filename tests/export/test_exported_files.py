# SPDX-License-Identifier: Apache-2.0
"""An exported file in the place of a checkpoint: ``eval``, ``predict`` and ``Predictor`` find what its model finds."""

import json

import pytest
import torch
from click.testing import CliRunner
from exports import kept_exports, shared_exports  # noqa: F401
from torch import nn

from cpvt_det import Predictor
from cpvt_det.checkpoint.exported import ExportedModel, Program, load_for_evaluation, open_program
from cpvt_det.class_names import Classes
from cpvt_det.cli import main
from cpvt_det.config import load_cfg
from cpvt_det.errors import ConfigError, MapSizeError, WeightsError
from cpvt_det.inference import classify
from cpvt_det.runner.train import run as run_config

FIXED = ("--dynamic", "none", "--batch", "2", "--size", "64x64")
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
    assert f"96: {file} takes canvases of 64x64, and these images need" in (tmp_path / "sizes/sizes.md").read_text()


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
    said = f"{file} is an exported program, in which {key[0]} is fixed; leave it as it is, or set it in cpvt-det export"
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
        f"error: {file} takes canvases of 64x64, and these images need 64x176; export it with a larger --size, or set smaller "
        "images in INPUT"
    )


def test_a_program_does_not_stand_for_weights(run, file, tmp_path):
    """Where tensors are needed: training, other exports, conversion, and pictures of attention."""
    said = f"{file} is an exported program, which predict and eval run; here give the checkpoint that it was exported from"
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
    with pytest.raises(WeightsError, match="is an exported program, which predict and eval run"):
        run_config(cfg)


def test_other_classes_and_devices_are_refused(run, file):
    cfg = load_cfg(str(run.folder / "config.yaml"), ["MODEL.WEIGHTS", str(file)])
    known = Predictor.from_checkpoint(run.weights, device="cpu").classes
    load_for_evaluation(cfg, known)
    with pytest.raises(WeightsError, match=r"has other classes than the data, or in another order: .*; evaluate the checkpoint"):
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
    with pytest.raises(WeightsError, match=r"other.onnx is no file of cpvt-det export, or an older one: .*; export it again"):
        Predictor.from_checkpoint(tmp_path / "other.onnx")


@pytest.mark.parametrize(("name", "extra"), [("onnxruntime", "export"), ("openvino", "openvino")])
def test_a_missing_runtime_is_named_with_the_way_to_install_it(tmp_path, monkeypatch, name, extra):
    import sys

    monkeypatch.setitem(sys.modules, name, None)
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

    return ExportedModel(Program(run, {"stride": 8, "fixed": fixed}), "the program"), calls


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
    with pytest.raises(MapSizeError, match="the program takes canvases of 24x16, and these images need 8x24"):
        model(torch.zeros(1, 3, 8, 24), torch.zeros(1, 8, 24, dtype=torch.bool))
    free, calls = program(lambda images, mask: images.sum((1, 2, 3)))
    assert len(free(batch.images, batch.padding_mask)[0]) == 3 and calls == [(3, 3, 8, 16)]


def test_a_program_of_a_classifier_gives_scores():
    model, _ = program(lambda images, mask: torch.tensor([[0.25, 0.75]]).expand(len(images), -1))
    assert [scores.tolist() for scores in classify(model, [{"image": torch.zeros(3, 8, 8)}] * 2)] == [[0.25, 0.75]] * 2
