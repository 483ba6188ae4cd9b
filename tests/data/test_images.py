# SPDX-License-Identifier: Apache-2.0
"""An image file and its boxes: decoded as what it shows, and augmented together."""

import struct
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cpvt_det.common.boxes import cxcywh_to_xyxy
from cpvt_det.common.errors import ConfigError, DataError
from cpvt_det.data.images import read_header, read_image, read_pillow
from cpvt_det.data.mapper import Mapper, RandomShortSide, train_transform
from cpvt_det.data.records import ImageRecord

# Reading images


def test_image_is_read_as_it_was_written(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for name in ("a.png", "a.bmp", "a.tiff", "a.PNG", "ä ö.png"):
        Image.fromarray(pixels).save(tmp_path / name)
        image = read_image(str(tmp_path / name))
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 5, 7))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "gif"])
@pytest.mark.parametrize("mode", ["L", "P", "1"])
def test_grey_and_palette_images_become_rgb(tmp_path, mode, suffix):
    """A palette of 16 greys, or of black and white, written without loss."""
    grey = np.repeat(np.arange(0, 256, 17, dtype=np.uint8)[None], 3, axis=0)
    picture = Image.fromarray(grey).convert(mode)
    picture.save(tmp_path / f"a.{suffix}")
    expected = np.array(picture.convert("RGB"))
    assert np.array_equal(read_image(str(tmp_path / f"a.{suffix}")).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_is_dropped(tmp_path, mode):
    picture = Image.new(mode, (4, 3), (200, 128) if mode == "LA" else (200, 200, 200, 128))
    picture.save(tmp_path / "a.png")
    assert read_image(str(tmp_path / "a.png")).unique().tolist() == [200]


@pytest.mark.parametrize("suffix", ["jpg", "tiff"])
@pytest.mark.parametrize(
    ("inks", "expected"),
    [
        ((0, 0, 0, 0), (255, 255, 255)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 128, 255, 64), (191, 95, 0)),
        ((0, 0, 0, 255), (0, 0, 0)),
    ],
)
def test_cmyk_is_ink_on_white_paper(tmp_path, inks, expected, suffix):
    """Red is what neither cyan nor black takes: (255 - C) (255 - K) / 255. A JPEG holds them inverted, and loses a little."""
    Image.new("CMYK", (16, 8), inks).save(tmp_path / f"a.{suffix}", **({"quality": 100} if suffix == "jpg" else {}))
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert tuple(image.shape) == (3, 8, 16)
    np.testing.assert_allclose(image[:, 3, 5], expected, atol=3 if suffix == "jpg" else 1)


@pytest.mark.parametrize("mode", ["HSV", "LAB"])
def test_other_colour_spaces_become_rgb(tmp_path, mode):
    """By hand: full hue, saturation and value of HSV are red; a lightness of 50 % without colour, which is 128, is grey 119."""
    picture = Image.new(mode, (5, 4), {"HSV": (0, 255, 255), "LAB": (128, 128, 128)}[mode])
    expected = {"HSV": (255, 0, 0), "LAB": (119, 119, 119)}[mode]
    np.testing.assert_allclose(read_pillow(picture)[:, 2, 3], expected, atol=1)
    if mode == "LAB":
        picture.save(tmp_path / "a.tif")
        assert read_header(str(tmp_path / "a.tif")).mode == "LAB"
        np.testing.assert_allclose(read_image(str(tmp_path / "a.tif"))[:, 2, 3], expected, atol=1)


