# SPDX-License-Identifier: Apache-2.0
"""A classifier through the same road as a detector: data, training, resuming, evaluation, faults."""

import json
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from image_classes import class_words, draw_folders
from PIL import Image
from test_runner import assert_same_run
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError, UnknownNameError, WeightsError
from cpvt_det.common.structures import Targets, level_padding_mask
from cpvt_det.config import load_cfg
from cpvt_det.data.formats.image_folder import read_image_folder
from cpvt_det.data.loader import MappedDataset, TrainBatches
from cpvt_det.data.mapper import ClassMapper, central_transform, crop_transform
from cpvt_det.data.records import ImageRecord
from cpvt_det.evaluation.top_k import ClassEvaluator, format_accuracies, most_confused
from cpvt_det.losses.class_training import BatchMixing, ClassCriterion, ClassTrainingModel
from cpvt_det.models import BACKBONE_REGISTRY, Classifier
from cpvt_det.training.train import run

ALL = {
    "INPUT__CLASSIFY__RANDAUGMENT": (2, 9),
    "INPUT__CLASSIFY__ERASE": 0.5,
    "INPUT__CLASSIFY__MIXUP": 0.8,
    "INPUT__CLASSIFY__CUTMIX": 1.0,
    "INPUT__CLASSIFY__REPEATS": 2,
    "MODEL__CLASSIFIER__SMOOTHING": 0.1,
}


class ToyTokens(nn.Module):
    """A token backbone: patches of 16 pixels, and special tokens that are the mean of the valid patches times 1, 2, ..."""

    def __init__(self, num_special=1):
        super().__init__()
        self.strides, self.channels, self.size_divisibility, self.num_tokens = [16], [8], 16, num_special
        self.patch = nn.Conv2d(3, 8, 16, 16)

    def tokens(self, images, padding_mask):
        mask = level_padding_mask(padding_mask, 16).flatten(1)
        patches = self.patch(images).flatten(2).transpose(1, 2)
        mean = patches.masked_fill(mask[..., None], 0).sum(1) / (~mask).sum(1, keepdim=True)
        special = torch.stack([mean * (1 + n) for n in range(self.num_tokens)], 1) if self.num_tokens else None
        return special, patches, mask


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return draw_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def toy():
    BACKBONE_REGISTRY.register_as("toy_tokens")(ToyTokens)
    yield {"MODEL__BACKBONE__NAME": "toy_tokens", "MODEL__BACKBONE__STAGES": (5,)}
    del BACKBONE_REGISTRY._obj_map["toy_tokens"]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """A run of six iterations with every augmentation."""
    folder = tmp_path_factory.mktemp("trained")
    run(load_cfg("", class_words(folders, folder, **ALL, TEST__EVAL_PERIOD=3, TEST__REPORT=True)))
    return folder


def config(folders, output, **more):
    return load_cfg("", class_words(folders, output, **more))


def classifier(folders, output, **more):
    cfg = config(folders, output, **more)
    cfg.MODEL.NUM_CLASSES = 3
    torch.manual_seed(0)
    return build_detector(cfg)


def check_data(folders, output, **more):
    empty = output / "empty.yaml"
    empty.write_text("VERSION: 2\n")
    return CliRunner().invoke(
        main, ["check-data", "--config-file", str(empty), "--runner", "builtin", *class_words(folders, output, **more)]
    )


@pytest.mark.parametrize("kind", ["maps", "one", "two", "mean"])
def test_an_image_is_classified_the_same_alone_and_in_a_batch(kind, folders, tmp_path, toy):
    more = {} if kind == "maps" else {**toy, "MODEL__BACKBONE__NUM_SPECIAL": {"one": 1, "two": 2, "mean": 0}[kind]}
    model = classifier(folders, tmp_path, **more).double().eval()
    images = [torch.rand(3, *size).double() * 255 for size in ((48, 80), (37, 50), (96, 33))]
    together = model.preprocess(images)
    found = model(together.images, together.padding_mask).logits
    alone = [model(batch.images, batch.padding_mask).logits[:, 0] for batch in (model.preprocess([one]) for one in images)]
    assert found.shape == (2 if kind == "two" else 1, 3, 3)
    torch.testing.assert_close(found, torch.stack(alone, 1), rtol=0, atol=1e-10)


