# SPDX-License-Identifier: Apache-2.0
"""The model card of a trained model, written from its checkpoint and its run: data, figures, commands, a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fvcore.common.config import CfgNode
from tabulate import tabulate

from cpvt_det.builders import is_classifier
from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.class_names import Classes
from cpvt_det.errors import DataError
from cpvt_det.evaluation.thresholds import Thresholds
from cpvt_det.visualize.curves import read_metrics

PICTURE = "detections.png"
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
TRAINING = """\
## Training

On {images}{sets}, by `config.yaml`, from which places on the machine of the training are taken out:

```
cpvt-det train --config-file config.yaml DATASETS.REGISTER "[['{first}', 'train.json', 'images'], ...]"
```
"""


@dataclass
class RunFacts:
    """What the folder of a run has on one of its checkpoints.

    Attributes:
        iteration: iteration of the checkpoint; ``None`` if it is unknown.
        images: number of training images; ``None`` if it is unknown.
        figures: figures of the evaluation at that iteration, by their names in the metrics; none if there was none.
        picture: picture of detections beside the ground truth; ``None`` if there is none.
    """

    iteration: int | None = None
    images: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    picture: Path | None = None


def read_facts(checkpoint: Path | None) -> RunFacts:
    """The facts on a checkpoint, from it and from the files of its run beside it; a model folder has none."""
    if checkpoint is None or not checkpoint.is_file():
        return RunFacts()
    content = read_checkpoint(checkpoint, only_look=True)
    node = content.get("cpvt_det") if isinstance(content.get("cpvt_det"), dict) else {}
    iteration, picture = content.get("iteration"), checkpoint.parent / "pictures" / PICTURE
    try:
        line = read_metrics(checkpoint.parent / "metrics.json").get(iteration, {})
    except DataError:  # somebody removed it
        line = {}
    figures = {name: value for name, value in line.items() if "/" in name and value == value}
    return RunFacts(iteration, (node.get("data") or {}).get("images"), figures, picture if picture.is_file() else None)


def write_card(repo_id: str, cfg: CfgNode, classes: Classes, thresholds: Thresholds | None, facts: RunFacts) -> str:
    """The text of the card, without its metadata.

    Args:
        repo_id: name of the repository.
        cfg: config of the model.
        classes: classes of the model.
        thresholds: score thresholds, if they are known.
        facts: facts on its run.
    """
    classifies, model = is_classifier(cfg), cfg.MODEL.META_ARCHITECTURE.removeprefix("CPVT")
    encoding = "" if classifies else f" and the position encoding `{cfg.MODEL.POSITION.NAME}`"
    parts = [
        f"# {repo_id.rpartition('/')[2]}\n",
        f"{model} with {cfg.MODEL.BACKBONE.NAME}{encoding}, trained with cpvt_det.\n",
        f"{len(classes)} classes: {_listed(classes.names)}.\n",
    ]
    if facts.picture is not None:
        parts.append(f"![Detections beside the ground truth]({PICTURE})\n")
    best = None if thresholds is None else thresholds.overall
    python = (CLASSIFY if classifies else DETECT).format(repo_id=repo_id)
    parts.append(USE.format(python=python, threshold="" if best is None else f" Scores from {best:.3g} have the best F1."))
    if facts.figures:
        rows = sorted(facts.figures.items(), key=lambda row: "/AP-" in row[0])  # those of classes last
        table = tabulate([(name, f"{value:.1f}") for name, value in rows], ("figure", ""), tablefmt="pipe", disable_numparse=True)
        parts.append(EVALUATION.format(tests=_listed(cfg.DATASETS.TEST), iteration=facts.iteration, table=table))
    if cfg.DATASETS.TRAIN:
        images = "" if facts.images is None else f"{facts.images} images of "
        parts.append(TRAINING.format(images=images, sets=_listed(cfg.DATASETS.TRAIN), first=cfg.DATASETS.TRAIN[0]))
    return "\n".join(parts)


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
