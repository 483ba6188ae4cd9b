# SPDX-License-Identifier: Apache-2.0
"""A folder in the place of a config: trained on, checked, and never written into; broken ones end with a sentence."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import test_folders as layouts
import yaml
from click.testing import CliRunner
from PIL import Image
from tiny import MODEL, RUN

from cpvt_det.cli import folder as folder_module
from cpvt_det.cli import main
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import config_root, load_cfg
from cpvt_det.data.coco import read_coco
from cpvt_det.data.loader import SampleLoader
from cpvt_det.data.validation.duplicates import near_duplicates
from cpvt_det.training import choose
from cpvt_det.training.recipe import Pace

SMALL = {**MODEL, "MODEL.DETECTOR.NUM_LEVELS": 2, "TEST.PICTURES": 2, "SOLVER.LOG_PERIOD": 1, "SOLVER.EPOCHS": 1.0}
SMALL |= {key: RUN[key] for key in ("INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN", "INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST")}
WORDS = [str(word) for pair in SMALL.items() for word in pair]
OF_DETR = [*WORDS, "MODEL.DETECTOR.NUM_LEVELS", "None"]  # the default detector, which has one level


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, and beside it the user's ``mine``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_one_command_trains_from_a_folder_and_its_yaml_trains_the_same(here, monkeypatch):
    monkeypatch.setattr(choose, "WARM_UP", 1)
    monkeypatch.setattr(choose, "STEPS", 1)
    mine = here.parent / "mine"
    layouts.write_labelimg_yolo(mine)
    before = layouts.files_below(mine)
    result = call("train", "../mine", "--budget", "1m", "--num-gpus", 0, "--runner", "builtin", *WORDS)
    assert result.exit_code == 0, result.output
    assert layouts.files_below(mine) == before
    assert "../mine: yolo, 8 files such as" not in result.output and "../mine: yolo, 6 files such as" in result.output
    assert "measured: " in result.output and "split drawn with seed 0" in result.output
    output = here / "output/mine"
    assert (output / "model_best.pth").is_file() and (output / "pictures/detections.png").is_file()
    log = (output / "log.txt").read_text()
    assert "cpvt-det predict output/mine/model_best.pth" in log and "from a pretrained backbone" not in log
    parts = {split: json.loads((output / f"data/{split}.json").read_text()) for split in ("train", "val")}
    assert sorted(image["file_name"] for part in parts.values() for image in part["images"]) == [f"{name}.png" for name in "abcdef"]

    chosen = output / "chosen.yaml"
    first, second, *_ = chosen.read_text().splitlines()
    assert first == f"# Chosen by cpvt-det train {(here.parent / 'mine').resolve()}"
    assert (
        second == f"# To repeat this run from {here}: cpvt-det train --num-gpus 0 --config-file output/mine/chosen.yaml "
        "OUTPUT_DIR output/mine_again"
    )
    assert yaml.safe_load(chosen.read_text())["SOLVER"]["THREADS"] >= 1
    assert yaml.safe_load(chosen.read_text())["MODEL"]["DEVICE"] == "cpu"
    again = call("train", "--config-file", chosen, "--num-gpus", 0, "--runner", "builtin", "OUTPUT_DIR", "again")
    assert again.exit_code == 0, again.output
    losses = [losses_of(folder / "metrics.json") for folder in (output, here / "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 2  # 1 epoch of 5 images, 2 a step

    refused = call("train", "../mine", "--resume", "--budget", "1h")
    assert refused.exit_code == 2 and "leave out --budget, --format, --new-split and --start; to train longer" in refused.output
    resumed = call("train", "../mine", "--resume", "--num-gpus", 0, "--runner", "builtin", "SOLVER.EPOCHS", "2")
    assert resumed.exit_code == 0, resumed.output
    assert "measured:" not in resumed.output and len(losses_of(output / "metrics.json")) == 5
    shorter = call("train", "../mine", "--resume", "--num-gpus", 0, "--runner", "builtin", "SOLVER.EPOCHS", "1")
    assert shorter.exit_code == 2 and "has 5 iterations already, and the config asks for 2 (1 epochs x 5 images" in shorter.output
    weights = (output / "model_best.pth").read_bytes()
    second = call("train", "../mine", "--budget", "1m", "--num-gpus", 0, "--runner", "builtin", *WORDS)
    assert "output/mine already has a run, so this one goes to output/mine_2" in second.output, second.output
    assert (output / "model_best.pth").read_bytes() == weights and (here / "output/mine_2/model_best.pth").is_file()
    assert yaml.safe_load(chosen.read_text())["SOLVER"]["EPOCHS"] == 1


def losses_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["total_loss"] for line in lines if "total_loss" in line]


def test_measuring_trains_some_steps_and_evaluates_some_images(drawn_cfg, drawn_coco):
    cfg = load_cfg("", [*OF_DETR, "DATALOADER.NUM_WORKERS", "0"])
    cfg.INPUT.RESIZE_CROP.ENABLED = False
    dataset = read_coco(drawn_coco.files)
    pace = choose.measure(cfg, [dataset, dataset])
    assert isinstance(pace, Pace) and 0 < pace.image < 5 and 0 < pace.step < 5
    assert cfg.MODEL.NUM_CLASSES == 3
    with pytest.raises(ConfigError, match=r"SOLVER\.THREADS must be at least 0"):
        choose.measure(
            load_cfg("", [*OF_DETR, "DATALOADER.NUM_WORKERS", "0", "SOLVER.THREADS", "-1"]),
            [dataset, dataset],
        )


def test_what_is_measured_is_what_is_trained(monkeypatch, drawn_cfg, drawn_coco):
    """With the workers and the mixed images of the run: no epoch is a closing one."""
    words = ["INPUT.AUGMENTATIONS", "[['Mosaic', {'p': 1}]]", "INPUT.CLOSE_EPOCHS", "1", "DATALOADER.NUM_WORKERS", "1"]
    cfg, seen = load_cfg("", [*OF_DETR, *words]), []

    class Stop(Exception):
        pass

    def look(self):
        seen.append(self)
        raise Stop

    monkeypatch.setattr(SampleLoader, "__iter__", look)
    dataset = read_coco(drawn_coco.files)
    with pytest.raises(Stop):
        choose.measure(cfg, [dataset, dataset])
    (loader,) = seen
    assert loader.num_workers == 1
    start, _ = loader.dataset.closing
    assert start == float("inf")


def test_check_data_reads_the_same_and_writes_nothing(here):
    mine = here.parent / "mine"
    layouts.write_labelimg_yolo(mine)
    before = layouts.files_below(here.parent)
    result = call("check-data", mine)
    assert result.exit_code == 0, result.output
    assert layouts.files_below(here.parent) == before
    assert "mine_train: 5 images" in result.output and "mine_val: 1 images" in result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["class", "train", "val"] in rows and [row[0] for row in rows if row[0] in layouts.NAMES] == layouts.NAMES


def test_faults_of_a_split_that_is_drawn_are_headed_with_the_folder(here):
    """The split's files are gone when the command ends."""
    layouts.write_labelimg_yolo(here.parent / "mine")
    (here.parent / "mine/a.png").write_bytes(b"no picture")
    result = call("check-data", "../mine", "--new-split")
    assert result.exit_code == 2
    assert "mine_train (../mine):" in result.output and "a.png" in result.output
    assert ".json" not in result.output


