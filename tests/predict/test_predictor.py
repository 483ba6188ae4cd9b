# SPDX-License-Identifier: Apache-2.0
"""The predictor: what an evaluation finds, from images of every kind, from a checkpoint or a model folder."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from test_checkpoint import checkpoint_of, detector, to_facebook
from tiny import DETECTORS, overrides

import cpvt_det
from cpvt_det import Predictor
from cpvt_det.checkpoint import files, read_weights
from cpvt_det.common.errors import ConfigError, DataError, RunStoppedError, WeightsError
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import load_cfg
from cpvt_det.data.images import read_image
from cpvt_det.predict.predictor import read_input
from cpvt_det.training.train import run

IMAGES = (7, 12, 30, 41, 5)
ORIENTATION = 0x0112


@pytest.fixture(scope="module", params=DETECTORS)
def trained(request, tiny_run):
    """A run of either detector."""
    return tiny_run(request.param)


@pytest.fixture(scope="module")
def detr(tiny_run):
    return tiny_run("detr")


@pytest.fixture(scope="module")
def predictor(detr):
    return Predictor.from_checkpoint(detr.weights, device="cpu")


def noise(height=30, width=50, channels=3, dtype=np.uint8):
    values = np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, (height, width, channels), dtype=dtype)
    return values[:, :, 0] if channels == 1 else values


def same(one, other):
    """Whether two sets of detections are equal bit for bit."""
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("boxes_xyxy", "scores", "labels"))


def test_the_predictor_finds_what_the_evaluation_found_bit_for_bit(trained):
    """From files, with the averaged weights, the test size of the config, and the category ids of the data."""
    predictor = Predictor.from_checkpoint(trained.weights, device="cpu")
    found = predictor([trained.image(image_id) for image_id in IMAGES])
    results = [row for image_id, one in zip(IMAGES, found, strict=True) for row in one.to_coco(image_id)]
    assert results == trained.found
    assert len(results) > 10


def test_images_of_many_sizes_find_in_a_batch_what_they_find_alone(trained):
    predictor = Predictor.from_checkpoint(trained.weights, device="cpu")
    paths = [trained.image(image_id) for image_id in IMAGES]
    for alone, together in zip(predictor(paths), predictor(paths, batch_size=4), strict=True):
        torch.testing.assert_close(together.boxes_xyxy, alone.boxes_xyxy, rtol=0, atol=1e-3)
        torch.testing.assert_close(together.scores, alone.scores, rtol=0, atol=1e-5)
        assert torch.equal(together.labels, alone.labels)


def test_every_kind_of_input_finds_the_same(detr, predictor):
    path = detr.image(30)
    pixels = read_image(str(path))
    array = pixels.permute(1, 2, 0).numpy()
    expected = predictor(path)
    for kind in (str(path), Image.open(path), pixels):
        assert same(predictor(kind), expected)
    assert same(predictor(array, channels="rgb"), expected)
    assert same(predictor(array[:, :, ::-1], channels="bgr"), expected)
    assert same(predictor(pixels.flip(0), channels="bgr"), expected)
    assert not same(predictor(array, channels="bgr"), expected)
    mixed = predictor([path, array, pixels], channels="rgb", batch_size=1)
    assert len(mixed) == 3 and all(same(one, expected) for one in mixed)
    assert len(predictor((path,))) == 1
    assert predictor([]) == []


def test_a_predictor_is_used_in_other_precisions(detr):
    """Under another default dtype bit for bit, in float64 up to rounding, under autocast with scores in float32."""
    predictor = Predictor.from_checkpoint(detr.weights, "cpu")
    found = predictor(detr.image(7))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert same(predictor(detr.image(7)), found)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = predictor(detr.image(7))
    assert coarse.scores.dtype == torch.float32 and (coarse.scores - found.scores).abs().max() < 0.05
    predictor.detector.double()
    assert (predictor(detr.image(7)).scores - found.scores).abs().max() < 1e-5
    predictor.detector.half()
    with pytest.raises(TypeError, match=r"the weights of this DETR are torch\.float16"):
        predictor(detr.image(7))


def test_detections_know_their_classes_and_their_image(detr, predictor):
    found = predictor(detr.image(30))
    assert len(found) == 6 and found.image.shape == (3, 33, 90)
    assert found.class_ids.tolist() == [(3, 17, 90)[label] for label in found.labels.tolist()]
    assert found.names == [("red", "green", "blue")[label] for label in found.labels.tolist()]
    assert (found.boxes_xyxy >= 0).all() and (found.boxes_xyxy <= torch.tensor([90, 33, 90, 33])).all()
    middle = found.scores.sort().values[3].item()
    above = found.above(middle)
    assert above.scores.min() == middle and len(above) == 3
    assert above.source == found.source
    assert repr(above).startswith(f"<3 detections: {above.names[0]} {above.scores[0]:.2f}, ")
    assert repr(found.above(1)) == "<0 detections>"
    assert found.above(1).to_coco(1) == [] and found.above(1).names == []
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\], as scores are, got "):
            found.above(wrong)


def test_a_drawing_is_the_image_with_its_boxes(detr, predictor):
    """The 33 x 90 image is enlarged 12 times, so that its short side is 384 at least."""
    found = predictor(detr.image(30))
    drawn = found.draw()
    assert isinstance(drawn, Image.Image) and drawn.size == (90 * 12, 33 * 12)
    empty = np.array(found.above(1).draw())
    assert np.array_equal(empty[::12, ::12], np.array(Image.open(detr.image(30)).convert("RGB")))
    assert not np.array_equal(np.array(drawn), empty)


# --- what images become


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_a_pillow_image_is_read_as_its_file_is(tmp_path, mode):
    image = Image.fromarray(noise(channels=1, dtype=np.uint16)) if mode == "I;16" else Image.fromarray(noise()).convert(mode)
    path = tmp_path / ("a.tif" if mode in ("CMYK", "YCbCr") else "a.png")
    image.save(path)
    with Image.open(path) as opened:
        assert torch.equal(read_input(opened), read_image(str(path)))
    if mode not in ("P", "YCbCr"):
        assert torch.equal(read_input(image), read_image(str(path)))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pillow_image_is_turned_as_its_file_is(tmp_path, suffix, orientation):
    """Whether it was decoded before or not; one that was turned by hand is not turned again."""
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(noise().repeat(8, 0).repeat(8, 1)).save(path, exif=exif, **({"quality": 95} if suffix == "jpg" else {}))
    expected = read_image(str(path))
    with Image.open(path) as fresh, Image.open(path) as decoded, Image.open(path) as by_hand:
        decoded.load()
        for image in (fresh, decoded, decoded.convert("RGB"), ImageOps.exif_transpose(by_hand)):
            assert (read_input(image).int() - expected.int()).abs().max() <= (1 if suffix == "jpg" else 0)


def test_arrays_are_grey_or_have_an_order(tmp_path):
    grey, wide = noise(channels=1), noise(dtype=np.uint16)
    assert torch.equal(read_input(grey), torch.from_numpy(grey).expand(3, -1, -1))
    assert torch.equal(read_input(grey[:, :, None]), read_input(grey))
    assert torch.equal(read_input(wide, "rgb"), torch.from_numpy((wide // 256).astype(np.uint8)).permute(2, 0, 1))
    colour = noise(channels=4)
    assert torch.equal(read_input(colour, "rgb"), torch.from_numpy(colour[:, :, :3].copy()).permute(2, 0, 1))
    assert torch.equal(read_input(colour, "bgr"), torch.from_numpy(colour[:, :, [2, 1, 0]]).permute(2, 0, 1))
    before = colour.copy()
    read_input(colour, "rgb").zero_()
    assert np.array_equal(colour, before)


@pytest.mark.parametrize(
    ("image", "channels", "said"),
    [
        (noise(), None, r"does not tell the order of its channels: pass channels='rgb', or 'bgr' for images from OpenCV"),
        (noise().astype(np.float32), "rgb", r"uint8 or uint16, got float32; convert values in \[0, 1\] by \(255"),
        (noise().transpose(2, 0, 1), "rgb", r"\(H, W, 3\), \(H, W, 4\) or \(H, W\), got \(3, 30, 50\)$"),
        (noise()[None], "rgb", r"got \(1, 30, 50, 3\); pass several images as a list"),
        (noise()[:0], "rgb", r"got \(0, 50, 3\)"),
        (torch.zeros(3, 4, 5), None, r"a tensor must be uint8, got torch.float32; convert values in \[0, 1\] by \(255"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8), None, r"must be \(3, H, W\), got \(4, 5, 3\)$"),
        (torch.zeros(1, 3, 4, 5, dtype=torch.uint8), None, r"got \(1, 3, 4, 5\); pass a batch as list\(batch\)"),
        (None, None, r"NoneType is not an image; pass a path, a PIL image"),
        (Image.new("F", (4, 5)), None, r"pixels of mode F have no fixed range and cannot be converted to 8-bit RGB"),
        (Image.new("RGB", (0, 5)), None, r"the image has no pixels: its size is 0 x 5"),
        ("nowhere.png", None, r"cannot read image nowhere.png: no such file"),
    ],
)
def test_what_is_no_image_is_refused_and_named(predictor, image, channels, said):
    with pytest.raises(DataError, match=said):
        predictor(image, channels=channels)
    with pytest.raises(DataError, match=r"^images\[1\]: .*" + said):
        predictor([torch.zeros(3, 4, 5, dtype=torch.uint8), image], channels=channels)


def test_a_cut_off_image_of_pillow_is_refused(predictor, tmp_path):
    Image.fromarray(noise()).save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])
    with pytest.raises(DataError, match="cannot read image from Pillow: "):
        predictor(Image.open(tmp_path / "cut.png"))


def test_an_unknown_order_is_refused_for_every_kind(predictor, detr):
    for image in (noise(), detr.image(7)):
        with pytest.raises(DataError, match="channels must be 'rgb' or 'bgr', got 'brg'"):
            predictor(image, channels="brg")


def test_a_batch_has_an_image(predictor):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        predictor([], batch_size=0)


# --- where it comes from


def test_importing_the_package_imports_no_torch():
    code = "import sys, cpvt_det; assert 'torch' not in sys.modules and 'Predictor' in cpvt_det.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'cpvt_det' has no attribute 'Predicter'"):
        cpvt_det.Predicter  # noqa: B018


def test_keys_and_device_override_the_checkpoint(detr):
    words = ["TEST.DETECTIONS_PER_IMAGE", "2", "INPUT.MIN_SIZE_TEST", "16"]
    small = Predictor.from_checkpoint(detr.weights, device="cpu", overrides=words)
    found = small(detr.image(7))
    assert len(found) == 2
    assert small.mapper.prepare(read_image(str(detr.image(7)))).shape == (3, 16, 29)
    with pytest.raises(ConfigError, match=r"did you mean 'TEST.PICTURES'"):
        Predictor.from_checkpoint(detr.weights, overrides=["TEST.PICTUREZ", "2"])
    with pytest.raises(ConfigError, match="MODEL.DEVICE"):
        Predictor.from_checkpoint(detr.weights, device="abacus")


def test_a_model_folder_is_the_checkpoint(trained, tmp_path):
    from_file = Predictor.from_checkpoint(trained.weights, device="cpu")
    from_file.save(tmp_path / "deep" / "model")
    names = ["classes.json", "config.yaml", "model.safetensors", "model.safetensors.sha256", "thresholds.json"]
    assert sorted(path.name for path in (tmp_path / "deep/model").iterdir()) == names
    assert json.loads((tmp_path / "deep/model/classes.json").read_text()) == [
        {"id": 3, "name": "red"},
        {"id": 17, "name": "green"},
        {"id": 90, "name": "blue"},
    ]
    assert "DEVICE: auto" in (tmp_path / "deep/model/config.yaml").read_text()  # not that of this machine
    from_folder = Predictor.from_checkpoint(tmp_path / "deep/model", device="cpu")
    for image_id in IMAGES:
        assert same(from_folder(trained.image(image_id)), from_file(trained.image(image_id)))
    from_folder.save(tmp_path / "again")
    for name in (*names[:3], names[4]):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "deep/model" / name).read_bytes(), name


def test_a_model_folder_keeps_the_thresholds_and_goes_without(detr, tmp_path):
    predictor = Predictor.from_checkpoint(detr.weights, device="cpu")
    predictor.thresholds = Thresholds(0.3125, (None, 0.25, 0.75))
    predictor.save(tmp_path / "model")
    assert json.loads((tmp_path / "model/thresholds.json").read_text()) == {"overall": 0.3125, "classes": [None, 0.25, 0.75]}
    again = Predictor.from_checkpoint(tmp_path / "model", device="cpu")
    assert again.thresholds == predictor.thresholds and again.threshold == 0.3125
    again.thresholds = None
    again.save(tmp_path / "model")
    assert not (tmp_path / "model/thresholds.json").exists()
    older = Predictor.from_checkpoint(tmp_path / "model", device="cpu")
    assert older.thresholds is None and older.threshold == 0.5


def test_a_model_folder_is_model_weights(detr, tmp_path):
    """And its config is a run's: the evaluation of both finds what the run's own did."""
    Predictor.from_checkpoint(detr.weights, device="cpu").save(tmp_path / "model")
    words = overrides(detr.drawn.files, tmp_path / "eval", MODEL__WEIGHTS=str(tmp_path / "model"))
    run(load_cfg(str(tmp_path / "model/config.yaml"), words), eval_only=True)
    assert json.loads((tmp_path / "eval/inference/coco_instances_results.json").read_text()) == detr.found


def test_a_folder_that_cannot_be_written_keeps_the_model_of_before(detr, predictor, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    predictor.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = Predictor.from_checkpoint(detr.weights, device="cpu", overrides=["TEST.PICTURES", "3"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.safetensors.torch, "save", full)
    with pytest.raises(
        RunStoppedError,
        match=r"cannot write .*model.safetensors: No space left on device; the file that was there before is unchanged",
    ):
        other.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot write the model folder .*file: "):
        predictor.save(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", None, r"cannot read the model folder .*: .*No such file .*config.yaml"),
        ("config.yaml", "MODEL: [", r"cannot read the config in "),
        ("config.yaml", "- 1", r"the config in .* is not a YAML mapping"),
        ("config.yaml", "MODEL: {DEPTH: 3}", r"unknown config key .*'MODEL.DEPTH'.*--config-file replaces it"),
        ("classes.json", "{", r"classes.json must be a JSON list of classes"),
        ("classes.json", '[{"name": "red"}]', r"classes.json must be a JSON list of classes"),
        ("classes.json", '[{"id": "1", "name": "a"}]', r"class ids must be whole numbers"),
        ("classes.json", '[{"id": 1, "name": "a"}]', r"a class head with 4 rows does not match 1 class ids and 1 names"),
        ("thresholds.json", "{", r"cannot read .*thresholds.json: .*; remove the file to use no stored thresholds"),
        ("thresholds.json", "[0.5]", r"thresholds must be {\"overall\": score, \"classes\": \[3 scores\]}"),
        ("model.safetensors", "x", r"damaged: its content does not match its checksum file"),
    ],
)
def test_a_spoilt_model_folder_says_what_is_wrong(predictor, tmp_path, name, content, said):
    predictor.save(tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    with pytest.raises((WeightsError, ConfigError), match=said):
        Predictor.from_checkpoint(tmp_path / "model")


def test_the_folder_of_a_run_is_its_best_checkpoint_or_names_the_others(detr, tmp_path):
    best = Predictor.from_checkpoint(detr.folder / "model_best.pth", device="cpu")
    assert same(Predictor.from_checkpoint(detr.folder, device="cpu")(detr.image(7)), best(detr.image(7)))
    shutil.copy(detr.weights, tmp_path)
    with pytest.raises(WeightsError, match=r"it is the folder of a run, so give one of its files: model_final.pth"):
        Predictor.from_checkpoint(tmp_path)


@pytest.fixture
def without_config(detr, tmp_path):
    """A checkpoint without its config."""
    checkpoint = torch.load(detr.weights, weights_only=True)
    del checkpoint["cpvt_det"]["config"]
    torch.save(checkpoint, tmp_path / "old.pth")
    return tmp_path / "old.pth"


def test_weights_that_tell_no_config_take_a_given_one(detr, without_config):
    with pytest.raises(WeightsError, match=r"old.pth contains no config; give one with --config-file"):
        Predictor.from_checkpoint(without_config)
    predictor = Predictor.from_checkpoint(without_config, device="cpu", config_file=str(detr.folder / "config.yaml"))
    assert predictor(detr.image(12)).to_coco(12) == [row for row in detr.found if row["image_id"] == 12]


def test_keys_of_training_that_are_gone_do_not_matter(detr, predictor, tmp_path):
    """A run of an earlier version: what it was trained with may have had other names, but what it detects with may not."""
    checkpoint = torch.load(detr.weights, weights_only=True)
    config = checkpoint["cpvt_det"]["config"]
    checkpoint["cpvt_det"]["config"] = (
        config.replace("SOLVER:\n", "SOLVER:\n  CLIP_GRADIENTS: {ENABLED: true}\n") + "OLD: {KEY: 1}\n"
    )
    torch.save(checkpoint, tmp_path / "old.pth")
    assert "CLIP_GRADIENTS" in checkpoint["cpvt_det"]["config"]
    assert same(Predictor.from_checkpoint(tmp_path / "old.pth", device="cpu")(detr.image(7)), predictor(detr.image(7)))
    checkpoint["cpvt_det"]["config"] = config.replace("INPUT:\n", "INPUT:\n  SHARPEN: 2\n")
    torch.save(checkpoint, tmp_path / "old.pth")
    with pytest.raises(WeightsError, match=r"'INPUT.SHARPEN'.*; --config-file replaces it"):
        Predictor.from_checkpoint(tmp_path / "old.pth")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL.NUM_CLASSES", "5"], r"MODEL.NUM_CLASSES is 5, but .*old.pth has 3 classes \(red, green, blue\)"),
        (["MODEL.DETR.HIDDEN_DIM", "32"], r"old.pth has different shapes from the config's model"),
        (["MODEL.DETR.NUM_OBJECT_QUERIES", "7"], r"old.pth fits only part of the config's model: .*1 re-initialised"),
    ],
)
def test_weights_that_do_not_fit_are_refused(detr, without_config, words, said):
    with pytest.raises((ConfigError, WeightsError), match=said):
        Predictor.from_checkpoint(without_config, config_file=str(detr.folder / "config.yaml"), overrides=words)


def test_a_compiled_checkpoint_is_used_as_it_is(detr, predictor, tmp_path):
    checkpoint = torch.load(detr.weights, weights_only=True)
    averaged = checkpoint["cpvt_det"].pop("ema")  # with their counter
    checkpoint["model"] = {f"_orig_mod.{name}": tensor for name, tensor in averaged.items() if name != "n_averaged"}
    torch.save(checkpoint, tmp_path / "compiled.pth")
    assert same(Predictor.from_checkpoint(tmp_path / "compiled.pth", "cpu")(detr.image(7)), predictor(detr.image(7)))


def test_weights_without_a_class_head_are_no_detector(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match=r"resnet\.pth has no class head"):
        Predictor.from_checkpoint(tmp_path / "resnet.pth", config_file="coco/detr_r50_sine_50ep.yaml")


def test_weights_of_another_project_need_classes(tmp_path):
    torch.save({"model": to_facebook(detector().state_dict())}, tmp_path / "official.pth")
    with pytest.raises(WeightsError, match=r"does not contain the names of its classes; make a model folder with a classes.json"):
        Predictor.from_checkpoint(tmp_path / "official.pth", config_file="coco/detr_r50_sine_50ep.yaml")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other.pth contains no dict of tensors by name"):
        Predictor.from_checkpoint(tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"no weights file .*none.pth"):
        Predictor.from_checkpoint(tmp_path / "none.pth")


def test_converted_weights_keep_the_config(detr, predictor, tmp_path):
    torch.save(read_weights(detr.weights).as_checkpoint(), tmp_path / "weights.pth")
    converted = Predictor.from_checkpoint(tmp_path / "weights.pth", device="cpu")
    assert same(converted(detr.image(5)), predictor(detr.image(5)))


def test_a_checkpoint_with_a_config_that_is_no_text_names_none(tmp_path):
    checkpoint = checkpoint_of(detector())
    checkpoint["cpvt_det"]["config"] = {"MODEL": 1}
    torch.save(checkpoint, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match="contains no config"):
        Predictor.from_checkpoint(tmp_path / "odd.pth")
