# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det predict``: what it finds, what it writes, what it refuses."""

import io
import json
import os
import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from pycocotools.coco import COCO

from cpvt_det import Predictor
from cpvt_det.cli import main
from cpvt_det.predict.detect_files import picture_names


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run("detr")


@pytest.fixture
def photos(run, tmp_path):
    """The run's images in a folder of their own, one of them deeper."""
    folder = tmp_path / "photos"
    shutil.copytree(run.drawn.files.image_root, folder)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image either")
    shutil.move(folder / "part/041.png", folder / "041.png")
    return folder


def predict(run, source, output, *words):
    return predict_by(run.weights, source, output, *words)


def predict_by(weights, source, output, *words):
    command = ["predict", weights, "--input", source, "--output", output, "--device", "cpu", *words]
    return CliRunner().invoke(main, [str(word) for word in command])


def written(output):
    """The image ids by name, and the detections of each."""
    images = json.loads((output / "images.json").read_text())["images"]
    detections = json.loads((output / "detections.json").read_text())
    return {image["file_name"]: [row for row in detections if row["image_id"] == image["id"]] for image in images}


def test_a_folder_becomes_pictures_and_coco_files(run, photos, tmp_path):
    """They are what the run's evaluation found, under other image ids; COCO's own tools read them."""
    result = predict(run, photos, tmp_path / "out", "--threshold", 0)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/out: 5 images, 30 detections with score >= 0, " in result.stdout
    assert " images/s; the best score is " in result.stdout
    found = written(tmp_path / "out")
    assert list(found) == ["041.png", "part/005.png", "part/007.png", "part/012.png", "part/030.png"]
    expected = [{**row, "image_id": 0} for row in run.found if row["image_id"] == 30]
    assert [{**row, "image_id": 0} for row in found["part/030.png"]] == expected
    pictures = sorted(path.relative_to(tmp_path / "out/pictures").as_posix() for path in (tmp_path / "out").rglob("*.jpg"))
    assert pictures == ["041.jpg", "part/005.jpg", "part/007.jpg", "part/012.jpg", "part/030.jpg"]
    with redirect_stdout(io.StringIO()):
        images = COCO(str(tmp_path / "out/images.json"))
        results = images.loadRes(str(tmp_path / "out/detections.json"))
    assert (len(images.imgs), len(results.anns)) == (5, 30)
    assert images.loadCats([3, 17, 90])[0] == {"id": 3, "name": "red"}
    assert images.imgs[5]["height"] == 33 and images.imgs[5]["width"] == 90


def test_a_picture_is_drawn_above_the_threshold(run, tmp_path):
    found = Predictor.from_checkpoint(run.weights, device="cpu")(run.image(30))
    middle = found.scores.sort().values[3].item()
    assert predict(run, run.image(30), tmp_path / "out", "--threshold", middle).exit_code == 0
    assert len(written(tmp_path / "out")["030.png"]) == 3
    with Image.open(tmp_path / "out/pictures/030.jpg") as picture:
        drawn = np.array(found.above(middle).draw(), dtype=int)
        assert np.abs(np.array(picture, dtype=int) - drawn).mean() < 3


def keeping(run, folder, thresholds):
    """The run's weights with other thresholds; without, as an earlier version wrote them, for ``None``."""
    checkpoint = torch.load(run.weights, weights_only=True)
    checkpoint["cpvt_det"]["thresholds"] = thresholds
    if thresholds is None:
        del checkpoint["cpvt_det"]["thresholds"]
    torch.save(checkpoint, folder / "kept.pth")
    return folder / "kept.pth"


