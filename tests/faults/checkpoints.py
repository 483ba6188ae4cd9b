# SPDX-License-Identifier: Apache-2.0
"""Checkpoints.

A checkpoint is written to a temporary file, flushed and renamed. It gets a SHA-256 file, which is compared at every read. Files
from elsewhere are checked against the checksums inside torch's zip format. `SOLVER.CHECKPOINT_KEEP` numbered checkpoints are
kept, besides `model_best.pth` and `model_final.pth`. Weights that are not finite are not saved.

A run has a random id, stored in its checkpoints and in `run_id` of its `OUTPUT_DIR`. `--resume` loads the undamaged checkpoint
of that run with the most iterations; to go back further, move later ones away. If the last run left none, the newest of an
earlier run is loaded, with a warning. Processes that torchrun restarts only continue their own run.

No code from a file is run: torch files are read with `weights_only=True`, `.pkl` files by an unpickler that only accepts
arrays, numbers, text and containers.

`python -m faults.kills 50` kills a process at random moments while it saves one checkpoint after another. Of 50 kills, 32 came
in the middle of a save. 0 checkpoints were lost, and none was older than the last that the process had reported as saved.
"""

import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import overrides

from cpvt_det.checkpoint.files import checksum_of, read_checkpoint
from faults.case import Case, Cut, Ending, call
from faults.drawn import Drawn, call_on, draw

SHORT = {"SOLVER__MAX_ITER": 2, "SOLVER__CHECKPOINT_PERIOD": 1, "DATASETS__TEST": ()}
FINAL = "model_final.pth"
LIMIT = 400_000  # bytes of a file: room for all but a checkpoint


def after_run(damage: Callable[[Path], Any], *words: str, **more: object) -> Callable[[Path], Ending]:
    """Train two steps, do damage to the run's folder, and call the command again."""

    def run(folder: Path) -> Ending:
        drawn = draw(folder / "data", lambda _: None)
        trained = call_on(drawn, "train", **SHORT)
        if trained.code:
            return trained
        damage(folder / "out")
        settings = {key: str(value).replace("OUT", str(folder / "out")) for key, value in more.items()}
        return call_on(drawn, "train", *words, **{**SHORT, **settings})

    return run


def with_files(names: list[str], *words: str) -> Callable[[Path], Ending]:
    """Call a command whose words may be names of empty files, in a folder that has these."""

    def run(folder: Path) -> Ending:
        for name in names:
            (folder / name).write_bytes(b"")
        return call(*(str(folder / word) if "." in word or word == "found" else word for word in words))

    return run


def weights(damage: Callable[[Path], Any], *words: str, name: str = FINAL, **more: object) -> Callable[[Path], Ending]:
    """Evaluate a checkpoint of a short run after damage to it."""
    words = words or ("--eval-only",)
    return after_run(damage, *words, MODEL__WEIGHTS=f"OUT/{name}", DATASETS__TEST=("drawn",), OUTPUT_DIR="OUT/eval", **more)


def flip(out: Path) -> None:
    content = bytearray((out / FINAL).read_bytes())
    content[len(content) // 2] ^= 1
    (out / FINAL).write_bytes(content)


def flip_without_checksum(out: Path) -> None:
    flip(out)
    checksum_of(out / FINAL).unlink()


def halve(*names: str) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        for name in names:
            os.truncate(out / name, (out / name).stat().st_size // 2)

    return damage


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def hidden_code(hide: Callable[[Path], Any], name: str) -> Callable[[Path], Ending]:
    """Evaluate a file that contains code, and look whether it ran."""
    evaluate = weights(hide, name=name)

    def run(folder: Path) -> Ending:
        ending = evaluate(folder)
        assert (folder / "out" / name).is_file()
        assert not (folder / "out" / "ran").exists(), "the file's code was run"
        return ending

    return run


def hide_code(name: str) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        (out / name).write_bytes(pickle.dumps({"model": Code(out / "ran")}, 2))

    return damage


def hide_code_as_torch_did(out: Path) -> None:
    torch.save({"model": {}, "x": Code(out / "ran")}, out / "code.pth", _use_new_zipfile_serialization=False)


def hide_code_in_zip(out: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "x": Code(out / "ran")}, out / "code.pth")


def zip_bomb(out: Path) -> None:
    with zipfile.ZipFile(out / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))