def test_the_heads_see_what_the_key_names(folders, tmp_path, toy):
    """By hand: the toy's class token is the mean of its patches, its second token twice that."""
    model = classifier(folders, tmp_path, **toy, MODEL__BACKBONE__NUM_SPECIAL=2).eval()
    mean = classifier(folders, tmp_path, **toy, MODEL__BACKBONE__NUM_SPECIAL=2, MODEL__CLASSIFIER__POOL="mean").eval()
    mean.load_state_dict({name: value for name, value in model.state_dict().items() if "distilled" not in name})
    batch = model.preprocess([torch.rand(3, 40, 20) * 255])
    first, second = model(batch.images, batch.padding_mask).logits
    torch.testing.assert_close(mean(batch.images, batch.padding_mask).logits[0], first)
    _, patches, mask = model.backbone.tokens(batch.images, batch.padding_mask)
    vector = 2 * patches[~mask].mean(0)
    torch.testing.assert_close(second[0], F.linear(vector, model.distilled_embed.weight, model.distilled_embed.bias))
    scores = model(batch.images, batch.padding_mask).scores()
    torch.testing.assert_close(scores, ((first + second) / 2).softmax(-1))


def test_a_head_that_cannot_be_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL: MODEL.CLASSIFIER.POOL is 'token', but the backbone has no class token"):
        classifier(folders, tmp_path, MODEL__CLASSIFIER__POOL="token")
    with pytest.raises(UnknownNameError, match=r"unknown MODEL.CLASSIFIER.POOL 'max'; known: mean, token"):
        classifier(folders, tmp_path, MODEL__CLASSIFIER__POOL="max")
    backbone = ToyTokens()
    del backbone.num_tokens
    with pytest.raises(TypeError, match=r"backbone with tokens ToyTokens has no num_tokens; its contract requires num_tokens"):
        Classifier(backbone, 3)


def test_a_run_writes_what_a_detector_s_run_writes(trained):
    results = json.loads((trained / "results.json").read_text())
    assert list(results["classes"]) == ["top1", "top1_class_mean", "top5", "top1-blue", "top1-green", "top1-red"]
    best = torch.load(trained / "model_best.pth", weights_only=True)["cpvt_det"]
    assert best["best"]["name"] == "classes/top1" and best["classes"]["names"] == ["blue", "green", "red"]
    answers = json.loads((trained / "inference/classes.json").read_text())
    assert len(answers) == 6 and answers[0]["class"] == "blue" and len(answers[0]["found"]) == 3
    right = sum(one["found"][0]["name"] == one["class"] for one in answers)
    assert results["classes"]["top1"] == pytest.approx(100 * right / 6) and results["classes"]["top5"] == 100
    for name in ("pictures/classes.png", "pictures/curves.png", "report/confusion.png", "inference/confusion.csv"):
        assert (trained / name).stat().st_size > 0, name
    assert "Classes that are confused most" in (trained / "report/report.md").read_text()
    log = (trained / "log.txt").read_text()
    assert "scores from" not in log and "train: 12 images of 3 classes" in log


