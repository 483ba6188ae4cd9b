# SPDX-License-Identifier: Apache-2.0
"""From a name to its file, and from a label file to its image; text in several encodings; what a folder lists."""

import os
from pathlib import Path

import pytest
from PIL import Image

from cpvt_det.common.errors import DataError
from cpvt_det.data.listing import IMAGES, Listing, find_files, readable
from cpvt_det.data.names import FORMS, Names
from cpvt_det.data.text import decode, ends_of, numbered_lines, read_xml
from cpvt_det.data.validation.rules import FAULT


def names_of(folder: Path, *images: str) -> Names:
    for name in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    listing = Listing(folder)
    return Names(listing.images, listing)


def pairs_of(folder: Path, images: list[str], labels: list[str], **written) -> dict[str, str]:
    names = names_of(folder, *images)
    hints = {folder / label: name for label, name in written.items()}
    pairs = names.pair([folder / label for label in labels], hints)
    return {str(label.relative_to(folder)): str(image.relative_to(folder)) for label, image in pairs.items()}


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        # each split has its own, also where one of the two files is missing
        (["images/train/1.jpg", "images/val/1.jpg"], ["labels/train/1.txt"], {"labels/train/1.txt": "images/train/1.jpg"}),
        (["images/val/1.jpg"], ["labels/train/1.txt"], {}),
        (["train/images/1.jpg", "val/images/1.jpg"], ["val/labels/1.txt"], {"val/labels/1.txt": "val/images/1.jpg"}),
        (["cam0/1.jpg", "cam1/1.jpg", "cam0/2.jpg"], ["cam1/2.txt", "cam0/2.txt"], {"cam0/2.txt": "cam0/2.jpg"}),
        # labels/ comes before the image's own folder; one image has one label file
        (["images/1.jpg"], ["images/1.txt", "labels/1.txt"], {"labels/1.txt": "images/1.jpg"}),
        # predictions of a run are no labels, as others are there
        (["images/1.jpg", "images/2.jpg"], ["labels/1.txt", "runs/predict/labels/2.txt"], {"labels/1.txt": "images/1.jpg"}),
        # folders of any name, where nothing else fits
        (["pictures/1.jpg"], ["marks/1.txt"], {"marks/1.txt": "pictures/1.jpg"}),
        (["pictures/train/1.jpg"], ["marks/val/1.txt"], {}),
        # letter by letter first: the other image stays without
        (["a/P1.jpg", "a/p1.jpg"], ["a/p1.txt"], {"a/p1.txt": "a/p1.jpg"}),
        (["a/P1.jpg"], ["a/p1.txt", "a/P1.txt"], {"a/P1.txt": "a/P1.jpg"}),
        # uploads of two names are two images
        (["a/12345678-x.jpg"], ["a/87654321-x.txt"], {}),
        (["a/12345678-x.jpg"], ["a/12345678-x.txt"], {"a/12345678-x.txt": "a/12345678-x.jpg"}),
        # dots in names
        (["a/x.v1.jpg", "a/x.v2.jpg"], ["a/x.v2.txt"], {"a/x.v2.txt": "a/x.v2.jpg"}),
        (["a/x.png", "a/x.jpg"], ["a/x.png.txt"], {"a/x.png.txt": "a/x.png"}),
    ],
)
def test_a_label_file_is_of_one_image_whose_folder_agrees(images, labels, expected, tmp_path):
    assert pairs_of(tmp_path, images, labels) == expected


def test_what_could_be_of_two_images_is_refused_unless_it_names_one(tmp_path):
    with pytest.raises(DataError, match=r"a/1.txt could belong to .*a/1.jpg or to .*a/1.png; give only one of them this name"):
        pairs_of(tmp_path, ["a/1.jpg", "a/1.png"], ["a/1.txt"])
    assert pairs_of(tmp_path, [], ["a/1.txt"], **{"a/1.txt": "D:\\pets\\1.png"}) == {"a/1.txt": "a/1.png"}
    with pytest.raises(DataError, match=r"2.txt could belong to"):
        pairs_of(tmp_path / "deeper", ["images/train/2.jpg", "images/val/2.jpg"], ["labels/2.txt"])


@pytest.mark.parametrize(
    ("written", "source", "expected"),
    [
        ("1.jpg", "train.json", "train/1.jpg"),
        ("1.jpg", "instances_val2017.json", "val/1.jpg"),
        ("val/1.jpg", "train.json", "val/1.jpg"),
        ("/home/ann/test_set/val/1.jpg", "train.json", "val/1.jpg"),
        ("train/2.jpg", "train.json", None),  # which is in val
        ("2.jpg", "train.json", "val/2.jpg"),
        ("nothing/2.jpg", "all.json", "val/2.jpg"),
        ("C:\\pets\\2.JPG", "all.json", "val/2.jpg"),
        ("", "all.json", None),
        ("..", "all.json", None),
        ("3.jpg", "all.json", None),
    ],
)
def test_a_written_path_is_found_by_its_end(written, source, expected, tmp_path):
    found = names_of(tmp_path, "train/1.jpg", "val/1.jpg", "val/2.jpg").find(written, tmp_path / source)
    assert found == (expected and tmp_path / expected)


