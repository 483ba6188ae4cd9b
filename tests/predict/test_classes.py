# SPDX-License-Identifier: Apache-2.0
"""A trained classifier in use: predicted, exported, counted, drawn, fine-tuned, in either runner."""

import json

import pytest
import torch
from click.testing import CliRunner
from image_classes import class_words, draw_folders
from PIL import Image

from cpvt_det.builders.trained import load_trained
from cpvt_det.checkpoint.load import load_weights
from cpvt_det.cli import main
from cpvt_det.cli.export import _report
from cpvt_det.common.errors import ConfigError, RunStoppedError
from cpvt_det.config import load_cfg
from cpvt_det.export.program import Canvas
from cpvt_det.predict import ClassPredictor, Predictor
from cpvt_det.training.train import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return draw_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def weights(folders, tmp_path_factory):
    """A classifier whose test images are whole, so that a batch is padded."""
    folder = tmp_path_factory.mktemp("run")
    run(load_cfg("", class_words(folders, folder, SOLVER__MAX_ITER=3, INPUT__CLASSIFY__CROP_RATIO=0.0, TEST__PICTURES=0)))
    return folder / "model_final.pth"


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_predicted_classes_are_those_of_the_evaluation(folders, weights, tmp_path):
    done = call("predict", weights, "--input", folders / "val", "--output", tmp_path / "out", "--device", "cpu", "--batch", 4)
    assert done.exit_code == 0 and "6 images" in done.output, done.output
    found = json.loads((tmp_path / "out/classes.json").read_text())
    expected = json.loads((weights.parent / "inference/classes.json").read_text())
    assert [one["file_name"] for one in found] == [f"{name}/{n}.png" for name in ("blue", "green", "red") for n in (0, 1)]
    for one, other in zip(found, expected, strict=True):
        assert [part["name"] for part in one["found"]] == [part["name"] for part in other["found"]]
        scores = [[part["score"] for part in answer["found"]] for answer in (one, other)]
        torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), rtol=0, atol=1e-6)
        assert sum(scores[0]) == pytest.approx(1) and scores[0] == sorted(scores[0], reverse=True)


def test_in_python_an_image_of_any_kind_is_classified(folders, weights, tmp_path):
    predictor = ClassPredictor.from_checkpoint(weights, device="cpu")
    path = folders / "val/red/0.png"
    one, other = predictor([path, Image.open(path)])
    assert torch.equal(one.scores, other.scores) and one.name == one.best(1)[0]["name"] and one.name in repr(one)
    predictor.save(tmp_path / "model")
    again = ClassPredictor.from_checkpoint(tmp_path / "model", device="cpu")(path)
    assert torch.equal(again.scores, one.scores)
    with pytest.raises(ValueError, match="tiles are for detectors, and this model is a classifier"):
        predictor(path, tiles=64)


def test_a_predictor_of_the_other_task_is_refused(weights, tiny_run, folders, tmp_path):
    with pytest.raises(
        ConfigError, match=r"'CPVTClassifier' is not a detector; to classify images, use cpvt-det predict or ClassPredictor"
    ):
        Predictor.from_checkpoint(weights, device="cpu")
    with pytest.raises(ConfigError, match=r"'CPVTDetr' is not a classifier; use Predictor"):
        ClassPredictor.from_checkpoint(tiny_run("detr").weights, device="cpu")
    words = ["--input", folders / "val", "--output", tmp_path / "out", "--threshold", 0.5]
    for option in ("--threshold", "--overlap", "--tiles"):
        done = call("predict", weights, *words[:-2], option, 1 if option == "--tiles" else 0.5)
        assert done.exit_code == 2 and f"{option} is for detections" in done.output
    (tmp_path / "file").touch()
    done = call("predict", weights, *words[:2], "--output", tmp_path / "file/out")
    assert done.exit_code == 2 and "cannot write to" in done.output


