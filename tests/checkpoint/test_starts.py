# SPDX-License-Identifier: Apache-2.0
"""Public weights by name: the table, and the road of each row with random weights under its authors' names, from a local server."""

import re
from dataclasses import replace

import pytest
import torch
import yaml
from click.testing import CliRunner
from conftest import draw_coco
from image_server import serving
from test_checkpoint import to_facebook
from test_convert_deformable import rename, to_detrex, to_official, to_transformers
from test_convert_dino import to_detrex_names, to_dino
from tiny import RUN

from cpvt_det import Predictor
from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.convert import CONVERSIONS
from cpvt_det.checkpoint.fetch import Place, find_start, starts
from cpvt_det.checkpoint.weights import read_weights, recognise
from cpvt_det.cli import main
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS
from cpvt_det.common.errors import WeightsError
from cpvt_det.config import flat_items, load_cfg
from cpvt_det.predict.server import PageServer

SMALL = (
    *("MODEL.BACKBONE.WEIGHTS", ""),
    *(
        "MODEL.DETR.HIDDEN_DIM",
        "32",
        "MODEL.DETR.DIM_FEEDFORWARD",
        "16",
        "MODEL.DETR.ENC_LAYERS",
        "1",
        "MODEL.DETR.DEC_LAYERS",
        "2",
    ),
    *("MODEL.DETR.NUM_OBJECT_QUERIES", "8"),
)
INPUT = ("INPUT.MIN_SIZE_TEST", "64", "INPUT.MAX_SIZE_TEST", "96")
FOUR_MAPS = (
    (r"^neck\.extra_convs\.0\.", "neck.convs.3."),
    (r"^input_proj\.4\.0", "neck.extra_convs.0.conv"),
    (r"^input_proj\.4\.1", "neck.extra_convs.0.norm"),
)
"""Names of detrex where the first extra level is the fifth."""
FETCHED = [name for name, start in starts().items() if start.places]


def converter(start):
    """Our names -> those of the start's authors."""
    if start.source == "detrex_deformable_detr":
        one_stage = "dab" in start.name and "two_stage" not in start.name
        convert = to_detrex if start.name.startswith("deformable") else lambda state: to_detrex_names(state, one_stage)
        return lambda state: rename(convert(state), FOUR_MAPS if "5scale" in start.name else ())
    return {"facebook_detr": to_facebook, "hf_deformable_detr": to_transformers, "dino": to_dino, "deformable_detr": to_official}[
        start.source
    ]


