# SPDX-License-Identifier: Apache-2.0
"""A study's plan: its runs, the data of each, and what is measured. One YAML file contains it all."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

import studies.ablations  # noqa: F401, registers encodings
from cpvt_det.builders import backbone_position, build_backbone, build_encoder_position, is_classifier
from cpvt_det.common.errors import ConfigError, UnknownNameError, config_errors, first_line
from cpvt_det.config import SAME_RUN, flat_items, get_cfg, load_cfg, merge_checked, nested
from cpvt_det.data.shapes.dataset import describe
from cpvt_det.data.shapes.scene import ShapesSpec
from cpvt_det.training.tasks.task import build_task
from studies.engine.probes import VERSIONS

AFFECTS = re.compile(
    r"MODEL\.(BACKBONE\.)?WEIGHTS(_SHA256)?$|SOLVER\.EARLY_STOPPING$|DATASETS\.TEST$|"
    r"TEST\.(?!(PICTURES|PICTURE_THRESHOLD|REPORT|IMS_PER_BATCH)$)"
)
"""Keys that may change when a run is resumed, and that nevertheless change its result."""


@dataclass(frozen=True)
class DrawnData:
    """A shapes data set of the plan.

    Attributes:
        name: name in ``DATASETS.TRAIN`` and ``TEST`` of the configs.
        images: number of images.
        seed: seed of the drawing; data sets of one seed that differ only in ``scale`` contain the same scenes.
        spec: properties of the images.
    """

    name: str
    images: int
    seed: int
    spec: ShapesSpec

    def describe(self) -> dict[str, Any]:
        """All that the drawing depends on."""
        return describe("val", self.images, self.seed, self.spec)


@dataclass(frozen=True)
class Group:
    """Runs of one config that are compared with each other.

    Attributes:
        name: name of the group.
        config: path of the YAML config, relative to the plan.
        seeds: number of runs of each variant; a seed determines the weights and the order of the data.
        variants: name -> config keys of the variant.
        first_seed: the seeds are this number and the next ones; not 0 for runs that choose something for the others.
        keys: config keys of all variants.
        beside: variants of earlier groups, as ``group/variant``, that tables show with these.
        baselines: variants that the others are compared with, of this group or of ``beside``.
        sweeps: sweeps of the plan that every trained model is evaluated on.
        probes: names from ``PROBES`` that are measured of every trained detector; none of a classifier.
        weights: ``group/variant`` whose weights of the same seed the runs start from.
        backbone: ``group/variant/seed`` whose backbone the runs start from.
    """

    name: str
    config: str
    seeds: int
    variants: Mapping[str, Mapping[str, Any]]
    first_seed: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[str] = ()
    baselines: Sequence[str] = ()
    sweeps: Sequence[str] = ()
    probes: Sequence[str] = ()
    weights: str = ""
    backbone: str = ""

    @property
    def seed_range(self) -> range:
        """All seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def runs(self) -> Iterator["Run"]:
        """All runs, seed by seed, so that an interrupted study has pairs."""
        for seed in self.seed_range:
            yield from (Run(self, variant, seed) for variant in self.variants)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        group: group that the run belongs to.
        variant: name of a variant of the group.
        seed: seed of the weights and of the data order.
    """

    group: Group
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """``group/variant/seed``; also the path of its files."""
        return f"{self.group.name}/{self.variant}/{self.seed}"


@dataclass(frozen=True)
class Question:
    """A comparison that the plan names before its runs.

    Attributes:
        text: the question, in words.
        group: name of the group.
        variant: variant that is asked about.
        baseline: variant of the same group that it is compared with.
        value: data set of the group's sweeps -> weight; the sum of the main figure over them, so weighted, is compared. Empty: the
            main figure on the training's own test data.
    """

    text: str
    group: str
    variant: str
    baseline: str
    value: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """A panel of the study's picture, with all variants of a group.

    Attributes:
        title: what the panel shows.
        group: name of the group.
        value: as of :class:`Question`.
    """

    title: str
    group: str
    value: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A whole study.

    Attributes:
        folder: folder of the plan's file; records are written to ``results`` in it.
        output: folder for checkpoints, logs and drawn data sets.
        data: shapes data sets.
        evaluations: name -> config keys of an evaluation, such as another data set or another size of the images.
        sweeps: name -> data set of ``data`` or name in ``evaluations`` -> its number on an axis.
        groups: groups in the order of running.
        questions: what the study is to answer.
        panels: the panels of its picture, from left to right.
    """

    folder: Path
    output: Path
    data: Sequence[DrawnData]
    evaluations: Mapping[str, Mapping[str, Any]]
    sweeps: Mapping[str, Mapping[str, float]]
    groups: Sequence[Group]
    questions: Sequence[Question] = ()
    panels: Sequence[Panel] = ()
    _fingerprints: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _figures: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    _configs: dict[str, CfgNode] = field(default_factory=dict, repr=False, compare=False)  # by file: a study has hundreds of runs

    def runs(self) -> Iterator[Run]:
        """All runs, group after group."""
        for group in self.groups:
            yield from group.runs()

    def group(self, name: str) -> Group:
        """A group by its name.

        Raises:
            UnknownNameError: a name that no group has.
        """
        found = {group.name: group for group in self.groups}
        if name not in found:
            raise UnknownNameError("group of the study", name, found)
        return found[name]

    def record_path(self, name: str) -> Path:
        """The path of a run's record, by the run's name."""
        return self.folder / "results" / f"{name}.json"

    def output_of(self, name: str) -> Path:
        """The ``OUTPUT_DIR`` of a run, by the run's name."""
        return self.output / "runs" / name

    def data_root(self, name: str) -> Path:
        """The folder of a drawn data set."""
        return self.output / "data" / name

    def config_of(self, run: Run) -> CfgNode:
        """The whole config of a run.

        Raises:
            ConfigError: keys or values that cannot be used.
        """
        group = run.group
        if group.config not in self._configs:
            self._configs[group.config] = load_cfg(str(self.folder / group.config))
        cfg = self._configs[group.config].clone()
        for keys, source in ((group.keys, group.name), (group.variants[run.variant], run.name)):
            merge_checked(cfg, nested(keys.items()), f"the plan, {source}")
        cfg.SEED = run.seed
        cfg.OUTPUT_DIR = str(self.output_of(run.name))
        cfg.DATASETS.REGISTER = [*cfg.DATASETS.REGISTER, *(self.registration(data.name) for data in self.data)]
        if group.weights:
            cfg.MODEL.WEIGHTS = str(self.output_of(f"{group.weights}/{run.seed}") / "model_final.pth")
        if group.backbone:
            cfg.MODEL.BACKBONE.WEIGHTS = str(self.output_of(group.backbone) / "backbone.pth")
        return cfg

    def swept_config_of(self, run: Run, name: str) -> CfgNode:
        """The config of a run, for the evaluation on one data set of a sweep.

        Raises:
            ConfigError: as :meth:`config_of`.
        """
        cfg, keys = self.config_of(run), self.evaluations.get(name, {"DATASETS.TEST": [name]})
        merge_checked(cfg, nested(keys.items()), f"the plan, {name}")
        return cfg

    def figures_of(self, group: Group) -> tuple[str, ...]:
        """The figures that a record of the group has, by the task of its config; the main one first."""
        if group.name not in self._figures:
            self._figures[group.name] = tuple(build_task(self.config_of(next(group.runs()))).figures)
        return self._figures[group.name]

    def registration(self, name: str) -> list[str]:
        """The entry of ``DATASETS.REGISTER`` for a drawn data set."""
        root = self.data_root(name)
        return [name, str(root / "annotations" / "val.json"), str(root / "val")]

    def fingerprint(self, run: Run) -> str:
        """Twelve digits that change with the keys that a run sets and that affect its training or its evaluation, with its drawn
        data, and with the runs that it starts from.

        They do not change with the defaults of other keys, nor with data that the plan does not draw.
        """
        if run.name in self._fingerprints:
            return self._fingerprints[run.name]
        cfg, defaults = self.config_of(run), dict(flat_items(get_cfg()))
        from_runs = {"MODEL.WEIGHTS": run.group.weights, "MODEL.BACKBONE.WEIGHTS": run.group.backbone}
        keys = {
            key: value
            for key, value in flat_items(cfg)
            if (AFFECTS.match(key) or not SAME_RUN.match(key)) and value != defaults.get(key) and not from_runs.get(key)
        }
        data = {data.name: data.describe() for data in self.data if data.name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)}
        before = [self.fingerprint(self.run(origin)) for origin in self.origins(run)]
        return self._fingerprints.setdefault(run.name, _hash([keys, data, before]))

    def measured_fingerprint(self, group: Group) -> str:
        """Twelve digits that change with what is measured of a group's trained models."""
        known = {data.name: data.describe() for data in self.data} | self.evaluations
        sweeps = {sweep: {name: known[name] for name in self.sweeps[sweep]} for sweep in group.sweeps}
        return _hash([sweeps, {probe: VERSIONS[probe] for probe in group.probes}])

    def origins(self, run: Run) -> list[str]:
        """The names of the runs whose weights a run starts from, of earlier groups."""
        weights = f"{run.group.weights}/{run.seed}" if run.group.weights else ""
        return [name for name in (weights, run.group.backbone) if name]

    def run(self, name: str) -> Run:
        """A run by its name.

        Raises:
            ConfigError: the plan has no such run.
        """
        found = next((run for run in self.runs() if run.name == name), None)
        if found is None:
            raise ConfigError(f"the plan has no run {name!r}; names of runs are group/variant/seed")
        return found


