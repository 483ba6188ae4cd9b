# SPDX-License-Identifier: Apache-2.0
"""What a record of a benchmark says of its machine, and when a run is refused. Never a speed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import load, machine, memory, origin, peers, products, products_alone, report
from benchmarks.equal import difference
from benchmarks.harness import ROUNDS, Contender, Plan, Work, without_failures
from benchmarks.run import main
from benchmarks.suites import Options, find_suite, known_suites, op
from cpvt_det.common.errors import BadInputError

pytestmark = pytest.mark.usefixtures("quiet_machine")

AVX512 = {"instruction_set": "AVX512"}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (AVX512, ""),
        ({"instruction_set": "AVX512_VNNI"}, ""),
        ({"instruction_set": "AVX2", "limited_by": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}, "_avx2"),
        ({"instruction_set": "AVX2"}, "_avx2"),
        ({"instruction_set": "NO AVX"}, "_noavx"),
        ({**AVX512, "limited_by": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}, "_limited"),
        ({**AVX512, "limited_by": {"CPVT_DET_WITHOUT": "winograd, onednn"}}, "_without_onednn_winograd"),
        ({"instruction_set": "AVX2", "limited_by": {"CPVT_DET_WITHOUT": "winograd"}}, "_avx2_without_winograd"),
    ],
)
def test_names_of_files_differ_by_instructions(found, name):
    assert machine.name_of_instructions(found) == name
    assert report.file_stem("model", "cpu", 1, found) == f"model_cpu{name}"
    assert report.file_stem("model", "cpu", 2, found) == f"model_cpu{name}_2threads"
    assert report.file_stem("model", "cuda", 2, found) == "model_cuda"


def test_settings_of_the_c_library_s_memory_are_in_the_record_and_its_name(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert "c_library" not in machine.machine("cpu")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    found = machine.machine("cpu")
    assert found["c_library"] == {"MALLOC_MMAP_MAX_": "0"}
    assert report.file_stem("model", "cpu", 2, {**AVX512, "c_library": found["c_library"]}) == "model_cpu_malloc_2threads"


def test_instructions_are_those_of_torch_and_the_environment_that_limits_them(monkeypatch):
    for name in (*origin.LIMITING, origin.WITHOUT):
        monkeypatch.delenv(name, raising=False)
    assert origin.instructions().keys() == {"instruction_set", "flags"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("CPVT_DET_WITHOUT", "winograd")
    assert origin.instructions()["limited_by"] == {"ONEDNN_MAX_CPU_ISA": "AVX2", "CPVT_DET_WITHOUT": "winograd"}
    assert origin.instructions()["instruction_set"] == torch.backends.cpu.get_cpu_capability()


def test_flags_are_those_of_products(monkeypatch):
    lines = ["model name\t: some", "flags\t\t: fpu fma sse4_2 avx avx2 avx_vnni avx512f avx512_bf16 aes"]
    monkeypatch.setattr(origin, "read_lines", lambda path: lines)
    assert origin.instructions()["flags"] == "fma avx2 avx_vnni avx512f avx512_bf16"
    lines[1] = "flags\t\t: fpu"
    assert origin.instructions()["flags"] == "none of avx2, fma, avx512"
    lines.pop()
    assert origin.instructions()["flags"] == "unknown"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["cpu family\t: 25", "model\t\t: 1", "model name\t: some one"], "some one, family 25, model 1"),
        (["model name\t: some one"], "some one"),
    ],
)
def test_a_processor_has_its_generation_where_the_system_tells_it(monkeypatch, lines, name):
    monkeypatch.setattr(origin, "read_lines", lambda path: lines)
    assert origin.cpu_model() == name


def test_a_commit_says_what_differs_but_for_results(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    files = [tmp_path / name for name in ("code.py", "benchmarks/results/a.json", "studies/one/results/group/peg/0.json")]
    git("init", "-q")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = origin.commit_of(tmp_path)
    assert len(commit) == 40
    for file in files[1:]:
        file.write_text("2")
    assert origin.commit_of(tmp_path) == commit
    files[0].write_text("2")
    assert origin.commit_of(tmp_path) == f"{commit}+changes"
    short = origin.commit_of(tmp_path, short=True)
    assert commit.startswith(short.removesuffix("+changes"))
    assert len(short) < 20


def test_a_busy_machine_is_refused_and_one_that_tells_no_load_is_not(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load.BOUND, 9.0, 9.0))
    assert load.check_load(busy=False) == load.BOUND
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    with pytest.raises(BadInputError, match=r"load average of the last minute is 1\.5, above 0\.75: .* --busy"):
        load.check_load(busy=False)
    assert load.check_load(busy=True) == 1.5
    monkeypatch.delattr(os, "getloadavg")
    assert load.check_load(busy=False) is None


@pytest.fixture
def tiny_op(monkeypatch, small_limits):
    monkeypatch.setattr(op, "IMAGES", {"33x47": (33, 47)})
    monkeypatch.setattr(op, "PLANS", dict.fromkeys(op.PLANS, Plan(rounds=1, most_rounds=1)))
    monkeypatch.setattr(peers, "IMPORTED", ())


def test_busy_and_the_load_at_the_start_are_in_the_record_and_the_table(tiny_op, monkeypatch, tmp_path):
    loads = iter([1.5])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads, 2.0), 0.0, 0.0))
    monkeypatch.setattr(machine, "instructions", lambda: {"instruction_set": "AVX2", "limited_by": {"ONEDNN_MAX_CPU_ISA": "AVX2"}})
    words = ["--suite", "op", "--quick", "--no-memory", "--case", "*q300*forward", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, [*words, "--busy"])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "op_cpu_avx2.json").read_text())
    assert (content["busy"], content["machine"]["load_average"]) == (True, 1.5)
    assert content["command"].endswith("--busy --no-memory")
    assert content["commit"] == origin.commit_of(peers.ROOT, short=True)
    table = (tmp_path / "op_cpu_avx2.md").read_text()
    for text in (f"Commit: {content['commit']}.", "load average 1.5", "instruction set AVX2", report.BESIDE_OTHER_WORK):
        assert text in table
    assert "limited by ONEDNN_MAX_CPU_ISA AVX2" in table
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "the load average of the last minute is 2.0" in refused.stderr


def test_a_quiet_run_says_nothing_of_other_work(tiny_op, tmp_path):
    words = ["--suite", "op", "--quick", "--no-memory", "--case", "*q300*forward", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (table,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert report.BESIDE_OTHER_WORK not in table
    assert "load average 0.25" in table


def test_every_measurement_of_record_has_seven_rounds():
    for name in known_suites():
        plan = find_suite(name).PLANS["full"]
        assert plan.most_rounds >= plan.rounds >= ROUNDS == 7, name


def test_attempts_that_fail_or_do_other_work_are_left_out_with_the_reason():
    def fail():
        raise RuntimeError("no compiler\nmuch more")

    attempts = [Contender(name, call, attempt=True) for name, call in (("b", fail), ("c", lambda: 2.0), ("d", lambda: 1.0))]
    work = Work([Contender("a", lambda: 1.0), *attempts], left_out={"e": "not here"})
    left = without_failures(work)
    assert [contender.name for contender in left.contenders] == ["a", "d"]
    assert left.left_out.keys() == {"b", "c", "e"}
    assert left.left_out["b"] == "no compiler"
    assert "c differs from a" in left.left_out["c"]
    assert memory.peak_bytes("op", None, attempts[2], Options()) is None
    plain = Work(work.contenders[:1])
    assert without_failures(plain) is plain


# products alone


def test_kinds_of_a_call_are_counted_by_shape():
    """A 1x1 convolution of stride 1 is a linear layer of all cells, dilated or not; other calls are not seen."""
    x, rows = torch.randn(2, 8, 4, 6), torch.randn(2, 24, 8)
    square, wide = torch.randn(16, 8, 1, 1), torch.randn(16, 8, 3, 3)

    def call():
        torch.nn.functional.linear(rows, square[:, :, 0, 0])
        torch.nn.functional.conv2d(x, square)
        torch.nn.functional.conv2d(x, square, dilation=2)
        torch.nn.functional.conv2d(x, square, stride=2)
        torch.nn.functional.conv2d(x, wide, None, 1, (1, 1)).relu()
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
        rows @ rows.transpose(1, 2)

    linear = products.Kind("linear", ((48, 8), (16, 8)))
    strided = products.Kind("convolution", ((2, 8, 4, 6), (16, 8, 1, 1)), stride=(2, 2))
    usual = products.Kind("convolution", ((2, 8, 4, 6), (16, 8, 3, 3)), padding=(1, 1))
    attention = products.Kind("attention", ((2, 24, 8),) * 3)
    product = products.Kind("product", ((2, 24, 8), (2, 8, 24)))
    assert products.watched(call) == {linear: 3, strided: 1, usual: 1, attention: 1, product: 1}
    assert str(strided) == "convolution, 2x8x4x6 by 16x8x1x1, stride 2"
    ways = {kind: products.ways_of(kind) for kind in (linear, strided, usual, attention, product)}
    assert ways[linear].keys() >= {"F.linear", "1x1 convolution, channels last, dilated", "1x1 convolution, contiguous"}
    assert ways[usual].keys() >= {"contiguous", "channels last"}
    for kind, found in ways.items():
        outputs = [call() for call in found.values()]
        assert all(difference(output, outputs[0]) < 1e-5 for output in outputs), kind


def test_winograd_is_a_way_and_hides_nothing(monkeypatch):
    class Winograd:
        convolve_3x3 = staticmethod(lambda x, weight: torch.nn.functional.conv2d(x, weight, padding=1))

    class Routes:
        takes = staticmethod(lambda route, x: True)

    monkeypatch.setattr(products, "optional", {"winograd": Winograd, "routes": Routes}.get)
    kind = products.Kind("convolution", ((1, 4, 5, 5), (4, 4, 3, 3)), padding=(1, 1))
    assert "winograd" in products.ways_of(kind)
    seen = []
    products.watched(lambda: seen.extend(Routes.takes(route, None) for route in ("winograd", "onednn", "rows")))
    assert seen == [False, True, True]
    assert Routes.takes("winograd", None)


def test_the_share_of_products_is_written_with_the_machine(monkeypatch, tmp_path):
    from benchmarks.models import Recipe
    from benchmarks.suites import model

    monkeypatch.setattr(model, "IMAGES", {"cpu": (64, 64)})
    monkeypatch.setattr(model, "DETR", Recipe("DETR", channels=32, layers=1, queries=5))
    words = ["--detector", "DETR", "--rounds", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(products_alone.main, words)
    assert result.exit_code == 0, result.output
    assert "DETR-R50 64x64 b2 inference: products and convolutions alone take" in result.output
    (path,) = tmp_path.glob("products_alone_cpu*.json")
    content = json.loads(path.read_text())
    assert content.keys() == {"command", "threads", "busy", "commit", "machine", "versions", "cases"}
    (case,) = content["cases"]
    assert case["share"]["median"] == pytest.approx(case["alone"] / case["whole"])
    assert sum(row["seconds"] for row in case["rows"]) == pytest.approx(case["alone"])
    assert sum(row["times"] for row in case["rows"]) > 60  # a ResNet-50 alone has 53
    assert "| operation | times | fastest way |" in path.with_suffix(".md").read_text()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert CliRunner().invoke(products_alone.main, words).exit_code == 2


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
OLDER = {
    "eval_cpu_2threads",
    "house_before",
    "matrix",
    "model_cpu_2threads",
    "op_cpu_2threads",
    "processes_cpu",
    "scaling_cpu",
    "shards_cpu",
    "before_after",
    "start_up",
}
"""Records of before records had all of this; the documents say so where they give their figures."""
WITHOUT_TIMES = {
    "graphs",
    "foreign_losses",
    "foreign_weights",
    "parity",
    "detectron2_cpvt",
    "house",
    "annotations_coco",
    "annotations_large",
    "first_run_memory",
}
"""Records of values and counts, and of seconds that are compared with nothing: of them no load is required."""


NEWER = sorted(path for path in RESULTS.rglob("*.json") if path.stem not in OLDER)


@pytest.mark.parametrize("path", NEWER, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_record_names_its_command_commit_instructions_and_load(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    machine_of = found.get("machine", found)
    assert found["command"].startswith("python benchmarks/")
    assert found.get("commit") or " " in found["versions"]["cpvt_det"]
    assert machine_of["instruction_set"] and machine_of["cpu"]
    if path.stem not in WITHOUT_TIMES:
        of_gpu = found.get("device") == "cuda"  # its steps follow each other, on many cores
        bound = machine_of["cores"] / 4 if of_gpu else load.BOUND
        assert machine_of["load_average"] <= bound or found.get("busy") or "--busy" in found["command"]
