# SPDX-License-Identifier: Apache-2.0
"""The machine of a benchmark: versions, processor, memory, and its limits, measured in the same run."""

import contextlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.clocks import clock_of
from benchmarks.origin import WITHOUT, cpu_model, instructions, read_lines

LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "numba", "triton", "pillow", "pycocotools", "faster-coco-eval")
COPIES = {"copy_in_cache_gb_per_s": 4, "copy_in_memory_gb_per_s": 512}
"""Megabytes of source and copy together: one that fits into the cache of any current processor and GPU, and one that does not."""
SECONDS = 0.3  # length of each measurement
SIDES = {"cpu": 2048, "cuda": 4096}  # rows and columns of the matrices that are multiplied


def versions() -> dict[str, str]:
    """Name -> version, of installed libraries."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with the build, such as +cu128
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def machine(device: str, load_average: float | None = None) -> dict[str, Any]:
    """Processor, cores, caches, memory, GPU; nothing that names the host.

    Args:
        device: ``cpu`` or ``cuda``.
        load_average: load average before the run; ``None``: the present one.
    """
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": cpu_model(), "cores": os.cpu_count()}
    found |= instructions()
    if settings := {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")}:
        found["c_library"] = settings
    found |= {"caches": _caches(), "memory_gib": round(_memory_bytes() / 2**30, 1)}
    if hasattr(os, "getloadavg"):
        found["load_average"] = round(os.getloadavg()[0], 2) if load_average is None else load_average
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpu_multiprocessors"] = properties.multi_processor_count
    return found


def name_of_instructions(found: dict[str, Any]) -> str:
    """An ending for names of files, such as ``_avx2``, different where times are of other instructions.

    Empty for AVX-512 with nothing left out. Libraries that are limited where torch is not are ``_limited``; ways of ours that are
    left out follow, as in ``_avx2_without_winograd``.

    Args:
        found: the outcome of :func:`instructions`, perhaps among other keys.
    """
    limited = found.get("limited_by", {})
    capability = found["instruction_set"].lower()
    is_full = capability.startswith("avx512")
    words = [re.sub(r"\W+", "", capability)] if not is_full else ["limited"] if set(limited) - {WITHOUT} else []
    left_out = sorted(re.findall(r"\w+", limited.get(WITHOUT, "")))
    return "".join(f"_{word}" for word in [*words, *["without"] * bool(left_out), *left_out])


def free_bytes(device: str) -> int:
    """Memory that is still available to a contender, in bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    for line in read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _memory_bytes()


def limits(device: str) -> dict[str, float]:
    """The best rates of the machine, by their names in the JSON; bytes read and bytes written both count."""
    found = {}
    for name, megabytes in COPIES.items():
        source = torch.ones(megabytes * 2**17, device=device)  # 4 bytes per element; the copy has the same size
        target = torch.empty_like(source)
        found[name] = 2 * source.nbytes / _best(lambda t=target, s=source: t.copy_(s), device) / 1e9
    side = SIDES[device]
    a = torch.rand(side, side, device=device)
    found["matmul_fp32_gflop_per_s"] = 2 * side**3 / _best(lambda: a @ a, device) / 1e9
    # Convolutions use another library, which is faster on some processors.
    image, weight = torch.rand(1, side // 8, 64, 64, device=device), torch.rand(side // 8, side // 8, 3, 3, device=device)
    image = image.contiguous(memory_format=torch.channels_last)
    operations = 2 * 9 * (side // 8) ** 2 * 64**2
    found["convolution_fp32_gflop_per_s"] = operations / _best(lambda: F.conv2d(image, weight, padding=1), device) / 1e9
    return {name: round(value, 1) for name, value in found.items()}


def _best(call: Callable[[], Any], device: str) -> float:
    clock, samples, begin = clock_of(device), [], time.perf_counter()
    clock.time(call, 1)
    while len(samples) < 3 or time.perf_counter() - begin < SECONDS:
        sample = clock.time(call, 3)
        # As in the table: with one thread CPU time, in which the load of other processes does not count.
        samples.append(sample.cpu if sample.cpu and torch.get_num_threads() == 1 else sample.wall)
    return min(samples)


def _caches() -> dict[str, str]:
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ("".join(read_lines(folder / name)) for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
