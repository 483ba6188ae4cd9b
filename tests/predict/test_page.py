# SPDX-License-Identifier: Apache-2.0
"""The page of ``cpvt-det serve`` in a real browser: pictures are dropped on it, and their boxes read back."""

import io
import json
import shutil

import numpy as np
import pytest
from browser import NARROW, Tab, overflows
from PIL import Image
from test_server import FILES, models, running, weights  # noqa: F401, fixtures

from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import load_coco
from cpvt_det.predict.served_model import ServedModel

MOST = 2_000_000
READ = """(panel) => {
  const picture = panel.querySelector(".stage img").getBoundingClientRect();
  return [...panel.querySelectorAll(".box")].filter((box) => box.checkVisibility()).map((box) => {
    const { x, y, width, height } = box.getBoundingClientRect();
    const [left, top] = [(x - picture.x) / picture.width, (y - picture.y) / picture.height];
    return { place: [left, top, width / picture.width, height / picture.height], text: box.textContent };
  });
}"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("a.jpg", "wide.tif"):
        (folder / name).write_bytes(FILES[name])
    return [folder / "a.jpg", folder / "wide.tif"]


@pytest.fixture(scope="module")
def server(models):  # noqa: F811
    with running(models, MOST) as started:
        yield started


@pytest.fixture
def tab(browser, server):
    opened = Tab(browser)
    opened.page.goto(server.url)
    yield opened
    assert opened.errors == [] and opened.outside(server.url) == []
    opened.page.close()


def drop(tab, path):
    """Drop a file or folder of the disk on the page, as a hand would."""
    box = tab.page.locator("#drop").bounding_box()
    session = tab.page.context.new_cdp_session(tab.page)
    for kind in ("dragEnter", "dragOver", "drop"):
        what = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        session.send("Input.dispatchDragEvent", {"type": kind, "x": box["x"] + 20, "y": box["y"] + 20, "data": what})


def finish(tab, text):
    """Wait for the line under the drop zone."""
    tab.page.get_by_text(text, exact=True).wait_for()


def read_boxes(tab, number):
    return tab.page.locator(".panel").nth(number).evaluate(READ)


def test_a_dropped_photograph_has_the_boxes_of_the_predictor(tab, models, shared_data):  # noqa: F811
    """On the screen, of both models, at every position of the slider; nothing is asked again."""
    require_boxes(tab, models, shared_data / "coco/val2017/000000000036.jpg")


def test_a_dropped_picture_that_a_browser_cannot_show_has_its_boxes_too(tab, models, pictures):  # noqa: F811
    require_boxes(tab, models, pictures[1])


def require_boxes(tab, models, path):  # noqa: F811
    drop(tab, path)
    finish(tab, "1 image")
    asked = len(tab.fetched)
    for number, model in enumerate(models):
        found = model.predictor(path)
        scores = found.scores.numpy()
        height, width = found.image.shape[1:]
        for step in (0, int(1000 * np.median(scores)), 1000):
            tab.slide(f"threshold-{number}", step)
            expected = found.above(step / 1000)
            boxes = sorted(read_boxes(tab, number), key=lambda box: box["text"])
            names = [f"{name} {score:.2f}" for name, score in zip(expected.names, expected.scores.tolist(), strict=True)]
            assert [box["text"] for box in boxes] == sorted(names)
            places = np.array([one["bbox"] for one in expected.to_coco(1)]).reshape(-1, 4) / [width, height, width, height]
            for box in boxes:  # borders have a least size of 3 pixels
                assert np.abs(places - box["place"]).max(1).min() < 0.02
        assert 0 < len(found.above(int(1000 * np.median(scores)) / 1000)) < len(found)
    assert len(tab.fetched) == asked


def test_classes_are_switched(tab, models, pictures):  # noqa: F811
    drop(tab, pictures[1])
    finish(tab, "1 image")
    tab.slide("threshold-1", 0)
    every = models[1].predictor(pictures[1]).names
    tab.page.locator(".panel").nth(1).get_by_role("checkbox", name=every[0]).uncheck()
    left = [box["text"].split()[0] for box in read_boxes(tab, 1)]
    assert sorted(left) == sorted(name for name in every if name != every[0])
    tab.page.locator(".panel").nth(1).get_by_role("button", name="none").click()
    assert read_boxes(tab, 1) == []


@pytest.mark.parametrize(("number", "drawn"), [(0, "canvas.look"), (1, "svg.look circle")], ids=["detr", "deformable"])
def test_a_box_shows_where_the_decoder_looked(tab, pictures, number, drawn):
    """By keyboard as by mouse; the layers have a slider; Close leads back to the box."""
    drop(tab, pictures[0])
    finish(tab, "1 image")
    tab.slide(f"threshold-{number}", 0)
    panel = tab.page.locator(".panel").nth(number)
    box = panel.locator(".box").last
    box.focus()
    tab.page.keyboard.press("Enter")
    panel.locator(drawn).first.wait_for()
    assert box.get_attribute("aria-pressed") == "true"
    said = panel.locator(".looked .note").inner_text()
    tab.slide(f"layer-{number}", 0)
    assert panel.locator(drawn).count() == (1 if number == 0 else 2 * 2 * 4)
    assert panel.locator(".looked output").inner_text() == "0"
    assert ("times an even share" if number == 0 else "stride 8: ") in said
    panel.get_by_role("button", name="Close").click()
    assert panel.locator(".look").count() == 0
    assert box.evaluate("(box) => box === document.activeElement")


def download(tab, models, pictures, path):  # noqa: F811
    """Save what the page has of two pictures, from the threshold that half of the first one's boxes pass; the threshold."""
    for picture in pictures:
        drop(tab, picture)
    finish(tab, "2 images")
    threshold = int(1000 * models[0].predictor(pictures[0]).scores.median()) / 1000
    tab.slide("threshold-0", round(1000 * threshold))
    with tab.page.expect_download() as waiting:
        tab.page.get_by_role("button", name="Download COCO JSON").first.click()
    waiting.value.save_as(path)
    return threshold