def test_a_resumed_run_is_the_uninterrupted_one(trained, folders, tmp_path):
    """With every augmentation, on the image and on the batch."""
    words = class_words(folders, tmp_path, **ALL, TEST__EVAL_PERIOD=3)
    run(load_cfg("", [*words, "SOLVER.MAX_ITER", "3"]))
    run(load_cfg("", words), resume=True)
    whole, resumed = (torch.load(folder / "model_final.pth", weights_only=True)["model"] for folder in (trained, tmp_path))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_resumed_transformer_is_the_uninterrupted_one(trained, folders, tmp_path):
    """Layers left out at random and recomputed, two tokens, a teacher, a moving average of the weights, beside all the rest."""
    more = {
        **ALL,
        "MODEL__BACKBONE__NAME": "cpvt_tiny",
        "MODEL__BACKBONE__STAGES": (4,),
        "MODEL__BACKBONE__EMBED_DIM": 32,
        "MODEL__BACKBONE__DEPTH": 3,
        "MODEL__BACKBONE__NUM_HEADS": 2,
        "MODEL__BACKBONE__NUM_TOKENS": 2,
        "MODEL__BACKBONE__DROP_PATH": 0.5,
        "MODEL__CHECKPOINTING": True,
        "MODEL__CLASSIFIER__TEACHER": str(trained / "model_best.pth"),
        "SOLVER__EMA__ENABLED": True,
        "SOLVER__EMA__DECAY": 0.5,
        "DATASETS__TEST": (),
    }
    words = {name: class_words(folders, tmp_path / name, **more) for name in ("whole", "part")}
    run(load_cfg("", words["whole"]))
    run(load_cfg("", [*words["part"], "SOLVER.MAX_ITER", "3"]))
    run(load_cfg("", words["part"]), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_faults_of_folders_are_named_before_training(tmp_path):
    folders = draw_folders(tmp_path / "data")
    broken = folders / "train/red/0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    (folders / "train/empty").mkdir()
    for path in (folders / "val/green").glob("*.png"):
        path.unlink()
    (folders / "val/green").rmdir()
    done = check_data(folders, tmp_path)
    assert done.exit_code == 2
    assert "image files that cannot be read: 1" in done.output and "train/red/0.png" in done.output
    assert done.output.count("classes without an image") == 4  # in the line of each split, and above its list
    assert "class 'empty'" in done.output and "class 'green'" in done.output
    with pytest.raises(ValueError, match="classes without an image"):
        run(config(folders, tmp_path / "out"))
    assert not (tmp_path / "out/metrics.json").exists()
    dropped = check_data(folders, tmp_path, DATASETS__ON_BAD="drop")
    assert dropped.exit_code == 0 and "train: 11 images of 4 classes" in dropped.output
    figures = run(config(folders, tmp_path / "out", DATASETS__ON_BAD="drop", SOLVER__MAX_ITER=1))["classes"]
    assert math.isnan(figures["top1-green"]) and not math.isnan(figures["top1_class_mean"])


def test_a_split_that_is_not_there_is_refused(folders, tmp_path):
    done = check_data(folders, tmp_path, DATASETS__REGISTER=[["train", str(folders), "train"], ["val", str(folders), "test"]])
    assert done.exit_code == 2 and "has no split 'test'" in done.output and "known: train, val" in done.output
    flat = check_data(folders, tmp_path, DATASETS__REGISTER=[["train", str(folders / "train"), ""], ["val", str(folders), "val"]])
    assert flat.exit_code == 0, flat.output
    inside = check_data(
        folders, tmp_path, DATASETS__REGISTER=[["train", str(folders / "train"), "red"], ["val", str(folders), "val"]]
    )
    assert "has no class folder" in inside.output


def test_images_with_several_classes_are_refused(drawn_coco, tmp_path):
    triples = [[name, str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)] for name in ("train", "val")]
    done = check_data(tmp_path, tmp_path, DATASETS__REGISTER=triples)
    assert done.exit_code == 2 and "images that do not have exactly one class" in done.output
    assert "007.png): red, green" in done.output and "041.png): none" in done.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"TASK": "detection"}, r"'CPVTClassifier' is not a detector; set TASK to classification"),
        ({"MODEL__META_ARCHITECTURE": "CPVTDetr"}, r"'CPVTDetr' is not a classifier; set it to CPVTClassifier"),
        ({"INPUT__CLASSIFY__SCALE": (0.5, 2.0)}, r"scale of crops must be a range of fractions .*got \(0.5, 2.0\)"),
        ({"INPUT__CLASSIFY__RATIO": (0, 1)}, r"ratio of crops must be a range of positive numbers"),
        ({"INPUT__CLASSIFY__SIZE": 0}, r"side of crops must be at least 1 pixel, got 0"),
        ({"INPUT__CLASSIFY__RANDAUGMENT": (2, 31)}, r"RandAugment needs a number .*0 to 30, got \(2, 31\)"),
        ({"INPUT__CLASSIFY__ERASE": 1.5}, r"probability of erasing must be from 0 to 1, got 1.5"),
        ({"INPUT__CLASSIFY__MIXUP": -0.1}, r"Mixup and CutMix must be at least 0"),
        ({"INPUT__CLASSIFY__REPEATS": 0}, r"images must be repeated at least once, got 0"),
        ({"INPUT__CLASSIFY__TEST_SIZE": 0}, r"test size must be at least 1 pixel, got 0"),
        ({"TEST__TILES__SIZE": 64}, r"TEST\.TILES is for detectors; a classifier classifies whole images"),
        ({"INPUT__CLASSIFY__CROP_RATIO": 1.5}, r"crop ratio must be from 0 \(no crop\) to 1, got 1.5"),
        ({"MODEL__CLASSIFIER__SMOOTHING": 1.0}, r"label smoothing must be from 0 to below 1, got 1.0"),
        ({"MODEL__CLASSIFIER__TEACHER_WEIGHTS": "x"}, r"TEACHER_WEIGHTS is 'x', but the teacher is not a timm network"),
        ({"MODEL__CLASSIFIER__TEACHER": "timm/resnet18"}, r"a teacher without weights teaches nothing"),
        ({"SOLVER__COSINE_END": 0.1}, r"COSINE_END is 0.1, but the schedule 'step' is not a cosine"),
        (
            {"SOLVER__COSINE_END": 2.0, "SOLVER__SCHEDULE": "cosine", "SOLVER__GAMMA": 0.1},
            r"COSINE_END must be from 0 to 1, got 2.0",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_iteration(more, message, folders, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(config(folders, tmp_path / "out", **more))
    assert not (tmp_path / "out/metrics.json").exists()


def record_of(tmp_path, height=30, width=50):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    boxes = np.array([[0, 0, width, height]], np.float32)
    return ImageRecord(str(tmp_path / "one.png"), 1, height, width, boxes, np.array([2]))


def test_an_augmented_image_depends_on_seed_epoch_and_image_alone(tmp_path):
    mapper = ClassMapper(crop_transform(16, randaugment=(2, 9), erase=0.5), with_targets=True)
    dataset = MappedDataset([record_of(tmp_path)] * 2, mapper, seed=3)
    first = dataset[(0, 1)]["image"]
    torch.rand(7)
    assert torch.equal(first, dataset[(0, 1)]["image"]) and first.shape == (3, 16, 16) and first.dtype == torch.uint8
    assert not torch.equal(first, dataset[(1, 1)]["image"]) and not torch.equal(first, dataset[(0, 0)]["image"])
    assert dataset[(0, 1)]["targets"].labels.tolist() == [2]


def test_the_test_size_is_a_centre_or_the_whole_image():
    image = torch.arange(40 * 80, dtype=torch.float32).reshape(1, 40, 80).expand(3, -1, -1) / 13
    centre = ClassMapper(central_transform(20, 0.5), with_targets=False).prepare(image.to(torch.uint8))
    assert torch.equal(centre, image.to(torch.uint8)[:, 10:30, 30:50])  # the short side is 40 already
    whole = ClassMapper(central_transform(20, 0), with_targets=False).prepare(image.to(torch.uint8))
    assert whole.shape == (3, 20, 40)
    assert central_transform(224, 0.9).transforms[0].size == [248]  # the whole part of 248.9, as timm and DeiT have it


def test_links_bring_no_image_twice_and_none_of_another_class(tmp_path):
    draw_folders(tmp_path)
    train = tmp_path / "train"
    before = read_image_folder(tmp_path, "train")
    first = next(folder for folder in sorted(train.iterdir()) if folder.is_dir())
    (first / "up").symlink_to(train, target_is_directory=True)
    (first / "self").symlink_to(first, target_is_directory=True)
    assert read_image_folder(tmp_path, "train") == before
    image = next(first.glob("*.*"))
    (train / image.name).write_bytes(image.read_bytes())
    notes = {"folders with images outside the class folders, left out": [str(train)]}
    assert read_image_folder(tmp_path, "train") == before | {"notes": notes}


def test_erased_pixels_have_the_given_colour():
    torch.manual_seed(0)
    mapper = ClassMapper(crop_transform(32, (1, 1), (1, 1), flip=False, erase=1.0, erase_with=(7, 8, 9)), with_targets=False)
    made = mapper.prepare(torch.full((3, 32, 32), 200, dtype=torch.uint8))
    erased = (made != 200).all(0)
    assert 0.01 < erased.float().mean() < 0.4 and made[:, erased].unique(dim=1).flatten().tolist() == [7, 8, 9]


def test_repeated_images_differ_and_an_epoch_has_a_part_of_them():
    batches = iter(TrainBatches(num_records=6, batch_size=6, seed=1, repeats=3))
    first, second = next(batches), next(batches)
    for epoch, batch in enumerate((first, second)):
        assert len({index for _, index in batch}) == 2 and len(set(batch)) == 6  # each draw has an augmentation of its own
        assert {number // 3 for number, _ in batch} == {epoch}
    later = TrainBatches(num_records=6, batch_size=6, seed=1, repeats=3)
    later.start = 1
    assert next(iter(later)) == second


@pytest.mark.parametrize(("kind", "mixup", "cutmix"), [("mixup", 0.8, 0.0), ("cutmix", 0.0, 1.0)])
def test_mixed_images_have_the_shares_of_their_classes(kind, mixup, cutmix):
    """By the pixels: image n is the constant n, so a mixed pixel tells its parts."""
    images, labels = torch.arange(4.0)[:, None, None, None].expand(4, 3, 20, 30).clone(), torch.tensor([0, 1, 2, 3])
    torch.manual_seed(5)
    mixed, shares = BatchMixing(4, mixup, cutmix)(images, labels)
    mean = mixed.mean((1, 2, 3))
    torch.testing.assert_close((shares * torch.arange(4.0)).sum(1), mean, rtol=1e-4, atol=1e-4)
    assert (shares > 0).sum(1).tolist() == [2] * 4 and torch.equal(shares.sum(1), torch.ones(4))
    assert all((len(image.unique()) == 1) == (kind == "mixup") for image in mixed)
    torch.manual_seed(5)
    assert torch.equal(mixed, BatchMixing(4, mixup, cutmix)(images, labels)[0])


def test_copies_of_an_image_in_a_batch_are_seldom_mixed_with_each_other():
    """``REPEATS`` puts copies side by side; image n of 32 is the constant n, three times, and has a class of its own."""
    labels = torch.arange(32).repeat_interleave(3)
    images = labels[:, None, None, None].expand(-1, 3, 8, 8).float()
    torch.manual_seed(0)
    mixed = [BatchMixing(32, 0.8, 1.0)(images, labels)[1] for _ in range(20)]
    alone = torch.cat([(shares > 0).sum(1) == 1 for shares in mixed]).float().mean()
    assert alone < 0.1  # by chance 2 of 95; shares of exactly 0 and 1 beside them


def test_the_loss_is_that_of_torch_and_a_teacher_has_half_of_it():
    torch.manual_seed(0)
    logits, labels, taught = torch.randn(2, 5, 4).double(), torch.tensor([0, 1, 2, 3, 1]), torch.tensor([3, 3, 2, 1, 0])
    shares = F.one_hot(labels, 4).double()
    plain = ClassCriterion(0.1)(logits[:1], shares)
    torch.testing.assert_close(plain.losses["loss_class"], F.cross_entropy(logits[0], labels, label_smoothing=0.1))
    found = ClassCriterion(0.1)(logits, shares, taught).losses
    torch.testing.assert_close(found["loss_class"], 0.5 * F.cross_entropy(logits[0], labels, label_smoothing=0.1))
    torch.testing.assert_close(found["loss_taught"], 0.5 * F.cross_entropy(logits[1], taught))
    without = ClassCriterion()(logits, shares)
    torch.testing.assert_close(without.losses["loss_class"], F.cross_entropy(logits.mean(0), labels))
    wrong = (logits.mean(0).argmax(-1) != labels).double().mean() * 100
    torch.testing.assert_close(without.metrics["metric_class_error"], wrong)
    logits[0, 3, 1] = math.nan
    assert ClassCriterion()(logits, shares).finite.tolist() == [True, True, True, False, True]


def test_parts_of_a_step_sum_to_the_whole(folders, tmp_path):
    model = ClassTrainingModel(classifier(folders, tmp_path).eval(), ClassCriterion(), BatchMixing(3))
    images = (torch.rand(5, 3, 32, 32) * 255).byte()
    samples = [{"image": image, "targets": Targets(torch.tensor([n % 3]), torch.zeros(1, 4))} for n, image in enumerate(images)]
    whole = model(samples).losses["loss_class"]
    parts = [model(part, model.normalizers(samples)).losses["loss_class"] for part in (samples[:2], samples[2:])]
    torch.testing.assert_close(sum(parts), whole)


def test_a_student_learns_the_classes_of_its_teacher_by_name(trained, folders, tmp_path):
    """The teacher's own classes are in another order here; its answers are compared with its own scores."""
    from cpvt_det.builders.trained import load_teacher, load_trained

    weights = str(trained / "model_best.pth")
    cfg = config(folders, tmp_path, MODEL__CLASSIFIER__TEACHER=weights)
    images = torch.rand(6, 3, 32, 32) * 255
    teacher = load_trained(weights, "cpu").detector
    batch = teacher.preprocess(list(images))
    scores = teacher(batch.images, batch.padding_mask).scores()
    found = load_teacher(cfg, Classes((1, 2, 3), ("red", "blue", "green")))(images)
    assert torch.equal(found, scores[:, [2, 0, 1]].argmax(-1))
    assert torch.equal(load_teacher(cfg, Classes((1, 2), ("red", "blue")))(images), scores[:, [2, 0]].argmax(-1))
    with pytest.raises(WeightsError, match=r"does not know these classes of the data: pink"):
        load_teacher(cfg, Classes((1,), ("pink",)))
    run(config(folders, tmp_path / "out", MODEL__CLASSIFIER__TEACHER=weights, SOLVER__MAX_ITER=1))
    line = json.loads((tmp_path / "out/metrics.json").read_text().splitlines()[0])
    assert line["loss_taught"] > 0 and line["total_loss"] == pytest.approx(line["loss_taught"] + line["loss_class"])
    state = torch.load(tmp_path / "out/model_final.pth", weights_only=True)["model"]
    assert state.keys() == classifier(folders, tmp_path).state_dict().keys()


def test_a_network_of_timm_teaches_with_its_own_statistics_of_pixels(folders, tmp_path):
    from cpvt_det.builders.trained import load_teacher

    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=3, img_size=160).eval()
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    words = {"MODEL__CLASSIFIER__TEACHER": "timm/test_vit", "MODEL__CLASSIFIER__TEACHER_WEIGHTS": str(tmp_path / "vit.pth")}
    cfg, classes = config(folders, tmp_path, INPUT__CLASSIFY__SIZE=160, **words), Classes((1, 2, 3), ("a", "b", "c"))
    images = torch.rand(8, 3, 160, 160) * 255
    mean, std = (torch.tensor(network.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    expected = network((images / 255 - mean) / std).argmax(-1)
    assert torch.equal(load_teacher(cfg, classes)(images), expected)
    with pytest.raises(WeightsError, match=r"timm/test_vit has 3 classes, but the data have 2"):
        load_teacher(cfg, Classes((1, 2), ("a", "b")))
    torch.save(dict(list(network.state_dict().items())[1:]), tmp_path / "vit.pth")
    with pytest.raises(WeightsError, match=r"does not fit .*timm/test_vit: only the network has cls_token"):
        load_teacher(cfg, classes)
    cfg.MODEL.CLASSIFIER.TEACHER = "timm/no_such"
    with pytest.raises(WeightsError, match=r"timm/no_such with weights .*Unknown model"):
        load_teacher(cfg, classes)


def test_a_distilled_network_of_timm_is_a_teacher(folders, tmp_path):
    from cpvt_det.builders.trained import load_teacher

    network = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1).eval()
    network.head_dist.bias.data[1] = 99.0
    torch.save(network.state_dict(), tmp_path / "w.pth")
    create = timm.create_model
    words = {"MODEL__CLASSIFIER__TEACHER": "timm/deit_tiny_distilled_patch16_224"}
    cfg = config(folders, tmp_path, INPUT__CLASSIFY__SIZE=224, MODEL__CLASSIFIER__TEACHER_WEIGHTS=str(tmp_path / "w.pth"), **words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **keys: create(name, depth=1, **keys))
        teacher = load_teacher(cfg, Classes((1, 2, 3), ("a", "b", "c")))
    assert teacher(torch.zeros(2, 3, 224, 224)).tolist() == [1, 1]


def records_of(*labels):
    return [ImageRecord(f"{n}.png", n, 9, 9, np.zeros((1, 4), np.float32), np.array([label])) for n, label in enumerate(labels)]


def test_accuracies_by_hand():
    """Six classes; images of classes 0, 0, 0, 1. Right: the first and the last; the second is among five, the third never added."""
    one, other = ClassEvaluator(records_of(0, 0, 0, 1), "abcdef"), ClassEvaluator(records_of(0, 0, 0, 1), "abcdef")
    one.add(0, torch.tensor([0.9, 0.1, 0.0, 0.0, 0.0, 0.0]))
    one.add(1, torch.tensor([0.1, 0.2, 0.3, 0.2, 0.15, 0.05]))
    other.add(3, torch.tensor([0.0, 0.9, 0.1, 0.0, 0.0, 0.0]))
    one.merge(other.state())
    figures = one.evaluate()["classes"]
    assert figures["top1"] == 50 and figures["top5"] == 75
    assert figures["top1-a"] == pytest.approx(100 / 3) and figures["top1-b"] == 100 and math.isnan(figures["top1-c"])
    assert figures["top1_class_mean"] == pytest.approx((100 / 3 + 100) / 2)
    assert one.confusion().tolist()[0] == [1, 0, 1, 0, 0, 0] and one.confusion().sum() == 3
    assert most_confused(one.confusion(), "abcdef") == [("a", "c", 1)]
    assert "| c       | n/a" in format_accuracies(one.evaluate()) and one.answers()[2]["found"] == []
    with pytest.raises(ValueError, match=r"image id 3 were already added"):
        one.merge(other.state())
    with pytest.raises(ValueError, match=r"image id 9 is not among the 4 images"):
        one.add(9, torch.zeros(6))
    with pytest.raises(ValueError, match=r"image id 2 needs 6 finite scores, got \(6,\), 5 finite"):
        one.add(2, torch.tensor([0.0, 0, 0, 0, 0, math.nan]))


def test_the_main_figures_come_first_in_curves():
    from cpvt_det.visualize.curves import main_figures

    found = ClassEvaluator(records_of(0, 1), ("a-b", "c")).evaluate()
    records = {1: {f"classes/{name}": value for name, value in found["classes"].items()}}
    assert main_figures(records) == [["classes/top1", "classes/top1_class_mean"]]