def test_the_kept_threshold_is_used_unless_another_is_given(run, tmp_path):
    found = Predictor.from_checkpoint(run.weights, device="cpu")(run.image(30))
    middle = found.scores.double().sort().values[3].item()
    weights = keeping(run, tmp_path, {"overall": middle, "classes": [None, None, None]})
    result = predict_by(weights, run.image(30), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (
        result.stderr.splitlines()[0]
        == f"Threshold {middle:.3g}: the best F1 in the last evaluation of {weights}; --threshold sets another"
    )
    assert f"1 image, 3 detections with score >= {middle:.3g}, " in result.stdout
    assert len(written(tmp_path / "out")["030.png"]) == 3
    given = predict_by(weights, run.image(30), tmp_path / "out", "--threshold", 0)
    assert "6 detections with score >= 0," in given.stdout and "Threshold" not in given.stderr


@pytest.mark.parametrize("thresholds", [None, {"overall": None, "classes": [None] * 3}], ids=["none", "no correct detection"])
def test_without_a_kept_threshold_it_is_half_and_that_is_told(run, tmp_path, thresholds):
    weights = keeping(run, tmp_path, thresholds)
    result = predict_by(weights, run.image(30), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"Threshold 0.5: {weights} contains none from an evaluation; --threshold sets another\n")
    assert "with score >= 0.5," in result.stdout


def test_the_best_score_is_named_and_what_to_do_where_nothing_passes(run, photos, tmp_path):
    predictor = Predictor.from_checkpoint(run.weights, device="cpu")
    best = max((predictor(path) for path in sorted(photos.rglob("0*.png"))), key=lambda found: found.scores[0])
    result = predict(run, photos, tmp_path / "out", "--threshold", 1)
    named = f"; the best score is {best.scores[0]:.3g}\n"
    assert "5 images, 0 detections with score >= 1," in result.stdout and result.stdout.endswith(named)
    assert result.stderr.endswith(
        "No detection reaches the threshold, so the pictures have no boxes; --threshold sets a lower one\n"
    )
    passing = predict(run, photos, tmp_path / "out", "--threshold", 0)
    assert passing.stdout.endswith(named) and "No detection reaches" not in passing.stderr


def test_a_picture_fits_into_a_jpeg(run, tmp_path):
    """A strip of 5 x 70,000 pixels, which is not enlarged: JPEG has no side above 65,500."""
    Image.new("RGB", (70_000, 5), "red").save(tmp_path / "strip.png")
    result = predict(run, tmp_path / "strip.png", tmp_path / "out", "INPUT.MAX_SIZE_TEST", 64)
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "out/pictures/strip.jpg") as picture:
        assert picture.size == (65_500, 5)


def test_batches_do_not_change_what_is_found(run, photos, tmp_path):
    for batch in (1, 3):
        assert predict(run, photos, tmp_path / str(batch), "--batch", batch, "--threshold", 0).exit_code == 0
    one, three = (
        [
            (row["image_id"], row["category_id"], *row["bbox"], row["score"])
            for rows in written(tmp_path / name).values()
            for row in rows
        ]
        for name in ("1", "3")
    )
    np.testing.assert_allclose(one, three, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("photos/part/030.png", ["030.png"]),
        ("photos/part/0*2.png", ["012.png"]),
        ("photos/*.png", ["041.png"]),
        ("photos/**/0[34]*.png", ["041.png", "part/030.png"]),
    ],
)
def test_files_and_globs(run, photos, tmp_path, monkeypatch, source, names):
    monkeypatch.chdir(tmp_path)
    result = predict(run, source, "out")
    assert result.exit_code == 0, result.output
    assert list(written(tmp_path / "out")) == names


def test_pictures_of_an_earlier_call_are_not_taken(run, photos, tmp_path):
    for _ in range(2):
        assert predict(run, photos, photos / "found").exit_code == 0
    assert len(written(photos / "found")) == 5
    nothing = predict(run, f"{photos}/found/**/*.jpg", photos / "found")
    assert (
        nothing.exit_code == 2 and "found/pictures, to which pictures are written; choose another output folder" in nothing.stderr
    )


def test_the_folder_of_the_photographs_may_be_the_output(run, photos, monkeypatch):
    monkeypatch.chdir(photos)
    for _ in range(2):
        assert predict(run, "part", ".").exit_code == 0
    assert len(written(photos)) == 4 and (photos / "pictures/007.jpg").is_file()
    again = predict(run, ".", ".")
    assert again.exit_code == 0 and "left out: 4 images in pictures, where pictures are drawn" in again.stderr


def test_an_input_is_not_overwritten(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 30), "red").save("pictures/a.jpg")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a.jpg").symlink_to("../pictures/a.jpg")
    before = (tmp_path / "pictures/a.jpg").read_bytes()
    os.link("pictures/a.jpg", "a.jpg")
    for source in ("pictures/a.jpg", "links/a.jpg", "*/a.jpg", "a.jpg"):
        result = predict(run, source, ".")
        assert result.exit_code == 2 and "choose another output folder" in result.stderr
    assert (tmp_path / "pictures/a.jpg").read_bytes() == before
    assert predict(run, "pictures/a.jpg", "out").exit_code == 0


def test_an_overlap_without_tiles_is_refused(run, photos, tmp_path):
    result = predict(run, photos, tmp_path / "out", "--overlap", 0.5)
    assert result.exit_code == 2 and "--overlap is for tiles; set their size with --tiles" in result.stderr
    assert predict(run, photos, tmp_path / "out", "--overlap", 0.5, "TEST.TILES.SIZE", 64).exit_code == 0


def test_keys_change_the_model(run, photos, tmp_path):
    words = ("--threshold", 0, "TEST.DETECTIONS_PER_IMAGE", 2)
    assert predict(run, photos, tmp_path / "out", *words).exit_code == 0
    assert {len(rows) for rows in written(tmp_path / "out").values()} == {2}


