# SPDX-License-Identifier: Apache-2.0
"""The times in a browser: what the record has, of a page that really showed boxes. Never a speed."""

import json

import numpy as np
import pytest
from browser import open_browser
from click.testing import CliRunner
from PIL import Image
from tiny import random_config

from benchmarks import browser

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_the_record_has_first_boxes_sliders_and_the_size_of_the_report(tmp_path):
    with open_browser():
        pass  # or the test is skipped
    (tmp_path / "tiny.yaml").write_text(random_config().dump(), encoding="utf-8")
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg")
    words = ["--photos", tmp_path, "--count", 3, "--config-file", tmp_path / "tiny.yaml", "--output", tmp_path / "out"]
    result = CliRunner().invoke(browser.main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "out").glob("browser_cpu*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "commit", "machine", "versions", "browser", "busy"} <= record.keys()
    (page,) = record["page"].values()
    assert page["from_the_command_s"] > page["from_the_drop_s"] > 0
    assert page["from_the_command_s"] > page["to_the_address_s"] > 0 and page["cpu_s"] > 0
    assert record["report"]["images"] == 3 and 0 < record["report"]["megabytes"] < 1


def test_a_folder_without_photographs_is_refused(tmp_path):
    result = CliRunner().invoke(browser.main, ["--photos", str(tmp_path)])
    assert result.exit_code == 2 and "has no .jpg" in result.output
