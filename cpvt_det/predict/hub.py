# SPDX-License-Identifier: Apache-2.0
"""Model folders on Hugging Face's hub, and their cards, written from a checkpoint and its run; imported only when used."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from huggingface_hub import HfApi, ModelCardData
from tabulate import tabulate

from cpvt_det.builders import is_classifier
from cpvt_det.checkpoint.fetch import hub_errors
from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.checkpoint.model_folder import CONFIG
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import DataError
from cpvt_det.config import get_cfg
from cpvt_det.evaluation.thresholds import Thresholds
from cpvt_det.visualize.curves import read_metrics

MOST_NAMES = 20
USE = """\
## Use

```python
{python}
```

A copy of these files is a model folder: `cpvt-det predict FOLDER --input photos --output found`.{threshold}
"""
DETECT = """\
from cpvt_det import Predictor

found = Predictor.from_pretrained("{repo_id}")("photo.jpg")
print(found.names, found.scores, found.boxes_xyxy)"""
CLASSIFY = """\
from cpvt_det.predict import ClassPredictor

print(ClassPredictor.from_pretrained("{repo_id}")("photo.jpg").best())"""
EVALUATION = """\
## Evaluation

On {tests}, after iteration {iteration}, in percent:

{table}
"""


def read_figures(checkpoint: Path | None) -> tuple[int | None, dict[str, float]]:
    """The iteration of a checkpoint in the folder of its run, and the metrics of the evaluation at that iteration, by their names
    in ``metrics.json``; ``None`` and no metrics for other checkpoints."""
    if checkpoint is None or not checkpoint.is_file():
        return None, {}
    iteration = read_checkpoint(checkpoint, only_look=True).get("iteration")
    try:
        line = read_metrics(checkpoint.parent / "metrics.json").get(iteration, {})
    except DataError:  # somebody removed it
        line = {}
    return iteration, {name: value for name, value in line.items() if "/" in name and value == value}


def push(
    repo_id: str,
    save: Callable[[Path], None],
    config: str,
    classes: Classes,
    thresholds: Thresholds | None,
    checkpoint: Path | None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    **options: Any,
) -> str:
    """Upload a model folder with a model card, for :meth:`cpvt_det.predict.predictor.Predictor.push_to_hub`.

    Args:
        repo_id, license, private, token, branch, options: as in ``push_to_hub``.
        save: function that writes the model folder.
        config: config of the model as YAML; local paths are removed before it is uploaded.
        classes: classes of the model.
        thresholds: score thresholds of the model, if they are known.
        checkpoint: file that the model was loaded from, for the metrics of its run.
    """
    cfg, (iteration, figures) = CfgNode.load_cfg(config), read_figures(checkpoint)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder)
        (folder / CONFIG).write_text(without_places(cfg).dump(), encoding="utf-8")
        kind = "image-classification" if is_classifier(cfg) else "object-detection"
        tags = [kind, "position-encoding"]
        metadata = ModelCardData(license=license, library_name="cpvt_det", pipeline_tag=kind, tags=tags)
        card = write_card(repo_id, cfg, classes, thresholds, iteration, figures)
        (folder / "README.md").write_text(f"---\n{metadata.to_yaml()}\n---\n\n{card}", encoding="utf-8")
        with hub_errors(f"upload to {repo_id} on"):
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=branch, **options))


def without_places(cfg: CfgNode) -> CfgNode:
    """A copy of a config without local paths, data addresses or callbacks. Names of weights stay, except ``MODEL.WEIGHTS``."""
    cfg, default = cfg.clone(), get_cfg()
    cfg.OUTPUT_DIR, cfg.DATASETS.REGISTER, cfg.MODEL.WEIGHTS = default.OUTPUT_DIR, [], ""
    cfg.MODEL.WEIGHTS_SHA256 = ""
    cfg.DATASETS.CACHE, cfg.CALLBACKS = default.DATASETS.CACHE, []
    backbone, classifier = cfg.MODEL.BACKBONE, cfg.MODEL.CLASSIFIER
    for node, key in ((backbone, "WEIGHTS"), (classifier, "TEACHER"), (classifier, "TEACHER_WEIGHTS")):
        value = node[key].removeprefix("timm/")  # prefix of a teacher's name
        if Path(value).parent != Path() or os.path.exists(value):  # a file, not a name
            node[key] = ""
    return cfg


def write_card(
    repo_id: str,
    cfg: CfgNode,
    classes: Classes,
    thresholds: Thresholds | None,
    iteration: int | None,
    figures: Mapping[str, float],
) -> str:
    """The text of the card, without its metadata.

    Args:
        repo_id: name of the repository.
        cfg: config of the model.
        classes: classes of the model.
        thresholds: score thresholds, if they are known.
        iteration, figures: result of :func:`read_figures`.
    """
    classifies, model = is_classifier(cfg), cfg.MODEL.META_ARCHITECTURE.removeprefix("CPVT")
    encoding = "" if classifies else f" and the position encoding `{cfg.MODEL.POSITION.NAME}`"
    parts = [
        f"# {repo_id.rpartition('/')[2]}\n",
        f"{model} with {cfg.MODEL.BACKBONE.NAME}{encoding}, trained with cpvt_det.\n",
        f"{len(classes)} classes: {_listed(classes.names)}.\n",
    ]
    best = None if thresholds is None else thresholds.overall
    python = (CLASSIFY if classifies else DETECT).format(repo_id=repo_id)
    parts.append(USE.format(python=python, threshold="" if best is None else f" Scores from {best:.3g} have the best F1."))
    if figures:
        rows = sorted(figures.items(), key=lambda row: "/AP-" in row[0])  # figures of single classes come last
        table = tabulate([(name, f"{value:.1f}") for name, value in rows], ("figure", ""), tablefmt="pipe", disable_numparse=True)
        parts.append(EVALUATION.format(tests=_listed(cfg.DATASETS.TEST), iteration=iteration, table=table))
    return "\n".join(parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
