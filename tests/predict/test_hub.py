# SPDX-License-Identifier: Apache-2.0
"""Models on Hugging Face's hub: pushed to a stand-in on this machine and loaded from it, with their card; never the real one."""

import base64
import hashlib
import http.server
import json
import re
import subprocess
import sys
import threading

import pytest
import torch
import yaml
from fvcore.common.config import CfgNode
from image_classes import class_words, draw_folders
from tiny import random_config, save_random

from cpvt_det import Predictor
from cpvt_det.checkpoint.model_folder import without_places
from cpvt_det.common.errors import WeightsError
from cpvt_det.config import load_cfg
from cpvt_det.predict import ClassPredictor
from cpvt_det.training.train import run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that pushing and loading take: one revision, files as they are."""

    repos: dict[str, dict[str, bytes]] = {}
    private: dict[str, bool] = {}

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            type(self).private[name] = asked.get("visibility") == "private" or asked.get("private")
            self.repos.setdefault(name, {})
            return self._answer({"url": f"{self._root}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        name, action = re.match(r"/api/models/(\w+/\w+)/(\w+)/", self.path).groups()
        if name.startswith("closed/"):
            return self._answer({"error": "You may not write here"}, 403)
        if action == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return self._answer({"files": files})
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer({"commitUrl": f"{self._root}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_GET(self):
        found = re.match(r"(?:/api/models)?/(\w+/\w+)(?:/resolve/\w+/(.+)|/revision/\w+|/tree/\w+)?", self.path)
        files = self.repos.get(found[1])
        if files is None:
            return self._answer({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            return self._answer([{"type": "file", "path": key, "size": len(files[key]), "oid": COMMIT} for key in files])
        if found[2] is None:
            return self._answer({"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": key} for key in files]})
        content = files.get(found[2].partition("?")[0])
        if content is None:
            return self._answer({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
        return self._answer(content, 200, **{"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    do_HEAD = do_GET

    def _answer(self, content, status=200, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def _root(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on the loopback, without repositories; the library looks there, and keeps what it fetches in a folder of the test."""
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHub", (Hub,), {"repos": {}, "private": {}}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", root)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", root + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    server.RequestHandlerClass.stop = lambda: (server.shutdown(), server.server_close())
    yield server.RequestHandlerClass
    server.RequestHandlerClass.stop()


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("boxes_xyxy", "scores", "labels"))


def test_a_pushed_model_is_loaded_again_bit_for_bit(hub, tiny_run):
    trained = tiny_run("detr")
    pushed = Predictor.from_checkpoint(trained.weights, device="cpu", overrides=["TEST.TILES.SIZE", "48"])
    url = pushed.push_to_hub("me/shapes", private=True, token="hf_none")
    assert url.endswith(f"/me/shapes/commit/{COMMIT}") and hub.private == {"me/shapes": True}
    names = {"README.md", "classes.json", "config.yaml", "model.safetensors", "model.safetensors.sha256"}
    assert hub.repos["me/shapes"].keys() - {"thresholds.json", ".gitattributes"} == names
    loaded = Predictor.from_pretrained("me/shapes", device="cpu", token="hf_none")
    assert loaded.classes == pushed.classes and loaded.thresholds == pushed.thresholds and loaded.tiling == pushed.tiling
    assert same(loaded(trained.image(30)), pushed(trained.image(30)))
    assert not list(loaded.origin.glob("*.md"))  # what is loaded is fetched, no more


def test_what_was_fetched_needs_no_network(hub, tiny_run):
    trained = tiny_run("detr")
    pushed = Predictor.from_checkpoint(trained.weights, device="cpu")
    pushed.push_to_hub("me/shapes", token="hf_none")
    Predictor.from_pretrained("me/shapes", device="cpu", token="hf_none")
    hub.stop()
    for options in ({}, {"local_files_only": True}):
        loaded = Predictor.from_pretrained("me/shapes", device="cpu", token="hf_none", **options)
        assert same(loaded(trained.image(30)), pushed(trained.image(30)))
    with pytest.raises(WeightsError, match=r"cannot fetch me/other from Hugging Face's hub: "):
        Predictor.from_pretrained("me/other", device="cpu", token="hf_none")
    with pytest.raises(WeightsError, match=r"cannot upload to me/shapes on Hugging Face's hub: "):
        pushed.push_to_hub("me/shapes", token="hf_none")


