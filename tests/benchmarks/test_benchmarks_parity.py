# SPDX-License-Identifier: Apache-2.0
"""The parity command: what it compares, what it must notice, and the tables that it reads and writes. Needs no checkout."""

import contextlib
import copy
import json
import sys

import pytest
import torch
from click.testing import CliRunner

from benchmarks import parity, parity_models, parity_outcomes
from benchmarks.detrex_model import EmptyModules
from benchmarks.parity_tables import Figure, look_up, read_cells, summary, written_into
from benchmarks.parity_variants import Variant, variants

KEYS = {"BACKBONE.NAME": "resnet10", "DETR.HIDDEN_DIM": 32, "DETR.NHEADS": 4, "DETR.DIM_FEEDFORWARD": 48, "DETR.ENC_LAYERS": 1}
KEYS |= {"DETR.DEC_LAYERS": 2, "DETR.NUM_OBJECT_QUERIES": 12, "DETECTOR.DECODER_POSITION": "same"}
OVERRIDES = tuple(text for key, value in KEYS.items() for text in (f"MODEL.{key}", str(value)))
TINY = Variant("stand-in", "tiny", "detr_r50_sine_50ep.yaml", OVERRIDES, sizes=((40, 64), (33, 60)))
WEIGHTS = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
DOCUMENT = """# Parity

## one

| model | dtype | logits | total |
|---|---|---|---|
| a | float64 | 1.0e-15 | not comparable |
| a | float32 | 2.0e-06 | 0.0e+00 |

| model | code | logits |
|---|---|---|
| a | ours | 3.0e-07 |

## two

| model | logits |
|---|---|
| a | 4.0e-15 |
"""


class StandInCriterion(torch.nn.Module):
    """The criterion of transformers' DETR, called as the official one."""

    def __init__(self, config):
        super().__init__()
        self.config = copy.copy(config)
        self.config.auxiliary_loss = True  # in its decoder it would norm the outputs between layers
        self.weight_dict = {f"{name}{suffix}": weight for name, weight in WEIGHTS.items() for suffix in ("", "_0")}

    def forward(self, output, labels):
        from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

        logits, boxes = (torch.stack([output["aux_outputs"][0][name], output[name]]) for name in ("pred_logits", "pred_boxes"))
        before = torch.get_default_dtype()
        torch.set_default_dtype(logits.dtype)  # its weight of "no object" has the default dtype
        try:
            given = (logits[-1], renamed(labels), "cpu", boxes[-1], self.config, logits, boxes)
            return ForObjectDetectionLoss(*given)[1]
        finally:
            torch.set_default_dtype(before)

    def matcher(self, output, labels):
        from transformers.loss.loss_for_object_detection import HungarianMatcher

        matcher = HungarianMatcher(class_cost=1, bbox_cost=5, giou_cost=2)
        return matcher({"logits": output["pred_logits"], "pred_boxes": output["pred_boxes"]}, renamed(labels))


def renamed(labels):
    return [{"class_labels": of["labels"], "boxes": of["boxes"]} for of in labels]


