# SPDX-License-Identifier: Apache-2.0
"""The tests of what is computed, over versions of torch, instruction sets and numbers of threads; run by ``make matrix``.

A processor can leave instructions out, not add any: on one with AVX-512, all three sets are run. Each library has its own switch.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "matrix"
INSTRUCTIONS = {
    "all": {},
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma",
    },
    "SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NUMBA_CPU_NAME": "nehalem",
        "NUMBA_CPU_FEATURES": "+sse4.2",
    },
}
THREADS = (1, 2)
COMPUTED = (
    "layers",
    "losses",
    "models",
    "ops",
    "position",
    "solver",
    "test_structures.py",
    "visualize/test_analyze.py",
    "whole/test_padding.py",
    "whole/test_parity_deformable_transformers.py",
    "whole/test_parity_transformers.py",
    "whole/test_seams.py",
)
"""Tests, folders and files, whose results come out of the kernels of torch, oneDNN, MKL and numba."""
DESCRIBE = "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability(), sep='|')"


def run_cell(python: str, instructions: str, threads: int, files: list[str]) -> dict[str, object]:
    """Run the tests once, by two workers; of four threads on two cores, those that have nothing to do sleep.

    Args:
        python: an interpreter with the package's extra ``test``.
        instructions: a key of :data:`INSTRUCTIONS`.
        threads: of torch, in the tests and in the processes that they start.
        files: files and folders of tests.
    """
    environment = {**os.environ, **INSTRUCTIONS[instructions], "TEST_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)} | {
        "OMP_WAIT_POLICY": "PASSIVE"
    }
    described = subprocess.run([python, "-c", DESCRIBE], env=environment, capture_output=True, text=True, check=True).stdout.strip()
    words = ["-m", "pytest", "-q", "--numprocesses", "2", "--dist", "loadfile", "--max-worker-restart", "2", *files]
    start = time.monotonic()
    ended = subprocess.run([python, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    version, capability = described.split("|")
    *_, last = ended.stdout.strip().splitlines()
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    broken = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.M)
    return {
        "torch": version,
        "instructions": instructions,
        "torch_capability": capability,
        "threads": threads,
        "exit_code": ended.returncode,
        "seconds": round(time.monotonic() - start),
        **counted,
        "broken": broken,
    }


def write(cells: list[dict[str, object]]) -> None:
    """The cells so far, as JSON and as a table."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").is_file() else None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    processor = model[1] if model else platform.processor()
    about = {"command": "make matrix", "commit": commit, "processor": processor, "python": platform.python_version()}
    RESULT.with_suffix(".json").write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n", encoding="utf-8")
    columns = ("torch", "instructions", "threads", "passed", "failed", "error", "skipped", "seconds")
    table = tabulate([[cell.get(column, 0) for column in columns] for cell in cells], columns, tablefmt="github")
    broken = [f"- {cell['torch']}, {cell['instructions']}, {cell['threads']}: {name}" for cell in cells for name in cell["broken"]]
    lines = ["# The tests of what is computed, by version of torch, instruction set and threads", ""]
    lines += [", ".join(f"{name} {value}" for name, value in about.items()), "", table, "", *broken]
    RESULT.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", help="interpreters, each with a torch of its own")
    parser.add_argument("--instructions", nargs="+", choices=INSTRUCTIONS, default=list(INSTRUCTIONS))
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--tests", nargs="+", default=[f"tests/{name}" for name in COMPUTED], help="files and folders of tests")
    chosen = parser.parse_args()
    cells = []
    for python in chosen.pythons:
        for instructions in chosen.instructions:
            for threads in chosen.threads:
                cells.append(run_cell(python, instructions, threads, chosen.tests))
                write(cells)
                print(cells[-1], flush=True)
    raise SystemExit(any(cell["exit_code"] for cell in cells))


if __name__ == "__main__":
    main()
