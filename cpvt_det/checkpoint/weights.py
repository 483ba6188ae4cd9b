# SPDX-License-Identifier: Apache-2.0
"""Read a file, a folder or a dict as weights under our names, with their config and the classes that the rows of their class heads
stand for.

The config of other projects' weights is found by the file's hash if it is known, otherwise by names and shapes. Settings that names
and shapes do not show get their usual values: 8 heads in DETR, 4 points in deformable attention, no DC5.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from torch import Tensor

from cpvt_det.checkpoint.convert import convert_state_dict, detect_source
from cpvt_det.checkpoint.fetch import EXPORTED, Start, find_start, locate, starts
from cpvt_det.checkpoint.files import read_checkpoint, sha256_of, state_dict_of
from cpvt_det.checkpoint.model_folder import is_in_folder, read_node
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS, Classes
from cpvt_det.common.errors import UnknownNameError, WeightsError
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import flat_items, get_cfg, load_cfg, merge_checked, nested, parse_config
from cpvt_det.models.backbones.resnet import DEPTHS

CLASS_HEAD = re.compile(r"^(class_embed\.(\d+\.)?|distilled_embed\.)(weight|bias)$")
PROPOSALS_HEAD = re.compile(r"^queries\.class_embed\.(weight|bias)$")
"""Class head of the proposals. With ``MODEL.QUERIES.CLASS_PROPOSALS``, its rows are classes; otherwise, row 0 means "an object",
and the other rows have no meaning."""
DENOISING_LABELS = re.compile(r"^queries\.denoising\.label_enc\.weight$")
HF_BACKGROUND_ROWS = {"hf_detr": 1, "hf_deformable_detr": 0, "hf_rt_detr": 0, "hf_d_fine": 0}
"""Source -> number of rows in its class heads beyond the labels in config.json."""
OF_80_ROWS = ("detrex_deformable_detr", "rt_detr", "hf_rt_detr", "hf_d_fine")
"""Sources whose class heads of 80 rows have COCO's classes in the order of their ids."""
REAL_TIME = ("rt_detr", "hf_rt_detr", "hf_d_fine")
"""Sources whose detectors cannot be told apart by shapes; ``--config-file`` must name the config."""
BODY = "backbone.body."
POINTS, HEADS, QUERIES = 4, 8, 300
_LAYER = re.compile(r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.")
_PROJECTION = re.compile(r"^input_proj\.(\d+)\.0\.weight$")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin", "model_best.pth")


@dataclass
class Weights:
    """Weights under our names.

    Attributes:
        state_dict: names -> tensors, on the CPU if they were read from a file.
        classes: one class per row of a class head, without the row "no object"; ``None`` if the classes are unknown.
        source: source of the weights' original names, a key of ``CONVERSIONS``; ``None`` for our names.
        origin: name of the weights in messages.
        config: config with which the weights were trained, as YAML. For other projects' weights it is derived from names and
            shapes. ``None`` if it is unknown.
        thresholds: score thresholds of the weights' last evaluation; ``None`` if they were not stored.
        class_proposals: whether the rows of the proposals' class head are classes; ``None`` if it is unknown.
        path: file that the weights were read from; ``None`` if they did not come from a file.
        project: project that trained the weights, as ``source``, also for converted ones; ``None`` for this package.
    """

    state_dict: dict[str, Tensor]
    classes: Classes | None
    source: str | None
    origin: str
    config: str | None = None
    thresholds: Thresholds | None = None
    class_proposals: bool | None = None
    path: Path | None = None
    project: str | None = None

    def as_checkpoint(self) -> dict[str, Any]:
        """The weights in the layout of our checkpoints, with the classes, the config and the thresholds if they are known."""
        known = {"config": self.config, "project": self.project}
        node: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        if self.classes is not None:
            node["classes"] = {"ids": list(self.classes.ids), "names": list(self.classes.names)}
        if self.thresholds is not None:
            node["thresholds"] = self.thresholds.state_dict()
        return {"model": self.state_dict, "cpvt_det": node} if node else {"model": self.state_dict}


def read_weights(weights: str | Path | Mapping[str, Any]) -> Weights:
    """Read our weights, or those of a known source.

    Args:
        weights: path of a file or a folder; a name, a URL or a repository, as in :func:`cpvt_det.checkpoint.fetch.locate`; or the
            content of such a file. A folder contains ``model.safetensors`` or ``pytorch_model.bin``: it is ours (from
            :func:`cpvt_det.checkpoint.model_folder.save_model`), that of a run, or one from Hugging Face with a ``config.json``.

    Returns:
        The weights under our names. The classes are read from the checkpoint. If it contains none, they are COCO's. In heads of 91
        or 92 rows, the row number is the category id, and the 80 rows of detrex are in the order of the ids.

    Raises:
        WeightsError: weights that cannot be read, or whose parts contradict each other.
    """
    if isinstance(weights, Mapping):
        path, start, origin, checkpoint = None, None, "the given weights", weights
    else:
        path, start = _file_of(locate(weights)), find_start(weights)
        if path.suffix in EXPORTED:
            raise WeightsError(
                f"{weights} is an exported program, which works in predict and eval; here, give the checkpoint that it was "
                "exported from"
            )
        origin, checkpoint = str(weights), read_checkpoint(path)
    state_dict = state_dict_of(checkpoint, origin)
    node = checkpoint.get("cpvt_det") if path is None or not is_in_folder(path) else read_node(path.parent)
    node = node if isinstance(node, Mapping) else {}
    try:
        if (found := detect_source(state_dict)) is not None:
            state_dict = convert_state_dict(state_dict, found)
    except WeightsError as error:
        raise WeightsError(f"{origin}: {error}") from error
    rows = next((len(tensor) for name, tensor in state_dict.items() if CLASS_HEAD.search(name)), None)
    classes = None if rows is None else _stored_classes(node.get("classes"), rows, origin)
    if classes is None and rows is not None and found in HF_BACKGROUND_ROWS and path is not None:
        classes = _config_classes(path.with_name("config.json"), rows - HF_BACKGROUND_ROWS[found])
    if classes is None and rows in (len(COCO_ROWS), len(COCO_ROWS) + 1):
        classes = COCO_ROWS
    if classes is None and found in OF_80_ROWS and rows == len(COCO_CLASSES):
        classes = COCO_CLASSES
    config = node.get("config") if isinstance(node.get("config"), str) else None
    if config is None and found is not None:
        config = recognise(state_dict, found, start or (path and start_of_file(path)))
    thresholds = None if classes is None else _stored_thresholds(node.get("thresholds"), len(classes), origin)
    proposals, project = _proposes_classes(state_dict, found, config), found or node.get("project")
    return Weights(state_dict, classes, found, origin, config, thresholds, proposals, path, project)


def config_of_weights(weights: Weights) -> CfgNode:
    """The config that weights were trained with.

    Raises:
        WeightsError: weights whose config is unknown or belongs to a different version.
    """
    if weights.config is None:
        origin = "" if weights.project is None else f"comes from another project ({weights.project}) and "
        raise WeightsError(
            f"{weights.origin} {origin}contains no config; give one with --config-file, for example "
            "--config-file coco/detr_r50_sine_50ep.yaml"
        )
    cfg, source = get_cfg(), f"the config in {weights.origin}"
    stored = parse_config(weights.config, source)
    known = dict(flat_items(cfg))  # other keys, such as detectron2's training keys, change no detection
    used = nested((key, value) for key, value in flat_items(stored) if key in known or key.startswith(("MODEL.", "INPUT.")))
    try:
        merge_checked(cfg, used, source)
    except UnknownNameError as error:
        raise WeightsError(
            f"{error}; the config may be from another version, or for detectron2 (use its DefaultPredictor then); --config-file "
            "replaces it"
        ) from error
    return cfg


def _proposes_classes(state_dict: Mapping[str, Tensor], source: str | None, config: str | None) -> bool | None:
    """The value of ``Weights.class_proposals``. For our weights, it is read from their config; for other projects' weights, it is
    true if they are those of a DAB or DINO model."""
    if not any(PROPOSALS_HEAD.search(name) for name in state_dict):
        return None
    if source is not None:
        return "queries.ref_point_head.layers.0.weight" in state_dict
    return None if config is None else bool(re.search(r"^ +CLASS_PROPOSALS: true$", config, re.MULTILINE | re.IGNORECASE))


def _file_of(path: Path) -> Path:
    """``path`` itself or, if it is a folder, the file of weights in it."""
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    run = sorted(file.name for file in path.glob("model_*.pth"))
    advice = f"; it is the folder of a run, so give one of its files: {', '.join(run[:5])}" if run else "; give a file of weights"
    raise WeightsError(f"the folder {path} contains neither {' nor '.join(FOLDER_FILES)}{advice}")


def _stored_classes(node: Any, rows: int, origin: str) -> Classes | None:
    """The classes that our checkpoints contain for the rows of their class head."""
    if not isinstance(node, Mapping):
        return None
    ids, names = tuple(node.get("ids", ())), tuple(node.get("names", ()))
    if not all(type(class_id) is int for class_id in ids) or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{origin}: class ids must be whole numbers and names must be text, got {ids[:3]} and {names[:3]}")
    if len(ids) != len(names) or rows - len(ids) not in (0, 1) or len(set(names)) != len(names):
        raise WeightsError(f"{origin}: a class head with {rows} rows does not match {len(ids)} class ids and {len(names)} names")
    return Classes(ids, names)


def _stored_thresholds(node: Any, num_classes: int, origin: str) -> Thresholds | None:
    """The score thresholds that our checkpoints and model folders contain; older ones have none."""
    if node is None:
        return None
    try:
        return Thresholds.from_state_dict(node, num_classes)
    except ValueError as error:
        raise WeightsError(f"{origin}: {error}") from error


def _config_classes(config: Path, count: int) -> Classes | None:
    """``count`` classes from ``id2label`` in a ``config.json`` of transformers, where "N/A" marks rows without a class."""
    try:
        labels = {int(row): str(name) for row, name in json.loads(config.read_text(encoding="utf-8"))["id2label"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the file does not exist, or is a different kind of config.json
    names = tuple(f"unused_{row}" if name == "N/A" else name for row, name in sorted(labels.items()))
    unnamed = all(name == f"LABEL_{row}" for row, name in labels.items())  # transformers' names for classes without names
    if unnamed or sorted(labels) != list(range(len(names))) or len(names) != count or len(set(names)) != len(names):
        return None
    return Classes(tuple(range(len(names))), names)


def start_of_file(path: Path) -> Start | None:
    """The public weights that a file contains, found by its hash; ``None`` for other files."""
    hashes = {place.sha256: start for start in starts().values() for place in start.places if place.sha256}
    return hashes.get(sha256_of(path))


def recognise(state_dict: Mapping[str, Tensor], source: str, start: Start | None = None) -> str | None:
    """The config of weights of another project.

    Args:
        state_dict: tensors under our names.
        source: source of their original names, a key of ``CONVERSIONS``.
        start: entry of these public weights in the table, if they are known.

    Returns:
        The config as YAML; ``None`` if the backbone is not a ResNet, or if the weights are not a detector's.
    """
    if start is not None:
        return load_cfg(start.config, start.overrides).dump()
    if source in REAL_TIME:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    try:
        words = _common_words(shapes)
        if "class_embed.weight" in shapes:
            config = "detr_r50_sine_50ep"
            words |= {"MODEL.DETR.NHEADS": HEADS, "MODEL.DETR.NUM_OBJECT_QUERIES": shapes["query_embed.weight"][0]}
            if "transformer.encoder.norm.weight" in shapes:
                words["MODEL.DETECTOR.PRE_NORM"] = True
        else:
            config = _kind(shapes, source)
            words |= _deformable_words(shapes)
    except KeyError:  # a name that all these detectors have is missing
        return None
    return load_cfg(f"coco/{config}.yaml", [str(word) for pair in words.items() for word in pair]).dump()


def _kind(shapes: Mapping[str, tuple[int, ...]], source: str) -> str:
    """The config of a Deformable-DETR or of one of its successors."""
    two_stage = "queries.enc_output.weight" in shapes
    if "queries.ref_point_head.layers.0.weight" in shapes:
        if "transformer.decoder.norm.weight" in shapes:
            return "dino_r50_4scale_official_12ep" if source == "dino" else "dino_r50_4scale_sine_offset_12ep"
        return f"dab_deformable_detr_r50_sine_offset{'_two_stage' if two_stage else ''}_50ep"
    if two_stage and "queries.query_embed.weight" in shapes:
        return "h_deformable_detr_r50_official_12ep"
    kind = "_two_stage" if two_stage else "_refine" if "bbox_embed.1.layers.0.weight" in shapes else ""
    return f"deformable_detr_r50_official{kind}_50ep"


def _common_words(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Values of the config's keys for the backbone and for the sizes that every transformer has."""
    blocks = [len({name.split(".")[3] for name in shapes if name.startswith(f"{BODY}layer{n}.")}) for n in range(1, 5)]
    kinds = {(kind.expansion, *depths): name for name, (kind, depths) in DEPTHS.items()}
    expansion = 4 if f"{BODY}layer1.0.conv3.weight" in shapes else 1
    words = {"MODEL.BACKBONE.NAME": kinds[(expansion, *blocks)], "MODEL.BACKBONE.WEIGHTS": ""}
    if "position.row_embed.weight" in shapes:
        words["MODEL.POSITION.NAME"] = "learned"
    layers = [match.groups() for match in map(_LAYER.match, shapes) if match]
    feedforward, width = shapes["transformer.encoder.layers.0.linear1.weight"]
    depth = {kind: 1 + max((int(number) for one, number in layers if one == kind), default=-1) for kind in ("encoder", "decoder")}
    sizes = {"HIDDEN_DIM": width, "DIM_FEEDFORWARD": feedforward, "ENC_LAYERS": depth["encoder"], "DEC_LAYERS": depth["decoder"]}
    return words | {f"MODEL.DETR.{key}": value for key, value in sizes.items()}


def _deformable_words(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    projections = {int(match[1]): shapes[match[0]] for match in map(_PROJECTION.match, shapes) if match}
    stage_of = {shapes[f"{BODY}layer{stage - 1}.0.downsample.0.weight"][0]: stage for stage in (3, 4, 5)}
    first = stage_of.get(projections[0][1], 2)
    stages = range(first, first + sum(shape[2:] == (1, 1) for shape in projections.values()))
    attention = shapes["transformer.encoder.layers.0.self_attn.attention_weights.weight"][0]
    embedded = shapes.get("queries.refpoint_embed.weight", shapes.get("queries.query_embed.weight", (QUERIES,)))[0]
    is_hybrid = "queries.pos_trans.weight" in shapes and embedded > QUERIES
    return {
        "MODEL.BACKBONE.STAGES": tuple(stages),
        "MODEL.DETECTOR.NUM_LEVELS": len(projections),
        "MODEL.DETR.NHEADS": attention // (len(projections) * POINTS),
        "MODEL.DETR.NUM_OBJECT_QUERIES": QUERIES if is_hybrid else embedded,
        **({"MODEL.QUERIES.HYBRID": embedded - QUERIES} if is_hybrid else {}),
    }