def stand_in():
    """A small DETR of transformers as a peer; its decoder layers' outputs are taken with hooks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    words = {"num_labels": 91, "d_model": 32, "num_queries": 12, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    words |= {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("attention_heads", 4), ("ffn_dim", 48))}
    backbone = transformers.ResNetConfig(downsample_in_bottleneck=False, out_features=["stage4"], **sizes)
    config = transformers.DetrConfig(backbone_config=backbone, **words)
    module = transformers.DetrForObjectDetection(config)
    for name, parameter in module.model.backbone.named_parameters():
        parameter.requires_grad_(any(f".stages.{stage}." in name for stage in (1, 2, 3)))

    def forward(batch):
        decoded = []
        hooks = [layer.register_forward_hook(lambda _, __, out: decoded.append(out)) for layer in module.model.decoder.layers]
        module.model(batch.images, pixel_mask=~batch.padding_mask)
        for hook in hooks:
            hook.remove()
        outputs = [module.model.decoder.layernorm(queries) for queries in decoded]
        first, last = (
            {"pred_logits": module.class_labels_classifier(queries), "pred_boxes": module.bbox_predictor(queries).sigmoid()}
            for queries in outputs
        )
        return {**last, "aux_outputs": [first]}

    return parity_models.Peer(module, StandInCriterion(config), forward, "hf_detr")


@pytest.fixture(scope="module")
def compared():
    """Peer, ours and its criterion in float64, the batch, and their outcome of it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peer = stand_in()
        for name, parameter in peer.module.named_parameters():
            if parameter.ndim == 2:  # queries and keys have other names than in the official code
                torch.nn.init.normal_(parameter, 0, 1 if "embedding" in name else parameter.shape[1] ** -0.5)
        batch, targets = parity_models.draw_batch(TINY.sizes, 91, 32)
        parity_models.draw_weights(peer, parity_models.in_dtype(batch, targets, torch.float32)[0])
        detector, criterion, _ = parity_models.build_ours(TINY, peer.module.state_dict(), peer.source)
    parity_models.to_dtype(peer, torch.float64)
    given = parity_models.in_dtype(batch, targets, torch.float64)
    return detector.double(), criterion, given, parity_outcomes.their_outcome(peer, *given)


def gaps(compared, criterion=None):
    detector, ours, given, theirs = compared
    return parity_outcomes.compare(parity_outcomes.our_outcome(detector, criterion or ours, *given), theirs)


def test_the_same_weights_give_the_same_answer_losses_and_gradients(compared):
    found = gaps(compared)
    assert found["logits"].shape == [2, 2, 12, 92]
    assert found["matchings that differ"].shape == [2 * 2]
    assert found.keys() == {"logits", "boxes", *WEIGHTS, "total", "gradient norm", "any gradient", "matchings that differ"}
    assert max(gap.relative for gap in found.values()) < parity.LIMITS["float64"]


def test_one_changed_weight_of_any_part_shows(compared):
    """The last trained weight of each part, a thousandth larger, moves some figure far out of rounding."""
    detector = compared[0]
    parts = {name.split(".")[0]: parameter for name, parameter in detector.named_parameters() if parameter.grad is not None}
    assert len(parts) >= 4
    for name, parameter in parts.items():
        before = parameter.detach().clone()
        torch.no_grad()(parameter.mul_)(1.001)
        worst = max(gap.relative for gap in gaps(compared).values())
        torch.no_grad()(parameter.copy_)(before)
        assert worst > 1e3 * parity.LIMITS["float64"], name
    assert max(gap.relative for gap in gaps(compared).values()) < parity.LIMITS["float64"]


def test_another_weight_of_a_loss_shows_in_total_and_gradients_alone(compared):
    cfg = parity_models.load_cfg(
        str(parity_models.CONFIGS / TINY.config), ["MODEL.NUM_CLASSES", "91", "MODEL.CRITERION.L1_WEIGHT", "4.0"]
    )
    found = gaps(compared, parity_models.build_criterion(cfg))
    differ = {name for name, gap in found.items() if gap.relative > parity.LIMITS["float64"]}
    assert differ == {"total", "gradient norm", "any gradient"}


def test_another_matching_and_a_missing_gradient_are_beyond_rounding(compared):
    detector, criterion, given, theirs = compared
    ours = parity_outcomes.our_outcome(detector, criterion, *given)
    ours.pairs[1, 0] = frozenset({(0, 0)})
    del ours.gradients[next(iter(ours.gradients))]
    found = parity_outcomes.compare(ours, theirs)
    figures = [Figure("p", {"dtype": "float64"}, name, gap.value, gap.shape, gap.relative) for name, gap in found.items()]
    assert {figure.column for figure in parity.beyond(figures)} == {"any gradient", "matchings that differ", "gradient norm"}
    assert found["matchings that differ"].value == 1
    for figure in figures:
        figure.deliberate = True
    assert not parity.beyond(figures)
    assert summary(figures).count("\n") == 1, "a heading and no row"