def test_check_data_tells_which_images_were_almost_seen_in_training(here):
    layouts.write_roboflow_voc(here.parent / "mine")
    assert "nearly the same" not in call("check-data", "../mine").output
    brighter = Image.open(here.parent / "mine/Train/a.png").point(lambda value: value // 2 + 99)
    brighter.save(here.parent / "mine/TEST/e.png")
    result = call("check-data", "../mine")
    assert result.exit_code == 0
    assert "validation images that are nearly the same as a training image: 1" in result.output
    assert "mine/TEST/e.png: ../mine/Train/a.png" in result.output
    brighter.save(here.parent / "mine/Train/b.png")
    result = call("check-data", "../mine")
    assert "validation images that are nearly the same as a training image: 1" in result.output
    assert "mine/TEST/e.png: ../mine/Train/a.png and 1 other" in result.output
    config = here / "mine.yaml"
    config.write_text("DATASETS: {REGISTER: [[a, ../mine/Train, ''], [b, ../mine/TEST, '']], TRAIN: [a], TEST: [b]}")
    assert "nearly the same" in call("check-data", "--config-file", config).output


def no_labels(mine):
    layouts.both(mine, "images/{name}.png", lambda split, name: ())


def labels_without_images(mine):
    layouts.write_cvat_yolo(mine)
    for path in mine.rglob("*.png"):
        path.unlink()


def two_formats(mine):
    layouts.write_voc(mine)
    layouts.write_json_beside(mine)


def overlapping_split(mine):
    layouts.write_roboflow_yolo(mine)
    for kind, end in (("images", "png"), ("labels", "txt")):
        shutil.copy(mine / f"train/{kind}/a.{end}", mine / f"valid/{kind}/copy_of_a.{end}")


BROKEN = {
    "no labels": (no_labels, "error: ../mine has 6 images and no annotations in a known format; put a COCO JSON"),
    "labels without images": (
        labels_without_images,
        "error: ../mine has annotations (5 files such as ../mine/obj_train_data/a.txt) but no images; put the images below",
    ),
    "two formats": (two_formats, "annotations in several formats: coco (../mine/labels.json); voc (../mine/VOC, splits"),
    "splits that overlap": (
        overlapping_split,
        "in both training and validation: 1 image, such as ../mine/train/images/a.png, which is "
        "../mine/valid/images/copy_of_a.png; the figures would include images seen in training",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", ["train", "check-data"])
def test_a_broken_folder_ends_with_a_sentence(kind, command, here):
    make, said = BROKEN[kind]
    make(here.parent / "mine")
    before = layouts.files_below(here.parent / "mine")
    result = call(command, "../mine", *WORDS)
    assert result.exit_code == 2
    assert said in result.output, result.output
    assert "Traceback" not in result.output
    assert layouts.files_below(here.parent / "mine") == before


def test_what_the_sentences_advise_helps(here):
    overlapping_split(here.parent / "overlap")
    two_formats(here.parent / "two")
    layouts.write_labelimg_yolo(here.parent / "damaged")
    (here.parent / "damaged/c.png").write_bytes(b"no image")
    for words in (["../overlap", "--new-split"], ["../two", "--format", "coco"], ["../damaged", "DATASETS.ON_BAD", "drop"]):
        result = call("check-data", *words)
        assert result.exit_code == 0, result.output


def test_a_class_of_200_that_validation_lacks_is_told_and_no_fault(here, monkeypatch):
    names = [f"kind {number}" for number in range(200)]
    mine = here.parent / "mine"
    layouts.both(mine, "images/{split}/{name}.png", lambda split, name: ())
    layouts.write(mine / "data.yaml", f"train: images/train\nval: images/val\nnames: {names}\n")
    for split, images in (("train", layouts.TRAIN), ("val", layouts.VAL)):
        for number, name in enumerate(images):
            kinds = range(number, 200 if split == "train" else 199, len(images))
            layouts.write(mine / f"labels/{split}/{name}.txt", "".join(f"{kind} 0.5 0.5 0.2 0.2\n" for kind in kinds))
    said = "val has no object of 1 of 200 classes, whose AP is not measured: kind 199"
    result = call("check-data", mine)
    assert result.exit_code == 0, result.output
    assert said in result.output and "kind 7" not in result.output  # 200 classes are no table

    def measure(cfg, datasets, processes):
        raise ConfigError(f"{len(datasets[1].records)} images to validate on")

    monkeypatch.setattr(choose, "measure", measure)
    assert re.search(rf"{said}\n.*error: \d images to validate on", call("train", mine).output, re.DOTALL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "name a folder of images and annotations, or a config with --config-file"),
        (["check-data"], "name a folder of images and annotations, or a config with --config-file"),
        (["train", "SEED", "1"], "name a folder of images and annotations"),
        (["train", "../none"], "there is no folder ../none"),
        (
            ["train", "../mine", "DATASETS.TEST", "[]"],
            "DATASETS.TEST is empty, but a run on a folder is evaluated",
        ),
        (["train", "../mine/annotations/mine.yaml"], "is not a folder; for a config: --config-file ../mine/annotations/mine.yaml"),
        (["train", "../mine", "SEED"], "the number of words is odd: SEED"),
        (["train", "../mine", "--format", "coko"], "did you mean 'coco'?"),
        (["train", "../mine", "--eval-only"], "--eval-only needs a config"),
        (["train", "../mine", "OUTPUT_DIR", "../mine/out"], "is inside ../mine, where nothing may be written"),
        (["train", ".."], "OUTPUT_DIR output/"),
        (
            ["train", "--config-file", "quickstart/detr_peg.yaml", "--budget", "1h"],
            "--new-split and --start need",
        ),
        (["train", "../mine", "SOLVER.BASE_LR", "fast"], "SOLVER.BASE_LR"),
        (["train", "../mine", "--budget", "soon"], "'soon' is not a time such as 90s, 30m or 1h30m"),
    ],
)
def test_words_that_cannot_be_used_are_refused(words, said, here):
    layouts.write_coco(here.parent / "mine")
    layouts.write(here.parent / "mine/annotations/mine.yaml", "SEED: 1")
    before = layouts.files_below(here.parent)
    result = call(*words)
    assert result.exit_code == 2 and said in result.output, result.output
    assert layouts.files_below(here.parent) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["TEST.BEST_FIGURE", "mAP"], "unknown figure of the evaluation (TEST.BEST_FIGURE) 'mAP'"),
        (["--num-gpus", 99], "--num-gpus 99, but torch sees"),
    ],
)
def test_what_the_run_would_refuse_is_refused_before_steps_are_measured(words, said, here, monkeypatch):
    monkeypatch.setattr(choose, "measure", None)
    layouts.write_coco(here.parent / "mine")
    result = call("train", "../mine", *words)
    assert result.exit_code == 2 and said in result.output, result.output


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
SEVERAL = [
    ({"TORCHELASTIC_RUN_ID": "1"}, "each process would choose its own settings"),
    ({**SRUN, "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}, "each process would choose its own settings"),
    (SRUN, "this is one of 2 processes (srun), without MASTER_ADDR"),
]


@pytest.mark.parametrize(("variables", "said"), SEVERAL, ids=["torchrun", "srun", "srun without the address"])
def test_one_of_several_processes_does_not_choose_for_itself(here, monkeypatch, variables, said):
    """Before the data are read and steps are measured."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    layouts.write_coco(here.parent / "mine")
    monkeypatch.setattr(folder_module, "_read", None)
    assert said in call("train", "../mine").output


def test_times():
    times = {"90s": 90, "30m": 1800, "1h30m": 5400, "0.5h": 1800, "2h": 7200}
    assert {text: folder_module.Duration().convert(text, None, None) for text in times} == times


def test_configs_are_listed_with_a_line_each():
    lines = call("configs").output.splitlines()
    names = [path.relative_to(config_root()).as_posix() for path in config_root().rglob("*.yaml") if not path.name.startswith("_")]
    assert sorted(line.split()[0] for line in lines) == sorted(names)
    assert all(len(line.split()) > 3 and len(line) < 260 for line in lines)
    assert any(line.startswith("coco/detr_r50_peg_50ep.yaml ") and line.endswith("; encoding: peg") for line in lines)
    assert [line.split()[0] for line in call("configs", "quickstart/de").output.splitlines()] == [
        "quickstart/deformable_peg.yaml",
        "quickstart/deformable_pp_peg.yaml",
        "quickstart/deformable_pp_sine_offset+peg.yaml",
        "quickstart/deformable_pp_sine_offset.yaml",
        "quickstart/detr_peg.yaml",
    ]


def test_a_packaged_config_can_be_a_base(here):
    (here / "mine.yaml").write_text("_BASE_: quickstart/deformable_peg.yaml\nSEED: 7\n")
    cfg = load_cfg("mine.yaml")
    assert (cfg.SEED, cfg.MODEL.BACKBONE.WIDTH) == (7, 32)


def test_images_that_cannot_be_compared_are_no_duplicates(here):
    (here / "a.png").write_bytes(b"no image")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(here / "b.png")
    assert near_duplicates(["a.png", "b.png"], ["a.png", "b.png"]) == {}


def begin_run(output, folder, checkpoint=False):
    output.mkdir(parents=True, exist_ok=True)
    (output / "chosen.yaml").write_text(f"# {folder_module.CHOSEN_FOR}{folder.resolve()}\n")
    if checkpoint:
        (output / "last_checkpoint").touch()


def test_a_run_that_left_checkpoints_keeps_its_folder(here, capsys):
    mine = here.parent / "mine"

    def output_of(resume=False):
        return folder_module._output_of(mine, resume)

    assert output_of() == output_of(resume=True) == "output/mine" and not capsys.readouterr().out
    for number, name in enumerate(("mine", "mine_2", "mine_3")):
        begin_run(here / "output" / name, mine)
        assert output_of() == output_of(resume=True) == f"output/{name}"  # it ended before its first checkpoint
        assert ("already has a run" in capsys.readouterr().out) == (number > 0)
        begin_run(here / "output" / name, mine, checkpoint=True)
        assert (output_of(), output_of(resume=True)) == (f"output/mine_{number + 2}", f"output/{name}")
        capsys.readouterr()


def test_a_gap_in_the_numbers_hides_no_run(here, capsys):
    mine = here.parent / "mine"
    begin_run(here / "output/mine_3", mine, checkpoint=True)
    assert folder_module._output_of(mine, resume=True) == "output/mine_3"
    assert folder_module._output_of(mine, resume=False) == "output/mine"


def test_a_run_that_is_going_on_keeps_its_folder_and_its_settings(here):
    """It has no checkpoint yet; its lock is another process's."""
    mine, output = here.parent / "mine", here / "output/mine"
    begin_run(output, mine)
    (output / ".lock").touch()
    assert folder_module._output_of(mine, resume=False) == "output/mine"
    lock = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", lock, str(output / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert folder_module._output_of(mine, resume=False) == "output/mine_2"
        before = (output / "chosen.yaml").read_text()
        with pytest.raises(ConfigError, match="another run is using OUTPUT_DIR output/mine; stop it"):
            folder_module.choose_run(mine, ("OUTPUT_DIR", "output/mine"), None, "", False, None, resume=False)
        assert (output / "chosen.yaml").read_text() == before
        process.stdin.close()


def test_where_there_is_no_run_to_go_on_with_that_is_told_before_steps_are_measured(here, monkeypatch):
    """The same command is right the first time, as with a config."""
    monkeypatch.setattr(choose, "measure", None)
    layouts.write_coco(here.parent / "mine")
    words = ["TEST.BEST_FIGURE", "mAP"]  # refused before that, too
    result = call("train", "../mine", "--resume", *words)
    assert "--resume: there is no run in output/mine to continue; this one starts at iteration 0" in result.output
    assert "no run" not in call("train", "../mine", *words).output


def test_the_run_of_another_folder_is_neither_resumed_nor_written_over(here, capsys):
    """Of a folder with the same name elsewhere, and of one whose name is this one's with a number."""
    mine, numbered, elsewhere = (here.parent / name for name in ("mine", "mine_2", "other/mine"))
    begin_run(here / "output/mine", mine, checkpoint=True)
    begin_run(here / "output/mine_2", numbered)
    assert folder_module._output_of(mine, resume=True) == "output/mine" and not capsys.readouterr().out
    assert folder_module._output_of(mine, resume=False) == "output/mine_3"
    assert folder_module._output_of(elsewhere, resume=False) == "output/mine_3"
    with pytest.raises(ConfigError, match=r"no run on .*other/mine to continue, and output/mine/chosen\.yaml belongs to other"):
        folder_module.choose_run(elsewhere, (), None, "", False, None, resume=True)
    begin_run(here / "output/mine_3", elsewhere, checkpoint=True)
    capsys.readouterr()
    assert folder_module._output_of(elsewhere, resume=True) == "output/mine_3"
    assert "the last run on" in capsys.readouterr().out
    assert folder_module._output_of(mine, resume=True) == "output/mine"
    begin_run(here / "output/mine", mine)  # started again, after that one
    assert folder_module._output_of(mine, resume=True) == "output/mine"
