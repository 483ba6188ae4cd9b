# SPDX-License-Identifier: Apache-2.0
"""Configs."""

from collections.abc import Sequence
from pathlib import Path

from tiny import DFINE, DINO

from faults.case import Case, Cut, Ending, call
from faults.drawn import call_on, draw

BOMB = "a0: &a0 {x: 1, y: 2}\n" + "\n".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40))


def config(text: str, words: Sequence[str] = ()):
    """``cpvt-det train`` with a YAML file of this text."""

    def run(folder: Path) -> Ending:
        (folder / "run.yaml").write_text(text.format(ran=folder / "ran") if "{ran}" in text else text, encoding="utf-8")
        ending = call("train", "--config-file", folder / "run.yaml", "--runner", "builtin", "OUTPUT_DIR", folder / "out", *words)
        assert not (folder / "ran").exists(), "the YAML's code was run"
        return ending

    return run


def reader(old: str, new: str) -> Cut:
    return Cut("config.py", old, new)


NEVER = "except ZeroDivisionError as error:"
UNREAD = reader("except Exception as error:  # what YAML and file systems raise has no common base", NEVER)
NESTED = (reader("except RecursionError as error:", NEVER), UNREAD)
SIZE = reader('_require_size(loaded, f"config {path}")', "pass")
TYPES = reader("except (ValueError, KeyError, AssertionError) as error:", NEVER)
UNKNOWN_KEY = (reader("if not cfg.is_new_allowed():", "if False:"), TYPES)
NO_CONFIG = reader(
    'raise ConfigError(f"no config file {name!r}, neither as a path nor below {config_root()}")', "return Path(name)"
)


def train(**more: object):
    """``cpvt-det train`` on a drawn data set, ended before its first step."""

    def run(folder: Path) -> Ending:
        ending = call_on(draw(folder / "data", lambda _: None), "train", **more)
        assert not (folder / "out/metrics.json").exists(), "a step was taken"
        return ending

    return run


def stopping(old: str) -> Cut:
    return Cut("training/callbacks.py", old, "if False:")


