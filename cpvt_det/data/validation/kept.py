# SPDX-License-Identifier: Apache-2.0
"""What was found in the image files of a large data set, kept for the next run."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cpvt_det.data.cache import TICK, hash_of_code
from cpvt_det.data.records import Records
from cpvt_det.data.shards import INDEX, open_shards, split_at_shards
from cpvt_det.data.storage import is_url
from cpvt_det.data.validation.check import Looked
from cpvt_det.data.validation.issues import Group, Issues
from cpvt_det.files import write_json

logger = logging.getLogger("cpvt_det")
LARGE = 10_000
"""Images from which on the result is kept; of fewer it takes a second."""
KINDS = ("faults", "infos")


class KeptLook:
    """The result of looking at all image files of a data set.

    It is valid as long as nothing is added to the folders of the images, removed or renamed, and images with faults do not change.
    Another image that is overwritten in its place is noticed when it is read: its size is compared then.

    Args:
        records: records of the data set.
        folder: ``DATASETS.CACHE``; empty: nothing is kept.
    """

    def __init__(self, records: Records, folder: str):
        self._records = records
        self._path: Path | None = None
        self._states: dict[str, list[int]] = {}
        self._start = time.time_ns()
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
        if not kept or kept["states"] != _states(kept["states"]) or kept["faulty"] != _states(kept["faulty"], True):
            self._states = _states(_places(self._records))  # before somebody looks, so that no change in between is missed
            return None
        issues = Issues()
        for name in KINDS:
            setattr(issues, name, {heading: Group(**group) for heading, group in kept[name].items()})
        return Looked(issues, kept["left_out"], {int(index): path for index, path in kept["paths"].items()})

    def save(self, looked: Looked) -> None:
        """Keep a result. A folder that cannot be written to costs only time."""
        if self._path is None or looked.may_pass:
            return
        places = np.flatnonzero(np.isin(self._records.image_ids, looked.faulty)).tolist()
        faulty = _states(map(self._records.path, places), True)
        if any(state and max(state[1:]) >= self._start - TICK * 1e9 for state in faulty.values()):
            return  # one may have changed since somebody looked
        groups = {name: {h: dataclasses.asdict(group) for h, group in getattr(looked.issues, name).items()} for name in KINDS}
        kept = {"states": self._states, "faulty": faulty, "left_out": looked.faulty, "paths": looked.paths}
        try:
            write_json(kept | groups, self._path)
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


def _states(places: Iterable[str], with_ctime: bool = False) -> dict[str, list[int]]:
    """Size and time of folders and files, and the time that no copy keeps; nothing of those that are not there."""
    states: dict[str, list[int]] = {}
    for place in places:
        states[place] = []
        with contextlib.suppress(OSError, ValueError):
            state = os.stat(place)
            states[place] = [state.st_size, state.st_mtime_ns, *([state.st_ctime_ns] if with_ctime else [])]
    return states


def _hash(records: Records) -> str:
    """A hash of names, ids and sizes of the images, of where they are, and of the code that looks at them."""
    table, digest = records.table, hashlib.sha256(str(records.root).encode("utf-8", "surrogatepass"))
    for array in (table.names, *(table.images[name] for name in ("id", "height", "width", "name_size")), records.rows):
        digest.update(np.ascontiguousarray(array))
    shards = split_at_shards(f"{records.root}/")[0]
    if shards:
        found = open_shards(shards)
        for array in (found.keys, found.shard_of, found.starts, found.sizes, found.lengths):
            digest.update(array)
    digest.update(hash_of_code().encode())
    return digest.hexdigest()[:32]
