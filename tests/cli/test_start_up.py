# SPDX-License-Identifier: Apache-2.0
"""What a command imports before it works: as little as it uses, because torch and its compiler take seconds."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import overrides, save_random

from cpvt_det import builders
from cpvt_det.common.memory import SPIN_COUNT, quick_imports
from cpvt_det.ops import routes

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import gc, json, sys
from cpvt_det.cli import main
main(standalone_mode=False)
print(json.dumps({"modules": list(sys.modules), "collects": gc.isenabled(), "kept": gc.get_freeze_count()}))
"""


def run(*words):
    """What a process that is one command has imported, whether it collects garbage, and how many objects it never looks at."""
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_data_are_checked_without_torch(drawn_coco, tmp_path):
    config = tmp_path / "empty.yaml"
    config.write_text("VERSION: 2\n")
    words = overrides(drawn_coco.files, tmp_path / "out")
    seen = run("check-data", "--config-file", config, "--runner", "builtin", *words)
    assert not {"torch", "torchvision", "scipy", "numba", "matplotlib"} & set(seen["modules"])
    assert "cpvt_det.data.validation.check" in seen["modules"]


def test_prediction_imports_no_solver_no_numba_and_no_figures(drawn_coco, tmp_path):
    weights = save_random(tmp_path / "weights.pth")
    seen = run("predict", weights, "--input", drawn_coco.files.image_root, "--output", tmp_path / "out", "--device", "cpu")
    kernels = set() if routes.is_on("winograd") else {"numba"}  # there the convolutions are of numba
    others = {"huggingface_hub", "supervision", "wandb", "mlflow", "fiftyone", "datumaro"}  # of those who ask for them
    assert not {"scipy.optimize", "matplotlib", "detectron2", "cpvt_det.predict.server", *kernels, *others} & set(seen["modules"])
    assert (tmp_path / "out/detections.json").is_file()
    assert seen["collects"] and seen["kept"] > 100_000  # objects that came with the imports


def test_what_imports_bring_is_never_looked_through_again(tmp_path, monkeypatch):
    (tmp_path / "many_lists.py").write_text("import gc\nlists = [[] for _ in range(10_000)]\nwas_enabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "many_lists", raising=False)
    before = gc.get_freeze_count()
    try:
        with quick_imports():
            import many_lists
        assert not many_lists.was_enabled and gc.isenabled()
        assert gc.get_freeze_count() >= before + 10_000
        before = gc.get_freeze_count()
        with quick_imports():
            import many_lists
        assert gc.get_freeze_count() <= before  # nothing came; a thread may have let something go
    finally:
        gc.unfreeze()
        monkeypatch.delitem(sys.modules, "many_lists", raising=False)


def test_every_builder_is_found_by_name_and_no_other():
    tables = ("DETECTOR_REGISTRY", "PART_REGISTRIES")
    assert all(callable(getattr(builders, name)) or name in tables for name in builders.__all__)
    with pytest.raises(AttributeError, match="cpvt_det.builders.*build_house"):
        _ = builders.build_house


@pytest.mark.parametrize(
    ("typed", "seen"),
    [({}, [SPIN_COUNT, None]), ({"OMP_WAIT_POLICY": "ACTIVE"}, [None, "ACTIVE"]), ({"GOMP_SPINCOUNT": "7"}, ["7", None])],
)
@pytest.mark.parametrize(
    "command", [["-m", "cpvt_det", "--import", "torch", "train"], ["-m", "cpvt_det", "analyze"], ["tools/train_net.py"]]
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(command, typed, seen, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print("at torch's import:", [os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")])
sys.meta_path.insert(0, Watch())
"""
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **typed}
    words = [sys.executable, *command, "--config-file", str(tmp_path / "none.yaml")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 2 and f"at torch's import: {seen}" in done.stdout