def test_a_model_folder_predicts(run, photos, tmp_path):
    Predictor.from_checkpoint(run.weights, device="cpu").save(tmp_path / "model")
    assert predict(run, photos, tmp_path / "one").exit_code == 0
    command = ["predict", tmp_path / "model", "--input", photos, "--output", tmp_path / "two", "--device", "cpu"]
    assert CliRunner().invoke(main, [str(word) for word in command]).exit_code == 0
    assert written(tmp_path / "one") == written(tmp_path / "two")


def test_pictures_have_names_of_their_own():
    assert picture_names(["a.png", "b/a.png", "c.tif", "c.png", "c.tif.jpg", "d"]) == {
        "a.png": "a.jpg",
        "b/a.png": "b/a.jpg",
        "c.tif": "c.tif.jpg",
        "c.png": "c.png.jpg",
        "c.tif.jpg": "c.tif.jpg.jpg",
        "d": "d.jpg",
    }


# --- bad input


def spoil(photos):
    """One file that is no image, one whose pixels are damaged behind a good header and end."""
    (photos / "text.png").write_text("this is no image")
    data = bytearray((photos / "041.png").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (photos / "damaged.png").write_bytes(data)


def test_unreadable_images_stop_it_before_any_work_and_are_all_named(run, photos, tmp_path):
    spoil(photos)
    (photos / "empty.jpg").write_text("")
    result = predict(run, photos, tmp_path / "out")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0] == "error: 2 of 8 image files cannot be read; --on-bad drop leaves them out"
    assert lines[1] == "  image files that cannot be read: 2"
    assert "empty.jpg: it is empty (0 bytes)" in lines[2] and "text.png: it is not an image" in lines[3]
    assert not (tmp_path / "out").exists()


def test_damage_behind_the_header_stops_it_by_name(run, photos, tmp_path):
    spoil(photos)
    (photos / "text.png").unlink()
    result = predict(run, photos, tmp_path / "out")
    assert result.exit_code == 2
    assert "damaged.png" in result.stderr and result.stderr.strip().endswith("--on-bad drop leaves it out")
    assert not (tmp_path / "out/detections.json").exists()


def test_unreadable_images_are_left_out_on_demand(run, photos, tmp_path):
    spoil(photos)
    result = predict(run, photos, tmp_path / "out", "--on-bad", "drop", "--batch", 2)
    assert result.exit_code == 0, result.output
    assert "text.png: it is not an image" in result.stderr
    assert "left out: cannot read image" in result.stderr and "damaged.png" in result.stderr
    assert len(written(tmp_path / "out")) == 5
    ids = [image["id"] for image in json.loads((tmp_path / "out/images.json").read_text())["images"]]
    assert len(set(ids)) == 5


def test_nothing_but_unreadable_images_is_an_error(run, photos, tmp_path):
    spoil(photos)
    result = predict(run, photos / "text.png", tmp_path / "out", "--on-bad", "drop")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "error: 1 of 1 image files cannot be read"


@pytest.mark.parametrize(
    ("source", "words", "said"),
    [
        ("nowhere.jpg", (), "there is no file or folder nowhere.jpg"),
        ("nowhere/*.jpg", (), "nothing matches nowhere/*.jpg"),
        ("void", (), "there is no image in the folder void or below it (suffixes: .apng, "),
        ("photos", ("--threshold", 1.5), "--threshold must be a score from 0 to 1, got 1.5"),
        ("photos", ("--threshold", "nan"), "--threshold must be a score from 0 to 1, got nan"),
        ("photos", ("--threshold", -0.1), "--threshold must be a score from 0 to 1, got -0.1"),
        (
            "photos/041.png",
            ("photos/part/005.png", "photos/part/007.png"),
            "photos/part/005.png is a file, not a config key; put a glob in quotes",
        ),
        ("photos", ("TEST.DETECTIONS_PER_IMAGE",), "KEY VALUE pairs"),
        ("photos", ("--device", "cuda:99"), "MODEL.DEVICE"),
        ("photos", ("--config-file", "none.yaml"), "no config file 'none.yaml'"),
    ],
)
def test_bad_input_is_a_line_and_code_2(run, photos, tmp_path, monkeypatch, source, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "void").mkdir()
    result = predict(run, source, "out", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("none.pth", "no weights file none.pth"),
        ("text.pth", "text.pth: damaged, incomplete or not a checkpoint"),
        ("folder", "the folder folder contains neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_bad_weights_are_a_line_and_code_2(photos, tmp_path, monkeypatch, weights, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(main, ["predict", weights, "--input", "photos", "--output", "out"])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert said in line


def test_an_output_that_is_a_file_is_refused(run, photos, tmp_path):
    (tmp_path / "out").write_text("")
    result = predict(run, photos, tmp_path / "out")
    assert result.exit_code == 2
    assert f"error: cannot write to {tmp_path}/out: " in result.stderr
