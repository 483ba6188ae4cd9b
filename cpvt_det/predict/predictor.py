# SPDX-License-Identifier: Apache-2.0
"""A trained detector or classifier that is called with images.

Decoding, resizing, batching, detector and post-processing are the same as in evaluation.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from cpvt_det.builders import build_class_mapper, build_postprocessor, build_test_mapper, build_tiling, is_classifier
from cpvt_det.builders.trained import Trained, load_model
from cpvt_det.checkpoint.exported import ExportedModel
from cpvt_det.checkpoint.fetch import fetch_folder
from cpvt_det.checkpoint.model_folder import save_model
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, DataError, RunStoppedError, WeightsError
from cpvt_det.common.structures import DEFAULT_THRESHOLD, Thresholds
from cpvt_det.data.images import read_image, read_pillow
from cpvt_det.data.mapper import Mapper
from cpvt_det.evaluation.answers import PostProcessor, classify, detect
from cpvt_det.evaluation.tiles import Tiling, detect_tiles
from cpvt_det.predict.detections import ImageClasses, ImageDetections
from cpvt_det.predict.films import FilmReader

ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor


class FoundFrame(NamedTuple):
    """The detections in a frame of a video.

    Attributes:
        number, time: number and time of the frame, as in :class:`cpvt_det.predict.films.Frame`.
        detections: detections in the frame, with its pixels as ``source``.
    """

    number: int
    time: float
    detections: ImageDetections


class Predictor:
    """A trained detector for images of any kind and size.

    Args:
        detector: detector with its weights, on its device.
        postprocess: post-processor for the detector's classification.
        mapper: mapper that prepares an image.
        classes: ids and names of the labels.
        config: config of the detector as YAML, for :meth:`save`.
        thresholds: score thresholds of the detector's last evaluation; ``None`` if they are unknown.
        tiling: tiles that large images are cut into, unless a call sets others; ``None`` to leave images whole.

    Attributes:
        origin: path of the checkpoint or folder that the detector was loaded from; ``None`` if it was not loaded.
    """

    def __init__(
        self,
        detector: nn.Module,
        postprocess: PostProcessor,
        mapper: Mapper,
        classes: Classes,
        config: str,
        thresholds: Thresholds | None = None,
        tiling: Tiling | None = None,
    ):
        self.detector = detector.eval()
        self.postprocess = postprocess
        self.mapper = mapper
        self.classes = classes
        self.config = config
        self.thresholds = thresholds
        self.tiling = tiling
        self.origin: Path | None = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device | None = None,
        config_file: str = "",
        overrides: Sequence[str] = (),
    ) -> "Predictor":
        """Load a checkpoint of a run (``model_best.pth``) or a model folder, which contain config, classes and image sizes. Two
        other kinds of files are accepted too: weights of other projects, whose config is derived from their names and shapes, and
        ONNX or OpenVINO files from ``cpvt-det export``.

        Args:
            path: path of the file or folder, or a name that ``cpvt-det weights`` lists. If the run had ``SOLVER.EMA``, the averaged
                weights are used, as in evaluation.
            device: device to run on; by default a CUDA GPU if there is one, else the CPU.
            config_file: config to use instead of the one in the weights, or for weights that contain none.
            overrides: KEY VALUE words, as on the command line: ``["INPUT.MIN_SIZE_TEST", "480"]``.

        Raises:
            WeightsError: weights that cannot be read, contain no config or no classes, or lack a part of the model.
            ConfigError: keys that cannot be used, or a device that does not exist.
        """
        predictor = cls.from_trained(load_model(path, device, config_file, overrides))
        predictor.origin = Path(path).expanduser()
        return predictor

    @classmethod
    def from_trained(cls, trained: Trained) -> "Predictor":
        """Make a predictor from a loaded model.

        Raises:
            ConfigError: a model of a different task, or keys that cannot be used.
        """
        cfg = trained.cfg
        if is_classifier(cfg):
            name = cfg.MODEL.META_ARCHITECTURE
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE {name!r} is not a detector; to classify images, use cpvt-det predict or ClassPredictor"
            )
        parts = trained.detector, build_postprocessor(cfg), build_test_mapper(cfg)
        return cls(*parts, trained.classes, cfg.dump(), trained.thresholds, build_tiling(cfg))

    @classmethod
    def from_pretrained(
        cls, repo_id: str, device: str | torch.device | None = None, overrides: Sequence[str] = (), **options: Any
    ) -> "Predictor":
        """Load public weights by their name, or a model from Hugging Face's hub, such as one from :meth:`push_to_hub`. The files
        are fetched once, and no network is needed afterwards.

        Args:
            repo_id: name of public weights, as listed by ``cpvt-det weights``; or name ``user/name`` of a repository; or path of a
                model folder.
            device: device to run on, as in :meth:`from_checkpoint`.
            overrides: KEY VALUE words, as in :meth:`from_checkpoint`.
            options: ``revision``, ``token``, ``cache_dir``, ``local_files_only`` and ``force_download`` of huggingface_hub.

        Raises:
            WeightsError: files that cannot be fetched, or that are not a model of a known kind.
            ConfigError: keys that cannot be used, or a device that does not exist.
        """
        repo_id = os.path.expanduser(repo_id)
        is_name = "/" not in repo_id or os.path.exists(repo_id)
        return cls.from_checkpoint(repo_id if is_name else fetch_folder(repo_id, **options), device, overrides=overrides)

    @property
    def threshold(self) -> float:
        """The score threshold with the highest F1 in the last evaluation; 0.5 if the weights contain none."""
        return DEFAULT_THRESHOLD if self.thresholds is None or self.thresholds.overall is None else self.thresholds.overall

    @overload
    def __call__(
        self,
        images: list[ImageInput] | tuple[ImageInput, ...],
        channels: str | None = None,
        batch_size: int = 1,
        tiles: Tiling | int | None = None,
    ) -> list[ImageDetections]: ...

    @overload
    def __call__(
        self, images: ImageInput, channels: str | None = None, batch_size: int = 1, tiles: Tiling | int | None = None
    ) -> ImageDetections: ...

    def __call__(self, images, channels=None, batch_size=1, tiles=None):
        """Detect objects.

        Args:
            images: a path, a PIL image, an array or a tensor, as :func:`read_input` takes them; or a list or tuple of any of these,
                of any sizes.
            channels: order of the channels in arrays and tensors, "rgb" or "bgr"; required for colour arrays.
            batch_size: number of images of a list, or of tiles, per batch. An image has the same detections in any batch.
            tiles: tiles that larger images are cut into, or the side of a tile in pixels; 0 for no tiles, ``None`` for
                :attr:`tiling`.

        Returns:
            The detections of the image, at most ``TEST.DETECTIONS_PER_IMAGE``; for a list of images, a list of these.

        Raises:
            DataError: an input that is not an image; the message contains its index in the list.
            ValueError: a batch of less than one image, or tiles of an impossible size or overlap.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        tiling = self.tiling if tiles is None else tiles or None
        if tiling is not None and not isinstance(tiling, Tiling):
            tiling = Tiling(tiling)
        if not isinstance(images, list | tuple):
            return self._predict_batch([images], [read_input(images, channels)], tiling, batch_size)[0]
        found: list[ImageDetections] = []
        for start in range(0, len(images), batch_size):
            part, pixels = images[start : start + batch_size], []
            for index, image in enumerate(part, start):
                try:
                    pixels.append(read_input(image, channels))
                except DataError as error:
                    raise DataError(f"images[{index}]: {error}") from error
            found += self._predict_batch(part, pixels, tiling, batch_size)
        return found

    def stream(
        self, source: str | os.PathLike[str] | FilmReader, every: int = 1, batch_size: int = 1, tiles: Tiling | int | None = None
    ) -> Iterator[FoundFrame]:
        """Detect in a video, a camera or a stream while it is read.

        Args:
            source: path, number of a camera or address, as for :class:`cpvt_det.predict.films.FilmReader`, or an open reader.
            every: interval of the frames: the first of every ``every`` frames is used.
            batch_size: number of frames per batch.
            tiles: tiles, as in a call of the predictor.

        Yields:
            Number, time and detections of each frame; the detections are the same as if the frame were a single image.

        Raises:
            BadInputError, DataError, RunStoppedError: as for :class:`cpvt_det.predict.films.FilmReader`; if a video breaks off, the
                error is raised after its last frame.
        """
        reader, part = source if isinstance(source, FilmReader) else FilmReader(source, every), []
        failure = None
        frames = iter(reader)
        while failure is None:
            try:
                part.append(next(frames))
            except (StopIteration, RunStoppedError) as error:
                failure = error
            if part and (failure is not None or len(part) == batch_size):
                found = self([frame.pixels for frame in part], batch_size=batch_size, tiles=tiles)
                yield from (FoundFrame(frame.number, frame.time, one) for frame, one in zip(part, found, strict=True))
                part = []
        if isinstance(failure, RunStoppedError):
            raise failure

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a model folder, which :meth:`from_checkpoint` and ``MODEL.WEIGHTS`` accept.

        Raises:
            WeightsError: a folder that cannot be created or written to, or an exported program, which has no weights to write.
            RunStoppedError: weights that cannot be written, for example because the disk is full.
        """
        if isinstance(self.detector, ExportedModel):
            raise WeightsError(f"{self.detector.origin} is an exported program and has no weights to save; load its checkpoint")
        save_model(Path(folder), self.detector.state_dict(), self.classes, self.config, self.thresholds)

    def push_to_hub(self, repo_id: str, license: str | None = None, **options: Any) -> str:
        """Upload the model folder to Hugging Face's hub, for :meth:`from_pretrained`, with a model card.

        The card lists the classes and explains how to use the model. If the model was loaded from a checkpoint in the folder of its
        run, the card also has the metrics of the evaluation at the checkpoint's iteration. Local paths and callbacks are removed
        from the config.

        Args:
            repo_id: name of the repository, ``user/name``; it is created if it does not exist.
            license: name of a licence, as the hub lists them.
            options: ``private``, ``token``, ``branch``, ``commit_message`` and ``create_pr`` of huggingface_hub.

        Returns:
            Address of the commit.

        Raises:
            WeightsError: a repository that cannot be reached or written to, or an invalid name.
        """
        from cpvt_det.predict import hub

        return hub.push(self, repo_id, license, **options)

    def _predict_batch(
        self, images: Sequence[ImageInput], pixels: list[Tensor], tiling: Tiling | None, batch_size: int
    ) -> list[ImageDetections]:
        """The detections of one batch; pixels are (3, H, W) uint8 each."""
        samples = [
            {"image": self.mapper.prepare(image), "pixels": image, "height": image.shape[1], "width": image.shape[2]}
            for image in pixels
        ]
        if tiling is None:
            detected = detect(self.detector, self.postprocess, samples)
        else:
            detected = detect_tiles(self.detector, self.postprocess, samples, self.mapper.prepare, tiling, batch_size)
        found = []
        for one, image, read in zip(detected, images, pixels, strict=True):
            # Of a file only the path, because the pixels of many images would fill the memory.
            source = os.path.expanduser(image) if isinstance(image, str | os.PathLike) else read
            found.append(ImageDetections(one.boxes_xyxy, one.scores, one.labels, self.classes, source))
        return found


class ClassPredictor(Predictor):
    """A trained classifier for images of any kind and size. It is called like a :class:`Predictor`, but returns
    :class:`ImageClasses`.
    """

    @classmethod
    def from_trained(cls, trained: Trained) -> "ClassPredictor":
        """Make a predictor from a loaded classifier.

        Raises:
            ConfigError: a detector, or keys that cannot be used.
        """
        if not is_classifier(trained.cfg):
            raise ConfigError(f"MODEL.META_ARCHITECTURE {trained.cfg.MODEL.META_ARCHITECTURE!r} is not a classifier; use Predictor")
        return cls(trained.detector, None, build_class_mapper(trained.cfg), trained.classes, trained.cfg.dump())

    def _predict_batch(
        self, images: Sequence[ImageInput], pixels: list[Tensor], tiling: Tiling | None, batch_size: int
    ) -> list[ImageClasses]:
        """The classes of one batch; each element of ``pixels`` is a (3, H, W) uint8 tensor."""
        if tiling is not None:
            raise ValueError("tiles are for detectors, and this model is a classifier; leave them out")
        found = classify(self.detector, [{"image": self.mapper.prepare(image)} for image in pixels])
        return [ImageClasses(scores, self.classes) for scores in found]


def read_input(image: ImageInput, channels: str | None = None) -> Tensor:
    """Turn one image of any kind into (3, H, W) uint8 RGB, as :func:`cpvt_det.data.images.read_image` decodes it.

    Args:
        image: path of a file; a PIL image; a tensor (3, H, W) uint8; or an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of uint8
            or uint16. Transparency is dropped, and from uint16 only the high byte is used.
        channels: order of the channels in arrays and tensors, "rgb" or "bgr". Required for colour arrays; the default of tensors is
            "rgb".

    Returns:
        (3, H, W) uint8, RGB, on the CPU.

    Raises:
        DataError: a file that cannot be read; arrays and tensors of an unsupported shape or dtype; a colour array without
            ``channels``.
    """
    if channels not in (None, "rgb", "bgr"):
        raise DataError(f"channels must be 'rgb' or 'bgr', got {channels!r}")
    if isinstance(image, str | os.PathLike):
        return read_image(os.path.expanduser(image))
    if isinstance(image, Image.Image):
        return read_pillow(image)
    if isinstance(image, np.ndarray):
        return _read_array(image, channels)
    if isinstance(image, Tensor):
        return _read_tensor(image, channels)
    raise DataError(f"{type(image).__name__} is not an image; pass a path, a PIL image, an array, a tensor or a list of these")


def _read_array(array: np.ndarray, channels: str | None) -> Tensor:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        advice = "; pass several images as a list" if array.ndim == 4 else ""
        raise DataError(f"an array must be (H, W, 3), (H, W, 4) or (H, W), got {array.shape}{advice}")
    if array.dtype not in (np.uint8, np.uint16):
        raise DataError(
            f"an array must be uint8 or uint16, got {array.dtype}; convert values in [0, 1] by (255 * x).round().astype('uint8')"
        )
    if array.shape[2] == 1:
        array = array.repeat(3, axis=2)
    elif channels is None:
        raise DataError("an array does not tell the order of its channels: pass channels='rgb', or 'bgr' for images from OpenCV")
    array = array[:, :, 2::-1] if channels == "bgr" else array[:, :, :3]
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    return torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous()  # (H, W, 3) -> (3, H, W)


def _read_tensor(tensor: Tensor, channels: str | None) -> Tensor:
    if tensor.ndim != 3 or tensor.shape[0] != 3 or 0 in tensor.shape:
        advice = "; pass a batch as list(batch)" if tensor.ndim == 4 else ""
        raise DataError(f"a tensor must be (3, H, W), got {tuple(tensor.shape)}{advice}")
    if tensor.dtype != torch.uint8:
        raise DataError(f"a tensor must be uint8, got {tensor.dtype}; convert values in [0, 1] by (255 * x).round().byte()")
    return (tensor.flip(0) if channels == "bgr" else tensor).cpu()
