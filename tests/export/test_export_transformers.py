# SPDX-License-Identifier: Apache-2.0
"""Vision transformers as ONNX: programs for images of any size give the answers of the model, by onnxruntime alone too."""

import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from image_classes import class_words

from cpvt_det import builders
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.cli import main
from cpvt_det.config import load_cfg

VIT = {
    "MODEL__BACKBONE__NAME": "cpvt_tiny",
    "MODEL__BACKBONE__POSITION__NAME": "table+peg_plain",
    "MODEL__BACKBONE__POSITION__TABLE__GRID": (3, 3),
    "MODEL__BACKBONE__STAGES": (4,),
    "MODEL__BACKBONE__EMBED_DIM": 32,
    "MODEL__BACKBONE__DEPTH": 2,
    "MODEL__BACKBONE__NUM_HEADS": 2,
    "MODEL__BACKBONE__NORM": "FrozenBN",
    "MODEL__BACKBONE__FREEZE_AT": 2,
}


def exported(folder):
    """A classifier with weights that matter, the file, and what the command printed."""
    cfg = load_cfg("", class_words(folder, folder, MODEL__NUM_CLASSES=3, **VIT))
    torch.manual_seed(0)
    model = builders.build_detector(cfg).eval()
    for parameter in model.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.normal_(model.class_embed.weight, std=0.4)
    classes = {"ids": [1, 2, 3], "names": ["blue", "green", "red"]}
    write_checkpoint({"model": model.state_dict(), "cpvt_det": {"classes": classes, "config": cfg.dump()}}, folder / "model.pth")
    command = ["export", folder / "model.pth", "--format", "onnx", "--output", folder / "model.onnx"]
    result = CliRunner().invoke(main, [str(word) for word in command])
    assert result.exit_code == 0, result.output
    return model, folder / "model.onnx", result.output


def test_an_onnx_file_of_a_cpvt_takes_images_of_any_size(tmp_path):
    """The command compares three batches of other sizes; here is one more, with onnxruntime alone: 48 x 80 and 30 x 64 pixels."""
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, path, printed = exported(tmp_path)
    differences = re.findall(r"differ from the model's by up to (\S+)$", printed, re.M)
    assert len(differences) == 3 and all(0 <= float(difference) < 1e-4 for difference in differences)
    generator = torch.Generator().manual_seed(3)
    images = [torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator) for size in ((48, 80), (30, 64))]
    batch = model.preprocess(images)
    canvas = np.zeros(tuple(batch.images.shape), np.float32)
    for place, image in zip(canvas, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(["scores"], {"images": canvas, "padding_mask": batch.padding_mask.numpy()})
    with torch.no_grad():
        expected = model(batch.images, batch.padding_mask).scores()
    assert found.std() > 0.01
    assert np.abs(found - expected.numpy()).max() < 1e-5
