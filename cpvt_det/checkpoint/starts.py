# SPDX-License-Identifier: Apache-2.0
"""Public weights by name: addresses and hashes of the files, and the configs they belong to. The table is
``configs/_starts.yaml``."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from cpvt_det.config import config_root

TABLE = "_starts.yaml"
STARTER = "starter_lite0"
"""Name of the detector that comes with the package. It is small enough for a CPU, and was trained on various photographs, not on
COCO."""


@dataclass(frozen=True)
class Place:
    """One file at one address.

    Attributes:
        where: URL, or ``owner/name@revision/file`` on Hugging Face's hub.
        sha256: hash of this file; empty if none was published. A copy in a different format or on a mirror may have a different
            hash.
        megabytes: size of this file, rounded; 0 if it is unknown.
    """

    where: str
    sha256: str = ""
    megabytes: int = 0

    @property
    def hub(self) -> tuple[str, str, str] | None:
        """Repository, revision and file on the hub; ``None`` for a URL."""
        if "://" in self.where:
            return None
        repo, _, rest = self.where.partition("@")
        revision, _, file = rest.partition("/")
        return repo, revision, file

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.where.partition("?")[0].rpartition("/")[2]

    @property
    def url(self) -> str:
        """Address to open in a browser."""
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        return self.where if self.hub is None else "{}/{}/resolve/{}/{}".format(endpoint, *self.hub)


@dataclass(frozen=True)
class Start:
    """Public weights of a detector that was trained on COCO 2017.

    Attributes:
        name: word by which users name the weights.
        config: config of the package that the weights belong to.
        overrides: KEY VALUE words that change this config.
        ap: box AP on COCO val2017 in percent, as the publisher states it.
        epochs: number of epochs that the weights were trained for.
        rows: number of rows in the class head.
        publisher: who trained the weights, and who hosts a copy.
        licence: licence of the weights, as the publisher states it.
        source: source of the tensor names, a key of ``CONVERSIONS``.
        places: addresses of the file and of its copies.
    """

    name: str
    config: str = ""
    overrides: tuple[str, ...] = ()
    ap: float = 0.0
    epochs: int = 0
    rows: int = 0
    publisher: str = ""
    licence: str = ""
    source: str = ""
    places: tuple[Place, ...] = ()


@cache
def starts() -> dict[str, Start]:
    """All public weights by name."""
    table = yaml.safe_load((config_root() / TABLE).read_text(encoding="utf-8"))
    for row in table.values():
        row["places"] = tuple(Place(**place) for place in row.get("places", ()))
        row["overrides"] = tuple(row.get("overrides", ()))
    return {name: Start(name, **row) for name, row in table.items()}


def find_start(word: str | os.PathLike[str]) -> Start | None:
    """Return the public weights with this name; ``None`` if there are none, or if a file or folder with that name exists."""
    return None if Path(word).expanduser().exists() else starts().get(os.fspath(word))
