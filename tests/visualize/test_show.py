# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det show``: what is drawn lies where it belongs, and averages are those worked out by hand."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from tiny import DEFORMABLE, DFINE, DINO, RTDETR, overrides, random_config, save_random
from torchvision.transforms.functional import to_pil_image

from cpvt_det.builders import build_detector
from cpvt_det.cli import main
from cpvt_det.cli import show as command
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import level_padding_mask
from cpvt_det.data.coco import load_coco
from cpvt_det.position import POSITION_REGISTRY
from cpvt_det.visualize import attention as drawing
from cpvt_det.visualize import pictures as feeding
from cpvt_det.visualize.attention import AttentionByPosition, average_attention
from cpvt_det.visualize.figures import new_grid
from cpvt_det.visualize.position import NamedDetector, _place, added_by, draw_kernels
from cpvt_det.visualize.recording import ForwardRecord, attention_layers, attention_weights, record_inputs, tokens_at


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def detector_of(**more):
    torch.manual_seed(0)
    return build_detector(random_config(**more)).eval()


def noise(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


def record(**more):
    """An image of 60 x 100 pixels on disk, fed at 30 x 50, on a canvas of 32 x 64."""
    detector, image = detector_of(**more), torch.zeros(3, 30, 50, dtype=torch.uint8)
    return ForwardRecord(detector, image, (60, 100), (32, 64), attention_layers(detector), {}, [])


def test_a_point_is_looked_up_in_the_map_of_its_level():
    """Strides 8 and 16: maps of 4 x 8 and 2 x 4. Pixel (70, 50) on disk is (35, 25) as fed: row 3, column 4; row 1, column 2."""
    found = [tokens_at(record(**DEFORMABLE), [(70, 50), (0, 0)], level) for level in (0, 1)]
    assert [[query.index for query in attended] for attended in found] == [[3 * 8 + 4, 0], [32 + 4 + 2, 32]]
    assert found[0][0].name == "at 70, 50"


def test_a_point_is_looked_up_in_the_only_level_of_a_hybrid_encoder():
    """Of strides 8 and 16 the last, whose map is 2 x 4: row 1, column 2."""
    hybrid = record(**RTDETR)
    assert hybrid.strides == [8, 16] and hybrid.is_dense("encoder") and not hybrid.is_dense("decoder")
    (query,) = tokens_at(hybrid, [(70, 50)], 0)
    assert query.index == 4 + 2
    with pytest.raises(BadInputError, match="--level 1: this RealTimeDETR has one level, 0"):
        tokens_at(hybrid, [(70, 50)], 1)


@pytest.mark.parametrize("point", [(100, 10), (10, 60), (-1, 0)])
def test_points_outside_the_image_are_refused(point):
    with pytest.raises(BadInputError, match="is outside the image: x must be below 100 and y below 60 pixels"):
        tokens_at(record(), [point], 0)


def test_levels_that_are_not_there_are_refused():
    with pytest.raises(BadInputError, match="--level 1: this DETR has one level, 0"):
        tokens_at(record(), [(1, 1)], 1)
    with pytest.raises(BadInputError, match="--level -1: this DeformableDETR has levels 0 to 1"):
        tokens_at(record(**DEFORMABLE), [(1, 1)], -1)


def test_heat_lies_where_the_attended_cell_is():
    """Row 2, column 3 of cells of 8 pixels, at twice their size on disk: x from 48 to 64, y from 32 to 48."""
    weights = torch.full((1, 2, 1, 32), 0.01)
    weights[0, 0, 0, 2 * 8 + 3] = 0.5
    _, panels = new_grid(1, 1, (2, 2), "one")
    note = drawing._paint_weights(panels[0, 0], record(), weights, 0, 0)
    (heat,) = panels[0, 0].images
    values, (left, right, bottom, top) = heat.get_array(), heat.get_extent()
    rows, columns = values.shape
    assert (rows, columns) == (4, 7)  # the eighth column is padding
    row, column = np.unravel_index(values.argmax(), values.shape)
    cell = left + (right - left) * np.array([column, column + 1]) / columns, top + (bottom - top) * np.array([row, row + 1]) / rows
    assert np.allclose(cell, [[48, 64], [32, 48]])
    assert np.count_nonzero(values) == 1
    assert note == "peak 14.0 x even"  # 0.5 of 28 cells
    assert drawing._paint_weights(panels[0, 0], record(), weights, 0, None) == "peak 7.1 x even"


def test_samples_lie_where_they_are_read():
    """Half of a canvas of 64 x 32 as fed is (32, 16), (64, 32) on disk; a quarter of the weight has a quarter of the area."""
    locations = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).view(1, 1, 1, 2, 1, 2)
    weights = torch.tensor([0.75, 0.25]).view(1, 1, 1, 2, 1)
    box = torch.tensor([0.5, 0.5, 0.25, 0.5]).expand(1, 1, 2, 4)
    _, panels = new_grid(1, 1, (2, 2), "one")
    axes = panels[0, 0]
    note = drawing._paint_samples(axes, record(**DEFORMABLE), (locations, weights, box), 0, 0)
    dots = [(*dot.get_offsets().tolist()[0], dot.get_sizes()[0] / drawing.LARGEST_POINT) for dot in axes.collections]
    assert dots == [(64, 32, 0.75), (32, 48, 0.25)]
    cross, outline = axes.lines
    assert cross.get_xydata().tolist() == [[64, 32]]
    assert outline.get_xydata().tolist() == [[48, 16], [80, 16], [80, 48], [48, 48], [48, 16]]
    assert note == "levels 75/25 %"