def test_datumaro_the_reader_of_cvat_reads_the_download(tab, models, pictures, tmp_path, recwarn):  # noqa: F811
    datumaro = pytest.importorskip("datumaro", reason="datumaro is not installed")
    download(tab, models, pictures, tmp_path / "annotations/instances_default.json")
    shutil.copytree(pictures[0].parent, tmp_path / "images/default")
    dataset = datumaro.Dataset.import_from(str(tmp_path), "coco_instances")
    rows = json.loads((tmp_path / "annotations/instances_default.json").read_text())["annotations"]
    found = [(one.attributes["score"], *one.get_bbox()) for item in dataset for one in item.annotations]
    expected = sorted((row["score"], *row["bbox"]) for row in rows)
    assert np.array(sorted(found)) == pytest.approx(np.array(expected), abs=0.02)
    assert not [warning for warning in recwarn if "segmentation" in str(warning.message)]


def test_the_download_is_a_coco_data_set_of_what_is_shown(tab, models, pictures, tmp_path):  # noqa: F811
    threshold = download(tab, models, pictures, tmp_path / "found.json")
    content = json.loads((tmp_path / "found.json").read_text())
    assert [one["name"] for one in content["categories"]] == ["red", "green", "blue"]
    assert [one["id"] for one in content["categories"]] == [3, 17, 90]
    assert [one["file_name"] for one in content["images"]] == [path.name for path in pictures[:2]]
    expected = [
        row for number, path in enumerate(pictures[:2], 1) for row in models[0].predictor(path).above(threshold).to_coco(number)
    ]
    keys = ("image_id", "category_id", "bbox", "score")
    assert [{key: one[key] for key in keys} for one in content["annotations"]] == expected and expected
    assert [one["id"] for one in content["annotations"]] == list(range(1, len(expected) + 1))
    assert all(one["segmentation"] == [] for one in content["annotations"])  # datumaro warns of each without
    dataset = load_coco(DatasetFiles("found", tmp_path / "found.json", pictures[0].parent))
    assert [len(record.labels) for record in dataset.records] == [
        sum(one["image_id"] == number for one in content["annotations"]) for number in (1, 2)
    ]


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_a_folder_is_taken_with_its_images_alone(tab, tmp_path, way):
    for name in ("b.png", "deep/a.png", "notes.txt", ".hidden.png"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FILES["grey.png"])
    if way == "chosen":
        tab.page.locator("#folder").set_input_files(tmp_path / "folder")
    else:
        drop(tab, tmp_path / "folder")
    finish(tab, "2 images")
    names = tab.page.locator("#strip button").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert names == ["folder/b.png", "folder/deep/a.png"]
    tab.page.locator("#strip button").nth(1).click()
    assert tab.texts("#name") == ["folder/deep/a.png, 70 x 50 pixels"]


