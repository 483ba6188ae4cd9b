# SPDX-License-Identifier: Apache-2.0
"""Annotations.

`cpvt-det check-data --config-file FILE` lists all faults of all splits; training and evaluation run the same
check before anything else.
"""

import json
from pathlib import Path

from faults.case import Case, Ending, call


def _json_text(text: str):
    def run(folder: Path) -> Ending:
        (folder / "a.json").write_text(text, encoding="utf-8")
        (folder / "run.yaml").write_text("VERSION: 2\n")
        words = ["--runner", "builtin", "OUTPUT_DIR", folder / "out", "DATASETS.TRAIN", "('a',)"]
        registered = json.dumps([["a", str(folder / "a.json"), str(folder)]])
        return call("train", "--config-file", folder / "run.yaml", *words, "DATASETS.REGISTER", registered)

    return run


CASES = [Case("malformed JSON", _json_text("{"), "a.json is not JSON")]
