# SPDX-License-Identifier: Apache-2.0
"""Builds the official CUDA op from a checkout given by its path, outside of the checkout: ``python -m benchmarks.on_gpu.build``."""

import glob
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

OUTCOME = "build.json"
"""File in the folder of the build: whether it ended well, its seconds, and the compiler's last words if not."""
SOURCES = ("vision.cpp", "cpu/ms_deform_attn_cpu.cpp", "cuda/ms_deform_attn_cuda.cu")


def main(checkout: Path, folder: Path, sources: tuple[str, ...] = SOURCES) -> dict[str, object]:
    """Compile the extension into ``folder``, where Python finds it by its name.

    Args:
        checkout: checkout of fundamentalvision/Deformable-DETR.
        folder: folder of the build; it gets ``build.json`` at the end.
        sources: files below ``models/ops/src``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found_cuda = _find_cuda()  # before torch looks for it
    import torch
    from torch.utils import cpp_extension

    from benchmarks.peers import EXTENSION

    if torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ".".join(map(str, torch.cuda.get_device_capability())))
    source, start = checkout / "models/ops/src", time.perf_counter()
    flags = ["-w", *["-DWITH_CUDA"] * (len(sources) == len(SOURCES))]
    outcome: dict[str, object] = {"built": False, "cuda_home": cpp_extension.CUDA_HOME, "found": found_cuda}
    try:
        cpp_extension.load(
            EXTENSION,
            [str(source / name) for name in sources],
            extra_include_paths=[str(source), *_headers_of_wheels()],
            extra_cflags=flags,
            extra_cuda_cflags=flags,
            build_directory=str(folder),
        )
        outcome["built"] = True
    except BaseException as error:
        outcome["reason"] = f"{type(error).__name__}: {error}"[-2500:]
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    (folder / OUTCOME).write_text(json.dumps(outcome), encoding="utf-8")
    return outcome


def _find_cuda() -> str:
    """Set ``CUDA_HOME`` where a toolkit with headers is at one of the usual places and no other is named."""
    if not os.environ.get("CUDA_HOME"):
        for folder in ("/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)):
            if Path(folder, "bin/nvcc").exists() and Path(folder, "include/cuda_runtime_api.h").exists():
                os.environ["CUDA_HOME"] = folder
                break
    return os.environ.get("CUDA_HOME", "")


def _headers_of_wheels() -> list[str]:
    """Folders of headers that came with torch's own wheels of CUDA, for toolkits that have the compiler alone."""
    if Path(os.environ.get("CUDA_HOME", "/none"), "include/cublas_v2.h").exists():
        return []
    return sorted(glob.glob(f"{sysconfig.get_paths()['purelib']}/nvidia/*/include"))


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))
