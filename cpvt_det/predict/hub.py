# SPDX-License-Identifier: Apache-2.0
"""Model folders on Hugging Face's hub, pushed by the mixin of its library. Imported when it is used."""

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det.builders import is_classifier
from cpvt_det.checkpoint.model_folder import CLASSES, CONFIG, THRESHOLDS, WEIGHTS
from cpvt_det.class_names import Classes
from cpvt_det.config import get_cfg
from cpvt_det.errors import ConfigError, WeightsError, first_line
from cpvt_det.evaluation.thresholds import Thresholds
from cpvt_det.predict.model_card import PICTURE, RunFacts, write_card
from cpvt_det.visualize.curves import main_figures

try:
    from huggingface_hub import EvalResult, ModelCardData, ModelHubMixin, snapshot_download
except ImportError as error:
    raise ConfigError("Hugging Face's hub needs the package huggingface_hub: pip install 'cpvt-det[hub]'") from error

FILES = (CONFIG, WEIGHTS, f"{WEIGHTS}.sha256", CLASSES, THRESHOLDS)
"""The files that are fetched; none of them can run code."""
CARD = "README.md"


class ModelFolder(ModelHubMixin, library_name="cpvt_det"):
    """A model folder on its way to the hub.

    Attributes:
        path: the folder on this machine.
    """

    path: Path

    @classmethod
    def at(cls, path: Path) -> "ModelFolder":
        """The model folder of a path."""
        folder = cls()  # the mixin would write arguments into a config.json
        folder.path = path
        return folder

    def _save_pretrained(self, save_directory: Path) -> None:
        shutil.copytree(self.path, save_directory, dirs_exist_ok=True)


def fetch(repo_id: str, **options: Any) -> Path:
    """Fetch a model folder; without a network, that which was fetched before.

    Not by the mixin, which asks for a ``config.json`` first and fails without a network where there is none.

    Args:
        repo_id: name of the repository, ``user/name``, or path of a folder.
        options: ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``force_download`` of the library.

    Returns:
        Path of the folder on this machine.

    Raises:
        WeightsError: a repository that cannot be reached, does not exist or has no weights of ours, or a name that is none.
    """
    if os.path.isdir(repo_id):
        return Path(repo_id)
    with _hub_errors(f"fetch {repo_id} from"):
        folder = Path(snapshot_download(repo_id, allow_patterns=list(FILES), **options))
    if not (folder / WEIGHTS).is_file():  # the folder does not even exist where no file is fetched
        raise WeightsError(f"{repo_id} on Hugging Face's hub has no {WEIGHTS}: it is no model of this package")
    return folder


def push(
    repo_id: str,
    save: Callable[[Path], None],
    cfg: CfgNode,
    classes: Classes,
    thresholds: Thresholds | None,
    facts: RunFacts,
    license: str | None = None,
    picture: bool = True,
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
        picture: whether the picture of the run's test images goes with the card, where there is one.
        options: ``private``, ``token``, ``branch``, ``commit_message`` and ``create_pr`` of the library.

    Returns:
        Address of the commit.

    Raises:
        WeightsError: a repository that cannot be reached or written to, or a name that is none.
    """
    facts = facts if picture else replace(facts, picture=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder)
        (folder / CONFIG).write_text(without_places(cfg).dump(), encoding="utf-8")
        metadata = _metadata(repo_id, cfg, facts, license).to_yaml()
        text = write_card(repo_id, cfg, classes, thresholds, facts)
        (folder / CARD).write_text(f"---\n{metadata}\n---\n\n{text}", encoding="utf-8")
        if facts.picture is not None:
            shutil.copy(facts.picture, folder / PICTURE)
        with _hub_errors(f"upload to {repo_id} on"):
            return str(ModelFolder.at(folder).push_to_hub(repo_id, **options))


@contextlib.contextmanager
def _hub_errors(action: str) -> Iterator[None]:
    try:
        yield
    except TypeError:  # an option that the library does not have
        raise
    except Exception as error:  # the library's, or those of its HTTP client, which is another one in each major version
        raise WeightsError(f"cannot {action} Hugging Face's hub: {first_line(error)}") from error


def without_places(cfg: CfgNode) -> CfgNode:
    """A config without the folders, files and addresses of the machine that it was used on; names of weights stay."""
    cfg, default = cfg.clone(), get_cfg()
    cfg.OUTPUT_DIR, cfg.DATASETS.REGISTER, cfg.MODEL.WEIGHTS = default.OUTPUT_DIR, [], ""
    cfg.DATASETS.CACHE, cfg.CALLBACKS = default.DATASETS.CACHE, []
    backbone, classifier = cfg.MODEL.BACKBONE, cfg.MODEL.CLASSIFIER
    for node, key in ((backbone, "WEIGHTS"), (classifier, "TEACHER"), (classifier, "TEACHER_WEIGHTS")):
        value = node[key].removeprefix("timm/")  # of a teacher's name
        if Path(value).parent != Path() or os.path.exists(value):  # a file, not a name
            node[key] = ""
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