def test_bad_files_are_messages_beside_good_ones(tab, tmp_path):
    contents = {
        "text.jpg": b"not an image\n",
        "large.jpg": bytes(MOST + 1),
        "empty.png": b"",
        "<img src=x>.jpg": FILES["a.jpg"][:500],
        "pixel.png": FILES["pixel.png"],
        "cmyk.jpg": FILES["cmyk.jpg"],
    }
    files = [{"name": name, "mimeType": "image/jpeg", "buffer": content} for name, content in contents.items()]
    tab.page.locator("#files").set_input_files(files)
    finish(tab, "2 images")
    messages = tab.texts("#messages li")
    assert messages[:2] == [
        "large.jpg: 2.0 MB are too much: at most 2 MB are accepted (--max-upload)",
        "empty.png: it is empty (0 bytes)",
    ]
    assert messages[2] == "text.jpg: cannot read image text.jpg: it is not an image, or its format is unknown"
    assert messages[3].startswith("<img src=x>.jpg: cannot read image") and len(messages) == 4
    assert tab.texts("#name") == ["pixel.png, 1 x 1 pixels"]
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(100_000_000)
    asked = len(tab.fetched)
    tab.page.locator("#files").set_input_files(tmp_path / "huge.jpg")
    tab.page.get_by_text("100.0 MB are too much: at most 2 MB are accepted (--max-upload)").wait_for()
    assert len(tab.fetched) == asked  # it is not even sent


def until(tab, script):
    """Wait until an expression of the video is true; the page's policy forbids playwright's own way."""
    tab.page.evaluate(
        "async () => { const video = document.getElementById('video');"
        f" while (!({script})) await new Promise((resolve) => setTimeout(resolve, 20)); }}"
    )


@pytest.fixture
def films():
    """The module that makes films, where there is what it needs."""
    pytest.importorskip("av", reason="PyAV is not installed")
    import test_films

    return test_films


@pytest.fixture
def sent(monkeypatch):
    """What the page sends to be detected, as the server has it: the browser does not tell."""
    contents, detect = [], ServedModel.detect
    monkeypatch.setattr(ServedModel, "detect", lambda self, content, name: contents.append(content) or detect(self, content, name))
    return contents


def require_frame(tab, models, content):  # noqa: F811
    """The boxes on the screen are those of the frame that was sent last."""
    for number, model in enumerate(models):
        tab.slide(f"threshold-{number}", 0)
        expected = model.predictor(Image.open(io.BytesIO(content)))
        shown = read_boxes(tab, number)
        assert sorted(
            f"{name} {score:.2f}" for name, score in zip(expected.names, expected.scores.tolist(), strict=True)
        ) == sorted(box["text"] for box in shown)


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_a_film_plays_with_its_boxes(tab, models, films, sent, tmp_path, way):  # noqa: F811
    """Frame after frame; at the end the last one stays, and the film can be wound back."""
    films.write_film(tmp_path / "film.webm", count=25, codec="libvpx")
    if way == "chosen":
        tab.page.locator("#files").set_input_files(tmp_path / "film.webm")
    else:
        drop(tab, tmp_path / "film.webm")
    until(tab, "video.ended")
    tab.page.get_by_text("film.webm at 2.4 s, 64 x 48 pixels", exact=True).wait_for()
    assert (
        len(set(sent)) >= 2 and len(sent) % 2 == 0 and len(sent) <= 2 * 25
    )  # both models are asked, about each frame at most once
    assert sent[-1] == sent[-2]
    require_frame(tab, models, sent[-1])
    before = len(sent)
    tab.page.evaluate("document.getElementById('video').currentTime = 0.2")
    tab.page.get_by_text("film.webm at 0.2 s, 64 x 48 pixels", exact=True).wait_for()
    assert len(sent) == before + 2
    require_frame(tab, models, sent[-1])
    tab.page.get_by_role("button", name="Close").click()
    assert not tab.page.locator("#player").is_visible() and tab.texts("#messages li") == []


