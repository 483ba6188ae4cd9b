# SPDX-License-Identifier: Apache-2.0
"""A study's plan: which runs there are, what each trains on, and what is measured of it. One YAML file says it all."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from cpvt_det.build import build_encoder_position
from cpvt_det.config import SAME_RUN, flat_items, get_cfg, load_cfg, merge_checked
from cpvt_det.data.shapes_scene import ShapesSpec
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors, first_line
from cpvt_det.study.probes import PROBES


@dataclass(frozen=True)
class DrawnData:
    """A shapes data set of the plan.

    Attributes:
        name: what ``DATASETS.TRAIN`` and ``TEST`` of the configs call it.
        images: how many.
        seed: of the drawing; sets of one seed hold the same scenes.
        spec: what the images are like.
    """

    name: str
    images: int
    seed: int
    spec: ShapesSpec


@dataclass(frozen=True)
class Group:
    """Runs of one config that are compared with each other.

    Attributes:
        name: of the group.
        config: the YAML, beside the plan.
        seeds: how many of each variant, from 0 on.
        variants: name -> the keys of the config that make it.
        keys: further keys, of all variants.
        baseline: the variant that the others are compared with, of this group or, as ``group/variant``, of another.
        sweeps: which of the plan's sweeps every trained detector is evaluated on.
        probes: which of ``PROBES`` are taken of it.
        weights: ``group/variant`` whose weights of the same seed the runs start from.
        backbone: ``group/variant/seed`` whose backbone the runs start from.
    """

    name: str
    config: str
    seeds: int
    variants: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = ""
    sweeps: Sequence[str] = ()
    probes: Sequence[str] = ()
    weights: str = ""
    backbone: str = ""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        group: it belongs to.
        variant: of the group.
        seed: of weights and data order.
    """

    group: Group
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """``group/variant/seed``, of its files too."""
        return f"{self.group.name}/{self.variant}/{self.seed}"


@dataclass(frozen=True)
class Plan:
    """A whole study.

    Attributes:
        folder: of the plan's file; records go to ``results`` in it.
        output: where runs write checkpoints and logs, and data is drawn.
        data: the shapes data sets.
        sweeps: name -> data set -> the number it stands for on an axis.
        groups: in the order they are worked through.
    """

    folder: Path
    output: Path
    data: Sequence[DrawnData]
    sweeps: Mapping[str, Mapping[str, float]]
    groups: Sequence[Group]

    def runs(self) -> Iterator[Run]:
        """All runs, of a group seed by seed, so that a study cut short has pairs."""
        for group in self.groups:
            for seed in range(group.seeds):
                yield from (Run(group, variant, seed) for variant in group.variants)

    def group(self, name: str) -> Group:
        """A group by its name.

        Raises:
            UnknownNameError: there is none.
        """
        found = {group.name: group for group in self.groups}
        if name not in found:
            raise UnknownNameError("group of the study", name, found)
        return found[name]

    def record_path(self, name: str) -> Path:
        """Where the record of a run lies, by the run's name."""
        return self.folder / "results" / f"{name}.json"

    def output_of(self, name: str) -> Path:
        """``OUTPUT_DIR`` of a run, by the run's name."""
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
        cfg = load_cfg(str(self.folder / group.config))
        for keys, source in ((group.keys, group.name), (group.variants[run.variant], run.name)):
            merge_checked(cfg, _nested(keys), f"the plan, {source}")
        cfg.SEED = run.seed
        cfg.OUTPUT_DIR = str(self.output_of(run.name))
        cfg.DATASETS.REGISTER = [*cfg.DATASETS.REGISTER, *(self.registration(data.name) for data in self.data)]
        if group.weights:
            cfg.MODEL.WEIGHTS = str(self.output_of(f"{group.weights}/{run.seed}") / "model_final.pth")
        if group.backbone:
            cfg.MODEL.BACKBONE.WEIGHTS = str(self.output_of(group.backbone) / "backbone.pth")
        return cfg

    def registration(self, name: str) -> list[str]:
        """What ``DATASETS.REGISTER`` says of a drawn data set."""
        root = self.data_root(name)
        return [name, str(root / "annotations" / "val.json"), str(root / "val")]

    def fingerprint(self, run: Run) -> str:
        """Twelve digits that change with the keys that a run sets, with its data, and with the runs that it starts from."""
        cfg, defaults = self.config_of(run), dict(flat_items(get_cfg()))
        told = [(key, value) for key, value in sorted(flat_items(cfg)) if not SAME_RUN.match(key) and value != defaults.get(key)]
        data = [data for data in self.data if data.name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)]
        before = [self.fingerprint(self.run(origin)) for origin in self.origins(run)]
        return hashlib.sha256(repr((told, data, before)).encode()).hexdigest()[:12]

    def origins(self, run: Run) -> list[str]:
        """The names of the runs whose weights a run starts from."""
        weights = f"{run.group.weights}/{run.seed}" if run.group.weights else ""
        return [name for name in (weights, run.group.backbone) if name]

    def run(self, name: str) -> Run:
        """A run by its name.

        Raises:
            ConfigError: the plan has no such run.
        """
        found = next((run for run in self.runs() if run.name == name), None)
        if found is None:
            raise ConfigError(f"the plan has no run {name!r}; runs are group/variant/seed")
        return found


def load_plan(path: str | Path) -> Plan:
    """Read a plan, and build every run's config once, so that a misspelt key is found before the first run.

    Raises:
        ConfigError: a file that is no plan, or runs that cannot be.
    """
    path = Path(path)
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        data = [DrawnData(name, keys["images"], keys["seed"], _spec(keys)) for name, keys in told.get("data", {}).items()]
        groups = [_group(name, keys) for name, keys in told["groups"].items()]
        plan = Plan(path.parent, Path(told["output"]), data, told.get("sweeps", {}), groups)
    except ConfigError:
        raise
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no plan of a study: {type(error).__name__} {first_line(error)}") from error
    for group in plan.groups:
        for sweep in group.sweeps:
            if sweep not in plan.sweeps:
                raise UnknownNameError(f"sweep of group {group.name}", sweep, plan.sweeps)
        for probe in group.probes:
            if probe not in PROBES:
                raise UnknownNameError(f"probe of group {group.name}", probe, PROBES)
        for run in (Run(group, variant, 0) for variant in group.variants):
            plan.fingerprint(run)
            cfg = plan.config_of(run)  # whose MODEL.POSITION may hold any key until the encoding is built
            build_encoder_position(cfg, cfg.MODEL.DETR.HIDDEN_DIM, 1, cfg.MODEL.DETR.ENC_LAYERS)
    return plan


def _group(name: str, keys: Mapping[str, Any]) -> Group:
    known = [known.name for known in fields(Group) if known.name != "name"]
    for key in keys:
        if key not in known:
            raise UnknownNameError(f"key of group {name}", key, known)
    return Group(name, **keys)


def _spec(told: Mapping[str, Any]) -> ShapesSpec:
    with config_errors("a data set of the plan"):
        return ShapesSpec(**{key: _tuple(value) for key, value in told.items() if key not in ("images", "seed")})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _nested(keys: Mapping[str, Any]) -> CfgNode:
    """``{"A.B": 1}`` -> ``{"A": {"B": 1}}``."""
    tree = CfgNode()
    for name, value in keys.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, CfgNode())
        node[last] = value
    return tree
