# SPDX-License-Identifier: Apache-2.0
"""Every command in README and documents, run where their files are there: as it stands, but that trainings are short and small.

What a test cannot run here (a clone of detectron2, other projects' weights) has its place below, with the reason.
"""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner
from conftest import draw_coco
from exports import kept_exports, shared_exports  # noqa: F401
from image_classes import class_words, draw_folders
from PIL import Image
from run_commands import commands
from test_foreign import write_voc
from tiny import MODEL, RUN

from cpvt_det.cli import main
from cpvt_det.config import load_cfg
from cpvt_det.training.train import run as train_run
from studies.__main__ import main as studies

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/README.md"]
ELSEWHERE = {
    r"make (quickstart|test|matrix)\b": "its parts are commands of their own, or how tests and site are run",
    r"(pip|git|apt-get|python3 -m venv) ": "installs",
    r"export DETECTRON2_ENV_MODULE=cpvt_det.d2$": "tests/d2/test_detectron2_home.py",
    r"python studies/classifiers/prepare.py ": "60,000 images: tests/studies/test_classifier_study.py",
    r"python (\$D2|detectron2)/tools/": "detectron2's own: tests/d2/test_detectron2_home.py, tests/plug/test_plug_detectron2.py",
    r"cpvt-det convert-weights detr-r50-e632da11.pth": "official weights: tests/checkpoint/test_checkpoint.py",
    r"cpvt-det train .* MODEL.WEIGHTS detr_r50.pth": "what that conversion writes",
    r"cpvt-det (predict dino_r50|train .* --start) ": "public weights: tests/checkpoint/test_starts.py, test_tuning.py",
    r"PYTHONPATH=tests python -m plug_matrix .*--peer": "other projects' checkouts: tests/plug/test_plug_families.py",
    r"python benchmarks/detectron2_cpvt.py ": "detectron2's own script: tests/benchmarks/test_detectron2_cpvt.py",
    r"python benchmarks/(films|exported_speed).py CHECKPOINT ": "a checkpoint: tests/benchmarks/test_films_speed.py, tests/export",
    r"python benchmarks/before_after.py ": "another checkout: tests/benchmarks/test_before_after.py",
    r"(DETECTRON2_DATASETS=DIR )?python -m studies run ": "hours of training: tests/studies/test_study.py",
    r"cpvt-det train --import my_parts ": "tests/docs/test_extend.py",
    r"cpvt-det train .* CALLBACKS ": "packages of others: tests/training/test_callbacks.py",
    r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ": "tests/docs/test_clusters.py",
    r"cpvt-det train --config-file quickstart/deformable_peg.yaml --runner builtin$": "make quickstart's",
    r"cpvt-det export .* --format openvino ": "a package that may be missing: tests/export/test_exported_files.py",
    r"cpvt-det predict .* --input (film.mp4|rtsp:)": "a package that may be missing: tests/predict/test_films.py",
    r"cpvt-det serve ": "it serves until it is stopped: tests/predict/test_server.py",
    r"cpvt-det shapes datasets/shapes$": "tests/data/test_shapes.py draws fewer",
}
"""Commands, by pattern, and why they are not run here."""
SMALL_IMAGES = {"analyze": ["--sizes", "64"], **{key: ["--size", "64x96"] for key in ("position", "patches", "features", "pixels")}}
"""Options that come after and so win."""
DOCUMENTED = list(dict.fromkeys(text for path in DOCUMENTS for text in commands(path)))