def test_files_elsewhere_are_found_where_they_are_named(tmp_path):
    outside = names_of(tmp_path / "outside", "1.jpg").listing.images[0]
    names = names_of(tmp_path / "inside", "2.jpg")
    assert names.find(str(outside), tmp_path / "inside/all.json") == outside
    assert names.find("../outside/1.jpg", tmp_path / "inside/all.json").samefile(outside)
    assert names.find(str(tmp_path / "inside/2.jpg"), tmp_path / "inside/all.json") == tmp_path / "inside/2.jpg"


def test_a_missing_image_is_told_by_the_name_that_was_written(tmp_path):
    (tmp_path / "photo.heic").touch()
    names = names_of(tmp_path, "1.jpg")
    heading, why = names.entry("x/photo.jpg", tmp_path / "all.json")[FAULT]
    assert heading == "image files that are missing"
    assert why == (
        f"{tmp_path}/all.json names 'x/photo.jpg', and no image below {tmp_path} has this name; {tmp_path}/photo.heic cannot "
        "be read here: convert them to JPEG or PNG"
    )


def test_every_form_says_what_differs():
    assert len({form[0] for form in FORMS}) == len(FORMS) and FORMS[0][0] == ""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_is_read_whatever_editor_wrote_it(encoding, tmp_path):
    (tmp_path / "names.txt").write_bytes("Käfer\r\n\r\n 猫 \rzwei\u2028teile\n".encode(encoding))
    assert numbered_lines(tmp_path / "names.txt") == [(1, "Käfer"), (3, "猫"), (4, "zwei\u2028teile")]
    assert "Käfer" in ends_of(tmp_path / "names.txt", 2**10)


def test_text_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "a.txt").write_bytes("Käfer".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*a.txt: .*can't decode.*; save it as UTF-8"):
        numbered_lines(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"cannot read .*b.txt: No such file"):
        numbered_lines(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"cannot read .*b.txt: No such file"):
        ends_of(tmp_path / "b.txt", 16)
    (tmp_path / "a.xml").write_bytes(b"<?xml version='1.0' encoding='latin-1'?><a>K\xe4fer</a>")
    assert read_xml(tmp_path / "a.xml").text == "Käfer"
    assert decode(b"") == ""


def test_a_large_file_is_known_by_its_ends(tmp_path):
    (tmp_path / "a.json").write_bytes(b"begin" + b" " * 2**12 + b"end")
    ends = ends_of(tmp_path / "a.json", 16)
    assert "begin" in ends and ends.endswith("end") and len(ends) == 32


def test_one_list_says_what_an_image_is(tmp_path):
    """Of those that this Pillow can read, a picture of each kind that it can write is read."""
    suffixes = [".jpg", ".jfif", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".tga", ".ppm", ".jp2", ".mpo"]
    assert set(suffixes) <= readable() <= IMAGES and ".heic" in IMAGES and ".txt" not in IMAGES
    for number, suffix in enumerate(suffixes):
        Image.new("RGB", (8, 6)).save(tmp_path / f"{number}{suffix.upper()}", Image.registered_extensions()[suffix])
    for hidden in (".trash/1.jpg", "@eaDir/1.jpg", "__MACOSX/1.jpg", "._1.jpg"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).touch()
    (tmp_path / "photo.heic").touch()
    found, unreadable, _ = find_files(str(tmp_path), tmp_path / "out")
    assert len(found) == len(suffixes) == len(Listing(tmp_path).images) and unreadable == [tmp_path / "photo.heic"]


def test_a_folder_of_photographs_that_cannot_be_read_is_no_empty_one(tmp_path):
    (tmp_path / "photo.heic").touch()
    with pytest.raises(DataError, match=r"no image in the folder .*photo.heic cannot be read here: convert them to JPEG or PNG"):
        find_files(str(tmp_path), tmp_path / "out")


def test_brackets_of_a_folder_that_exists_are_no_pattern(tmp_path):
    trip = tmp_path / "trip [2024]"
    for name in ("a.jpg", "b.jpg", "deep/c.jpg"):
        (trip / name).parent.mkdir(parents=True, exist_ok=True)
        (trip / name).touch()
    assert find_files(f"{trip}/*.jpg", tmp_path / "out")[0] == [trip / "a.jpg", trip / "b.jpg"]
    assert len(find_files(f"{trip}/**/*.jpg", tmp_path / "out")[0]) == 3
    assert find_files(f"{trip}/[ab].jpg", tmp_path / "out")[0] == [trip / "a.jpg", trip / "b.jpg"]
    with pytest.raises(DataError, match="nothing matches"):
        find_files(f"{trip}/[xy].jpg", tmp_path / "out")


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    """As if the user were not allowed to: root may read all."""
    names_of(tmp_path, "a.jpg", "private/b.jpg", "z/c.jpg")

    def scandir(path, scandir=os.scandir):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="cannot read folder .*private: Permission denied"):
        Listing(tmp_path)


def test_parts_of_a_path_do_not_depend_on_how_it_is_written(tmp_path, monkeypatch):
    names_of(tmp_path / "mine", "images/train/1.jpg")
    monkeypatch.chdir(tmp_path)
    for root in (Path("mine"), tmp_path / "mine", Path("mine/../mine")):
        listing = Listing(root)
        for path in (tmp_path / "mine/images/train/1.jpg", Path("mine/images/train/1.jpg"), root / "images/train/1.jpg"):
            assert listing.parts_of(path) == ("images", "train", "1.jpg") and listing.split_of(path) == "train"
        assert listing.below(Path(os.path.abspath("mine/images"))) == listing.images
        assert listing.parts_of(tmp_path) == () and listing.parts_of(Path("elsewhere/1.jpg")) == ()
