# SPDX-License-Identifier: Apache-2.0
"""The benchmark of timm's networks: both sides compute the same maps, and the record has every case. Never a speed."""

import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("timm")
from benchmarks import timm_backbone
from benchmarks.harness import Plan


@pytest.mark.usefixtures("quiet_machine")
def test_the_record_has_each_norm_and_padding(tmp_path, monkeypatch):
    monkeypatch.setattr(timm_backbone, "PADDED", {"none": ((64, 64),) * 2, "29 %": ((48, 64), (64, 43))})
    words = ["--network", "resnet10t", "--rounds", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(timm_backbone.main, words)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("timm_backbone_cpu*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    cases = [(row["norm"], row["padded"]) for row in record["rows"]]
    assert cases == [("FrozenBN", "none"), ("FrozenBN", "29 %"), ("BN", "none"), ("BN", "29 %")]
    differ = [row["maps_differ"] for row in record["rows"]]
    assert max(differ[::2]) < 1e-5 and min(differ[1::2]) > 1e-2  # under padding timm's maps are others
    assert all(row["cpu_ratio"]["median"] > 0 for row in record["rows"])
    assert {"command", "commit", "machine", "versions"} <= record.keys()


def test_unequal_maps_are_not_timed(monkeypatch):
    def networks(name, norm):
        ours, theirs = real(name, norm)
        torch.nn.init.zeros_(theirs.model.conv1[0].weight)
        return ours, theirs

    real = timm_backbone.networks
    monkeypatch.setattr(timm_backbone, "networks", networks)
    with pytest.raises(ValueError, match="resnet10t, FrozenBN: maps differ by .* without padding"):
        timm_backbone.measure("resnet10t", "FrozenBN", Plan(rounds=1))
