# SPDX-License-Identifier: Apache-2.0
"""How a folder's images are divided: near-duplicates and frames of a film stay together, rare classes are on both sides."""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from test_folders import draw

from cpvt_det.data.folders.prepare import divide
from cpvt_det.data.validation import duplicates
from cpvt_det.data.validation.duplicates import group_near_duplicates, near_duplicates


def sections(images, classes, **more):
    """Boxes of classes named by single letters, whose ids are their codes."""
    one = {"bbox": [0, 0, 9, 9], **more}
    annotations = [{**one, "image_id": image, "category_id": ord(name)} for image, names in classes.items() for name in names]
    return {
        "images": [{"id": n, "file_name": str(path)} for n, path in images.items()],
        "annotations": annotations,
        "categories": [{"id": number} for number in sorted({annotation["category_id"] for annotation in annotations})],
    }


def test_a_drawn_split_keeps_copies_together_and_rare_classes_on_both_sides(tmp_path):
    """Ten images of which 0, 1 and 2 are one picture in other sizes and brightness; class r is in 3 and 4 alone, class s in 5."""
    paths = {}
    for number in range(10):
        paths[number] = tmp_path / f"{number}.png"
        draw(paths[number], "abcdefghij"[max(number - 2, 0)])
    picture = Image.open(paths[0])
    picture.resize((120, 80)).save(paths[1])
    picture.point(lambda value: value // 2 + 20).save(paths[2])
    groups = group_near_duplicates(list(map(str, paths.values())))
    assert groups[0] == groups[1] == groups[2] and len(set(groups)) == 8
    some = [str(paths[5]), str(paths[1]), str(paths[2])]
    assert near_duplicates(some, [str(tmp_path / "none.png"), str(paths[0]), str(paths[4])]) == {1: (1, 2)}
    content = sections(paths, {number: ["c", *{3: ["r"], 4: ["r"], 5: ["s"]}.get(number, [])] for number in range(10)})
    for seed in range(20):
        parts = divide(content, tmp_path, seed, [])
        assert parts["train"] | parts["val"] == set(range(10)) and not parts["train"] & parts["val"]
        assert len({0, 1, 2} & parts["val"]) in (0, 3)
        assert len({3, 4} & parts["val"]) == 1 and 5 in parts["train"]
        assert len(parts["val"]) in (1, 2, 3, 4)
    assert divide(content, tmp_path, 3, []) == divide(content, tmp_path, 3, [])
    moved = tmp_path / "elsewhere"
    for number, path in paths.items():
        moved.mkdir(exist_ok=True)
        paths[number] = Path(shutil.copy(path, moved))
    assert divide(sections(paths, {0: ["a"], 4: ["a"]}), moved, 1, []) == divide(
        sections({number: tmp_path / path.name for number, path in paths.items()}, {0: ["a"], 4: ["a"]}), tmp_path, 1, []
    )


@pytest.mark.parametrize("more", [{"iscrowd": 1}, {"bbox": [3, 3, 0, 9]}, {"bbox": ["3", 3, 9, 9]}])
def test_the_only_object_to_learn_of_a_class_is_trained_on(tmp_path, more):
    """The other one is difficult, without area or faulty."""
    paths = {number: tmp_path / f"{number}.png" for number in range(10)}
    for number, path in paths.items():
        draw(path, "abcdefghij"[number])
    for seed in range(10):
        content = sections(paths, {number: ["c"] for number in paths} | {0: ["r"]})
        content["annotations"] += sections(paths, {1: ["r"]}, **more)["annotations"]
        assert 0 in divide(content, tmp_path, seed, [])["train"]


@pytest.mark.parametrize("kind", ["I;16", "turned", "turned tiff"])
def test_images_of_many_bits_and_turned_images_are_compared(tmp_path, kind):
    for name in "ab":
        draw(tmp_path / f"{name}.png", name)
    picture = Image.open(tmp_path / "b.png")
    if kind == "I;16":
        high = np.array(picture.convert("L")).astype(np.uint16) * 256
        Image.fromarray(high).save(tmp_path / "c.png")
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6  # upright after a quarter turn clockwise
        path = tmp_path / f"c.{'tiff' if 'tiff' in kind else 'png'}"
        picture.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    (path,) = tmp_path.glob("c.*")
    assert near_duplicates([str(tmp_path / "a.png"), str(tmp_path / "b.png")], [str(path)]) == {0: (1, 1)}


def test_plain_images_are_no_duplicates(tmp_path):
    for name in "ab":
        Image.new("RGB", (30, 30), (90, 90, 90)).save(tmp_path / f"{name}.png")
    both = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert near_duplicates(both, both) == {}
    assert len(set(group_near_duplicates(both))) == 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_groups_are_those_of_all_links_whatever_the_chunk(monkeypatch, chunk):
    """Points on a circle, where neighbours alone are alike: a chain of four in any order, one of two, and one point."""
    degrees = np.radians([10, 130, 30, 240, 20, 140, 40])
    points = np.stack((np.cos(degrees), np.sin(degrees)), axis=1).astype(np.float32)
    monkeypatch.setattr(duplicates, "_thumbnails", lambda paths: points)
    monkeypatch.setattr(duplicates, "ALIKE", np.cos(np.radians(12)))
    monkeypatch.setattr(duplicates, "CHUNK", chunk)
    groups = group_near_duplicates([""] * len(points))
    assert [groups.index(group) for group in groups] == [0, 1, 0, 3, 0, 1, 0]


def test_images_in_tar_files_are_compared(tmp_path):
    for name in "ab":
        draw(tmp_path / f"{name}.png", name)
    with tarfile.open(tmp_path / "000.tar", "w") as tar:
        tar.add(tmp_path / "b.png", "b.png")
    inside = f"{tmp_path}/000.tar/b.png"
    assert near_duplicates([str(tmp_path / "a.png"), str(tmp_path / "b.png")], [inside]) == {0: (1, 1)}


def film(folder, count, others=0):
    """Frames with one small thing that moves, which are near-duplicates of their neighbours, and other pictures."""
    paths = {}
    draw(folder / "first.png", "q")
    for number in range(count):
        frame = Image.open(folder / "first.png").copy()
        frame.paste((255, 255, 255), (number, 5, number + 2, 7))
        paths[number] = folder / f"frame_{number:02}.png"
        frame.save(paths[number])
    for number in range(others):
        paths[count + number] = folder / f"other_{number}.png"
        draw(paths[count + number], "abcdefghij"[number])
    return paths


@pytest.mark.parametrize("others", [0, 1])
def test_a_film_with_little_else_is_cut_in_the_order_of_its_frames(tmp_path, others):
    """Twelve frames: a fifth of them, two or three in a row, and a word of it."""
    paths, notes = film(tmp_path, 12, others), []
    parts = divide(sections(paths, {number: ["a"] for number in paths}), tmp_path, 0, notes)
    frames = sorted(number for number in parts["val"] if number < 12)
    assert 1 <= len(parts["val"]) <= 3 and len(parts["train"]) >= 9 and parts["train"] | parts["val"] == set(paths)
    assert frames == list(range(frames[0], frames[0] + len(frames))) if frames else parts["val"] == {12}
    assert (
        notes[0].startswith("12 images are nearly the same, like the frames of a video")
        and "resemble those of the training" in notes[0]
    )


def test_a_film_beside_enough_other_images_is_trained_on(tmp_path):
    """Also where it has a class of its own that only one other image has."""
    paths, notes = film(tmp_path, 8, 6), []
    for seed in range(10):
        content = sections(paths, {number: ["a", *(["r"] if number in (0, 9) else [])] for number in paths})
        parts = divide(content, tmp_path, seed, notes)
        assert set(range(8)) <= parts["train"] and 1 <= len(parts["val"]) <= 3
    assert notes == []