@pytest.fixture(scope="module")
def playground(tmp_path_factory, tiny_run):
    """A folder with what the documents speak of: data sets, photographs, and runs that are done."""
    folder = tmp_path_factory.mktemp("playground")
    drawn = draw_coco(folder / "mine")
    write_parts(drawn.content, {"train": [12, 30, 41, 5], "val": [7]}, folder / "mine")
    layouts = {"bccd": ("images", "train", "val"), "coco": ("train2017", "instances_train2017", "instances_val2017")}
    layouts["shapes"] = ("train", "train", "val")
    for name, (images, *splits) in layouts.items():
        shutil.copytree(folder / "mine/images", folder / f"datasets/{name}/{images}")
        (folder / f"datasets/{name}/annotations").mkdir()
        for split in splits:
            shutil.copy(drawn.files.annotations, folder / f"datasets/{name}/annotations/{split}.json")
    for name in ("shapes/val", "coco/val2017"):
        shutil.copytree(folder / "mine/images", folder / "datasets" / name)
    write_voc(folder / "datasets/BCCD_Dataset/BCCD", {"train": [12, 41, 5], "val": [7, 30]})
    run = tiny_run("detr")
    shutil.copytree(run.folder, folder / "output")
    for name in ("mine", "peg", "sine", "none", "quickstart", "tutorial"):
        shutil.copytree(run.folder, folder / "output" / name)
    words = class_words(draw_folders(folder / "by_class"), folder / "output/classifier", SOLVER__MAX_ITER=1, SOLVER__EPOCHS=0)
    train_run(load_cfg("", words))
    (folder / "photos/deeper").mkdir(parents=True)
    for name in ("photo.jpg", "picture.jpg", "photos/a.jpg", "photos/deeper/b.jpg"):
        Image.open(run.image(30)).save(folder / name)
    Image.open(run.image(30)).save(folder / "datasets/BCCD_Dataset/BCCD/JPEGImages/BloodImage_00001.jpg")
    Image.open(run.image(7)).save(folder / "datasets/shapes/val/000029.jpg")
    for name in ("configs", "tools", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "studies", folder / "studies")  # a report is written beside its plan
    drawn.files.annotations.unlink()  # mine/ has two sets
    return folder


def write_parts(content, parts, folder):
    """A COCO JSON for each part of the images of another."""
    for name, ids in parts.items():
        images = [image for image in content["images"] if image["id"] in ids]
        boxes = [box for box in content["annotations"] if box["image_id"] in ids]
        (folder / f"{name}.json").write_text(json.dumps({**content, "images": images, "annotations": boxes}))


@pytest.mark.parametrize("command", [text for text in DOCUMENTED if not any(re.match(pattern, text) for pattern in ELSEWHERE)])
def test_a_documented_command_runs(command, playground, shared_exports, monkeypatch):  # noqa: F811
    monkeypatch.chdir(playground)
    monkeypatch.setenv("DETECTRON2_DATASETS", "datasets")
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        _only_read(words[1], words[2:])
        return
    command_line = main
    if words[:3] == ["python", "-m", "studies"]:
        command_line, words = studies, words[3:]
    else:
        assert words[0] == "cpvt-det" or words[1] == "tools/train_net.py", f"neither run here nor listed in ELSEWHERE: {command}"
        words = words[1:] if words[0] == "cpvt-det" else ["train", *words[2:]]
    small = _short_and_small(words) if words[0] == "train" else SMALL_IMAGES.get(words[1 if words[0] == "show" else 0], [])
    if words[:2] == ["show", "position"]:  # of three models of 160 MB, which a process of the tests would keep room for
        result = forked.run(*words, *small)
        assert result.returncode == 0, result.stderr
        return
    result = CliRunner().invoke(command_line, [*words, *small])
    assert result.exit_code == 0, result.output


def _short_and_small(words: list[str]) -> list[str]:
    """Options and KEY VALUE words that come after and so win."""
    builtin = importlib.util.find_spec("detectron2") is None or "builtin" in words
    pairs = {**MODEL, **RUN, "SOLVER.MAX_ITER": 1, "MODEL.BACKBONE.WEIGHTS": ""}
    is_folder = "--config-file" not in words
    model = "CPVTDeformableDetr" if is_folder else load_cfg(words[words.index("--config-file") + 1]).MODEL.META_ARCHITECTURE
    if model == "CPVTClassifier":
        pairs = {key: value for key, value in pairs.items() if "DETR" not in key and not key.startswith("INPUT.")}
        pairs["INPUT.CLASSIFY.SIZE"] = 32
    if model == "CPVTDeformableDetr":
        pairs["MODEL.DETECTOR.NUM_LEVELS"] = 2
    if is_folder:
        pairs["OUTPUT_DIR"] = "output/folder"
    options = ["--num-gpus", "0", "--runner", "builtin" if builtin else "detectron2"]
    return [*options, *(str(word) for pair in pairs.items() for word in pair)]


def _only_read(script: str, words: list[str]) -> None:
    """A benchmark takes minutes: its options are read, its work is tested in ``tests/benchmarks/test_benchmarks.py``."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main.make_context(script, list(words))


def test_every_reason_is_for_a_command():
    assert [pattern for pattern in ELSEWHERE if not any(re.match(pattern, text) for text in DOCUMENTED)] == []
