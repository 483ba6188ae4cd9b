# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one contender above what stood there before: on a CPU in a process of its own.

``python -m benchmarks.memory`` is that process. It builds the case again, so that no other contender's memory is in the way, and
does the work on a tiny input first, so that libraries and compiled code are not counted. There glibc gives every block of a
megabyte back as it is freed, so the peak is what is alive, and not how blocks fell.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.clocks import CommandRun, fixed_threads
from benchmarks.harness import Case, Contender, Work
from benchmarks.suites import Options, find_case, find_suite
from cpvt_det.memory import peak, reset_peak, resident, trim_heap

ROOT = Path(__file__).resolve().parent.parent
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Of glibc: the size from which a block is the kernel's, fixed; else it grows to 32 MB as such blocks are freed."""


def peak_bytes(suite: str, case: Case, contender: Contender, options: Options) -> int | None:
    """Bytes that one call takes at its peak; None for a contender that has no peak to speak of (a limit).

    Raises:
        RuntimeError: the process failed; with the last line of what it said.
    """
    if contender.limit:
        return None
    if options.device == "cuda":
        return _peak_on_gpu(contender)
    # For one of ours no peer is imported: that takes longer than the work.
    ours = contender.name.startswith("cpvt_det")
    peers = {} if ours else {name: path and str(path) for name, path in options.peers.items()}
    words = json.dumps({"suite": suite, "case": case.name, "contender": contender.name, **asdict(options), "peers": peers})
    command = [sys.executable, "-m", "benchmarks.memory", words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | GIVE_BACK, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise RuntimeError(f"peak memory of {contender.name} in {case.name}: {said}")
    return int(done.stdout.strip().splitlines()[-1])


def _peak_on_gpu(contender: Contender) -> int:
    """The call's own; the inputs are there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, contender: str) -> int:
    """In a fresh process: the peak of one call above what the process held before it."""
    if case.warm is not None:
        _named(case.warm(), contender).call()
    chosen = _named(case.build(), contender)
    gc.collect()
    trim_heap()
    reset_peak()
    before = resident()
    output = chosen.call()
    return output.peak_bytes if isinstance(output, CommandRun) else max(0, peak() - before)


def _named(work: Work, name: str) -> Contender:
    return next(contender for contender in work.contenders if contender.name == name)


def main() -> None:
    words = json.loads(sys.argv[1])
    suite, case, contender = (words.pop(name) for name in ("suite", "case", "contender"))
    words["peers"] = {name: path and Path(path) for name, path in words["peers"].items()}
    options = Options(**words)
    with fixed_threads(options.threads):
        print(measure(find_case(find_suite(suite).cases(options), case), contender))


if __name__ == "__main__":
    main()