def test_an_exported_classifier_of_any_size_has_the_model_s_scores(folders, weights, tmp_path):
    import onnxruntime

    done = call("export", weights, "--format", "onnx", "--output", tmp_path / "model.onnx")
    assert done.exit_code == 0, done.output
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["cpvt_det"])
    assert [output.name for output in session.get_outputs()] == ["scores"]
    assert (metadata["size"], metadata["crop_ratio"], metadata["class_names"]) == (32, 0.0, ["blue", "green", "red"])
    assert "min_size" not in metadata
    model = load_trained(weights, "cpu").detector
    pixels, mask = torch.rand(2, 3, 40, 24) * 255, torch.zeros(2, 40, 24, dtype=torch.bool)
    mask[1, 30:], mask[1, :, 17:] = True, True
    (found,) = session.run(None, {"images": pixels.numpy(), "padding_mask": mask.numpy()})
    expected = model((pixels - model.pixel_mean) / model.pixel_std, mask).scores()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
    answers = []
    for path in (weights, tmp_path / "model.onnx"):
        done = call("predict", path, "--input", folders / "val", "--output", tmp_path / path.stem)
        assert done.exit_code == 0, done.output
        answers.append(json.loads((tmp_path / path.stem / "classes.json").read_text()))
    for one, other in zip(*answers, strict=True):
        assert [part["name"] for part in one["found"]] == [part["name"] for part in other["found"]]
        assert [part["score"] for part in one["found"]] == pytest.approx([part["score"] for part in other["found"]], abs=1e-5)


def test_a_program_with_other_scores_is_refused():
    _report(Canvas(1, 32, 32), 5e-5, 1e-4)
    with pytest.raises(RunStoppedError, match=r"by up to 2.0e-01, but only 1e-04 is allowed; no file was written"):
        _report(Canvas(1, 32, 32), 0.2, 1e-4)


def test_the_other_commands_know_classifiers(folders, weights, tmp_path):
    config = weights.parent / "config.yaml"
    counted = call("analyze", "--config-file", config, "--runner", "builtin", "--sizes", "32", "MODEL.NUM_CLASSES", 3)
    assert counted.exit_code == 0 and "Classifier, resnet10, 3 classes" in counted.output, counted.output
    shown = call("show", "data", "--config-file", config, "--runner", "builtin", "--output", tmp_path / "shown", "--count", 3)
    assert shown.exit_code == 0 and "train.png: 3 of 12 images" in shown.output, shown.output
    refused = call("show", "position", weights, "--output", tmp_path / "shown")
    assert refused.exit_code == 2 and "is a Classifier; this picture is for detectors" in refused.output
    refused = call("show", "position", config, "--output", tmp_path / "shown")
    assert refused.exit_code == 2 and "describes a classifier; this picture is for detectors" in refused.output


def test_rows_of_both_heads_are_taken_by_class_name(weights):
    """As in fine-tuning with other classes; the second head is that of a distillation token."""
    model = load_trained(weights, "cpu").detector
    model.distilled_embed = torch.nn.Linear(model.class_embed.in_features, 3)
    node = {"classes": {"ids": [1, 2, 3], "names": ["blue", "green", "red"]}}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for head in (model.class_embed, model.distilled_embed):
        torch.nn.init.zeros_(head.weight)
    report = load_weights(model, {"model": before, "cpvt_det": node}, ["red", "pink", "blue"])
    assert report.rows_by_name == {"red": 2, "pink": None, "blue": 0}
    for name, head in (("class_embed", model.class_embed), ("distilled_embed", model.distilled_embed)):
        assert torch.equal(head.weight[[0, 2]], before[f"{name}.weight"][[2, 0]]) and not head.weight[1].any()


@pytest.mark.detectron2
def test_both_runners_train_the_same_classifier(folders, tmp_path):
    """Every weight after six steps, with Mixup, and what an evaluation writes."""
    for runner in ("builtin", "detectron2"):
        words = class_words(folders, tmp_path / runner, INPUT__CLASSIFY__MIXUP=0.8)
        done = call("train", "--config-file", "_detectron2.yaml", "--num-gpus", 0, "--runner", runner, *words)
        assert done.exit_code == 0, done.output
    states = [torch.load(tmp_path / f"{name}/model_final.pth", weights_only=True)["model"] for name in ("builtin", "detectron2")]
    assert states[0].keys() == states[1].keys() and all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    results = [json.loads((tmp_path / f"{name}/results.json").read_text()) for name in ("builtin", "detectron2")]
    assert results[0] == results[1]


@pytest.mark.detectron2
def test_detectron2_builds_a_classifier(weights):
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg as load_d2

    cfg = load_d2(str(weights.parent / "config.yaml"), ["MODEL.DEVICE", "cpu"])
    model, ours = build_model(cfg).eval(), load_trained(weights, "cpu").detector
    model.load_state_dict(ours.state_dict())
    batch = ours.preprocess([torch.rand(3, 40, 24) * 255])
    found, expected = (one(batch.images, batch.padding_mask).scores() for one in (model, ours))
    torch.testing.assert_close(found, expected)
