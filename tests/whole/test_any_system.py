# SPDX-License-Identifier: Apache-2.0
"""What only Linux has is not needed: a run without it ends with the same weights, bit for bit.

Our code in its process finds no fork, no lock of files, no ``resource``, no ``/proc`` and ``/sys``, and no OpenMP of
GCC; data workers are spawned, as on macOS and Windows. Other libraries take what they find. What else is different on Windows, such
as its paths, is not tried here.
"""

import os
import subprocess
import sys

from test_runner import assert_same_run
from tiny import DEFORMABLE, overrides

WITHOUT = """
import ctypes, io, multiprocessing, os, sys

def absent(real, *beginnings):
    def call(path=None, *args, **kwargs):
        if str(path).startswith(beginnings):
            raise FileNotFoundError(2, "not on this system", str(path))
        return real(path, *args, **kwargs)
    return call

if __name__ == "__main__":
    for name in ("fork", "forkpty", "sched_getaffinity", "getloadavg"):
        delattr(os, name)
    multiprocessing.set_start_method("spawn")
    import torch, fvcore.common.checkpoint, torch.utils.tensorboard  # which take what they find of the system
    sys.modules["fcntl"] = sys.modules["resource"] = None
    io.open = absent(io.open, "/proc", "/sys")
    ctypes.CDLL = absent(ctypes.CDLL, torch._C.__file__, "None")
    from cpvt_det.cli import main
    main(standalone_mode=False)
    from cpvt_det.ops import numba_threads
    print([hasattr(numba_threads._map_in_threads(os.getpid()), "__self__"), multiprocessing.get_start_method()])
"""


def test_a_run_without_what_only_linux_has_is_the_same(train, drawn_coco, tmp_path):
    more = {**DEFORMABLE, "MODEL__DETR__DROPOUT": 0.3, "SOLVER__MAX_ITER": 3, "DATASETS__TEST": (), "MODEL__DEVICE": "cpu"}
    usual = train("usual", **more)
    script, words = tmp_path / "elsewhere.py", overrides(drawn_coco.files, "run", **more, DATALOADER__NUM_WORKERS=1)
    script.write_text(WITHOUT)
    command = [sys.executable, str(script), "train", "--runner", "builtin", "--config-file", "_detectron2.yaml", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "[False, 'spawn']"
    assert_same_run(usual, tmp_path / "run")
