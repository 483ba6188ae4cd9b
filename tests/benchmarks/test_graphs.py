# SPDX-License-Identifier: Apache-2.0
"""Graphs of a compiled forward, and what a training step reads of the device: few, and the counters see them."""

import json

import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT

from benchmarks import graphs
from cpvt_det.common import structures

MOST_GRAPHS, MOST_READS = 3, 2


def test_the_counter_sees_what_the_host_reads(monkeypatch):
    """One of each kind; a look at a mask on the CPU is none, as it is not done on other devices."""

    def read(mask):
        values = torch.arange(4.0)
        values[2].item(), bool(values.any()), values.nonzero(), values[mask], values.tolist(), values.cpu()
        values[mask] = 0.0
        return values[torch.tensor([1, 2])]

    monkeypatch.setattr(graphs, "PACKAGE", graphs.Path(__file__).parent)
    with graphs.counted_reads() as reads:
        assert structures.has_padding(torch.zeros(1, 2, 2, dtype=torch.bool))
        read(torch.tensor([True, False, True, False]))
    named = sorted(line.split(" ")[1] for line in reads.elements())
    assert named == ["_local_scalar_dense"] * 2 + ["cpu", "index", "index_put_", "nonzero", "tolist"]


@pytest.mark.parametrize("name", graphs.DETECTORS)
def test_a_training_step_reads_little_of_the_device(name):
    reads = graphs.count_reads(graphs.small_config(name))
    assert 0 < reads.total() <= MOST_READS, reads


def test_a_detector_compiles_to_few_graphs():
    """The one with the most parts, in training; DETR's and Deformable-DETR's are its parts, and in the record."""
    assert graphs.count_graphs(graphs.small_config("DINO"), training=True) <= MOST_GRAPHS


def test_the_record_has_counts_within_the_goals():
    record = json.loads((ROOT / "benchmarks/results/graphs.json").read_text(encoding="utf-8"))
    assert len(record["graphs"]) == 2 * len(graphs.DETECTORS) and all(found <= MOST_GRAPHS for found in record["graphs"].values())
    assert all(sum(reads.values()) <= MOST_READS for reads in record["reads"].values())


def test_the_command_writes_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "DETECTORS", ("DETR",))
    monkeypatch.setattr(graphs, "count_graphs", lambda cfg, training: 1)
    done = CliRunner().invoke(graphs.main, ["--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "graphs.json").read_text(encoding="utf-8"))
    assert record["graphs"] == {"DETR, inference": 1, "DETR, training": 1} and record["commit"]
