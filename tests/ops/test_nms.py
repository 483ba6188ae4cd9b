# SPDX-License-Identifier: Apache-2.0
"""Proposals that a better one stands for come last, detections get the score 0: as by torchvision, in exports by loops."""

import pytest
import torch
import torchvision

from cpvt_det.evaluation.answers import without_copies
from cpvt_det.ops.nms import nms_topk, nms_topk_exportable


def draw(seed, images=3, boxes=80, clusters=9):
    """Boxes around a few centres, so that many overlap, and scores without ties; the last of image 0 are padded."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.rand(images, clusters, 2, generator=generator).repeat(1, boxes // clusters + 1, 1)[:, :boxes]
    centers = centers + 0.03 * torch.randn(images, boxes, 2, generator=generator)
    sides = 0.2 + 0.1 * torch.rand(images, boxes, 2, generator=generator)
    padded = torch.zeros(images, boxes, dtype=torch.bool)
    padded[0, -20:] = True
    scores = torch.randn(images, boxes, generator=generator).masked_fill(padded, -50.0)
    return torch.cat((centers - sides / 2, centers + sides / 2), -1), scores, padded


def expected_order(boxes, scores, padded, threshold):
    """One image, by the definition: kept ones by score, suppressed ones by score, padded ones."""
    kept = torchvision.ops.nms(boxes[~padded], scores[~padded], threshold).tolist()
    rest = [int(i) for i in scores[~padded].argsort(descending=True) if int(i) not in kept]
    return kept + rest


@pytest.mark.parametrize("choose", [nms_topk, nms_topk_exportable])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("count", [5, 60])
def test_the_order_is_that_of_nms_then_score(choose, threshold, count):
    for seed in range(4):
        boxes, scores, padded = draw(seed)
        chosen = choose(boxes, scores, padded, threshold, count)
        for image in range(len(boxes)):
            order = expected_order(boxes[image], scores[image], padded[image], threshold)
            assert chosen[image].tolist() == order[:count]


@pytest.mark.parametrize(("clusters", "looked"), [(300, [40]), (2, [40, 160, 640, 1000]), (8, [40, 160])])
def test_no_more_boxes_are_looked_at_than_it_takes(monkeypatch, clusters, looked):
    """A thousand boxes around many, few and some centres: ten that stand apart are among the best 40, none, or the best 160."""
    boxes, scores, padded = (one[:1] for one in draw(7, images=2, boxes=1000, clusters=clusters))
    padded = torch.zeros_like(padded)
    numbers = []
    noted = lambda found, *rest: numbers.append(len(found)) or torchvision.ops.nms(found, *rest)  # noqa: E731
    monkeypatch.setattr("cpvt_det.ops.nms.nms", noted)
    chosen = nms_topk(boxes, scores, padded, 0.3, 10)
    assert chosen[0].tolist() == expected_order(boxes[0], scores[0], padded[0], 0.3)[:10]
    assert numbers == looked


def test_padded_ones_fill_what_is_left_and_none_is_chosen_twice():
    boxes, scores, padded = draw(5)
    for choose in (nms_topk, nms_topk_exportable):
        chosen = choose(boxes, scores, padded, 0.6, 70)
        assert sorted(chosen[0, :60].tolist()) == list(range(60))
        assert padded[0][chosen[0, 60:]].all()
        assert all(len(set(image.tolist())) == 70 for image in chosen)


def test_boxes_without_area_suppress_nothing():
    boxes, scores = torch.zeros(1, 3, 4), torch.tensor([[1.0, 3.0, 2.0]])
    for choose in (nms_topk, nms_topk_exportable):
        assert choose(boxes, scores, torch.zeros(1, 3, dtype=torch.bool), 0.5, 3).tolist() == [[1, 2, 0]]


def test_an_exported_program_takes_the_steps_as_one_loop():
    """Of any number of boxes; it does not grow with the number of steps."""

    class Chooser(torch.nn.Module):
        def __init__(self, count):
            super().__init__()
            self.count = count

        def forward(self, boxes, scores, padded):
            chosen = nms_topk(boxes, scores, padded, 0.6, self.count)
            ranked = scores.gather(1, chosen).sort(descending=True).values
            return chosen, without_copies(boxes.gather(1, chosen[..., None].expand(-1, -1, 4)), ranked, chosen % 2, 0.6)

    images, boxes = torch.export.Dim("images", min=1), torch.export.Dim("boxes", min=61)
    shapes = {name: {0: images, 1: boxes} for name in ("boxes", "scores", "padded")}
    programs = {count: torch.export.export(Chooser(count), draw(0), dynamic_shapes=shapes) for count in (5, 60)}
    assert "torchvision" not in str(programs[5].graph)
    assert len(programs[5].graph.nodes) == len(programs[60].graph.nodes)
    for count, program in programs.items():
        for given in (draw(1), draw(2, images=1, boxes=200)):
            for found, expected in zip(program.module()(*given), Chooser(count)(*given), strict=True):
                assert torch.equal(found, expected)


def test_an_image_gets_the_same_choice_in_any_batch():
    """Of boxes on a coarse grid many overlaps are the threshold itself, where the last bit decides."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(1, 6, (16, 40, 2), generator=generator) / 10
    sides = torch.randint(1, 4, (16, 40, 2), generator=generator) / 10
    boxes, scores = torch.cat((corners, corners + sides), -1), torch.rand(16, 40, generator=generator)
    padded = torch.zeros(16, 40, dtype=torch.bool)
    together = nms_topk(boxes, scores, padded, 0.5, 30)
    for image in range(16):
        one = slice(image, image + 1)
        assert torch.equal(nms_topk(boxes[one], scores[one], padded[one], 0.5, 30)[0], together[image])


@pytest.mark.parametrize("threshold", [0.1, 0.4, 0.7])
def test_detections_that_are_left_are_those_of_torchvision(threshold):
    """Class by class, and an image alone has the scores that it has in a batch."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        centers = torch.rand(3, 9, 2, generator=generator).repeat(1, 9, 1) + 0.03 * torch.randn(3, 81, 2, generator=generator)
        sides = 0.2 + 0.1 * torch.rand(3, 81, 2, generator=generator)
        boxes = torch.cat((centers - sides / 2, centers + sides / 2), -1)
        scores = torch.rand(boxes.shape[:2], generator=generator).sort(descending=True).values
        labels = torch.randint(3, boxes.shape[:2], generator=generator)
        found = without_copies(boxes, scores, labels, threshold)
        for image in range(len(boxes)):
            kept = torchvision.ops.batched_nms(boxes[image], scores[image], labels[image], threshold)
            expected = torch.zeros_like(scores[image]).scatter(0, kept, scores[image][kept])
            assert torch.equal(found[image], expected) and 0 < len(kept) < boxes.shape[1]
            assert torch.equal(
                without_copies(*(part[image : image + 1] for part in (boxes, scores, labels)), threshold)[0], expected
            )


def test_a_copy_of_a_copy_and_boxes_without_area_stay():
    """The second box goes for the first, so that it takes nothing from the third."""
    boxes = torch.tensor([[[0.0, 0, 10, 10], [4, 0, 14, 10], [8, 0, 18, 10], [3, 3, 3, 3], [3, 3, 3, 3]]])
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    found = without_copies(boxes, scores, torch.zeros(1, 5, dtype=torch.int64), 0.4)
    assert found.tolist() == [pytest.approx([0.9, 0, 0.7, 0.6, 0.5])]