def test_a_limit_of_pixels_is_of_all_formats_and_can_be_raised(tmp_path, monkeypatch):
    """Pillow warns of half its limit and refuses more; a JPEG, which torchvision decodes, is no exception."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    for name in ("a.jpg", "a.png"):
        path = str(tmp_path / name)
        Image.new("RGB", (20, 10), "red").save(path)
        for read in (read_header, read_image):
            with pytest.raises(DataError) as caught:
                read(path)
            assert str(caught.value) == (
                f"cannot read image {path}: Image size (200 pixels) exceeds limit of 100 pixels, could be decompression bomb DOS "
                "attack; if you trust it, set the environment variable CPVT_DET_MAX_PIXELS to as many pixels"
            )
        with monkeypatch.context() as raised:
            raised.setattr(Image, "MAX_IMAGE_PIXELS", 50)
            raised.setenv("CPVT_DET_MAX_PIXELS", "198")
            with pytest.raises(DataError, match="exceeds limit of 198 pixels"):
                read_image(path)
            raised.setenv("CPVT_DET_MAX_PIXELS", "200")
            assert read_header(path).width == read_image(path).shape[2] == 20


@pytest.mark.parametrize("limit", ["", "0", "-1", "4e8", "none", "٣"])
def test_a_limit_that_is_no_number_of_pixels_is_refused(tmp_path, monkeypatch, limit):
    monkeypatch.setenv("CPVT_DET_MAX_PIXELS", limit)
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    for read in (read_header, read_image):
        with pytest.raises(ConfigError, match=r"CPVT_DET_MAX_PIXELS in the environment is '.*'; set it to a number of pixels, "):
            read(str(tmp_path / "a.png"))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_become_eight(tmp_path, suffix):
    """The high byte counts: 0x80ff is 0x80."""
    values = np.array([[0, 0x0100, 0x80FF, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert image.dtype == torch.uint8
    assert image[:, 0].tolist() == [[0, 1, 128, 255]] * 3


def test_twelve_bits_become_eight(tmp_path):
    """A TIFF of one row, written by hand: 4095 is white."""
    values = [0x000, 0x7FF, 0x800, 0xFFF]
    packed = bytes.fromhex("".join(f"{value:03x}" for value in values))
    tags = [(256, 4), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 12 * 9 + 4), (277, 1), (278, 1), (279, len(packed))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    (tmp_path / "a.tiff").write_bytes(header + entries + struct.pack("<I", 0) + packed)
    assert read_image(str(tmp_path / "a.tiff"))[0].tolist() == [[0, 0x7F, 0x80, 0xFF]]


def test_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.new("RGB", (7, 5), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    image = read_image(str(tmp_path / "a.gif"))
    assert tuple(image.shape) == (3, 5, 7)
    assert image[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_image_is_turned_as_exif_says(tmp_path, suffix):
    """Orientation 6: the camera was turned, the first row of the file is the right column of the picture."""
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", exif=exif, **options)
    image = read_image(str(tmp_path / f"a.{suffix}"))
    assert tuple(image.shape) == (3, 16, 8)
    assert image[:, :, 5:].min() > 200
    assert image[:, :, :3].max() < 50


def spoil_missing(path):
    path.unlink()


def spoil_text(path):
    path.write_text("no image")


def spoil_empty(path):
    path.write_bytes(b"")


def spoil_truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_text, spoil_empty, spoil_truncated])
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.webp"])
def test_image_that_cannot_be_read_names_itself(tmp_path, name, spoil):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    spoil(path)
    with pytest.raises(DataError, match=rf"cannot read image .*{name}: ") as caught:
        read_image(str(path))
    assert "\n" not in str(caught.value)


def test_image_of_another_size_than_annotated_names_itself(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    record = ImageRecord(str(tmp_path / "a.png"), 77, 20, 10, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    with pytest.raises(
        DataError, match=r"a\.png \(id 77\) has 20 x 10 pixels after rotation by EXIF, but 10 x 20 in the annotations"
    ):
        Mapper(RandomShortSide([0], None), with_targets=False)(record)


# Augmentation


def draw_rectangles(tmp_path, size, boxes):
    """A black image with rectangles in red, green, blue; label k has channel k."""
    height, width = size
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    for label, (x0, y0, x1, y1) in enumerate(boxes):
        pixels[y0:y1, x0:x1, label] = 255
    Image.fromarray(pixels).save(tmp_path / "rectangles.png")
    labels = np.arange(len(boxes), dtype=np.int64)
    return ImageRecord(str(tmp_path / "rectangles.png"), 1, height, width, np.array(boxes, np.float32).reshape(-1, 4), labels)


def find_rectangle(image, label):
    """xyxy of the pixels whose channel is more than half on, or ``None``."""
    rows, columns = (image[label] > 127).nonzero(as_tuple=True)
    if not len(rows):
        return None
    return torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)).float()


TRANSFORMS = {
    "nothing": train_transform((), None, flip=False),
    "flip": train_transform((), None, flip=True),
    "resize": train_transform((50, 90, 140), 150, flip=False),
    "crop": v2.Compose([train_transform((), None, flip=False, crop_sizes=(60, 90), crop_range=(40, 70))]),
    "all": train_transform((50, 90), 150, flip=True, crop_sizes=(60, 90), crop_range=(40, 70)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_follow_their_objects(tmp_path, name):
    """Rectangles are drawn, transformed, and found again by their colour, where the boxes say; 40 draws each."""
    record = draw_rectangles(tmp_path, (60, 90), [(5, 10, 35, 30), (50, 20, 88, 55), (2, 40, 30, 58)])
    mapper = Mapper(TRANSFORMS[name], with_targets=True)
    shapes, lefts, lost = set(), set(), 0
    for seed in range(40):
        torch.manual_seed(seed)
        sample = mapper(record)
        image, targets = sample["image"], sample["targets"]
        _, height, width = image.shape
        boxes = cxcywh_to_xyxy(targets.boxes_cxcywh) * torch.tensor([width, height, width, height])
        assert type(image) is type(targets.boxes_cxcywh) is torch.Tensor
        assert (image.dtype, targets.boxes_cxcywh.dtype, targets.labels.dtype) == (torch.uint8, torch.float32, torch.int64)
        assert targets.boxes_cxcywh.min() >= 0
        assert targets.boxes_cxcywh.max() <= 1
        by_label = dict(zip(targets.labels.tolist(), boxes, strict=True))
        for label in range(3):
            found = find_rectangle(image, label)
            if label not in by_label:
                lost += 1
                assert found is None or (found[2:] - found[:2]).min() <= 2
            elif found is None:  # a sliver at the border that interpolation dims
                assert (by_label[label][2:] - by_label[label][:2]).min() <= 2
            else:
                assert (found - by_label[label]).abs().max() <= 1.5
        shapes.add((height, width))
        lefts.update(round(float(box[0]), 1) for box in boxes)
    assert (len(shapes) > 1) == (name in ("resize", "crop", "all"))
    assert (len(lefts) > 3) == (name != "nothing")
    assert (lost > 0) == (name in ("crop", "all"))


def test_flip_by_hand(tmp_path):
    """Half the images are mirrored: [5, 35] of 90 columns becomes [55, 85]."""
    record = draw_rectangles(tmp_path, (60, 90), [(5, 10, 35, 30)])
    lefts = Counter()
    for seed in range(60):
        torch.manual_seed(seed)
        targets = Mapper(train_transform((), None, flip=True), with_targets=True)(record)["targets"]
        lefts[round(float(cxcywh_to_xyxy(targets.boxes_cxcywh)[0, 0]) * 90)] += 1
    assert set(lefts) == {5, 55}
    assert 18 <= lefts[5] <= 42


@pytest.mark.parametrize(
    ("size", "short", "longest", "expected"),
    [
        ((60, 90), 30, None, (30, 45)),
        ((90, 60), 30, None, (45, 30)),
        ((60, 90), 120, 150, (100, 150)),
        ((480, 640), 800, 1333, (800, 1067)),
        ((10, 1000), 800, 1333, (13, 1333)),
        ((1, 1000), 8, 100, (1, 100)),
        ((60, 90), 0, None, (60, 90)),
    ],
)
def test_test_size_is_the_short_side_bounded_by_the_long(tmp_path, size, short, longest, expected):
    record = draw_rectangles(tmp_path, size, [])
    sample = Mapper(RandomShortSide([short], longest), with_targets=False)(record)
    assert tuple(sample["image"].shape[1:]) == expected
    assert (sample["height"], sample["width"]) == size
    assert "targets" not in sample


def test_image_without_objects_has_targets_without_rows(tmp_path):
    record = draw_rectangles(tmp_path, (60, 90), [])
    targets = Mapper(TRANSFORMS["all"], with_targets=True)(record)["targets"]
    assert targets.boxes_cxcywh.shape == (0, 4)
    assert (targets.labels.shape, targets.labels.dtype) == ((0,), torch.int64)
