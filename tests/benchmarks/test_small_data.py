# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ``cpvt-det train FOLDER``: its parts of a data set, its records, and the tables that are made of them."""

import json
import os
from pathlib import Path

import pytest
import small_data_tables as tables
import test_folders as layouts
import yaml
from click.testing import CliRunner
from PIL import Image

from benchmarks import join_folders, small_data
from cpvt_det.cli.check_data import check_data
from cpvt_det.common.errors import ConfigError

SINE = {"MODEL": {"POSITION": {"NAME": "sine_offset"}}}
FIGURES = {f"bbox/{name}": 10.0 + number for number, name in enumerate(("AP", "AP50", "AP75", "APs", "APm", "APl", "AP-fish"))}


def boxes_of(folder, split):
    return {path.stem: boxes for path, boxes in full_boxes_of(folder, split).items()}


def full_boxes_of(folder, split):
    content = json.loads((folder / split / "_annotations.coco.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    found = {os.path.realpath(folder / split / image["file_name"]): [] for image in content["images"]}
    paths = dict(zip((image["id"] for image in content["images"]), found, strict=True))
    for box in content["annotations"]:
        found[paths[box["image_id"]]].append((names[box["category_id"]], *(round(value) for value in box["bbox"])))
    return {Path(path): boxes for path, boxes in found.items()}


@pytest.mark.parametrize("write", [layouts.write_roboflow_yolo, layouts.write_roboflow_voc])
def test_a_part_has_the_images_of_smaller_parts_and_all_that_is_validated(write, tmp_path):
    write(tmp_path / "mine")
    parts = [small_data.write_part(tmp_path / "mine", count, tmp_path / str(count)) for count in (1, 2, 3)]
    drawn = [boxes_of(part, "train") for part in parts]
    assert [len(part) for part in drawn] == [1, 2, 3] and drawn[0].keys() < drawn[1].keys() < drawn[2].keys()
    for part in (*drawn, boxes_of(parts[0], "valid")):
        assert all(sorted(boxes) == sorted(layouts.BOXES[name]) for name, boxes in part.items())
    assert boxes_of(parts[0], "valid").keys() == set(layouts.VAL)
    result = CliRunner().invoke(check_data, [str(parts[2])])
    assert result.exit_code == 0 and "mine_train: 3 images" in result.output, result.output
    with pytest.raises(ConfigError, match="--images 5: there are only 4 training images"):
        small_data.write_part(tmp_path / "mine", 5, tmp_path / "5")


def test_joined_folders_have_the_images_and_boxes_of_each_and_one_class_of_a_name(tmp_path):
    layouts.write_roboflow_yolo(tmp_path / "one")
    layouts.write_roboflow_voc(tmp_path / "two")
    result = CliRunner().invoke(join_folders.main, [str(tmp_path / name) for name in ("both", "one", "two")])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "both/train/_annotations.coco.json").read_text())
    assert sorted(one["name"] for one in content["categories"]) == sorted(layouts.NAMES)
    assert len({one["id"] for one in content["annotations"]}) == len(content["annotations"])
    for name in ("one", "two"):
        drawn = {path: boxes for path, boxes in full_boxes_of(tmp_path / "both", "train").items() if name in path.parts}
        assert {path.stem for path in drawn} == set(layouts.TRAIN)
        assert all(sorted(boxes) == sorted(layouts.BOXES[path.stem]) for path, boxes in drawn.items())


