# SPDX-License-Identifier: Apache-2.0
"""Configs."""

from collections.abc import Sequence
from pathlib import Path

from faults.case import Case, Ending, call
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


CASES = [
    Case(
        "YAML tag that runs code",
        config("SEED: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{ran}']]"),
        "run.yaml: could not determine a constructor for the tag",
    ),
    Case("code as a value", config("VERSION: 2", ["SEED", "__import__('os').getpid()"]), "Type mismatch"),
    Case("malformed YAML", config("SEED: [1"), "cannot read config ...run.yaml: while parsing"),
    Case("YAML that is no mapping", config("- SEED"), "run.yaml is not a YAML mapping of keys to values"),
    Case("_BASE_ of itself", config("_BASE_: run.yaml"), "run.yaml: its _BASE_ leads back to itself"),
    Case(
        "40 lines of aliases that mean 2^40 parts",
        config(BOMB),
        "run.yaml has more than 100000 keys and values when its YAML aliases (*name) are expanded; remove the aliases",
    ),
    Case("an alias within what it names", config("MODEL: &a {x: *a}"), "run.yaml has more than 100000 keys and values"),
    Case(
        "5,000 brackets",
        config("SEED: " + "[" * 5_000),
        "run.yaml: its _BASE_ leads back to itself, or it is nested too deeply",
    ),
    Case(
        "key that the encoding does not take",
        lambda folder: call_on(
            draw(folder / "data", lambda _: None), "train", MODEL__POSITION__NAME="sine", MODEL__POSITION__KERNEL_SIZE=7
        ),
        "MODEL.POSITION.KERNEL_SIZE is 7, but the position encoding 'sine' does not take it; leave it at 3, or set",
    ),
    Case("unknown key", config("MODEL: {POSTION: {NAME: peg}}"), "'MODEL.POSTION' (did you mean 'MODEL.POSITION'?)"),
    Case("value of another type", config("SOLVER: {BASE_LR: fast}"), "Type mismatch"),
    Case(
        "key without a value",
        config("VERSION: 2", ["SEED"]),
        "overrides must be KEY VALUE pairs, but the number of words is odd: OUTPUT_DIR",
    ),
    Case(
        "value that Python cannot read", config("VERSION: 2", ["SEED", "{[]: 1}"]), "cannot read the value of SEED: unhashable type"
    ),
]
