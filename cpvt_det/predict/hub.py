# SPDX-License-Identifier: Apache-2.0
"""Model folders on Hugging Face's hub, by the mixin of its library. Imported when it is used."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.builders import is_classifier
from cpvt_det.checkpoint.model_folder import CLASSES, CONFIG, THRESHOLDS, WEIGHTS
from cpvt_det.data.coco import Classes
from cpvt_det.errors import ConfigError, WeightsError, first_line
from cpvt_det.evaluation.thresholds import Thresholds
from cpvt_det.predict.model_card import PICTURE, RunFacts, write_card
from cpvt_det.visualize.curves import main_figures

try:
    from huggingface_hub import EvalResult, ModelCardData, ModelHubMixin, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
except ImportError as error:
    raise ConfigError("Hugging Face's hub needs the package huggingface_hub: pip install 'cpvt-det[hub]'") from error

FILES = (CONFIG, WEIGHTS, f"{WEIGHTS}.sha256", CLASSES, THRESHOLDS)
"""The files that are fetched; none of them can run code."""
CARD = "README.md"


class ModelFolder(ModelHubMixin, library_name="cpvt_det"):
    """A model folder, in a repository of the hub or on its way there.

    Attributes:
        path: the folder on this machine.
    """

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "ModelFolder":
        """The model folder of a path."""
        folder = cls()  # the mixin would write arguments into a config.json
        folder.path = Path(path)
        return folder

    def _save_pretrained(self, save_directory: Path) -> None:
        shutil.copytree(self.path, save_directory, dirs_exist_ok=True)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "ModelFolder":
        is_here = os.path.isdir(model_id)
        return cls.at(model_id if is_here else snapshot_download(model_id, allow_patterns=list(FILES), **options))


def fetch(repo_id: str, **options: Any) -> Path:
    """Fetch a model folder.

    Args:
        repo_id: name of the repository, ``user/name``, or path of a folder.
        options: ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``force_download`` of the library.

    Returns:
        Path of the folder on this machine.

    Raises:
        WeightsError: a repository that cannot be reached or does not exist, or a name that is none.
    """
    try:
        return ModelFolder.from_pretrained(repo_id, **options).path
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise WeightsError(f"cannot fetch {repo_id} from Hugging Face's hub: {first_line(error)}") from error


def push(
    repo_id: str,
    save: Callable[[Path], None],
    cfg: CfgNode,
    classes: Classes,
    thresholds: Thresholds | None,
    facts: RunFacts,
    license: str | None = None,
    **options: Any,
) -> str:
    """Upload a model folder with a model card.

    Args:
        repo_id: name of the repository, which is created if it does not exist.
        save: function that writes the model folder.
        cfg: config of the model; what is written of it has no places on this machine.
        classes: classes of the model.
        thresholds: score thresholds of the model, if they are known.
        facts: facts on its run, for the card.
        license: name of a licence, as the hub lists them.
        options: ``private``, ``token``, ``branch``, ``commit_message`` and ``create_pr`` of the library.

    Returns:
        Address of the commit.

    Raises:
        WeightsError: a repository that cannot be reached or written to, or a name that is none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder)
        (folder / CONFIG).write_text(without_places(cfg).dump(), encoding="utf-8")
        metadata = _metadata(repo_id, cfg, facts, license).to_yaml()
        text = write_card(repo_id, cfg, classes, thresholds, facts)
        (folder / CARD).write_text(f"---\n{metadata}\n---\n\n{text}", encoding="utf-8")
        if facts.picture is not None:
            shutil.copy(facts.picture, folder / PICTURE)
        try:
            return str(ModelFolder.at(folder).push_to_hub(repo_id, **options))
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise WeightsError(f"cannot upload to {repo_id} on Hugging Face's hub: {first_line(error)}") from error


def without_places(cfg: CfgNode) -> CfgNode:
    """A config without the folders and files of the machine that it was used on."""
    cfg = cfg.clone()
    cfg.OUTPUT_DIR, cfg.DATASETS.REGISTER, cfg.MODEL.WEIGHTS = "output", [], ""
    if Path(cfg.MODEL.BACKBONE.WEIGHTS).parent != Path() or os.path.exists(cfg.MODEL.BACKBONE.WEIGHTS):  # a file, not a name
        cfg.MODEL.BACKBONE.WEIGHTS = ""
    return cfg


def _metadata(repo_id: str, cfg: CfgNode, facts: RunFacts, license: str | None) -> ModelCardData:
    """What the hub shows and searches by."""
    first = next(iter(cfg.DATASETS.TEST), "")
    kind = "image-classification" if is_classifier(cfg) else "object-detection"
    results = []
    for figure in itertools.chain(*main_figures({0: dict(facts.figures)})):
        *of, _, metric = figure.split("/")  # of several test sets, the name of the set comes first
        name = "/".join(of) or first
        results.append(EvalResult(kind, name, name, metric.lower(), round(facts.figures[figure], 2), metric_name=figure))
    return ModelCardData(
        license=license,
        library_name="cpvt_det",
        pipeline_tag=kind,
        tags=[kind, "position-encoding"],
        model_name=repo_id.rpartition("/")[2],
        eval_results=results or None,
    )
