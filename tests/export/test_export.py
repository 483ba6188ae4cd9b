# SPDX-License-Identifier: Apache-2.0
"""Exported programs: the model's answers at sizes never traced, aten alone, and a file only where that was seen."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from exports import kept_exports, shared_exports  # noqa: F401
from test_models import unlike_initial
from test_solver import tiny_cfg
from tiny import DETECTORS, DFINE, DINO, RTDETR
from torch.nn import functional as F

from cpvt_det import builders
from cpvt_det.builders.trained import load_model, load_trained
from cpvt_det.checkpoint.exported import open_program
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.cli import main
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Detections
from cpvt_det.export import check, program
from cpvt_det.export.program import Canvas, ExportModule, prepare, trace
from cpvt_det.layers.norm import MaskedBatchNorm2d, MaskedGroupNorm, NoNorm
from cpvt_det.models.real_time_detr import RepVGGBlock
from cpvt_det.position.peg import PEGDetection

pytestmark = pytest.mark.usefixtures("shared_exports")
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("cat", "dog", "tree")
STATIC = ("--dynamic", "none", "--batch", "2", "--size", "48x64")
NMS = {"MODEL__QUERIES__NMS_THRESHOLD": 0.6}
ONE_STAGE = {"MODEL__DETECTOR__BOX_REFINEMENT": False, "MODEL__DETECTOR__TWO_STAGE": False}
REFINE = {"MODEL__DETECTOR__TWO_STAGE": False}


def make_cfg(kind="detr", position="peg", **more):
    overrides = {
        **{**DETECTORS, "dino": DINO, "dfine": DFINE, "rtdetr": RTDETR}[kind],
        "MODEL__POSITION__NAME": position,
        "INPUT__MIN_SIZE_TEST": 64,
        "INPUT__MAX_SIZE_TEST": 90,
    }
    return tiny_cfg(**{**overrides, **more})


def make(cfg):
    """A detector whose norms have seen something and whose answers differ from query to query."""
    torch.manual_seed(0)
    detector = unlike_initial(builders.build_detector(cfg)).eval()
    spread = {"sampling_offsets.bias": 2.0, "query_embed.weight": 2.0, "class_embed": 0.4, "bbox_embed": 0.4, "attn.in_proj": 0.5}
    for name, parameter in detector.named_parameters():
        for part, std in spread.items():
            if part in name:
                torch.nn.init.normal_(parameter, std=std)
    return detector


def save(tmp_path, cfg, detector=None, name="model.pth", **node):
    classes = {"ids": [3, 17, 90], "names": list(NAMES)}
    state = {"classes": classes, "config": cfg.dump(), **node}
    write_checkpoint({"model": (detector or make(cfg)).state_dict(), "cpvt_det": state}, tmp_path / name)
    return tmp_path / name


def export(weights, output, *words, format="torch_export"):
    command = ["export", weights, "--format", format, "--output", output, *words]
    return CliRunner().invoke(main, [str(word) for word in command])


def differences(output):
    """The largest difference by canvas, as the command prints them."""
    lines = (line.split(": boxes and scores differ from the model's by up to ") for line in output.splitlines())
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def namespaces(program):
    """Those of a program's operators, in all of its graphs; arithmetic on sizes has none."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return {node.target.namespace for graph in graphs for node in graph.nodes if hasattr(node.target, "namespace")}


def last_line(result):
    return result.output.strip().splitlines()[-1]


