# SPDX-License-Identifier: Apache-2.0
"""Pictures, checked by their pixels."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from cpvt_det.common.structures import Detections
from cpvt_det.visualize import pictures
from cpvt_det.visualize.pictures import GAP, Compared, class_color, draw_panel, save_comparisons, save_contact_sheet, sheet_rows

NAMES = ["square", "circle", "star"]
GREY = 90


def grey_image(height: int, width: int) -> torch.Tensor:
    return torch.full((3, height, width), GREY, dtype=torch.uint8)


def objects(*rows: tuple) -> Detections:
    """Rows of (label, score, x1, y1, x2, y2)."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return Detections(boxes_xyxy=table[:, 2:], scores=table[:, 1], labels=table[:, 0].long())


def draw_comparison(*args, **kwargs) -> torch.Tensor:
    """(3, H, W) uint8, the comparison."""
    return pil_to_tensor(pictures.draw_comparison(*args, **kwargs))


def coverage(region: torch.Tensor, color: tuple[int, int, int]) -> float:
    """The share of the pixels of (3, h, w) that have a colour."""
    return (region == torch.tensor(color)[:, None, None]).all(dim=0).float().mean().item()


def panels_of(picture: torch.Tensor, height: int, width: int, count: int = 2) -> list[torch.Tensor]:
    """The images in a picture, without titles and gaps."""
    return [picture[:, -height:, k * (width + GAP) : k * (width + GAP) + width] for k in range(count)]


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(128, 160, 3), (128, 128, 3), (127, 300, 4), (384, 500, 1), (800, 600, 1), (10, 1000, 2), (10, 3000, 1)],
)
def test_small_images_are_enlarged_by_a_whole_number(height, width, scale):
    picture = draw_comparison(grey_image(height, width), objects(), objects(), NAMES, 0.5)
    assert picture.dtype == torch.uint8
    assert picture.shape[2] == 2 * width * scale + GAP
    assert height * scale < picture.shape[1] < height * scale + 80  # a title above
    for panel in panels_of(picture, height * scale, width * scale):
        assert coverage(panel, (GREY,) * 3) == 1
    assert coverage(picture[:, :, width * scale : width * scale + GAP], (255,) * 3) == 1
    assert coverage(picture[:, : -height * scale], (255,) * 3) < 1  # the title's letters


def test_enlarging_keeps_the_picture():
    image = torch.arange(3 * 8 * 6, dtype=torch.uint8).reshape(3, 8, 6)
    picture = draw_comparison(image, None, objects(), NAMES, 0.5)
    assert torch.equal(picture[:, -8 * 64 :: 64, ::64], image)


def test_boxes_are_drawn_where_they_are_and_in_the_colour_of_their_class():
    """A box (40, 50, 100, 110) at scale 3 covers columns 120 to 299 and rows 150 to 329 of its panel."""
    detections, truth = objects((0, 0.9, 40, 50, 100, 110)), objects((1, 1, 20, 60, 80, 120))
    picture = draw_comparison(grey_image(128, 160), truth, detections, NAMES, 0.5)
    left, right = panels_of(picture, 384, 480)
    red, blue = class_color(0), class_color(1)
    for edge in (
        left[:, 150:330, 120:122],
        left[:, 150:330, 298:300],
        left[:, 150:152, 120:300],
        left[:, 328:330, 120:300],
    ):
        assert coverage(edge, red) == 1
    assert coverage(left[:, 152:328, 122:298], (GREY,) * 3) == 1  # nothing inside
    assert coverage(left[:, 330:], (GREY,) * 3) == 1  # nothing below
    assert coverage(left[:, 100:150, 120:300], red) > 0.1  # the label above
    assert coverage(left, blue) == 0
    assert coverage(right[:, 180:360, 60:62], blue) == 1
    assert coverage(right, red) == 0


def test_the_image_itself_is_not_drawn_on():
    image = grey_image(400, 400)
    draw_comparison(image, None, objects((0, 0.9, 40, 50, 100, 110)), NAMES, 0.5)
    assert torch.equal(image, grey_image(400, 400))