def test_float64_reaches_the_code_of_a_peer_and_nothing_after(compared):
    class Asks(torch.nn.Module):
        def forward(self):
            return torch.zeros(1, dtype=torch.float32), torch.zeros(1, dtype=torch.int64).float()

    with parity_outcomes.float64_for_float32(Asks()):
        assert [tensor.dtype for tensor in Asks()()] == [torch.float64] * 2
    assert [tensor.dtype for tensor in Asks()()] == [torch.float32] * 2


def figure(labels, column="logits", section="one"):
    return Figure(section, labels, column, 5e-9, [1], 5e-9)


def test_figures_find_their_cells_and_are_written_there():
    """A table without a column of dtypes is one of float64; cells that are no number stay."""
    of = [
        figure({"model": "a", "dtype": "float64"}),
        figure({"model": "a", "dtype": "float32"}),
        figure({"model": "a", "code": "ours"}),
    ]
    of += [figure({"model": "a", "dtype": "float64"}, section="two"), figure({"model": "a", "dtype": "float64"}, "total")]
    of += [figure({"model": "b", "dtype": "float64"})]
    look_up(of, DOCUMENT)
    assert [one.stated for one in of] == ["1.0e-15", "2.0e-06", "3.0e-07", "4.0e-15", "not comparable", ""]
    after = written_into(of, DOCUMENT)
    look_up(of, after)
    assert [one.stated for one in of] == ["5.0e-09"] * 4 + ["not comparable", ""]
    assert "| a | float32 | 5.0e-09 | 0.0e+00 |" in after
    assert after.count("\n") == DOCUMENT.count("\n")


def test_every_model_that_is_compared_has_its_rows_in_the_document():
    document = (parity.ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    rows = [(cell.section, cell.labels["model"], cell.column) for cell in read_cells(document)]
    dtypes = {(parity.SECTIONS[variant.peer], variant.name): (1 if variant.own_constants else 2) for variant in variants()}
    assert {row[:2] for row in rows if row[0] in parity.SECTIONS.values() and row[0] not in parity.PARITY_TESTS} == dtypes.keys()
    for row, count in dtypes.items():
        assert rows.count((*row, "any gradient")) == count, row


def test_the_document_has_the_figures_of_its_record():
    record = json.loads((parity.ROOT / "benchmarks" / "results" / "parity.json").read_text(encoding="utf-8"))
    figures = [Figure(**one) for one in record["figures"]]
    document = (parity.ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert written_into(figures, document) == document
    look_up(figures, document)
    assert sum(bool(figure.stated) for figure in figures) > 250


def test_the_command_says_what_it_left_out(tmp_path):
    words = ["--model", "no such model", "--output", str(tmp_path / "new" / "parity")]
    result = CliRunner().invoke(parity.main, words)
    assert result.exit_code == 0, result.output
    assert "left out: facebookresearch/detr: no checkout was given: --peer detr=PATH" in result.output
    content = json.loads((tmp_path / "new" / "parity.json").read_text())
    assert content["left_out"].keys() >= {"facebookresearch/detr", "fundamentalvision/Deformable-DETR", "detrex"}
    assert "## " not in (tmp_path / "new" / "parity.md").read_text()


def test_tables_of_the_parity_tests_are_read_after_pytests_own_dots():
    text = ".| resnet18, sine, float64 | total loss | 3.6e-15 | 25.4 |\n| multi, float32 | boxes | 1.2e-07 | 0.9 |\n.\n2 passed"
    assert parity.PRINTED.findall(text) == [
        ("resnet18, sine, float64", "total loss", "3.6e-15", "25.4"),
        ("multi, float32", "boxes", "1.2e-07", "0.9"),
    ]


def test_empty_modules_stand_in_for_the_named_packages_only(monkeypatch):
    finder = EmptyModules(("absent_a",), ("absent_b._C",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    with contextlib.ExitStack() as stack:
        for name in ("absent_a", "absent_a.inner"):
            stack.callback(sys.modules.pop, name, None)
        from absent_a.inner import Anything

        assert isinstance(Anything, type)
        with pytest.raises(ImportError):
            import absent_c  # noqa: F401
