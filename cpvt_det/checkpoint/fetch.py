# SPDX-License-Identifier: Apache-2.0
"""Public weights by name, and their download to this machine, through huggingface_hub or, for other addresses, torch.hub.

``configs/_starts.yaml`` lists addresses and hashes of the files, and the configs they belong to. A file gets its final name only
after it has been checked. While one process fetches a file, others that need it wait. Importing this module fetches nothing.
"""

import contextlib
import difflib
import hashlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock

from cpvt_det.checkpoint.files import read_checkpoint, sha256_of
from cpvt_det.checkpoint.model_folder import CLASSES, CONFIG, THRESHOLDS, WEIGHTS
from cpvt_det.common.errors import WeightsError, first_line
from cpvt_det.config import config_root

HOME = "CPVT_DET_WEIGHTS"
"""Environment variable that names the folder for files that do not come from the hub, and for files that users put there
themselves."""
TIMEOUT = 10.0
"""Seconds to wait for an answer from a server, as in huggingface_hub's default."""
FOLDER_FILES = ("config.json", CONFIG, WEIGHTS, f"{WEIGHTS}.sha256", CLASSES, THRESHOLDS)
"""The files of a repository that are fetched; no file of these kinds can run code."""
EXPORTED = {".onnx": "onnx", ".xml": "openvino"}
"""File name suffix of an exported program -> its format."""
SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".pkl", ".ckpt", ".yaml", *EXPORTED)
"""Suffixes of paths: a word that ends in one of them is never taken for a repository."""
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
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


def locate(word: str | os.PathLike[str]) -> Path:
    """The file or folder that a word stands for. The word is a path or, if nothing exists there, a name of public weights
    (:func:`starts`), a URL, or a repository on Hugging Face's hub, whose files are fetched.

    Raises:
        WeightsError: files that cannot be fetched, or a word that is none of these.
    """
    text, path = os.fspath(word), Path(word).expanduser()
    if (start := find_start(word)) is not None:
        return fetch(start)
    if text == STARTER and not path.exists():
        return Path(__file__).with_name("starter")
    if text.startswith(("http://", "https://")):
        return fetch(Start(hashlib.sha256(text.encode()).hexdigest()[:12], places=(Place(text),)))
    if path.exists() or path.suffix in SUFFIXES:
        return path
    if REPOSITORY.fullmatch(text) and not path.parent.exists():
        return fetch_folder(text)
    close = "".join(f" (did you mean {name}?)" for name in difflib.get_close_matches(text, starts(), n=1))
    raise WeightsError(f"{text} is neither a weights file nor a name that cpvt-det weights lists{close}")


def weights_folder() -> Path:
    """The folder that :data:`HOME` names, or else the default folder."""
    return Path(os.environ.get(HOME) or "~/.cache/cpvt_det/weights").expanduser()


def path_of(start: Start, place: Place) -> Path:
    """The path that is searched first for a file, whether it was fetched or put there by a user."""
    return weights_folder() / start.name / place.file


def find(start: Start) -> Path | None:
    """The file of public weights on this machine; ``None`` if it must be fetched.

    Raises:
        WeightsError: a file that differs from the one in the table.
    """
    for place in start.places:
        path = path_of(start, place)
        if not path.is_file() and place.hub is not None:
            path = _in_cache_of_hub(*place.hub) or path
        if path.is_file():
            _require_same(path, place)
            return path
    return None


def fetch(start: Start) -> Path:
    """The file of public weights. If it is not on this machine, it is fetched from the first of its addresses that has it.

    Raises:
        WeightsError: a file that cannot be fetched or differs from the one in the table. The message says how to download it by
            hand and where to put it.
    """
    if (found := find(start)) is not None:
        return found
    reasons = []
    for place in start.places:
        try:
            return _from_hub(place) if place.hub else _from_url(place, path_of(start, place))
        except Exception as error:  # those of two HTTP clients, of the file system and of a check have no common base
            reasons.append(f"{place.url}: {first_line(error)}")
    first = start.places[0]
    size = f"{first.megabytes} MB" if first.megabytes else "size unknown"
    raise WeightsError(
        f"cannot fetch {'; '.join(reasons)}. Without a network, download {first.url} ({size}, SHA-256 {first.sha256 or 'unknown'}) "
        f"on another machine and put it at {path_of(start, first)}; the environment variable {HOME} sets another folder"
    )


def fetch_folder(repo_id: str, **options: Any) -> Path:
    """Fetch a model folder from Hugging Face's hub; without a network, use the copy that was fetched before.

    Args:
        repo_id: name of the repository, ``user/name``.
        options: ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``force_download`` of huggingface_hub.

    Returns:
        Path of the folder on this machine.

    Raises:
        WeightsError: a repository that cannot be reached, does not exist or has no weights, or an invalid name.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(f"fetch {repo_id} from"):
        folder = Path(snapshot_download(repo_id, allow_patterns=list(FOLDER_FILES), **options))
    if not (folder / WEIGHTS).is_file():  # the folder does not even exist if no file was fetched
        raise WeightsError(f"{repo_id} on Hugging Face's hub has no {WEIGHTS}, so it is not a model that cpvt_det can read")
    return folder


@contextlib.contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Turn any error from the hub's library into one of our own one-line errors.

    Raises:
        WeightsError: an error of the library or of its HTTP client. The library's major versions use different HTTP clients.
    """
    try:
        yield
    except Exception as error:
        raise WeightsError(f"cannot {action} Hugging Face's hub: {first_line(error)}") from error


def _in_cache_of_hub(repo: str, revision: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _from_hub(place: Place) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import get_session

    repo, revision, file = place.hub
    get_session().head(place.url, timeout=TIMEOUT)  # without a network, the download would retry for half a minute
    path = Path(hf_hub_download(repo, file, revision=revision))
    _require_same(path, place)
    return path


def _from_url(place: Place, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part, before = path.with_name(f"part-{path.name}"), socket.getdefaulttimeout()
    with FileLock(f"{path}.lock"):
        if path.is_file():  # another process has fetched it meanwhile
            return path
        for left in path.parent.glob(f"{part.name}*"):  # left by a killed process
            left.unlink()
        print(f"{place.url} -> {path}", file=sys.stderr)
        socket.setdefaulttimeout(TIMEOUT)  # torch.hub sets none
        try:
            torch.hub.download_url_to_file(place.url, str(part), place.sha256 or None, progress=sys.stderr.isatty())
            if not place.sha256:
                read_checkpoint(part)
            part.replace(path)
        finally:
            socket.setdefaulttimeout(before)
            part.unlink(missing_ok=True)
    return path


def _require_same(path: Path, place: Place) -> None:
    """Refuse a file other than the one in the table, compared by its hash if it is known."""
    if place.sha256 and sha256_of(path) != place.sha256:
        raise WeightsError(f"{path} is not the file at {place.url}: its SHA-256 should be {place.sha256}; remove it and try again")