DRAWN = {"detr": {}, "deformable": DEFORMABLE, "dino": DINO, "rtdetr": RTDETR, "dfine": DFINE}


@pytest.mark.parametrize("kind", DRAWN)
def test_attention_is_drawn_by_command(tmp_path, kind):
    weights = save_random(tmp_path / "run" / "model.pth", MODEL__DETR__ENC_LAYERS=2, **DRAWN[kind])
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 72, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    words = ["show", "attention", weights, "--input", tmp_path / "image.png", "--output", tmp_path / "out"]
    result = call(*words, "--points", "5,40 70,3", "--points", "20,20")
    assert result.exit_code == 0, result.output
    names = ["encoder.png", "encoder_heads.png", "decoder.png", "decoder_heads.png"]
    assert result.output.split() == [str(tmp_path / "out" / name) for name in names]
    assert all(Image.open(tmp_path / "out" / name).width > 300 for name in names)


def test_by_offset_undoes_what_depends_on_the_offset_alone():
    height, width = 3, 4
    kernel = torch.rand(2 * height - 1, 2 * width - 1)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    dy = y[None, None] - y[:, :, None, None] + height - 1
    dx = x[None, None] - x[:, :, None, None] + width - 1
    assert torch.allclose(AttentionByPosition(0, kernel[dy, dx]).by_offset(), kernel)


def test_attention_to_itself():
    """2 x 1 places: all on itself is twice even."""
    assert AttentionByPosition(0, torch.eye(2).view(2, 1, 2, 1)).on_itself() == 2
    assert AttentionByPosition(0, torch.full((2, 1, 2, 1), 0.5)).on_itself() == 1


def test_attention_by_place_is_the_mean_over_heads_and_images():
    detector = detector_of(MODEL__DETR__ENC_LAYERS=2)
    images = noise((40, 64), (40, 64))
    found = average_attention(detector, images, 1)
    batch = detector.preprocess(images)
    layer = detector.transformer.encoder.layers[1].self_attn
    with record_inputs({"layer": layer}) as inputs, torch.no_grad():
        detector(batch.images, batch.padding_mask)
        expected = attention_weights(layer, *inputs["layer"]).mean((0, 1)).view(5, 8, 5, 8)
    assert found.shape == (5, 8) and found.layer == average_attention(detector, images, 9).layer == 1
    assert (found.weights - expected).abs().max() < 1e-6