def test_the_card_is_written_from_the_run(hub, tiny_run):
    trained = tiny_run("detr")
    Predictor.from_checkpoint(trained.weights, device="cpu").push_to_hub("me/shapes", license="mit", token="hf_none")
    _, metadata, card = hub.repos["me/shapes"]["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(metadata)
    assert (metadata["license"], metadata["pipeline_tag"], metadata["library_name"]) == ("mit", "object-detection", "cpvt_det")
    last = [json.loads(line) for line in (trained.folder / "metrics.json").read_text().splitlines()][-1]
    assert f"| bbox/AP50     | {last['bbox/AP50']:.1f}" in card and "| bbox/AP-red" in card and "bbox/APl" not in card
    assert "On drawn, after iteration 2, in percent:" in card
    assert "3 classes: red, green, blue." in card and 'Predictor.from_pretrained("me/shapes")' in card


def test_no_place_on_this_machine_is_pushed(hub, tiny_run, tmp_path):
    """Every key that names one has one; the key of the teacher is a classifier's."""
    trained = tiny_run("detr")
    predictor = Predictor.from_checkpoint(trained.weights, device="cpu")
    cfg = CfgNode.load_cfg(predictor.config)
    cfg.DATASETS.CACHE, cfg.CALLBACKS = str(tmp_path / "cache"), [["mlflow", {"uri": f"file://{tmp_path}/mlflow"}]]
    cfg.MODEL.WEIGHTS = cfg.MODEL.BACKBONE.WEIGHTS = str(tmp_path / "old.pth")
    cfg.MODEL.CLASSIFIER.TEACHER = cfg.MODEL.CLASSIFIER.TEACHER_WEIGHTS = str(tmp_path / "teacher.pth")
    predictor.config = cfg.dump()
    predictor.push_to_hub("me/shapes", token="hf_none")
    for name in ("README.md", "config.yaml", "classes.json"):
        text = hub.repos["me/shapes"][name].decode()
        assert str(trained.folder.parent) not in text and str(tmp_path) not in text and "/" + "tmp" not in text, name
    assert len(Predictor.from_pretrained("me/shapes", device="cpu", token="hf_none").classes) == 3


def test_names_of_weights_are_pushed():
    words = {"BACKBONE__WEIGHTS": "DEFAULT", "CLASSIFIER__TEACHER": "timm/deit_small", "CLASSIFIER__TEACHER_WEIGHTS": "DEFAULT"}
    cfg = random_config(**{f"MODEL__{key}": value for key, value in words.items()})
    assert without_places(cfg).MODEL == cfg.MODEL


def test_a_model_without_a_run_is_pushed_with_what_is_known(hub, tmp_path):
    predictor = Predictor.from_checkpoint(save_random(tmp_path / "weights.pth"), device="cpu")
    predictor.save(tmp_path / "folder")
    Predictor.from_pretrained(tmp_path / "folder", device="cpu").push_to_hub("me/random", token="hf_none")
    card = hub.repos["me/random"]["README.md"].decode()
    assert "## Evaluation" not in card and "## Use" in card
    assert len(Predictor.from_pretrained("me/random", device="cpu", token="hf_none").classes) == 3


def test_a_classifier_is_pushed_and_loaded_as_one(hub, tmp_path):
    folders = draw_folders(tmp_path / "folders")
    run(load_cfg("", class_words(folders, tmp_path / "run", SOLVER__MAX_ITER=2, TEST__PICTURES=0)))
    pushed = ClassPredictor.from_checkpoint(tmp_path / "run/model_final.pth", device="cpu")
    pushed.push_to_hub("me/colours", token="hf_none")
    card = hub.repos["me/colours"]["README.md"].decode()
    assert "pipeline_tag: image-classification" in card and "| classes/top1 " in card and "ClassPredictor.from_pretrained" in card
    assert "position encoding" not in card
    image = folders / "val/red/0.png"
    loaded = ClassPredictor.from_pretrained("me/colours", device="cpu", token="hf_none")
    assert torch.equal(loaded(image).scores, pushed(image).scores)


def test_what_cannot_be_reached_is_one_line(hub, tmp_path):
    with pytest.raises(WeightsError, match=r"cannot fetch me/nothing from Hugging Face's hub: .*404"):
        Predictor.from_pretrained("me/nothing", token="hf_none")
    with pytest.raises(WeightsError, match=r"cannot fetch a/b/c from Hugging Face's hub: "):
        Predictor.from_pretrained("a/b/c", token="hf_none")
    hub.repos["me/other"] = {"pytorch_model.py": b"raise SystemExit", "config.json": b"{}"}
    with pytest.raises(
        WeightsError, match="me/other on Hugging Face's hub has no model.safetensors, so it is not a model that cpvt_det can read"
    ):
        Predictor.from_pretrained("me/other", token="hf_none")
    predictor = Predictor.from_checkpoint(save_random(tmp_path / "weights.pth"), device="cpu")
    with pytest.raises(WeightsError, match=r"cannot upload to closed/model on Hugging Face's hub: .*403"):
        predictor.push_to_hub("closed/model", token="hf_none")


def test_without_supervision_prediction_works_and_names_it(tmp_path):
    """In a process where it cannot be imported; nor is the hub's library, which takes time, before it is used."""
    weights = save_random(tmp_path / "weights.pth")
    script = f"""
import sys
sys.modules["supervision"] = None
import torch
from cpvt_det import Predictor
predictor = Predictor.from_checkpoint({str(weights)!r}, device="cpu")
found = predictor(torch.zeros(3, 40, 60, dtype=torch.uint8))
print("huggingface_hub" in sys.modules)
try:
    found.to_supervision()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    imported, supervision = done.stdout.splitlines()
    assert imported == "False"
    assert supervision == "ConfigError to_supervision needs the package supervision: pip install 'cpvt-det[supervision]'"