def load_plan(path: str | Path) -> Plan:
    """Read a plan, and build every variant's config, so that a misspelt key is found before the first run.

    Raises:
        ConfigError: a file that is not a plan, or impossible runs.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        data = [DrawnData(name, keys["images"], keys["seed"], _spec(keys)) for name, keys in content.get("data", {}).items()]
        groups = [_group(name, keys) for name, keys in content["groups"].items()]
        measured = content.get("evaluations", {}), content.get("sweeps", {})
        questions = [Question(**keys) for keys in content.get("questions", [])]
        panels = [Panel(**keys) for keys in content.get("panels", [])]
        plan = Plan(path.parent, Path(content["output"]), data, *measured, groups, questions, panels)
        for sweep, sets in plan.sweeps.items():
            _require_known(f"data set of sweep {sweep}", sets, [*(drawn.name for drawn in data), *plan.evaluations])
        for number, group in enumerate(groups):
            _check_group(plan, group, groups[:number])
        for question in questions:
            group = plan.group(question.group)
            _require_known(f"variant in question {question.text!r}", (question.variant, question.baseline), group.variants)
            _require_known(f"data set in question {question.text!r}", question.value, _swept(plan, group))
        for panel in panels:
            _require_known(f"data set in panel {panel.title!r}", panel.value, _swept(plan, plan.group(panel.group)))
    except ConfigError:
        raise
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a study plan: {type(error).__name__}: {first_line(error)}") from error
    return plan


def _check_group(plan: Plan, group: Group, earlier: Sequence[Group]) -> None:
    _require_known(f"sweep of group {group.name}", group.sweeps, plan.sweeps)
    _require_known(f"probe of group {group.name}", group.probes, VERSIONS)
    swept = _swept(plan, group)
    variants = [f"{other.name}/{variant}" for other in earlier for variant in other.variants]
    _require_known(f"variant of an earlier group in 'beside' of group {group.name}", group.beside, variants)
    _require_known(f"baseline of group {group.name}", group.baselines, [*group.variants, *group.beside])
    before = [f"{other.name}/{variant}/{seed}" for other in earlier for variant in other.variants for seed in other.seed_range]
    for run in group.runs():
        _require_known(f"run of an earlier group that {run.name} starts from", plan.origins(run), before)
    for variant in group.variants:
        cfg = plan.config_of(Run(group, variant, 0))
        if group.probes and is_classifier(cfg):
            raise ConfigError(f"probes are of detectors, but {group.name}/{variant} is a classifier")
        _check_config(cfg)
    for name in swept:
        plan.swept_config_of(next(group.runs()), name)


def _swept(plan: Plan, group: Group) -> list[str]:
    """The data sets that the models of a group are evaluated on."""
    return [name for sweep in group.sweeps for name in plan.sweeps[sweep]]


def _check_config(cfg: CfgNode) -> None:
    """Build what has an encoding: its node accepts any key until then."""
    if not is_classifier(cfg):
        build_encoder_position(cfg, cfg.MODEL.DETR.HIDDEN_DIM, 1, cfg.MODEL.DETR.ENC_LAYERS)
    if backbone_position(cfg):
        with config_errors("MODEL.BACKBONE"):
            build_backbone(cfg)


def _require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _group(name: str, keys: Mapping[str, Any]) -> Group:
    known = [known.name for known in fields(Group) if known.name != "name"]
    for key in keys:
        if key not in known:
            raise UnknownNameError(f"key of group {name}", key, known)
    return Group(name, **keys)


def _spec(keys: Mapping[str, Any]) -> ShapesSpec:
    with config_errors("a data set of the plan"):
        return ShapesSpec(**{key: _tuple(value) for key, value in keys.items() if key not in ("images", "seed")})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
