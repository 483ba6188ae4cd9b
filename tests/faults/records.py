# SPDX-License-Identifier: Apache-2.0
"""Records of long runs of the scripts in this folder, whose figures ``docs/reliability.md`` states."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.origin import commit_of, cpu_model

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def keep(name: str, number: int, found: NamedTuple) -> None:
    """Write what ``python -m faults.NAME NUMBER`` found to ``NAME.json``, with commit and processor."""
    record = {"command": f"python -m faults.{name} {number} --write", "commit": commit_of(ROOT, short=True), "cpu": cpu_model()}
    text = json.dumps({**record, **found._asdict()}, indent=1) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    """The record of ``python -m faults.NAME``."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