def zoo(out: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in read_checkpoint(out / FINAL)["model"].items()}
    (out / "zoo.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "somebody"}))


def change_thresholds(out: Path) -> None:
    """Scores above 1, for both classes."""
    checkpoint = read_checkpoint(out / FINAL)
    checkpoint["cpvt_det"]["thresholds"] = {"overall": 7.5, "classes": [7.5, 7.5]}
    torch.save(checkpoint, out / "other.pth")


def change_weights(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        torch.save(change(read_checkpoint(out / FINAL)["model"]), out / "other.pth")

    return damage


def spoil(weights: dict) -> dict:
    return {**weights, "class_embed.bias": weights["class_embed.bias"] * torch.nan}


def empty(out: Path) -> None:
    for path in out.glob("model_*"):
        path.unlink()


def full_disk(folder: Path, runner: str = "builtin") -> Ending:
    """In a process that may write no file as large as a checkpoint."""
    drawn: Drawn = draw(folder / "data", lambda _: None)
    (folder / "run.yaml").write_text("VERSION: 2\n")
    words = ["--config-file", str(folder / "run.yaml"), "--runner", runner, *overrides(drawn.files, folder / "out", **SHORT)]
    result = subprocess.run(
        [sys.executable, "-m", "cpvt_det", "train", *words],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    )
    assert not list((folder / "out").glob(".*.tmp"))
    return Ending(result.returncode, result.stderr)


def file_in_the_way(folder: Path) -> Ending:
    (folder / "out").write_text("")
    return call_on(draw(folder / "data", lambda _: None), "train", **SHORT)


def nothing(out: Path) -> None:
    pass


def files(old: str, new: str = "if False:") -> Cut:
    return Cut("checkpoint/files.py", old, new)


DAMAGED = files(
    "except Exception as error:  # what zip, pickle and file systems raise has no common base", "except ZeroDivisionError as error:"
)
NO_FILE = files("if not path.is_file():")
WEIGHTS_ONLY = files('map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False')
SHAPES = Cut("checkpoint/initial.py", "if not any(pattern.search(name) for pattern in may_differ):", "if False:")
SKIPPED = Cut("checkpoint/resume.py", "            skipped[path.name] = str(error)\n            continue\n", "            raise\n")

CASES = [
    Case(
        "thresholds that are no scores",
        weights(change_thresholds, name="other.pth"),
        'other.pth: thresholds must be {"overall": score, "classes": [2 scores]}, scores from 0 to 1 or null, got {...7.5...',
        guard=Cut(
            "common/structures.py",
            "if not fits or not all(isinstance(score, float) and 0 <= score <= 1 for score in scores):",
            "if False:",
        ),
    ),
    Case(
        "one flipped bit in the weights",
        weights(flip),
        f"{FINAL}: damaged: its content does not match its checksum file {FINAL}.sha256",
        guard=files('if beside.read_text(encoding="utf-8").split()[:1] != [sha256_of(path)]:'),
    ),
    Case(
        "the same, without the file's checksum",
        weights(flip_without_checksum),
        f"{FINAL}: damaged: the checksum of its part ... is wrong",
        guard=files("if damaged is not None:"),
    ),
    Case("half a file", weights(halve(FINAL)), f"{FINAL}: damaged", guard=(files("if not only_look:"), DAMAGED)),
    Case(
        "an exported program where weights are needed",
        with_files(["detector.onnx"], "convert-weights", "detector.onnx", "other.pth"),
        "detector.onnx is an exported program, which works in predict and eval; here, give the checkpoint that it was exported "
        "from",
        guard=Cut("checkpoint/weights.py", "if path.suffix in EXPORTED:", "if False:"),
    ),
    Case(
        "an OpenVINO file without its .bin",
        with_files(["detector.xml", "photo.png"], "predict", "detector.xml", "--input", "photo.png", "--output", "found"),
        "there is no file ...detector.bin, which belongs to ...detector.xml",
        guard=Cut("checkpoint/exported.py", "if not file.is_file():", "if False:"),
    ),
    Case("no file", weights(nothing, name="gone.pth"), "no weights file ...gone.pth", guard=NO_FILE),
    Case(
        "code in a .pkl",
        hidden_code(hide_code("code.pkl"), "code.pkl"),
        "code.pkl: refused, because it contains a Python object (...mkdir)",
        guard=files(
            '        if f"{module}.{name}" not in self.allowed:\n',
            "        return super().find_class(module, name)\n        if False:\n",
        ),
    ),
    Case(
        "code in a pickle named .pth",
        hidden_code(hide_code("code.pth"), "code.pth"),
        "code.pth: refused, because it contains a Python object (...mkdir)",
        guard=WEIGHTS_ONLY,
    ),
    Case(
        "code in a .pth of torch before 1.6",
        hidden_code(hide_code_as_torch_did, "code.pth"),
        "code.pth: refused, because it contains a Python object (...mkdir)",
        guard=WEIGHTS_ONLY,
    ),
    Case(
        "code in a .pth",
        hidden_code(hide_code_in_zip, "code.pth"),
        "code.pth: refused, because it contains a Python object (...mkdir)",
        guard=WEIGHTS_ONLY,
    ),
    Case(
        "a .pkl of 10 bytes that asks for 64 GB",
        weights(lambda out: (out / "x.pkl").write_bytes(b"\x80\x02Nr\xff\xff\xff\xff."), name="x.pkl"),
        "x.pkl: refused, because it asks for more memory than a file of its size can need: 4294967295",
        guard=files('if operation.name in ("PUT", "BINPUT", "LONG_BINPUT", "FRAME") and argument > size:'),
    ),
    Case(
        "a .pth of 64 KB that unpacks to 64 MB",
        weights(zip_bomb, name="bomb.pth"),
        "bomb.pth: refused, because its ... unpack to 67",
        guard=files("if unpacked > UNPACKED * size + SLACK:"),
    ),
    Case(
        "a .pkl of arrays, as in the model zoo",
        weights(zoo, name="zoo.pkl"),
        "zoo.pkl: ... tensors loaded",
        0,
        guard=files("    allowed |= _makers_of_arrays()\n", ""),
    ),
    Case(
        "weights that fit in part, --eval-only",
        weights(nothing, MODEL__DETR__NUM_OBJECT_QUERIES=5),
        "fits only part of the config's model, but evaluation needs all of it: ...leave the rest random with --allow-partial",
        guard=Cut("checkpoint/initial.py", "if for_evaluation and report.is_partial and not allow_partial:", "if False:"),
    ),
    Case(
        "the same with --allow-partial",
        weights(nothing, "--eval-only", "--allow-partial", MODEL__DETR__NUM_OBJECT_QUERIES=5),
        "1 re-initialised (query_embed.weight)",
        0,
        guard=Cut("checkpoint/initial.py", "report.is_partial and not allow_partial:", "report.is_partial:"),
    ),
    Case(
        "weights with nothing in common, --allow-partial",
        weights(change_weights(lambda w: {"a": torch.ones(1)}), "--eval-only", "--allow-partial", name="other.pth"),
        "has no tensor that fits the model (a of shape (1,) in the weights, ",
        guard=Cut("checkpoint/load.py", "if not report.loaded:", "if False:"),
    ),
    Case(
        "weights of a compiled model",
        weights(change_weights(lambda w: {f"_orig_mod.{name}": tensor for name, tensor in w.items()}), name="other.pth"),
        "other.pth: ... tensors loaded",
        0,
        guard=files('INSIDE.sub("", key)', "key"),
    ),
    Case(
        "weights of Conditional DETR",
        weights(
            change_weights(lambda w: {**w, "transformer.decoder.layers.0.sa_qcontent_proj.weight": torch.ones(1)}), name="other.pth"
        ),
        "other.pth: weights of Conditional DETR (recognised by the tensor transformer.decoder.layers.0.sa_qcontent_proj.weight)",
        guard=Cut("checkpoint/convert.py", "for architecture, marker in OTHERS.items():", "for architecture, marker in ():"),
    ),
    Case(
        "weights with a NaN to start from",
        after_run(change_weights(spoil), MODEL__WEIGHTS="OUT/other.pth", OUTPUT_DIR="OUT/new"),
        "other.pth contains numbers that are not finite, in class_embed.bias; training cannot start from it",
        guard=Cut("checkpoint/initial.py", 'broken = "" if for_evaluation else not_finite(detector.state_dict())', 'broken = ""'),
    ),
    Case(
        "newest checkpoint cut off, --resume",
        after_run(halve(FINAL), "--resume"),
        f"Skipped a checkpoint: ...{FINAL}: damaged...Resumed from ...model_0000001.pth",
        0,
        guard=SKIPPED,
    ),
    Case(
        "newest checkpoint of 0 bytes, --resume",
        after_run(lambda out: os.truncate(out / FINAL, 0), "--resume"),
        f"Skipped a checkpoint: ...{FINAL}: damaged...Resumed from ...model_0000001.pth",
        0,
        guard=SKIPPED,
    ),
    Case(
        "no checkpoint whole, --resume",
        after_run(halve(FINAL, "model_0000001.pth", "model_0000000.pth"), "--resume"),
        "all checkpoints in ... are damaged (model_",
        guard=Cut("checkpoint/resume.py", "if chosen is None:", "if False:"),
    ),
    Case(
        "empty last_checkpoint, --resume",
        after_run(lambda out: (out / "last_checkpoint").write_text(""), "--resume"),
        f"Resumed from ...{FINAL}",
        0,
        guard="a resume does not read it where there are checkpoints",
    ),
    Case(
        "checkpoints gone, --resume",
        after_run(empty, "--resume"),
        f"last_checkpoint in ... names ...{FINAL}, which does not exist; put that file back",
        guard=Cut("checkpoint/checkpointer.py", "if self.has_checkpoint():", "if False:"),
    ),
    Case(
        "--resume in an empty folder",
        after_run(nothing, "--resume", OUTPUT_DIR="OUT/new"),
        "Nothing to resume in ...: starting at iteration 0",
        0,
        guard=Cut("checkpoint/checkpointer.py", "if checkpoints_of(Path(self.save_dir)):", "if True:"),
    ),
    Case(
        "--resume where the run that was started last left no checkpoint",
        after_run(lambda out: (out / "run_id").write_text("another"), "--resume"),
        f"The run that was last started in ... has no undamaged checkpoint; ...{FINAL} belongs to an earlier run",
        0,
        guard=Cut("checkpoint/resume.py", "if run_id_of(chosen[1]) != named:", "if False:"),
    ),
    Case(
        "disk full at a save",
        full_disk,
        "stopped: cannot write ...model_0000000.pth: File too large",
        1,
        guard=files("except (OSError, RuntimeError) as error:", "except ZeroDivisionError as error:"),
    ),
    Case(
        "OUTPUT_DIR that is a file",
        file_in_the_way,
        "cannot write to OUTPUT_DIR ...: ...; set another OUTPUT_DIR",
        guard=Cut("common/errors.py", "except OSError as error:", "except ZeroDivisionError as error:"),
    ),
]
