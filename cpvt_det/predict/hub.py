# SPDX-License-Identifier: Apache-2.0
"""Model folders on Hugging Face's hub, and their cards, written from a checkpoint and its run; imported only when used."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from huggingface_hub import HfApi, ModelCardData
from tabulate import tabulate

from cpvt_det.builders import is_classifier
from cpvt_det.checkpoint.fetch import hub_errors
from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.checkpoint.model_folder import CONFIG, without_places
from cpvt_det.common.errors import DataError
from cpvt_det.visualize.curves import read_metrics

MOST_NAMES = 20
USE = """\
## Use

```python
{python}
```

A copy of these files is a model folder: `cpvt-det predict FOLDER --input photos --output found`.
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
    predictor: Any,
    repo_id: str,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    **options: Any,
) -> str:
    """Upload a model folder with a model card, for :meth:`cpvt_det.predict.predictor.Predictor.push_to_hub`.

    Args:
        predictor: a :class:`cpvt_det.predict.predictor.Predictor`; local paths are removed from its config before it is uploaded.
        repo_id, license, private, token, branch, options: as in ``push_to_hub``.
    """
    cfg = CfgNode.load_cfg(predictor.config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predictor.save(folder)
        (folder / CONFIG).write_text(without_places(cfg).dump(), encoding="utf-8")
        kind = "image-classification" if is_classifier(cfg) else "object-detection"
        tags = [kind, "position-encoding"]
        metadata = ModelCardData(license=license, library_name="cpvt_det", pipeline_tag=kind, tags=tags)
        card = f"---\n{metadata.to_yaml()}\n---\n\n{write_card(predictor, repo_id, cfg)}"
        (folder / "README.md").write_text(card, encoding="utf-8")
        with hub_errors(f"upload to {repo_id} on"):
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=branch, **options))


def write_card(predictor: Any, repo_id: str, cfg: CfgNode) -> str:
    """The text of the card, without its metadata.

    Args:
        predictor: predictor of the model. The card has the metrics of its run if it was loaded from a checkpoint in the run's
            folder.
        repo_id: name of the repository.
        cfg: config of the model.
    """
    classifies, model = is_classifier(cfg), cfg.MODEL.META_ARCHITECTURE.removeprefix("CPVT")
    encoding = "" if classifies else f" and the position encoding `{cfg.MODEL.POSITION.NAME}`"
    parts = [
        f"# {repo_id.rpartition('/')[2]}\n",
        f"{model} with {cfg.MODEL.BACKBONE.NAME}{encoding}, trained with cpvt_det.\n",
        f"{len(predictor.classes)} classes: {_listed(predictor.classes.names)}.\n",
        USE.format(python=(CLASSIFY if classifies else DETECT).format(repo_id=repo_id)),
    ]
    iteration, figures = read_figures(predictor.origin)
    if figures:
        rows = sorted(figures.items(), key=lambda row: "/AP-" in row[0])  # figures of single classes come last
        table = tabulate([(name, f"{value:.1f}") for name, value in rows], ("figure", ""), tablefmt="pipe", disable_numparse=True)
        parts.append(EVALUATION.format(tests=_listed(cfg.DATASETS.TEST), iteration=iteration, table=table))
    return "\n".join(parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