CASES = [
    Case(
        "YAML tag that runs code",
        config("SEED: !!python/object/apply:os.mkdir ['{ran}']"),
        "run.yaml: could not determine a constructor for the tag",
        guard=reader("str(path), allow_unsafe=False", "str(path), allow_unsafe=True"),
    ),
    Case(
        "code as a value",
        config("VERSION: 2", ["SEED", "__import__('os').getpid()"]),
        "Type mismatch",
        guard=reader(
            "CfgNode._decode_cfg_value(value)", "eval(value) if '__import__' in value else CfgNode._decode_cfg_value(value)"
        ),
    ),
    Case("malformed YAML", config("SEED: [1"), "cannot read config ...run.yaml: while parsing", guard=UNREAD),
    Case(
        "YAML that is no mapping",
        config("- SEED"),
        "run.yaml is not a YAML mapping of keys to values",
        guard=(reader("except (TypeError, AttributeError) as error:", NEVER), UNREAD),
    ),
    Case("_BASE_ of itself", config("_BASE_: run.yaml"), "run.yaml: its _BASE_ leads back to itself", guard=NESTED),
    Case(
        "40 lines of aliases that mean 2^40 parts",
        config(BOMB),
        "run.yaml has more than 100000 keys and values when its YAML aliases (*name) are expanded; remove the aliases",
        guard=SIZE,
    ),
    Case("an alias within what it names", config("MODEL: &a {x: *a}"), "run.yaml has more than 100000 keys and values", guard=SIZE),
    Case(
        "5,000 brackets",
        config("SEED: " + "[" * 5_000),
        "run.yaml: its _BASE_ leads back to itself, or its YAML is nested too deeply",
        guard=NESTED,
    ),
    Case(
        "key that the encoding does not take",
        lambda folder: call_on(
            draw(folder / "data", lambda _: None), "train", MODEL__POSITION__NAME="sine", MODEL__POSITION__KERNEL_SIZE=7
        ),
        "unknown option of position encoding 'sine' 'kernel_size'; known: normalize, offset, temperature; it belongs to peg, ",
        guard=Cut("common/registry.py", "if option not in accepted:", "if False:"),
    ),
    Case(
        "mixed queries without two stages",
        train(**{**DINO, "MODEL__DETECTOR__TWO_STAGE": False}),
        "MODEL.QUERIES.NAME is 'mixed', but MODEL.DETECTOR.TWO_STAGE is False; set TWO_STAGE to True, or NAME to one of learned, "
        "anchors",
        guard=Cut(
            "builders/detector.py",
            "if source in (*OF_ONE_STAGE, *OF_PROPOSALS) and (source in OF_PROPOSALS) != two_stage:",
            "if False:",
        ),
    ),
    Case(
        "denoising for another number of classes than the data's",
        train(**{**DINO, "MODEL__NUM_CLASSES": -1}),
        "MODEL.NUM_CLASSES is -1, but the data has 2 classes (cell, mite)",
        guard=Cut("builders/datasets.py", "if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):", "if False:"),
    ),
    Case(
        "a power of scores below 0",
        train(**{**DINO, "MODEL__CRITERION__CLASSIFICATION__GAMMA": -1.0}),
        "MODEL.CRITERION.CLASSIFICATION: gamma must be at least 0, got -1.0",
        guard=Cut("losses/classification.py", "if not low <= value <= high:", "if False:"),
    ),
    Case(
        "images smaller than a cell of the hybrid encoder's coarsest map",
        train(**{**DFINE, "INPUT__MIN_SIZE_TRAIN": (15, 40)}),
        "INPUT.MIN_SIZE_TRAIN allows images of 15 pixels, which is smaller than a cell of the coarsest feature map (16 pixels): "
        "use larger images, or change MODEL.BACKBONE.STAGES",
        guard=Cut(
            "builders/detector.py",
            'require_larger_images(cfg, coarsest, f"a cell of the coarsest feature map ({coarsest} pixels)", '
            '"MODEL.BACKBONE.STAGES")',
            "pass",
        ),
    ),
    Case(
        "scrambled sines beside a PEG",
        train(**{**DFINE, "MODEL__POSITION__NAME": "sine_scrambled+peg"}),
        "MODEL.POSITION.NAME: sine_scrambled reproduces, for comparison, what other code computes in hybrid encoders; use it alone "
        "and in CPVTRealTimeDetr, or use sine_grid, which is correct",
        guard=Cut("builders/detector.py", 'if "sine_scrambled" in names and (len(names) > 1 or encoder is None):', "if False:"),
    ),
    Case(
        "unknown key",
        config("MODEL: {POSTION: {NAME: peg}}"),
        "'MODEL.POSTION' (did you mean 'MODEL.POSITION'?)",
        guard=UNKNOWN_KEY,
    ),
    Case("value of another type", config("SOLVER: {BASE_LR: fast}"), "Type mismatch", guard=TYPES),
    Case(
        "TEST.BEST_FIGURE that no evaluation has",
        train(TEST__BEST_FIGURE="mAP"),
        "unknown figure of the evaluation (TEST.BEST_FIGURE) 'mAP'; known: bbox/AP, bbox/AP-cell",
        guard=Cut("training/tasks/task.py", "if not (figure := task.cfg.TEST.BEST_FIGURE):", "if True:"),
    ),
    Case(
        "TEST.BEST_FIGURE of large objects, where there are none",
        train(TEST__BEST_FIGURE="APl"),
        "TEST.BEST_FIGURE APl: drawn has no objects that it measures; choose another figure",
        guard=Cut("training/tasks/task.py", "if math.isnan(", "if not ("),
    ),
    Case(
        "early stopping without evaluations during the run",
        train(SOLVER__EARLY_STOPPING=3),
        "SOLVER.EARLY_STOPPING is 3, but the run is evaluated at its end only; set TEST.EVAL_EPOCHS or EVAL_PERIOD",
        guard=stopping("if patience and not (test.EVAL_PERIOD > 0 or by_epochs):"),
    ),
    Case(
        "early stopping without a test set",
        train(SOLVER__EARLY_STOPPING=3, DATASETS__TEST=(), TEST__EVAL_PERIOD=2),
        "SOLVER.EARLY_STOPPING is 3, but nothing is evaluated: name a test set in DATASETS.TEST, or leave the key out",
        guard=stopping("if patience and not tests:"),
    ),
    Case(
        "early stopping after -1 evaluations",
        train(SOLVER__EARLY_STOPPING=-1, TEST__EVAL_PERIOD=2),
        "SOLVER.EARLY_STOPPING must be at least 0 (0 for no early stopping), got -1",
        guard=stopping("if patience < 0:"),
    ),
    Case(
        "-1 threads",
        train(SOLVER__THREADS=-1),
        "SOLVER.THREADS must be at least 0 (0 for as many as torch takes), got -1",
        guard=Cut("training/setup.py", "if cfg.SOLVER.THREADS < 0:", "if False:"),
    ),
    Case(
        "NMS of detections at 0",
        train(TEST__NMS=0.0),
        "TEST.DETECTIONS_PER_IMAGE, TEST.NMS: nms must be above 0 and at most 1, got 0.0",
        guard=Cut("evaluation/answers.py", "if not 0 < nms <= 1:", "if False:"),
    ),
    Case(
        "threshold of pictures that is no score",
        train(TEST__PICTURE_THRESHOLD=1.5),
        "TEST.PICTURE_THRESHOLD must be a score from 0 to 1, or None for the score with the best F1, got 1.5",
        guard=Cut(
            "builders/data.py",
            "if threshold is not None and not (type(threshold) in (int, float) and 0 <= threshold <= 1):",
            "if False:",
        ),
    ),
    Case(
        "key without a value",
        config("VERSION: 2", ["SEED"]),
        "overrides must be KEY VALUE pairs, but the number of words is odd: OUTPUT_DIR",
        guard=reader("if len(overrides) % 2:", "if False:"),
    ),
    Case(
        "value that Python cannot read",
        config("VERSION: 2", ["SEED", "{[]: 1}"]),
        "cannot read the value of SEED: unhashable type",
        guard=reader("except (TypeError, MemoryError, RecursionError) as error:", NEVER),
    ),
]