@pytest.mark.parametrize("encoding", ["sine", "peg", "sine+peg"])
@pytest.mark.parametrize("more", [{}, DEFORMABLE], ids=["detr", "deformable"])
def test_padding_does_not_change_what_is_added(encoding, more):
    detector = detector_of(MODEL__POSITION__NAME=encoding, **more)
    images, beside = noise((48, 64), (48, 64)), torch.zeros(3, 80, 96, dtype=torch.uint8)
    (alone, _), (padded, mask) = added_by(detector, images), added_by(detector, images, beside)
    assert mask.any() and len(alone) == len(padded) == 1 + ("+" in encoding)
    for one, other in zip(alone, padded, strict=True):
        for short, wide in zip(one.maps, other.maps, strict=True):
            height, width = short.shape[2:]
            assert (short - wide[:, :, :height, :width]).abs().max() < 1e-5
            assert short.std() > 1e-3
            if one.layer is not None:
                assert not wide.masked_select(level_padding_mask(mask, 80 // wide.shape[2])[:, None]).any()


def write_config(folder, name, **more):
    path = folder / f"{name}.yaml"
    path.write_text(random_config(**more).dump(), encoding="utf-8")
    return path


def test_encodings_are_drawn_side_by_side(tmp_path, monkeypatch):
    """The attention is that of the first layer after every encoding; the last model alone has a layer after its PEG."""
    found, draw = [], drawing.draw_found
    monkeypatch.setattr(drawing, "draw_found", lambda pairs, *more: found.extend(pairs) or draw(pairs, *more))
    configs = [write_config(tmp_path, name, MODEL__POSITION__NAME=name) for name in ("none", "peg")]
    weights = save_random(tmp_path / "run" / "model.pth", MODEL__POSITION__NAME="sine+peg", MODEL__DETR__ENC_LAYERS=2)
    result = call("show", "position", *configs, weights, "--output", tmp_path / "out", "--size", "40x64")
    assert result.exit_code == 0, result.output
    pictures = [str(tmp_path / "out" / f"{name}.png") for name in ("added", "kernels", "attention")]
    lines = result.output.splitlines()
    assert lines == pictures and all(Image.open(path).width > 300 for path in pictures)
    names = ["none, random weights", "peg, random weights", "sine+peg, run/model.pth"]
    assert [(name, attention.layer) for name, attention in found] == list(zip(names, (0, 0, 1), strict=True))


def test_deformable_detr_has_no_attention_by_place(tmp_path):
    config = write_config(tmp_path, "deformable", MODEL__POSITION__NAME="sine_offset", **DEFORMABLE)
    Image.new("RGB", (30, 20), "red").save(tmp_path / "image.png")
    result = call("show", "position", config, "--output", tmp_path / "out", "--size", "48x32", "--input", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no kernels.png was written: no model has a PEG" in result.output
    assert "not in attention.png: sine_offset, random weights, which has no attention between all tokens" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["added.png"]


@pytest.fixture
def panels(monkeypatch):
    """What is drawn instead of drawing it: canvas, objects and title."""
    drawn = []

    def note(canvas, objects, names, title):
        drawn.append((canvas, objects, [names[label] for label in objects.labels], title))
        return to_pil_image(canvas)

    monkeypatch.setattr(feeding, "draw_panel", note)
    return drawn


def show_data(drawn_coco, tmp_path, *words, **more):
    (tmp_path / "run.yaml").write_text("VERSION: 2\n")
    options = ["--config-file", tmp_path / "run.yaml", "--runner", "builtin", "--output", tmp_path / "pictures", *words]
    return call("show", "data", *options, *overrides(drawn_coco.files, tmp_path / "out", **more))


def test_test_images_are_drawn_as_they_are_fed(drawn_coco, tmp_path, panels):
    """Image 7, 40 x 72 pixels, at its own size beside image 12, 64 x 48: pixels as on disk, then stripes."""
    result = show_data(drawn_coco, tmp_path, "--count", 2, TEST__IMS_PER_BATCH=2, INPUT__MIN_SIZE_TEST=0)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'pictures/drawn.png'}: 2 of 5 images" in result.output
    canvas, objects, names, title = panels[2]
    records = {record.image_id: record for record in load_coco(drawn_coco.files).records}
    pixels = torch.from_numpy(np.array(Image.open(records[7].file_name))).permute(2, 0, 1)
    assert torch.equal(canvas[:, :40, :72], pixels)
    assert canvas.shape == (3, 64, 72) and set(canvas[:, 40:].unique().tolist()) == {205, 235}
    assert np.allclose(objects.boxes_xyxy, records[7].boxes_xyxy) and names == ["green", "red"]
    assert title == "batch 0, image 7: 72 x 40 of 72 x 40, on 72 x 64"
    assert Image.open(tmp_path / "pictures" / "drawn.png").size == (72 + 8 + 72, 64)


def test_boxes_follow_the_resized_image(drawn_coco, tmp_path, panels):
    result = show_data(drawn_coco, tmp_path, "--count", 5, INPUT__MIN_SIZE_TEST=80, INPUT__MAX_SIZE_TEST=1000)
    assert result.exit_code == 0, result.output
    canvas, objects, _, title = panels[-1]
    assert title == "batch 4, image 5: 80 x 112 of 40 x 56, on 80 x 112"
    assert np.allclose(objects.boxes_xyxy, [[9, 12.5, 50, 74]])
    inside = canvas[:, 14:73, 11:49].float().mean((1, 2))
    assert inside[1] > 200 > 60 > inside[0]  # the green rectangle that the box is of


def test_training_images_are_drawn_with_the_boxes_that_are_learned(drawn_coco, tmp_path, panels):
    """In every augmented image the boxes lie on the coloured rectangles; what SOLVER.ACCUMULATE parts, has a canvas of its own."""
    more = {"SOLVER__IMS_PER_BATCH": 4, "SOLVER__ACCUMULATE": 2, "INPUT__RANDOM_FLIP": "horizontal"}
    result = show_data(drawn_coco, tmp_path, "--count", 8, DATASETS__TEST=(), INPUT__MIN_SIZE_TRAIN=(64,), **more)
    assert result.exit_code == 0, result.output
    assert [title.split(",")[0] for *_, title in panels] == [f"batch {n // 2}" for n in range(8)]
    colours = {"red": 0, "green": 1, "blue": 2}
    checked = 0
    for canvas, objects, names, _ in panels:
        for (x1, y1, x2, y2), name in zip(objects.boxes_xyxy.round().int().tolist(), names, strict=True):
            inside = canvas[:, y1 + 2 : y2 - 2, x1 + 2 : x2 - 2].float()
            if inside.numel() and min(inside.shape[1:]) > 5:
                checked += 1
                assert inside.mean((1, 2)).argmax() == colours[name]
    assert checked >= 4
    first = [panel[0] for panel in panels]
    assert show_data(drawn_coco, tmp_path, "--count", 8, DATASETS__TEST=(), INPUT__MIN_SIZE_TRAIN=(64,), **more).exit_code == 0
    assert all(torch.equal(one, panel[0]) for one, panel in zip(first, panels[8:], strict=True))  # by SEED


def test_the_smallest_numbers_of_a_point_are_read():
    assert command._point("0,12.5") == (0, 12.5)
    assert command._point("-3,4") == (-3, 4)


@pytest.mark.parametrize("encoding", [name for name, _ in POSITION_REGISTRY if name != "sine_scrambled"])
def test_kernels_are_drawn_of_every_encoding_that_has_them(encoding, tmp_path):
    model = NamedDetector(encoding, detector_of(MODEL__POSITION__NAME=encoding))
    drawn = draw_kernels([model], tmp_path / "kernels.png")
    has_pegs = "peg" in encoding and encoding != "peg_ffn"  # whose convolution is one of many channels inside a layer
    assert (drawn is not None) == has_pegs == (tmp_path / "kernels.png").exists()


def test_places_of_pegs_in_words():
    assert _place("pegs.before.0") == "before the first layer, level 0"
    assert _place("pegs.2.1") == "after layer 2, level 1"
    assert _place("pegs.0.1.3") == "after layer 0, level 1, number 3"
    assert _place("pegs.1") == "to queries and keys, level 1"
