# SPDX-License-Identifier: Apache-2.0
"""DETR with PEG by hand: data, model, losses, steps and evaluation in plain Python, without config and runner.

    python examples/by_hand.py [ITERATIONS]

draws 64 images of shapes, trains a tiny DETR on them and evaluates it on 16 others; 20 iterations are too few to learn much.
"""

import sys
import tempfile
from pathlib import Path

import torch

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from cpvt_det.data.mapper import Mapper, RandomShortSide, train_transform
from cpvt_det.data.shapes.dataset import draw_dataset
from cpvt_det.data.shapes.scene import ShapesSpec
from cpvt_det.evaluation.answers import PostProcessor
from cpvt_det.evaluation.coco import CocoEvaluator
from cpvt_det.losses import HungarianMatcher, SetCriterion, SoftmaxClassification
from cpvt_det.models import DETR, ResNetBackbone, Transformer
from cpvt_det.position import build_position

CHANNELS, QUERIES, BATCH = 64, 20, 4


def main(iterations: int = 20) -> dict[str, float]:
    """Train for some iterations and evaluate; the figures of COCO's evaluation by name, in percent."""
    torch.manual_seed(0)
    # Data: a COCO JSON and a folder of images.
    root = Path(tempfile.mkdtemp())
    draw_dataset(root, 64, 16, 0, ShapesSpec())
    train, val = (read_coco(DatasetFiles(split, root / f"annotations/{split}.json", root / split)) for split in ("train", "val"))
    augment = Mapper(train_transform((96, 128), 160, flip=True, crop_sizes=(), crop_range=()), with_targets=True)
    resize = Mapper(RandomShortSide([128], 160), with_targets=False)

    # Model: five parts and a position encoding. The neck, the queries and the heads are DETR's own.
    classification = SoftmaxClassification(len(train.classes))
    model = DETR(
        backbone=ResNetBackbone("resnet10", norm="BN", stages=[4], freeze_at=0, width=32),
        position=build_position("peg", CHANNELS, num_layers=2),
        transformer=Transformer(encoder_layers=2, decoder_layers=2, channels=CHANNELS, num_heads=4, ffn_channels=128),
        channels=CHANNELS,
        num_queries=QUERIES,
        num_logits=classification.num_logits,
        decoder_position=build_position("sine", CHANNELS),
    )
    criterion = SetCriterion(HungarianMatcher(classification))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)

    # Steps.
    model.train()
    for iteration in range(iterations):
        chosen = torch.randint(len(train.records), (BATCH,)).tolist()
        samples = [augment(train.records[number]) for number in chosen]
        batch = model.preprocess([sample["image"] for sample in samples])
        targets = [sample["targets"] for sample in samples]
        losses = criterion(model(batch.images, batch.padding_mask, targets), targets).losses
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        print(iteration, {name: round(loss.item(), 3) for name, loss in losses.items()})

    # Evaluation.
    model.eval()
    evaluator = CocoEvaluator(val.records, val.classes)
    with torch.no_grad():
        for sample in map(resize, val.records):
            batch = model.preprocess([sample["image"]])
            found = PostProcessor(classification)(model(batch.images, batch.padding_mask), [(sample["height"], sample["width"])])
            evaluator.add(sample["image_id"], found[0])
    return evaluator.evaluate()["bbox"]


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