# What is exported, and that it is the model


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A two-stage Deformable-DETR with NMS of proposals and PEG as ONNX, all of it dynamic: config, model, file, output."""
    folder = tmp_path_factory.mktemp("shipped")
    cfg = make_cfg("deformable", "peg", **NMS, MODEL__DETR__DEC_LAYERS=1, MODEL__DETR__NUM_OBJECT_QUERIES=4)
    detector = make(cfg)
    for head in detector.class_embed:
        head.bias.data += 2  # sure enough to be printed
    result = export(save(folder, cfg, detector), folder / "detector.onnx", format="onnx")
    assert result.exit_code == 0, result.output
    return cfg, detector, folder / "detector.onnx", result.output


STATIC_CASES = [
    ("detr", "none", {}, ()),
    ("detr", "learned", {"MODEL__CRITERION__CLASSIFICATION__NAME": "focal"}, ()),
    ("detr", "sine+peg", {"MODEL__BACKBONE__NORM": "FrozenBN"}, ()),
    ("deformable", "sine_offset", {**REFINE, "TEST__NMS": 0.2}, ("--sampling", "grid_sample")),
    ("dino", "sine_offset+peg", {}, ()),
    ("deformable", "sine_offset+peg", {**ONE_STAGE, "MODEL__POSITION__PEG__NORM": "GN"}, ()),
    ("rtdetr", "sine_grid", {}, ()),
    ("dfine", "peg", {"MODEL__DETECTOR__NORM": "GN"}, ()),
    ("dfine", "sine_grid+peg", {}, ("--no-mask",)),
    ("detr", "learned", {}, ("--no-mask",)),
]


@pytest.mark.parametrize(("kind", "position", "more", "words"), STATIC_CASES)
def test_a_torch_program_gives_the_models_answers(tmp_path, kind, position, more, words):
    result = export(save(tmp_path, make_cfg(kind, position, **more)), tmp_path / "detector.pt2", *STATIC, *words)
    assert result.exit_code == 0, result.output
    extra = {"cpvt_det.json": ""}
    loaded = torch.export.load(tmp_path / "detector.pt2", extra_files=extra)
    assert namespaces(loaded) <= {"aten", "higher_order"}
    assert json.loads(extra["cpvt_det.json"])["class_names"] == list(NAMES)
    assert json.loads(extra["cpvt_det.json"])["class_ids"] == [3, 17, 90]


@pytest.mark.parametrize(("kind", "position", "more", "words"), [STATIC_CASES[1], STATIC_CASES[3], STATIC_CASES[4]])
def test_an_onnx_file_gives_the_models_answers(tmp_path, kind, position, more, words):
    result = export(save(tmp_path, make_cfg(kind, position, **more)), tmp_path / "detector.onnx", *STATIC, *words, format="onnx")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.glob("detector*")] == ["detector.onnx"]


def test_a_program_without_a_mask_takes_images_alone_and_stretches_them(tmp_path):
    """Its answers are those of the model for the stretched image, and nothing in it masks."""
    onnx = pytest.importorskip("onnx")
    weights = save(tmp_path, make_cfg("detr", "peg"))
    choices = {}
    for name, words in {"masked": (), "filled": ("--no-mask",)}.items():
        result = export(weights, tmp_path / f"{name}.onnx", "--dynamic", "batch", "--size", "64x96", *words, format="onnx")
        assert result.exit_code == 0, result.output
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        choices[name] = sum(node.op_type == "Where" for node in graph.node)
        assert [one.name for one in graph.input] == ["images", "padding_mask"][: 2 if name == "masked" else 1]
    assert choices["filled"] < 0.3 * choices["masked"]
    model, original = load_model(tmp_path / "filled.onnx"), load_trained(weights, "cpu")
    images = [torch.randint(0, 255, (3, *size), dtype=torch.uint8) for size in ((40, 90), (64, 30))]
    batch = model.detector.preprocess(images)
    assert batch.images.shape == (2, 3, 64, 96) and not batch.padding_mask.any()
    stretched = [F.interpolate(image[None].float(), (64, 96), mode="bilinear", antialias=True)[0] for image in images]
    assert torch.equal(batch.images, torch.stack(stretched))
    found = builders.build_output_decoder(original.cfg).decode(model.detector(batch.images, batch.padding_mask))
    prepared = original.detector.preprocess(stretched)
    with torch.no_grad():
        expected = builders.build_output_decoder(original.cfg).decode(original.detector(prepared.images, prepared.padding_mask))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["dino", "dfine"])
def test_a_program_of_any_size_gives_the_models_answers(tmp_path, kind):
    """Of mixed queries, refined positions, levels that are joined and distributions nothing depends on the size that was traced."""
    result = export(save(tmp_path, make_cfg(kind, "peg")), tmp_path / "detector")
    assert result.exit_code == 0, result.output
    found = differences(result.output)
    assert list(found) == ["1 x 32 x 80", "3 x 80 x 48", "4 x 96 x 96"] and max(found.values()) < 1e-4


@pytest.mark.parametrize(("format", "nms"), [("torch_export", 1.0), ("onnx", 1.0), ("openvino", 1.0), ("torch_export", 0.5)])
def test_half_precision_stays_near(tmp_path, format, nms):
    path = save(tmp_path, make_cfg("deformable", "sine_offset", TEST__NMS=nms, **REFINE))
    if format == "openvino":
        pytest.importorskip("openvino")
    result = export(path, tmp_path / ("detector.xml" if format == "openvino" else "detector"), *STATIC, "--half", format=format)
    assert result.exit_code == 0, result.output
    assert 1e-5 < max(differences(result.output).values()) < 2e-2


def test_three_batches_are_compared_of_sizes_that_were_not_traced(shipped):
    found = differences(shipped[3])
    assert list(found) == ["1 x 32 x 80", "3 x 80 x 48", "4 x 96 x 96"] and max(found.values()) < 1e-4


def test_an_onnx_file_has_aten_alone_left_of_its_domains_and_takes_one_stride(shipped):
    onnx, (cfg, detector, path, _) = pytest.importorskip("onnx"), shipped
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} == {""}
    assert (model.ir_version, [(one.domain, one.version) for one in model.opset_import]) == (8, [("", 18)])
    onnx.checker.check_model(model)
    assert b"stack_trace" not in path.read_bytes() and str(ROOT).encode() not in path.read_bytes()
    answers = open_program(path, "onnx").run(torch.full((1, 3, 16, 16), 99.0), torch.zeros(1, 16, 16, dtype=torch.bool))
    with torch.no_grad():
        batch = detector.preprocess([torch.full((3, 16, 16), 99)])
        expected = builders.build_postprocessor(cfg).decode(detector(batch.images, batch.padding_mask))
    for found, wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_program_keeps_the_thresholds_of_the_weights(tmp_path):
    kept = {"overall": 0.3125, "classes": [0.25, None, 0.75]}
    for name, node in (("with", {"thresholds": kept}), ("without", {})):
        result = export(save(tmp_path, make_cfg("detr", "none"), **node), tmp_path / f"{name}.pt2", *STATIC)
        assert result.exit_code == 0, result.output
        extra = {"cpvt_det.json": ""}
        torch.export.load(tmp_path / f"{name}.pt2", extra_files=extra)
        facts = json.loads(extra["cpvt_det.json"])
        expected = {"threshold": 0.3125, "class_thresholds": [0.25, None, 0.75]} if node else {}
        assert {key: value for key, value in facts.items() if "threshold" in key} == expected


def test_everything_that_may_differ_from_call_to_call_is_dynamic_by_default(tmp_path):
    cfg = make_cfg()
    module = ExportModule(prepare(make(cfg)), builders.build_postprocessor(cfg))
    traced = trace(module, Canvas(2, 24, 32))
    for canvas in (Canvas(1, 16, 24), Canvas(5, 40, 104)):
        boxes, scores, labels = traced.module()(
            torch.zeros(canvas.batch, 3, canvas.height, canvas.width),
            torch.zeros(canvas.batch, canvas.height, canvas.width, dtype=torch.bool),
        )
        assert boxes.shape == (canvas.batch, 6, 4) and scores.shape == labels.shape == (canvas.batch, 6)
        assert labels.dtype == torch.int64


def test_pixels_under_the_padding_do_not_matter():
    cfg = make_cfg("deformable", "peg")
    module = ExportModule(prepare(make(cfg)), builders.build_postprocessor(cfg))
    images, mask = torch.rand(2, 3, 32, 48) * 255, torch.zeros(2, 32, 48, dtype=torch.bool)
    mask[0, 20:], mask[1, :, 33:] = True, True
    with torch.no_grad():
        answers = [module(images.masked_fill(mask[:, None], filling), mask) for filling in (0.0, 1e6)]
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


def test_pegs_are_folded_in_the_copy_alone():
    detector = make(make_cfg("deformable", "peg"))
    ready = prepare(detector)
    norms = [[peg.norm for peg in model.modules() if isinstance(peg, PEGDetection)] for model in (detector, ready)]
    assert len(norms[1]) == 2 and all(isinstance(norm, NoNorm) for norm in norms[1])
    assert not any(isinstance(norm, NoNorm) for norm in norms[0])
    ready = prepare(make(make_cfg("deformable", "peg", MODEL__POSITION__NORM="GN")))
    assert all(isinstance(peg.norm, MaskedGroupNorm) for peg in ready.modules() if isinstance(peg, PEGDetection))


def test_the_norms_and_branches_of_a_hybrid_encoder_are_folded():
    """Of a group norm nothing is, and it stands in every convolution."""
    left = {}
    for norm in ("BN", "GN"):
        ready = prepare(make(make_cfg("dfine", "peg", MODEL__DETECTOR__NORM=norm)))
        parts = [*ready.transformer.encoder.modules(), *ready.neck.modules()]
        left[norm] = {type(part) for part in parts if isinstance(part, (MaskedBatchNorm2d, MaskedGroupNorm))}
        assert {part.conv2 is None for part in parts if isinstance(part, RepVGGBlock)} == {norm == "BN"}
    assert left == {"BN": set(), "GN": {MaskedGroupNorm}}


@pytest.mark.parametrize("kind", ["detr", "deformable", "dino", "dfine"])
def test_a_program_in_full_precision_is_one_graph(kind):
    """Blocks that leave autocast would be graphs of their own, and all would be traced a second time to put them in place."""
    cfg = make_cfg(kind, "peg")
    traced = trace(ExportModule(prepare(make(cfg)), builders.build_postprocessor(cfg)), Canvas(1, 32, 48), ())
    assert [module for module in traced.graph_module.modules() if module is not traced.graph_module] == []


# The comparison


def detections(boxes, scores, labels):
    return Detections(torch.tensor(boxes).view(-1, 4), torch.tensor(scores), torch.tensor(labels))


def test_differences_are_those_of_the_nearest_pairs():
    """Two detections of one score in the other order, one box off by 0.02, one score by 0.01; one that was left out."""
    one, two, three = [0.1, 0.1, 0.3, 0.3], [0.5, 0.5, 0.9, 0.9], [0.2, 0.6, 0.4, 0.8]
    expected = detections([one, two, three, one], [0.8, 0.8, 0.5, 0.1], [0, 0, 1, 1])
    moved = [0.2, 0.6, 0.42, 0.8]
    found = detections([two, one, moved], [0.8, 0.8, 0.51], [0, 0, 1])
    assert check.difference(found, expected) == pytest.approx(0.02)


COPIES = ([0.1, 0.1, 0.5, 0.5], [0.1, 0.1, 0.5, 0.45], [0.6, 0.1, 0.9, 0.5])  # the second overlaps the first by 7 of 8


@pytest.mark.parametrize(
    ("scores", "labels", "nms", "is_right"),
    [
        ([0.8, 0.0, 0.5], [0, 0, 0], 0.5, True),
        ([0.8, 0.7, 0.5], [0, 0, 0], 0.5, False),  # a copy is left
        ([0.8, 0.7, 0.5], [0, 1, 0], 0.5, True),  # of another class
        ([0.8, 0.0, 0.5], [0, 1, 0], 0.5, False),
        ([0.8, 0.7, 0.0], [0, 0, 0], 0.95, False),  # one that overlaps none is gone
        ([0.8, 0.7, 0.5], [0, 0, 0], 0.875, True),  # rounding decides
        ([0.8, 0.0, 0.5], [0, 0, 0], 0.875, True),
    ],
)
def test_copies_are_read_off_the_boxes_found(scores, labels, nms, is_right):
    """The model's own copies have their scores: which of them rounding takes does not matter."""
    found = detections(COPIES, scores, labels)
    expected = detections(COPIES, [0.8, 0.71, 0.5], labels)
    difference = check.difference(found, expected, nms)
    assert difference == pytest.approx((0.01 if found.scores[1] else 0) if is_right else math.inf, abs=1e-6)