@pytest.mark.usefixtures("quiet_machine")
def test_a_record_has_the_last_figures_and_names_no_folder(monkeypatch, tmp_path):
    def train(folder, output, budget, seed, start, words):
        (output / "pictures").mkdir(parents=True)
        Image.new("RGB", (8, 6)).save(output / "pictures/detections.png")
        rows = [{"iteration": 3, "total_loss": 1.0}, {"iteration": 4, **FIGURES, "bbox/AP50": 5.0}, {"iteration": 9, **FIGURES}]
        (output / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chosen = {"SEED": seed, "OUTPUT_DIR": str(output), "DATASETS": {"TRAIN": [str(folder)]}, **SINE}
        (output / "chosen.yaml").write_text(yaml.safe_dump(chosen))
        assert (budget, words) == ("90s", ("MODEL.POSITION.NAME", "sine_offset")) and len(boxes_of(folder, "train")) == 2
        return {"seconds": 80.0, "cpu_seconds": 75.0}

    monkeypatch.setattr(small_data, "train", train)
    layouts.write_roboflow_yolo(tmp_path / "photos")
    options = "--budget 90s --seed 3 --label unmasked --images 2"
    words = ["fishes", tmp_path / "photos", *options.split(), "--picture", "--output", tmp_path / "out"]
    done = CliRunner().invoke(small_data.main, [*map(str, words), "MODEL.POSITION.NAME", "sine_offset"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "fishes_90s_sine_unmasked_2_images_3.jpg").is_file()
    text = (tmp_path / "out" / "fishes_90s_sine_unmasked_2_images_3.json").read_text()
    record = json.loads(text)
    assert (record["AP"], record["AP50"], record["iterations"], record["curve"]) == (10.0, 11.0, 10, {"5": 5.0, "10": 11.0})
    assert record["AP of classes"] == {"fish": 16.0} and record["chosen"] == {"SEED": 3, **SINE}
    assert record["command"].endswith(f"fishes FOLDER {options} MODEL.POSITION.NAME sine_offset")
    assert (record["images"], record["words"]) == (2, ["MODEL.POSITION.NAME", "sine_offset"])
    assert str(tmp_path) not in text and {"commit", "machine", "versions", "cores", "seconds", "cpu_seconds"} < record.keys()


def write_record(folder, name, seed, ap, label="", budget="10m", encoding="sine_offset", **more):
    record = {"command": f"python benchmarks/small_data.py {name} FOLDER --budget {budget}", "label": label, "budget": budget}
    record |= {"seed": seed, "cores": 2, "machine": {"cpu": "C", "instruction_set": "AVX2"}, "AP": ap, "AP50": 2 * ap, **more}
    record |= {"iterations": 1000 + round(ap), "seconds": 600, "cpu_seconds": 1000 + seed, "curve": {"10": 2 * ap, "5": ap}}
    record.setdefault("chosen", {"MODEL": {"POSITION": {"NAME": encoding}}, "INPUT": {"MIN_SIZE_TEST": 240}})
    (folder / f"{name}_{budget}_{label}_{encoding}_{more.get('images', '')}_{seed}.json").write_text(json.dumps(record))


def test_tables_grow_with_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    every = (tables.as_trained, tables.goals, tables.by_size, tables.one_at_a_time, tables.encodings)
    assert [table()[1][0] for table in every if table != tables.goals] == ["no record yet"] * 4
    assert [row[2:] for row in tables.goals()[1:3]] == [["82", "", "no record yet", "0"], ["90", "", "no record yet", "0"]]
    for seed, ap in enumerate((10.0, 14.0)):
        write_record(tmp_path, "aquarium", seed, ap, encoding="peg")  # as the command took it at first
    for seed, label in enumerate(("", "sine", "sine")):  # as it takes it now, and was told to before; the third has no partner
        write_record(tmp_path, "aquarium", seed, 13.0 + 4 * seed, label=label)
    write_record(tmp_path, "aquarium", 1, 2.0, label="no_weights", words=["MODEL.BACKBONE.WEIGHTS", ""])
    assert tables._quoted("['a', 1]") == "\"['a', 1]\"" and tables._quoted("''") == tables._quoted("") == "''"
    write_record(tmp_path, "aquarium", 0, 5.0, images=50)
    write_record(tmp_path, "aquarium", 0, 6.0, label="without_partner", budget="2h")
    write_record(tmp_path, "mine", 0, 30.0)
    of_peg, of_sine = ["12.0 (10.0 to 14.0)", "24.0 (20.0 to 28.0)"], ["17.0 (13.0 to 21.0)", "34.0 (26.0 to 42.0)"]
    assert tables.as_trained()[1:] == [
        ["Aquarium", "10m", "sine", *of_sine, "13.0, 26.0", "10.0", "1,001", "3"],
        ["Aquarium", "10m", "PEG", *of_peg, "10.0, 20.0", "10.0", "1,000", "2"],
        ["mine", "10m", "sine", "30.0", "60.0", "30.0, 60.0", "10.0", "1,000", "1"],
    ]
    assert [row[2:] for row in tables.by_size()[1:]] == [["50", "5.0", "10.0", "1,005", "1"], ["448", *of_sine, "1,017", "3"]]
    (change,) = tables.one_at_a_time()[1:]  # the other one has nothing to be compared with
    assert change[2:4] == ["sine", "no weights: `MODEL.BACKBONE.WEIGHTS ''`"]
    assert change[4:] == ["17.0", "34.0", "2.0 (-15.0)", "4.0 (-30.0)", "1,017, 1,002", "1"]
    (sine,) = tables.encodings()[1:]
    assert sine[:3] == ["Aquarium", "10m", "sine"]
    assert sine[3:] == [*of_peg, "15.0 (13.0 to 17.0) (+3.0)", "30.0 (26.0 to 34.0) (+6.0)", "1,012, 1,015", "2"]
    write_record(tmp_path, "bccd", 0, 41.0)
    write_record(tmp_path, "bccd", 0, 44.5, budget="1h")
    write_record(tmp_path, "bccd", 0, 60.0, budget="1h", encoding="peg")  # not what the command takes
    assert tables.goals()[1:3] == [["BCCD", "10m", "82", "82.0", "reached", "1"], ["BCCD", "1h", "90", "89.0", "missed", "1"]]
    tables.draw_curves(tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").size[0] > 500
    write_record(tmp_path, "mine", 0, 31.0, label="sine")
    with pytest.raises(ValueError, match="two records of seed 0"):
        tables.as_trained()


def test_a_peer_stands_below_the_runs_of_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PEERS", tmp_path)
    assert tables.peers()[1][0] == "no record yet"
    for seed, ap in enumerate((10.0, 14.0)):
        write_record(tmp_path, "aquarium", seed, ap)
    write_record(tmp_path, "aquarium", 0, 20.0, budget="30m")
    peer = {"command": "python benchmarks/dense_peer.py aquarium FOLDER", "budget": "10m", "cpu_seconds": 650.2, "iterations": 1240}
    peer |= {"AP": 15.0, "AP50": 38.0, "seed": 0, "machine": {"instruction_set": "AVX2"}}
    (tmp_path / "peer.json").write_text(json.dumps(peer))
    first, second, longer = tables.peers()[1:]
    assert first == ["Aquarium", "10m", "AVX2", "224", "FCOS", "650", "1,240", "15.0", "38.0", "1"]
    assert second[:5] == ["Aquarium", "10m", "AVX2", "240", "ours, from ImageNet"]
    assert second[7:] == ["12.0 (10.0 to 14.0)", "24.0 (20.0 to 28.0)", "2"]
    assert longer[:5] == ["Aquarium", "30m", "AVX2", "240", "ours, from ImageNet"]
    chosen = {"MODEL": {"POSITION": {"NAME": "sine_offset"}, "WEIGHTS": "starter"}, "INPUT": {"MIN_SIZE_TEST": 240}}
    write_record(tmp_path, "aquarium", 0, 16.0, label="starter", chosen=chosen)
    assert [row[4] for row in tables.peers()[1:4]] == ["FCOS", "ours, from ImageNet", "ours, from the starter"]
    assert tables.peers()[3][7:] == ["16.0", "32.0", "1"]
    chosen = {
        "MODEL": {"META_ARCHITECTURE": "CPVTRealTimeDetr", "POSITION": {"NAME": "sine_grid"}},
        "INPUT": {"MIN_SIZE_TEST": 240},
    }
    write_record(tmp_path, "aquarium", 0, 17.0, label="dfine", chosen=chosen)
    assert [row[4] for row in tables.peers()[1:4]] == ["FCOS", "D-FINE, from ImageNet", "ours, from ImageNet"]
