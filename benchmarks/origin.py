# SPDX-License-Identifier: Apache-2.0
"""What a record contains of where it was made: the commit, the processor, and the instructions that libraries may use."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cpvt_det

FLAGS = re.compile(r"avx2|fma|avx_vnni|avx512\w*")
"""Instructions of /proc/cpuinfo that matter to products and convolutions."""
LIMITING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that limit the instructions of torch, oneDNN and MKL."""
WITHOUT = "CPVT_DET_WITHOUT"
"""The environment variable that leaves out our own ways of computing."""
RECORDS = ("benchmarks/results", "studies/*/results", "studies/*/log.txt", "studies/*/report.md", "studies/*/figures")
"""What runs write into a checkout of ours."""


def describe_origin() -> dict[str, Any]:
    """The commit of the package's checkout, the processor and its instructions; nothing that names the host."""
    return {"commit": commit_of(Path(cpvt_det.__file__).parent), "cpu": cpu_model(), **instructions()}


def commit_of(folder: Path, short: bool = False, besides: Sequence[str] = RECORDS) -> str:
    """The commit of a checkout, ``+changes`` if tracked files in the folder differ from it.

    Args:
        folder: a folder of the checkout.
        short: True: as few digits as git thinks enough.
        besides: patterns of paths, from the checkout's top, that may differ.
    """
    commit = _git(folder, "rev-parse", *["--short"] * short, "HEAD")
    watched = (".", *(f":(top,exclude,glob){pattern}{ending}" for pattern in besides for ending in ("", "/**")))
    changes = "+changes" if commit and _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *watched) else ""
    return f"{commit or 'of unknown commit'}{changes}"


def cpu_model() -> str:
    """The processor's name; with family and model, where the system gives them: a cloud's names leave the generation out."""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in read_lines(Path("/proc/cpuinfo")))}
    generation = [f"{word} {facts[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in facts]
    return ", ".join([facts.get("model name") or platform.processor() or "unknown", *generation])


def instructions() -> dict[str, Any]:
    """What torch uses of the processor's instructions, what there is of them, and the environment variables that leave some out."""
    found: dict[str, Any] = {"instruction_set": torch.backends.cpu.get_cpu_capability(), "flags": _flags()}
    limited = {name: os.environ[name] for name in (*LIMITING, WITHOUT) if os.environ.get(name)}
    return found | ({"limited_by": limited} if limited else {})


def read_lines(path: Path) -> list[str]:
    """The lines of a system's file; none where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _flags() -> str:
    for line in read_lines(Path("/proc/cpuinfo")):
        if line.startswith("flags"):
            return " ".join(word for word in line.partition(":")[2].split() if FLAGS.fullmatch(word)) or "none of avx2, fma, avx512"
    return "unknown"


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