def test_with_nms_the_best_detection_is_not_left_out():
    expected = detections(COPIES, [0.8, 0.71, 0.5], [0, 0, 0])
    assert check.difference(detections(COPIES[1:], [0.71, 0.5], [0, 0]), expected, 0.5) == pytest.approx(0.09)


def test_one_expected_detection_does_not_serve_two():
    box, far = [0.1, 0.1, 0.3, 0.3], [0.5, 0.1, 0.7, 0.3]
    expected = detections([box, far], [0.8, 0.8], [0, 0])
    assert check.difference(detections([box, box], [0.8, 0.8], [0, 0]), expected) == pytest.approx(0.4)


@pytest.mark.parametrize("nms", [1.0, 0.7])
@pytest.mark.parametrize("spoil", ["label", "NaN box", "NaN score"])
def test_what_cannot_be_compared_differs_without_bound(spoil, nms):
    box = [0.1, 0.1, 0.3, 0.3]
    found = detections([box], [0.8], [0])
    if spoil == "label":
        found.labels += 1
    else:
        (found.boxes_xyxy if spoil == "NaN box" else found.scores).fill_(math.nan)
    assert math.inf == check.difference(found, detections([box], [0.8], [0]), nms)


def test_canvases_of_the_comparison_were_not_traced_and_are_padded():
    detector = make(make_cfg("deformable", "peg"))
    traced = check.traced_canvas(detector)
    unseen = check.unseen_canvases(detector, traced, program.DIMENSIONS)
    assert len({canvas.batch for canvas in [traced, *unseen]}) == 4
    assert all(canvas.height != traced.height and canvas.width != traced.width for canvas in unseen)
    assert all(canvas.height != canvas.width for canvas in unseen[:2])
    for canvas in unseen:
        sizes = [tuple(image.shape[1:]) for image in check.draw_images(canvas, 16)]
        assert len(set(sizes)) == canvas.batch
        batch = detector.preprocess(check.draw_images(canvas, 16))
        assert tuple(batch.images.shape[2:]) == (canvas.height, canvas.width) and batch.padding_mask.any((1, 2)).all()