def test_a_photograph_that_is_chosen_ends_the_film(tab, pictures, films, tmp_path):
    for picture in pictures:
        drop(tab, picture)
    finish(tab, "2 images")
    films.write_film(tmp_path / "film.webm", count=250, codec="libvpx")
    tab.page.locator("#files").set_input_files(tmp_path / "film.webm")
    tab.page.locator("#name", has_text="film.webm at").wait_for()
    tab.page.locator("#strip button").nth(1).click()
    assert tab.texts("#name")[0].startswith("wide.tif") and not tab.page.locator("#player").is_visible()
    tab.page.wait_for_timeout(300)  # an answer that was under way changes nothing
    assert tab.texts("#name")[0].startswith("wide.tif")


def test_what_cannot_be_played_is_a_message(tab, films, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no film")
    tab.page.locator("#files").set_input_files(tmp_path / "broken.mp4")
    tab.page.locator("#messages li").wait_for()
    assert tab.texts("#messages li") == ["broken.mp4: this browser cannot play it; cpvt-det predict --input reads most films"]
    films.write_sound(tmp_path / "sound.mp4")
    tab.page.locator("#files").set_input_files(tmp_path / "sound.mp4")
    tab.page.locator("#messages li", has_text="sound.mp4").wait_for()
    assert len(tab.texts("#messages li")) == 1 and not tab.page.locator("#player").is_visible()


def test_a_camera_plays_with_its_boxes(browser, server, models, sent):  # noqa: F811
    """Chromium's stand-in for a camera, a drawn film."""
    tab = Tab(browser, permissions=["camera"])
    tab.page.goto(server.url)
    tab.page.get_by_role("button", name="Camera").click()
    tab.page.locator("#name", has_text="camera at").wait_for()
    until(tab, "video.currentTime > 1")
    tab.page.evaluate("document.getElementById('video').pause()")
    tab.page.wait_for_timeout(500)
    assert len(set(sent)) >= 2
    require_frame(tab, models, sent[-1])
    tab.page.get_by_role("button", name="Close").click()
    assert tab.page.evaluate("document.getElementById('video').srcObject") is None and tab.errors == []
    tab.page.close()


def test_a_camera_that_is_refused_is_a_message(browser, server):
    tab = Tab(browser, permissions=[])
    tab.page.goto(server.url)
    tab.page.evaluate("() => { navigator.mediaDevices.getUserMedia = async () => { throw new Error('Permission denied') } }")
    tab.page.get_by_role("button", name="Camera").click()
    tab.page.locator("#messages li").wait_for()
    assert tab.texts("#messages li") == ["camera: Permission denied"] and not tab.page.locator("#player").is_visible()
    tab.page.close()


def test_a_server_that_is_gone_is_a_message(browser, models):  # noqa: F811
    tab = Tab(browser)
    with running(models) as server:
        tab.page.goto(server.url)
    file = {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": FILES["a.jpg"]}
    tab.page.locator("#files").set_input_files(file)
    finish(tab, "0 images")
    assert "does cpvt-det serve still run?" in tab.texts("#messages li")[0]
    tab.page.close()


def test_a_narrow_window_is_enough(browser, server, pictures, tmp_path):
    """Also for the long names, without a space, that data sets have."""
    tab = Tab(browser, NARROW)
    tab.page.goto(server.url)
    path = tmp_path / f"{'of_a_data_set_' * 6}.jpg"
    path.write_bytes(pictures[0].read_bytes())
    drop(tab, path)
    finish(tab, "1 image")
    assert not overflows(tab.page)
    tab.slide("threshold-0", 0)
    tab.page.locator(".box:visible").last.click()
    tab.page.locator(".look").first.wait_for()
    assert not overflows(tab.page)
    tab.page.close()