def test_detections_below_the_threshold_are_left_out():
    detections = objects((0, 0.5, 40, 50, 100, 110), (1, 0.49, 40, 50, 100, 110))
    (panel,) = panels_of(draw_comparison(grey_image(128, 160), None, detections, NAMES, 0.5), 384, 480, count=1)
    assert coverage(panel, class_color(0)) > 0
    assert coverage(panel, class_color(1)) == 0


def test_where_none_passes_the_best_three_are_drawn():
    """Four of class 0 to 3 below the threshold, the best last; class 0 has the lowest score."""
    box = (40, 50, 100, 110)
    detections = objects((0, 0.1, *box), (1, 0.2, 5, 5, 30, 30), (2, 0.3, 100, 5, 150, 40), (3, 0.4, 5, 60, 30, 120))
    names = ["a", "b", "c", "d"]
    (panel,) = panels_of(draw_comparison(grey_image(128, 160), None, detections, names, 0.5), 384, 480, count=1)
    assert [coverage(panel, class_color(label)) > 0 for label in range(4)] == [False, True, True, True]
    (panel,) = panels_of(draw_comparison(grey_image(128, 160), None, detections, names, 0.35), 384, 480, count=1)
    assert [coverage(panel, class_color(label)) > 0 for label in range(4)] == [False, False, False, True]


def test_on_an_image_without_objects_nothing_below_the_threshold_is_drawn():
    """Nothing is the right answer there."""
    low = objects((0, 0.4, 40, 50, 100, 110))
    left, _ = panels_of(draw_comparison(grey_image(128, 160), objects(), low, NAMES, 0.5), 384, 480)
    assert coverage(left, class_color(0)) == 0
    left, _ = panels_of(draw_comparison(grey_image(128, 160), objects((1, 1, 0, 0, 9, 9)), low, NAMES, 0.5), 384, 480)
    assert coverage(left, class_color(0)) > 0


def test_scores_of_the_ground_truth_do_not_matter():
    picture = draw_comparison(grey_image(128, 160), objects((0, 0, 40, 50, 100, 110)), objects(), NAMES, 0.5)
    left, right = panels_of(picture, 384, 480)
    assert coverage(left, class_color(0)) == 0
    assert coverage(right, class_color(0)) > 0


def test_without_ground_truth_there_is_one_panel():
    assert draw_comparison(grey_image(128, 160), None, objects(), NAMES, 0.5).shape[2] == 480


@pytest.mark.parametrize(
    "box", [(-50, -50, 500, 500), (200, 200, 300, 300), (30, 30, 30, 30), (-9, -9, -5, -5), (127.9, 0, 128, 128)]
)
def test_boxes_on_and_beyond_the_border_are_drawn_inside(box):
    detections = objects((2, 0.9, *box))
    (panel,) = panels_of(draw_comparison(grey_image(128, 128), None, detections, NAMES, 0.5), 384, 384, count=1)
    assert coverage(panel, class_color(2)) > 0


def test_labels_do_not_hide_each_other():
    """Three objects on one box: each label shows its ground, about as large as alone."""
    rows = [(label, 0.9, 40, 50, 100, 110) for label in range(3)]
    alone = [draw_comparison(grey_image(128, 160), None, objects(row), NAMES, 0.5) for row in rows]
    together = draw_comparison(grey_image(128, 160), None, objects(*rows), NAMES, 0.5)
    border = 4 * 2 * 178 / together[0].numel()
    for label, picture in enumerate(alone):
        ground = coverage(picture, class_color(label)) - border
        assert coverage(together, class_color(label)) > 0.9 * ground > 0


def test_a_name_wider_than_the_picture_is_cut_off():
    picture = draw_comparison(grey_image(384, 384), None, objects((0, 0.9, 5, 50, 9, 60)), ["long " * 40], 0.5)
    assert picture.shape[2] == 384


def test_neighbouring_classes_have_clearly_different_colours():
    colors = np.array([class_color(label) for label in range(80)])
    assert np.abs(np.diff(colors, axis=0)).max(axis=1).min() > 60
    assert len({tuple(color) for color in colors.tolist()}) == 80


