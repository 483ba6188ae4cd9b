# SPDX-License-Identifier: Apache-2.0
"""Which way imports point: the core without detectron2, layers and models without what stands above them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cpvt_det

PACKAGE = Path(cpvt_det.__file__).parent
ABOVE = {"d2"}  # knows detectron2; nothing else does

# What a folder of the lower layers may import of the package, besides its own kind.
ALLOWED = {
    "common": set(),
    "ops": {"common"},
    "layers": {"common", "ops"},
    "position": {"common", "layers"},
    "models": {"common", "ops", "layers", "position"},
    "losses": {"common"},
    "data": {"common"},
    "evaluation": {"common", "layers", "losses", "models", "ops", "data"},
    "fast": {"common", "ops", "layers", "position", "models"},
}


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def core_files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ABOVE]


def imports_of(path):
    """Every module that a file imports, also inside functions, by its full name."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def run_python(code):
    """Run code in a fresh interpreter with detectron2 blocked; returns what it prints."""
    code = f"import sys\nsys.modules['detectron2'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_runs_where_detectron2_cannot_be_imported():
    """Every module outside d2/ imports, and a model predicts and learns."""
    modules = [module_name(path) for path in core_files() if path.name != "__main__.py"]
    output = run_python(f"""
import importlib, torch
torch.set_num_threads(1)
for name in {modules!r}:
    importlib.import_module(name)
from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.config import get_cfg
from cpvt_det.common.structures import Targets
cfg = get_cfg()
cfg.MODEL.NUM_CLASSES, cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.STAGES = 2, "resnet18", (3,)
cfg.MODEL.DETR.HIDDEN_DIM, cfg.MODEL.DETR.NHEADS, cfg.MODEL.DETR.DIM_FEEDFORWARD = 16, 2, 16
predictions = build_detector(cfg)(torch.rand(1, 3, 32, 48), torch.zeros(1, 32, 48, dtype=torch.bool))
targets = [Targets(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.2]]))]
losses = build_criterion(cfg)(predictions, targets).losses
sum(losses.values()).backward()
print(sorted(losses), [name for name in sys.modules if name.startswith("cpvt_det.d2")])
""")
    assert output.strip().splitlines()[-1] == "['loss_class', 'loss_giou', 'loss_l1'] []"


def test_models_losses_and_layers_pull_in_nothing_from_above():
    output = run_python("""
import cpvt_det.layers, cpvt_det.models, cpvt_det.losses, cpvt_det.evaluation.answers
print(sorted(name for name in sys.modules if name.startswith("cpvt_det.")))
""")
    loaded = {name.split(".")[1] for name in ast.literal_eval(output.strip().splitlines()[-1])}
    assert loaded <= {"common", "layers", "ops", "position", "evaluation", "losses", "models"}


def test_only_d2_imports_detectron2():
    for path in core_files():
        assert [name for name in imports_of(path) if name.split(".")[0] == "detectron2"] == [], path


def test_only_entry_points_import_d2():
    """training/ and cli/ may choose it; what both runners share may not."""
    for path in core_files():
        imported = [name for name in imports_of(path) if name == "cpvt_det.d2" or name.startswith("cpvt_det.d2.")]
        if path.relative_to(PACKAGE).parts[0] not in ("training", "cli"):
            assert imported == [], path


@pytest.mark.parametrize("part", ALLOWED)
def test_lower_layers_do_not_import_higher_ones(part):
    """So no class of theirs sees a config: only builders/, config.py and what stands above them does."""
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imports_of(path) if name.startswith("cpvt_det.")}
        assert used <= ALLOWED[part] | {part}, path


def test_package_itself_imports_nothing_until_it_is_asked():
    """setup.py reads the version from it, and an isolated build has no torch."""
    body = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    assert [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)] == ["from typing import Any"]
    assert "torch" not in imports_of(PACKAGE.parent / "setup.py")