def random_model(start, *words):
    cfg = load_cfg(start.config, (*start.overrides, *SMALL, *words))
    cfg.MODEL.NUM_CLASSES = 80 if start.rows == 80 else 91
    torch.manual_seed(0)
    model = build_detector(cfg).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):  # a hundred layers of noise are no numbers any more
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def more_words(start):
    backbone = () if "dc5" in start.name else ("MODEL.BACKBONE.NAME", "resnet10")  # with bottlenecks only
    return (*backbone, *(("MODEL.QUERIES.HYBRID", "5") if start.name.startswith("h_") else ()))


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that puts random weights of a row behind a URL, and the row in the table; it returns the model."""
    monkeypatch.setenv(fetch.HOME, str(tmp_path / "home"))
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "server") as server:

        def serve(name):
            start, words = starts()[name], more_words(starts()[name])
            model, file = random_model(start, *words), f"{name}.pth"
            torch.save({"model": converter(start)(model.state_dict())}, tmp_path / "server" / file)
            row = replace(start, overrides=(*start.overrides, *SMALL, *words, *INPUT), places=(Place(f"{server.url}/{file}"),))
            monkeypatch.setitem(starts(), name, row)
            return model

        yield serve


def same(first, second):
    batch = first.preprocess([torch.rand(3, 64, 96) * 255, torch.rand(3, 72, 40) * 255])
    with torch.no_grad():
        one, two = (model(batch.images, batch.padding_mask) for model in (first, second))
    return torch.equal(one.logits, two.logits) and torch.equal(one.boxes, two.boxes)


# The table


@pytest.mark.parametrize("name", starts())
def test_a_row_of_the_table_is_whole(name):
    start = starts()[name]
    assert re.fullmatch(r"[a-z0-9_]+", name) and start.name == name
    assert start.source in CONVERSIONS and start.rows in (80, 91, 92) and 30 < start.ap < 60 and start.epochs > 0
    assert start.licence and start.publisher and start.places
    for place in start.places:
        assert re.fullmatch(r"([0-9a-f]{64})?", place.sha256) and isinstance(place.megabytes, int)
        assert place.url.startswith("https://") and place.file.endswith((".pth", ".pt", ".safetensors"))
        if place.hub:
            assert re.fullmatch(r"\w+/[\w-]+ ([0-9a-f]{40}|main) [\w.]+", " ".join(place.hub))


def test_no_hash_stands_for_two_files():
    hashes = [place.sha256 for start in starts().values() for place in start.places if place.sha256]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("name", starts())
def test_names_and_shapes_of_a_row_tell_its_config(name):
    """But for DC5, which they do not show, and the length of the training."""
    start = starts()[name]
    cfg = load_cfg(start.config, (*start.overrides, "MODEL.DETR.ENC_LAYERS", "1", "MODEL.DETR.DEC_LAYERS", "2"))
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.BACKBONE.WEIGHTS = start.rows, ""
    with torch.device("meta"):
        state_dict = build_detector(cfg).state_dict()
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.BACKBONE.DC5 = load_cfg("").MODEL.NUM_CLASSES, False
    known, found = (dict(flat_items(yaml.safe_load(text))) for text in (cfg.dump(), recognise(state_dict, start.source)))
    assert {
        key: (known.get(key), found.get(key))
        for key in known | found
        if known.get(key) != found.get(key) and not key.startswith("SOLVER.")
    } == {}


def test_the_list_says_what_is_here_and_asks_nobody(served, tmp_path):
    served("detr_r50")
    listed = CliRunner().invoke(main, ["weights"])
    assert listed.exit_code == 0 and re.search(r"detr_r50 +42.0 +500 +92 +Apache-2.0 +facebookresearch/detr +no", listed.output)
    assert not (tmp_path / "home").exists()
    fetched = CliRunner().invoke(main, ["weights", "detr_r50"])
    assert fetched.exit_code == 0 and str(tmp_path / "home/detr_r50/detr_r50.pth") in fetched.output
    assert re.search(r"detr_r50 .* yes\n", CliRunner().invoke(main, ["weights"]).output)
    assert CliRunner().invoke(main, ["weights", "detr"]).exit_code == 2


# The road


@pytest.mark.parametrize("name", FETCHED)
def test_a_row_is_fetched_by_name_and_detects_what_its_model_does(name, served):
    model = served(name)
    predictor = Predictor.from_pretrained(name, device="cpu")
    assert same(predictor.detector, model)
    assert predictor.classes == (COCO_CLASSES if starts()[name].rows == 80 else COCO_ROWS)
    assert predictor.mapper.prepare(torch.zeros(3, 100, 300, dtype=torch.uint8)).shape[1:] == (32, 96)


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "detr_r50").write_bytes(b"no weights")
    assert find_start("detr_r50") is None
    with pytest.raises(WeightsError, match="detr_r50: damaged, incomplete or not a checkpoint"):
        read_weights("detr_r50")


def test_a_url_is_fetched_once(served, tmp_path):
    model = served("deformable_detr_r50_refine")
    url = starts()["deformable_detr_r50_refine"].places[0].url
    first = read_weights(url)
    next((tmp_path / "server").iterdir()).unlink()
    again = read_weights(url)
    assert all(torch.equal(first.state_dict[name], tensor) for name, tensor in again.state_dict.items())
    assert first.state_dict.keys() == {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    with pytest.raises(WeightsError, match=r"cannot fetch http://127.*/gone\.pth: HTTP Error 404"):
        read_weights(url.rpartition("/")[0] + "/gone.pth")


def test_a_file_of_another_project_needs_no_config(served, tmp_path):
    model = served("dino_r50")
    predictor = Predictor.from_checkpoint(next((tmp_path / "server").iterdir()), device="cpu")
    assert same(predictor.detector, model)


def test_a_file_whose_hash_is_known_is_that_of_the_table(served, tmp_path, monkeypatch):
    """DC5 does not show in names and shapes."""
    model = served("detr_r50_dc5")
    (path,) = (tmp_path / "server").iterdir()
    assert not same(Predictor.from_checkpoint(path, device="cpu").detector, model)
    row = starts()["detr_r50_dc5"]
    place = replace(row.places[0], sha256=fetch.sha256_of(path))
    monkeypatch.setitem(starts(), "detr_r50_dc5", replace(row, places=(place,)))
    assert same(Predictor.from_checkpoint(path, device="cpu").detector, model)


def test_predict_and_export_take_a_name(served, tmp_path):
    served("deformable_detr_r50_two_stage")
    drawn = draw_coco(tmp_path)
    name, image = "deformable_detr_r50_two_stage", drawn.files.image_root / "part/012.png"
    words = ["predict", name, "--input", image, "--output", tmp_path / "found", "--threshold", "0", "--device", "cpu"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert "person" in (tmp_path / "found/coco.json").read_text()
    words = ["export", name, "--format", "torch_export", "--output", tmp_path / "a.pt2", "--dynamic", "none", "--size", "64x96"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert "sides must be multiples of the model's stride 64" in done.output  # the model is there; tracing it takes minutes


def test_serve_takes_a_name(served, monkeypatch):
    served("detr_r50")
    shown = []
    monkeypatch.setattr(PageServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(PageServer, "show", lambda self, models: shown.extend(models))
    done = CliRunner().invoke(main, ["serve", "detr_r50", "--device", "cpu", "--port", "0"])
    assert done.exit_code == 0 and "detr_r50: http://127.0.0.1:" in done.output, done.output
    assert shown[0].name == "detr_r50" and shown[0].predictor.classes.names == COCO_ROWS.names


def test_eval_takes_a_name(served, tmp_path):
    """Of classes that the weights do not have a part is random, which has to be allowed."""
    served("detr_r50")
    files = draw_coco(tmp_path).files
    more = {**RUN, "MODEL.DEVICE": "cpu", "OUTPUT_DIR": tmp_path / "eval", "DATASETS.TEST": ("drawn",)}
    more["DATASETS.REGISTER"] = [[files.name, str(files.annotations), str(files.image_root)]]
    words = ["eval", "detr_r50", "--runner", "builtin", "--allow-partial", *(word for pair in more.items() for word in pair)]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "eval/results.json").is_file()