def test_images_of_a_large_batch_have_pixels():
    assert min(min(image.shape[1:]) for image in check.draw_images(Canvas(200, 32, 80), 16)) > 1


def test_a_program_that_is_not_the_model_leaves_no_file(tmp_path, monkeypatch):
    def prepare_wrongly(detector, sampling):
        ready = prepare(detector, sampling)
        ready.class_embed.bias.data[0] += 0.01
        return ready

    monkeypatch.setattr(program, "prepare", prepare_wrongly)
    (tmp_path / "detector.pt2").write_text("older")
    result = export(save(tmp_path, make_cfg("detr", "none")), tmp_path / "detector.pt2", *STATIC)
    assert result.exit_code == 1
    assert last_line(result).startswith("stopped: the exported program differs from the model by up to")
    assert "no file was written" in last_line(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["detector.pt2", "model.pth", "model.pth.sha256"]
    assert (tmp_path / "detector.pt2").read_text() == "older"


# Bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "caffe"], "'caffe' is not one of"),
        (["--dynamic", "batch,depth"], "(did you mean 'width'?); known: batch, height, none, width"),
        (["--dynamic", "batch", "--size", "0x64"], "--size 0x64 is not HEIGHTxWIDTH"),
        (["--dynamic", "batch", "--size", "60x64"], "must be multiples of the model's stride 8; use 64x64"),
        (["--dynamic", "batch", "--size", "8x808"], "the model's learned encoding covers only 400 pixels"),
        (["--dynamic", "none"], "add --size HEIGHTxWIDTH"),
        (["--size", "64x64"], "--size 64x64 contradicts --dynamic"),
        (["--batch", "2"], "--batch 2 contradicts --dynamic"),
        (["--output", "nowhere/detector.pt2"], "the folder nowhere does not exist or cannot be written to"),
        (
            ["--format", "openvino"],
            "the name of an OpenVINO file must end in .xml; its weights are stored beside it, in a .bin file",
        ),
        (["MODEL.NUM_CLASSES", "7"], "MODEL.NUM_CLASSES is 7, but"),
        (["MODEL.POSITION.NAME", "none"], "fits only part of the config's model"),
        (["MODEL.POSITIONS", "none"], "unknown config key"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, words, said):
    result = export(save(tmp_path, make_cfg("detr", "learned")), tmp_path / "detector.pt2", *words)
    assert result.exit_code == 2
    assert said in last_line(result)
    assert not (tmp_path / "detector.pt2").exists()


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(BadInputError, match=r"--format onnx needs onnxscript: pip install 'cpvt-det\[export\]'"):
        program.require_packages("onnx")
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(BadInputError, match=r"needs onnxscript, nncf: pip install 'cpvt-det\[export,int8\]'"):
        program.require_packages("openvino", int8=True)
    program.require_packages("torch_export")
