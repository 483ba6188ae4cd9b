# SPDX-License-Identifier: Apache-2.0
"""Detectors as detectron2's meta architectures, which take a list of dicts and return losses or instances."""

from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor, nn

from cpvt_det import builders
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.common.boxes import xyxy_to_cxcywh
from cpvt_det.common.errors import DataError
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.d2.backbones import build_detector_backbone
from cpvt_det.d2.data import class_names, register_datasets
from cpvt_det.data.catalog import registered_datasets
from cpvt_det.evaluation.answers import PostProcessor
from cpvt_det.fast import accelerate
from cpvt_det.losses import SetCriterion, TrainingModel
from cpvt_det.models import Classifier, Detector


class Detectron2Protocol:
    """detectron2's interface for one of our detectors; this class must come before the detector in the list of base classes.

    The keys of the state dict do not change, because criterion and post-processing have no parameters.
    """

    def __init__(self, *, criterion: SetCriterion, postprocessor: PostProcessor | None = None, **arguments: Any):
        classification = criterion.classification
        heads = {"num_logits": classification.num_logits, "prior_probability": classification.prior_probability}
        super().__init__(**heads | arguments)
        self.criterion = criterion
        self.postprocessor = postprocessor or PostProcessor(classification)

    @classmethod
    def from_config(cls, cfg: CfgNode, backbone: nn.Module | None = None) -> dict[str, Any]:
        """Turn a config into the constructor's arguments, with the config's backbone if no other is given.

        This also registers ``DATASETS.REGISTER``, since detectron2's trainers build the model before the data. If
        ``MODEL.NUM_CLASSES`` is 0, the number of classes of the first data set is read from detectron2's catalog. If
        ``MODEL.WEIGHTS`` is empty, the weights ``MODEL.BACKBONE.WEIGHTS`` are loaded into the backbone.
        """
        register_datasets(registered_datasets(cfg.DATASETS.REGISTER))
        names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
        if cfg.MODEL.NUM_CLASSES == 0 and names:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.MODEL.NUM_CLASSES = len(class_names(names[0]))
        loss = {"criterion": builders.build_criterion(cfg), "postprocessor": builders.build_postprocessor(cfg)}
        return {**_arguments(cfg, backbone), **loss}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.pixel_mean.device

    def forward(
        self, inputs: list[dict] | Tensor, padding_mask: Tensor | None = None, targets: Sequence[Targets] | None = None
    ) -> Any:
        """Run detectron2's forward for a list of dicts, and the core's forward for a tensor of images.

        Args:
            inputs: dicts with ``image`` (3, h, w) in [0, 255], ``height`` and ``width`` of the original image, and in training
                ``instances`` of detectron2 or ``targets`` of our loader; or normalised images (B, 3, H, W).
            padding_mask: (B, H, W) bool, True = padded; only with a tensor of images.
            targets: targets of the B images, in training; only with a tensor of images.

        Returns:
            For dicts, weighted losses by name in training and ``[{"instances": Instances}]`` in evaluation; for a tensor,
            ``Predictions``.
        """
        if isinstance(inputs, Tensor):
            return super().forward(inputs, padding_mask, targets)
        if self.training:
            return self._losses(inputs)
        batch = self.preprocess([sample["image"] for sample in inputs])
        predictions: Predictions = super().forward(batch.images, batch.padding_mask)
        resized = zip(inputs, batch.image_sizes, strict=True)
        sizes = [(sample.get("height", height), sample.get("width", width)) for sample, (height, width) in resized]
        return [
            {"instances": Instances(size, pred_boxes=Boxes(found.boxes_xyxy), scores=found.scores, pred_classes=found.labels)}
            for found, size in zip(self.postprocessor(predictions, sizes), sizes, strict=True)
        ]

    def _losses(self, inputs: list[dict]) -> dict[str, Tensor]:
        num_classes = self.criterion.classification.num_classes
        samples = [sample if "targets" in sample else {**sample, "targets": _to_targets(sample, num_classes)} for sample in inputs]
        result = TrainingModel(self, self.criterion)(samples)
        if has_event_storage():
            values = torch.stack([value.double() for value in result.metrics.values()]).tolist()
            get_event_storage().put_scalars(**dict(zip(result.metrics, values, strict=True)))
        return result.losses


class FromConfig:
    """A classifier of the core, built by detectron2. Only our runner can train it, because detectron2 has no data sets with one
    class per image."""

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Turn a config with ``MODEL.NUM_CLASSES`` into the constructor's arguments, as in :class:`Detectron2Protocol`."""
        return _arguments(cfg)


def _arguments(cfg: CfgNode, backbone: nn.Module | None = None) -> dict[str, Any]:
    """The model's arguments. If ``MODEL.WEIGHTS`` is empty, the weights ``MODEL.BACKBONE.WEIGHTS`` are loaded into the config's own
    backbone."""
    _, arguments = builders.detector_arguments(cfg, backbone or build_detector_backbone(cfg))
    node = cfg.MODEL.BACKBONE
    if backbone is None and node.WEIGHTS and not cfg.MODEL.WEIGHTS:
        load_backbone_weights(arguments["backbone"], node.WEIGHTS, node.NAME)
    return arguments


def register_detectors() -> None:
    """Register a meta architecture for every registered detector that does not have one yet."""
    for name, arguments in builders.DETECTOR_REGISTRY:
        if name not in META_ARCH_REGISTRY:
            META_ARCH_REGISTRY._do_register(name, _meta_architecture(name, arguments.detector))


def _meta_architecture(name: str, detector: type[Detector]) -> type[Detector]:
    """Turn a detector or a classifier into a meta architecture of detectron2, which is built from a config or from keyword
    arguments.

    It takes the same keyword arguments as the model. A detector takes two more. ``criterion`` is the set loss, whose classification
    determines the defaults of ``num_logits`` and ``prior_probability``. ``postprocessor`` by default keeps the 100 best detections.
    """

    @configurable
    def __init__(self, **arguments: Any):
        super(made, self).__init__(**arguments)
        accelerate(self)

    text = f":class:`{detector.__module__}.{detector.__qualname__}` in detectron2, from a config or by keyword."
    protocol = FromConfig if issubclass(detector, Classifier) else Detectron2Protocol
    made = type(name, (protocol, detector), {"__init__": __init__, "__doc__": text, "__module__": __name__})
    return made


register_detectors()
CPVTDetr = META_ARCH_REGISTRY.get("CPVTDetr")
CPVTDeformableDetr = META_ARCH_REGISTRY.get("CPVTDeformableDetr")


def _to_targets(sample: dict, num_classes: int) -> Targets:
    """The targets of a sample with ``instances``.

    Raises:
        DataError: a sample without ``instances``, or a label beyond the model's classes, which a softmax head would learn as "no
            object".
    """
    where = f"{sample.get('file_name', 'a training image')} (id {sample.get('image_id')})"
    if "instances" not in sample:
        raise DataError(f"{where} has no 'instances'; the training mapper must add them, also for images without objects")
    instances: Instances = sample["instances"]
    labels = instances.gt_classes
    if labels.device.type == "cpu" and len(labels) and labels.max() >= num_classes:
        raise DataError(
            f"{where} has an object of class {labels.max()}, but the model has {num_classes} classes, counted from 0; "
            "set MODEL.NUM_CLASSES"
        )
    height, width = instances.image_size
    boxes = instances.gt_boxes.tensor
    return Targets(labels, xyxy_to_cxcywh(boxes) / boxes.new_tensor([width, height, width, height]))