def test_rows_of_a_sheet_are_filled_from_side_to_side():
    """Comparisons are twice as wide as their image. One of 4 : 3 fills 1600 at (1600 - 8) / (8 / 3) = 597; one of 3 : 4 would be
    1061 high, so two stand in a row, at (1600 - 24) / 3 = 525; the last row, of one square, would be 796 high and is bounded.
    """
    assert sheet_rows([(300, 400), (400, 300), (800, 600), (50, 50)]) == [(1, 597), (2, 525), (1, 640)]
    assert sheet_rows([(10, 4000)]) == [(1, 2)]
    assert sheet_rows([]) == []


def test_a_sheet_of_comparisons_has_no_space_beside_its_images(tmp_path):
    """Grey images of unequal shape and size, from 40 to 900 pixels: but for titles and gaps the sheet is grey, to the last row."""
    sizes = [(300, 400), (400, 300), (800, 600), (40, 60), (900, 500), (500, 500)]
    compared = [Compared(grey_image(*size), objects(), objects()) for size in sizes]
    save_comparisons(compared, NAMES, 0.5, tmp_path / "pictures/sheet.png")
    with Image.open(tmp_path / "pictures/sheet.png") as picture:
        sheet = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    assert abs(sheet.shape[2] - 1600) <= 4
    rows = sheet_rows(sizes)
    assert sum(count for count, _ in rows) == 6 and all(300 < height <= 640 for _, height in rows)
    images = sum(height * (1600 - (2 * count - 1) * GAP) for count, height in rows)
    assert coverage(sheet, (GREY,) * 3) * sheet[0].numel() == pytest.approx(images, rel=0.02)
    assert coverage(sheet, (GREY,) * 3) > 0.9


def test_boxes_of_a_resized_image_are_where_they_were_and_labels_can_be_read():
    """A box (400, 200, 800, 600) of an image of 1600 x 1200, at a height of 600, covers columns 200 to 399 and rows 100 to 299."""
    picture = draw_comparison(grey_image(1200, 1600), None, objects((0, 0.9, 400, 200, 800, 600)), NAMES, 0.5, height=600)
    assert picture.shape[2] == 800
    (panel,) = panels_of(picture, 600, 800, count=1)
    red = class_color(0)
    for edge in (panel[:, 100:300, 200:202], panel[:, 100:300, 398:400], panel[:, 100:102, 200:400], panel[:, 298:300, 200:400]):
        assert coverage(edge, red) == 1
    label = (panel[:, :100] == torch.tensor(red)[:, None, None]).all(0)
    rows, _ = label.nonzero(as_tuple=True)
    assert rows.max() - rows.min() >= 20


def test_a_contact_sheet_is_a_png_with_every_panel_in_its_place(tmp_path):
    """Columns are as wide as their widest panel, 30 and 50; rows as high as their highest, 20 and 40."""
    sizes = [(20, 10), (15, 50), (40, 30)]
    panels = [torch.full((3, *size), 10 * k, dtype=torch.uint8) for k, size in enumerate(sizes)]
    path = tmp_path / "pictures" / "sheet.png"
    save_contact_sheet([to_pil_image(panel) for panel in panels], path, columns=2)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        sheet = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    assert sheet.shape == (3, 20 + GAP + 40, 30 + GAP + 50)
    assert torch.equal(sheet[:, :20, :10], panels[0])
    assert torch.equal(sheet[:, :15, 30 + GAP :], panels[1])
    assert torch.equal(sheet[:, 20 + GAP :, :30], panels[2])
    assert (sheet == 255).all(dim=0).sum() == sheet[0].numel() - sum(height * width for height, width in sizes)


def test_a_panel_is_that_of_the_comparison():
    truth = objects((1, 1, 20, 60, 80, 120))
    both = draw_comparison(grey_image(128, 160), truth, objects(), NAMES, 0.5)
    alone = pil_to_tensor(draw_panel(grey_image(128, 160), truth, NAMES, "ground truth (1)"))
    assert torch.equal(alone, both[:, :, 480 + GAP :])
    assert coverage(alone, class_color(1)) > 0.005
