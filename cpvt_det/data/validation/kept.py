# SPDX-License-Identifier: Apache-2.0
"""What was found in the image files of a large data set, kept for the next run."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from cpvt_det.data.records import Records
from cpvt_det.data.shards import INDEX, open_shards, split_at_shards
from cpvt_det.data.storage import is_url
from cpvt_det.data.validation.check import Looked
from cpvt_det.data.validation.issues import Group, Issues
from cpvt_det.files import write_json

logger = logging.getLogger("cpvt_det")
LARGE = 10_000
"""Images from which on the result is kept; of fewer it takes a second."""


class KeptLook:
    """The result of looking at all image files of a data set, if it has no faults.

    It is valid as long as nothing is added to the folders of the images, removed or renamed. An image that is overwritten in its
    place is noticed when it is read: its size is compared then.

    Args:
        records: records of the data set.
        folder: ``DATASETS.CACHE``; empty: nothing is kept.
    """

    def __init__(self, records: Records, folder: str):
        self._records = records
        self._path: Path | None = None
        self._states: dict[str, list[int]] = {}
        if folder and len(records) >= LARGE and _can_change_be_seen(str(records.root)):
            self._path = Path(folder).expanduser() / f"{_hash(records)}.images.json"

    def load(self) -> Looked | None:
        """The result of an earlier run; ``None`` if there is none, or if a folder has changed."""
        if self._path is None:
            return None
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {}
        if not kept or kept["states"] != _states(kept["states"]):
            self._states = _states(_places(self._records))  # before somebody looks, so that no change in between is missed
            return None
        issues = Issues()
        issues.infos = {heading: Group(**group) for heading, group in kept["infos"].items()}
        return Looked(issues, paths={int(index): path for index, path in kept["paths"].items()})

    def save(self, looked: Looked) -> None:
        """Keep a result. A folder that cannot be written to costs only time."""
        if self._path is None or looked.faulty:
            return
        infos = {heading: dataclasses.asdict(group) for heading, group in looked.issues.infos.items()}
        try:
            write_json({"states": self._states, "infos": infos, "paths": looked.paths}, self._path)
        except OSError as error:
            logger.warning("What was found in the images is not kept in %s: %s", self._path.parent, error)


def _can_change_be_seen(root: str) -> bool:
    """Files behind URLs have nothing that shows a change, but the index of tar files shows theirs."""
    return not is_url(root) or bool(split_at_shards(f"{root}/")[0])


def _places(records: Records) -> set[str]:
    """The folders of the images, or what stands for them."""
    shards = split_at_shards(f"{records.root}/")[0]
    if not shards:
        return {os.path.dirname(path) for path in records.paths}
    found = open_shards(shards)
    return {f"{found.folder}/{name}" for name in (INDEX, *found.shards.tolist()) if not is_url(found.folder)}


def _states(places: Iterable[str]) -> dict[str, list[int]]:
    states = {}
    for place in places:
        with contextlib.suppress(OSError):
            state = os.stat(place)
            states[place] = [state.st_mtime_ns, state.st_size]
    return states


def _hash(records: Records) -> str:
    """A hash of names, ids and sizes of the images, of where they are, and of the code that looks at them."""
    columns, digest = records.columns, hashlib.sha256(str(records.root).encode("utf-8", "surrogatepass"))
    for array in (columns.names, columns.name_ends, columns.image_ids, columns.sizes, records.indices):
        digest.update(array)
    shards = split_at_shards(f"{records.root}/")[0]
    if shards:
        found = open_shards(shards)
        for array in (found.keys, found.shard_of, found.starts, found.sizes, found.lengths):
            digest.update(array)
    here = Path(__file__).parent
    for name in ("check.py", "kept.py", "../images.py", "../image_files.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:32]
