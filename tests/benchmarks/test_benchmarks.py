# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: arithmetic, order, refusals, files. Never a speed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from click.testing import CliRunner

import cpvt_det
from benchmarks import memory, peers, report, runner, suites
from benchmarks.clocks import Command, CommandRun, ProcessClock, Sample, fixed_threads
from benchmarks.equal import difference
from benchmarks.gather import corner_rows, make_gather
from benchmarks.harness import Case, Contender, Plan, Row, Spread, UnequalWorkError, Work, compare, ratios, run_rounds
from benchmarks.run import main
from benchmarks.runner import command_of, run_suite
from benchmarks.suites import Options, op
from cpvt_det.common.errors import BadInputError, UnknownNameError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quiet_machine")

ONCE = Plan(warm_up=0, rounds=1, most_rounds=1, seconds=0)


class FakeClock:
    """Tells the seconds that it was given, and writes down what it called."""

    def __init__(self, **seconds):
        self.seconds = {name: iter(values) for name, values in seconds.items()}
        self.called = []

    def time(self, call, repeats):
        name = call()
        self.called.append((name, repeats))
        wall = next(self.seconds[name])
        return Sample(wall, wall / 2)


def named(name, **more):
    return Contender(name, lambda: name, **more)


def test_ratios_are_paired_by_round_and_the_median_is_not_moved_by_one_bad_round():
    """B is twice as fast as A in every round, while the machine slows down; the third round has a disturbance in B."""
    a, b = [2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 80.0, 8.0, 16.0]
    wall, cpu = ratios([Sample(x, x) for x in a], [Sample(x, 3 * x) for x in b])
    assert wall == Spread(median=2.0, q1=2.0, q3=2.0, least=0.1, most=2.0)
    assert cpu.median == pytest.approx(2 / 3)


def test_spread_of_quartiles_by_hand():
    assert Spread.of([4, 1, 3, 2]) == Spread(median=2.5, q1=1.75, q3=3.25, least=1, most=4)
    with pytest.raises(ValueError, match="expected at least one figure, got none"):
        Spread.of([])


def test_no_cpu_ratio_where_a_clock_tells_no_cpu_time():
    assert ratios([Sample(1.0)], [Sample(0.5)])[1] is None


def test_rounds_alternate_and_the_warm_up_is_left_out():
    work = Work([named("a"), named("b")])
    clock = FakeClock(a=[100.0, 1.0, 2.0, 3.0], b=[50.0, 4.0, 5.0, 6.0])
    _, samples = run_rounds(work, Plan(warm_up=1, rounds=3, most_rounds=3), clock)
    assert [name for name, _ in clock.called] == list("abababab")
    assert [s.wall for s in samples["a"]] == [1, 2, 3]
    assert [s.wall for s in samples["b"]] == [4, 5, 6]


def test_rounds_go_on_until_the_seconds_are_spent_or_the_most_are_done():
    plan = Plan(warm_up=0, rounds=2, most_rounds=5, seconds=10)
    for seconds, rounds in ((100, 2), (3, 4), (1, 5)):
        samples = run_rounds(Work([named("a")]), plan, FakeClock(a=[seconds] * 9))[1]
        assert len(samples["a"]) == rounds


def test_a_short_call_is_repeated_within_a_sample():
    plan = Plan(warm_up=1, rounds=1, most_rounds=1, sample_seconds=0.01, most_repeats=7)
    work = Work([named("a"), named("b"), named("c")])
    clock = FakeClock(a=[0.003, 1], b=[1, 1], c=[1e-9, 1])
    repeats, _ = run_rounds(work, plan, clock)
    assert repeats == {"a": 4, "b": 1, "c": 7}
    assert clock.called[3:] == [("a", 4), ("b", 1), ("c", 7)]


def test_rows_refer_to_the_first_contender_and_to_the_fastest_peer():
    work = Work([named("a", peer=True), named("b"), named("c", peer=True)], tolerance=float("inf"))
    rows = compare(work, Plan(warm_up=0, rounds=2, most_rounds=2), FakeClock(a=[8, 8], b=[1, 2], c=[4, 4]))
    assert [row.ratio_wall.median for row in rows] == [1, 6, 2]  # 8/1 and 8/2
    assert [row.over_peer_wall.median for row in rows] == [0.5, 3, 1]
    assert [row.wall.median for row in rows] == [8, 1.5, 4]


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, 2.0, 3.1]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, torch.nan]), (torch.ones(3),) * 2],
)
def test_unequal_outputs_are_not_timed(other):
    clock = FakeClock()
    work = Work([Contender("ours", lambda: torch.tensor([1.0, 2.0, 3.0])), Contender("theirs", lambda: other)], tolerance=1e-3)
    with pytest.raises(UnequalWorkError, match=r"theirs differs from ours by .*not timed"):
        compare(work, Plan(), clock)
    assert clock.called == []


def test_tolerance_is_relative_may_be_a_contenders_own_and_a_limit_has_no_output():
    expected = torch.tensor([0.0, 1000.0])
    work = Work(
        [
            Contender("a", lambda: expected),
            Contender("b", lambda: expected + 0.05),
            Contender("c", lambda: (expected + 20).bfloat16(), tolerance=0.03),
            Contender("limit", lambda: None, limit=True),
        ],
        tolerance=1e-4,
    )
    rows = compare(work, ONCE, ProcessClock())
    assert rows[1].difference == pytest.approx(5e-5, rel=1e-2)
    assert rows[3].difference is None


def test_other_work_is_timed_and_told_but_not_compared(tmp_path, small_limits):
    class Suite:
        TITLE, PLANS = "A suite", {"quick": ONCE}

        @staticmethod
        def cases(options):
            contenders = [Contender("a", lambda: 1.0), Contender("b", lambda: 2.0, other_work="twice as much")]
            return [Case("one", {}, lambda: Work(contenders))]

    assert run_suite("some", Suite, Options(size="quick"), tmp_path) == []
    assert [row["difference"] for row in json.loads((tmp_path / "some_cpu.json").read_text())["cases"][0]["rows"]] == [0, None]
    assert "Timed, not compared:\n\n- b: twice as much" in (tmp_path / "some_cpu.md").read_text()


def test_a_check_is_compared_where_the_call_cannot_be():
    clock = FakeClock(a=[1.0], b=[1.0])
    work = Work([named("a", check=lambda: 5.0), named("b", check=lambda: 5.0)])
    assert [row.difference for row in compare(work, ONCE, clock)] == [0, 0]
    assert [name for name, _ in clock.called] == ["a", "b"]
    with pytest.raises(UnequalWorkError, match="b differs from a"):
        compare(Work([work.contenders[0], named("b", check=lambda: 6.0)]), ONCE, clock)


def test_difference_of_nested_outputs():
    nested = {"loss": 1.0, "parts": [torch.tensor([2.0]), None, "text"]}
    assert difference(nested, nested) == 0
    assert difference({"loss": 1.5, "parts": nested["parts"]}, nested) == 0.5
    for other in ({"loss": 1.0}, {**nested, "parts": nested["parts"][:2]}, {**nested, "parts": [*nested["parts"][:2], "other"]}):
        assert difference(other, nested) == float("inf")
    assert difference(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])) == 0
    assert difference(torch.zeros(0), torch.zeros(0)) == 0


def test_a_command_tells_its_own_time_or_is_timed_whole():
    script = 'import json, os; print(json.dumps({"wall": 3.0, "cpu": 2.0, "output": [1, int(os.environ["TWO"])]}))'
    told = Command([sys.executable, "-S", "-c", script], {"TWO": "2"})
    whole = Command([sys.executable, "-S", "-c", "print(1); print(2)"])
    run = told()
    assert isinstance(run, CommandRun)
    assert (run.sample, run.output) == (Sample(3.0, 2.0), [1, 2])
    assert run.peak_bytes > 1e6
    assert ProcessClock().time(told, 1) == Sample(3.0, 2.0)
    assert whole().output == ["1", "2"]
    assert 0 < whole().sample.cpu < 60


def test_a_command_that_fails_says_its_last_line():
    with pytest.raises(RuntimeError, match="exit code 3: out of luck"):
        Command([sys.executable, "-S", "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"])()


def test_fixed_threads_hold_processes_too_and_are_given_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    command = Command([sys.executable, "-S", "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"])
    with fixed_threads(2):
        assert torch.get_num_threads() == 2
        assert command().output == ["2"]
    assert torch.get_num_threads() == before
    assert command().output == ["None"]


def test_peak_memory_counts_what_the_call_takes_and_no_limit():
    """Within a half: what the system takes back meanwhile, of the libraries' own pages, is of tens of megabytes."""
    taken = 192 << 20
    work = Work([Contender("a", lambda: torch.ones(taken // 4).add_(1))])
    assert 0.5 * taken < memory.measure(Case("c", {}, lambda: work), "a") < 1.5 * taken
    assert memory.peak_bytes("op", None, named("limit", limit=True), Options()) is None


def test_peak_memory_is_measured_in_a_process_of_its_own():
    with pytest.raises(RuntimeError, match="peak memory of cpvt_det in nowhere: .*unknown case 'nowhere'"):
        memory.peak_bytes("op", Case("nowhere", {}, lambda: None), named("cpvt_det"), Options(size="quick"))


def test_times_are_kept_where_peak_memory_cannot_be_measured(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory to tell of")

    monkeypatch.setattr(runner, "peak_bytes", fail)
    case = Case("one", {}, lambda: Work([named("a")], left_out={"b": "is not here"}), memory=True)
    result = runner.run_case("some", case, Options(), ONCE, memory=True)
    assert [row.name for row in result.rows] == ["a"]
    assert result.left_out == {"b": "is not here", "a's peak memory": "no memory to tell of"}


def test_the_gather_reads_the_rows_that_sampling_reads():
    """Points in the middle of four pixels: the mean of their rows is what sampling gives."""
    level_shapes = [(3, 5), (2, 2)]
    pixels = torch.tensor([[1.5, 0.5], [0.5, 0.5]])  # xy of one point a level
    locations = ((pixels + 0.5) / torch.tensor([[5.0, 3.0], [2.0, 2.0]]))[None, None, None, :, None].expand(2, 4, 3, 2, 1, 2)
    value = torch.randn(2, 19, 3, 8)
    rows = corner_rows(locations, level_shapes)
    assert rows.shape == (2 * 4 * 3, 8)
    gathered = make_gather(value.reshape(-1, 8), rows)()
    weights = torch.full((2, 4, 3, 2, 1), 4.0)
    sampled = op.ms_deform_attn(value, level_shapes, locations, weights, implementation="eager")
    assert torch.allclose(gathered.view(2, 4, 24), sampled, atol=1e-5)


def test_points_keep_off_the_borders_between_pixels():
    inputs = op.make_inputs(op.TINY, 2, 0, "near", "cpu")
    sizes = torch.tensor([(width, height) for height, width in op.TINY])
    pixels = inputs.locations * sizes[:, None] - 0.5
    assert ((pixels - pixels.round()).abs() > 0.005).all()


def test_bytes_and_operations_by_hand():
    """One image of 10 tokens and 10 queries: 10 * 8 * 16 points of 4 corners, 32 values each."""
    counted = op.count(1, 10, 10, "forward")
    points = 1280
    assert counted["gathered_bytes"] == points * 4 * 32 * 4
    assert counted["flop"] == points * 4 * 32 * 2
    assert counted["compulsory_bytes"] == 4 * (10 * 256 + points * 3 + 10 * 256)
    assert op.count(1, 10, 10, "forward+backward")["flop"] == 3 * counted["flop"]


def test_case_names_are_unique_and_sizes_nest():
    quick, default, everything = ([s.name for s in op.shapes(size, "cpu")] for size in suites.SIZES)
    assert len(set(everything)) == len(everything)
    assert set(quick) < set(default) < set(everything)
    assert {s.batch for s in op.shapes("all", "cpu")} == {1, 2, 4, 8}


@pytest.fixture
def tiny_op(monkeypatch, small_limits):
    """The op suite on a map of a few tokens, without peers."""
    monkeypatch.setattr(op, "IMAGES", {"33x47": (33, 47)})
    monkeypatch.setattr(op, "PLANS", dict.fromkeys(op.PLANS, Plan(rounds=2, most_rounds=2)))
    monkeypatch.setattr(peers, "IMPORTED", ())


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_run_that_is_broken_off_leaves_the_cases_that_it_did(tmp_path, small_limits):
    def interrupt():
        raise KeyboardInterrupt

    class Suite:
        TITLE, PLANS = "A suite", {"quick": ONCE}

        @staticmethod
        def cases(options):
            return [Case("first", {}, lambda: Work([named("a")])), Case("second", {}, interrupt)]

    with pytest.raises(KeyboardInterrupt):
        run_suite("some", Suite, Options(size="quick"), tmp_path)
    assert [case["name"] for case in json.loads((tmp_path / "some_cpu.json").read_text())["cases"]] == ["first"]


def test_run_writes_json_a_table_and_a_chart_without_any_peer(tiny_op, tmp_path):
    result = call("--suite", "op", "--quick", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "op_cpu.json").read_text())
    assert content["command"] == "python benchmarks/run.py --suite op --device cpu --threads 1 --quick"
    assert {"python", "torch", "numpy", "cpvt_det"} <= content["versions"].keys()
    assert {"cpu", "instruction_set", "flags", "cores", "caches", "memory_gib", "load_average"} <= content["machine"].keys()
    products = {"matmul_fp32_gflop_per_s", "convolution_fp32_gflop_per_s"}
    assert {"copy_in_cache_gb_per_s", "copy_in_memory_gb_per_s"} | products == content["limits"].keys()
    assert (content["device"], content["threads"]) == ("cpu", 1)
    assert len(content["cases"]) == 4
    case = content["cases"][0]
    assert case["name"] == "33x47 b1 qall near forward"
    assert case["counts"].keys() == {"compulsory_bytes", "gathered_bytes", "flop"}
    assert case["left_out"] == {
        "official core": "no checkout given: --peer deformable_detr=PATH",
        "detrex": "no checkout given: --peer detrex=PATH",
        "transformers": "not installed",
    }
    row = case["rows"][0]
    assert row.keys() == set(Row.__dataclass_fields__)
    assert (row["name"], row["rounds"], row["ratio_cpu"]["median"]) == ("cpvt_det", 2, 1)
    table = (tmp_path / "op_cpu.md").read_text()
    assert "limit: gather only" in table
    assert "Left out:" in table
    assert (tmp_path / "op_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert str(ROOT) not in table + json.dumps(content)


def test_a_case_with_unequal_outputs_is_told_the_others_run_and_the_exit_code_is_1(tiny_op, tmp_path, monkeypatch):
    honest = op.ms_deform_attn

    def wrong(value, *args, implementation):
        out = honest(value, *args, implementation=implementation)
        return out * 1.01 if implementation == "eager" and args[1].shape[1] == op.FEW_QUERIES else out

    monkeypatch.setattr(op, "ms_deform_attn", wrong)
    result = call("--suite", "op", "--quick", "--output", tmp_path)
    assert result.exit_code == 1
    assert "failed: RuntimeError: the outputs of contenders differ in 2 cases" in result.stderr.splitlines()[-1]
    rows = {case["name"]: len(case["rows"]) for case in json.loads((tmp_path / "op_cpu.json").read_text())["cases"]}
    assert [bool(rows[name]) for name in rows] == [True, True, False, False]


def test_what_does_not_fit_is_left_out_with_the_reason(tiny_op, monkeypatch):
    monkeypatch.setattr(op, "free_bytes", lambda device: 1_000_000)
    work = op.cases(Options(size="quick"))[0].build()
    assert "GB are free" in work.left_out["cpvt_det export"]
    assert "cpvt_det export" not in [contender.name for contender in work.contenders]


def test_a_case_that_is_left_out_as_a_whole_has_its_line(tmp_path, small_limits):
    class Suite:
        TITLE, PLANS = "A suite", {"quick": ONCE}

        @staticmethod
        def cases(options):
            return [Case("big", {"size": "big"}, lambda: None, left_out="needs a GPU")]

    assert run_suite("some", Suite, Options(size="quick"), tmp_path) == []
    assert "all contenders: needs a GPU (big)" in (tmp_path / "some_cpu.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "opp"), "unknown suite 'opp' (did you mean 'op'?); known: classifier, data, eval, loss, model, op"),
        (
            ("--peer", "detrr=x"),
            "unknown peer 'detrr' (did you mean 'detr'?); known: deformable_detr, deim, detectron2, detr, detrex, dfine,",
        ),
        (("--peer", "detr"), "--peer detr=PATH"),
        (("--peer", "detr=/nowhere"), "/nowhere is not a checkout of facebookresearch/detr: it does not contain models/detr.py"),
        (("--peer", "transformers=/nowhere"), "is a library and has no path"),
        (("--suite", "op", "--quick", "--case", "nothing"), "no case of suite op matches 'nothing'; known: 640x640 b1"),
        (("--quick", "--all"), "--quick and --all cannot be used together; choose one"),
        (("--threads", "0"), "--threads"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words, said):
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.stderr.strip().splitlines()[-1]


def test_cuda_without_a_gpu_is_bad_input():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert call("--device", "cuda").exit_code == 2


def test_a_library_that_is_not_installed_is_bad_input(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match="pip install transformers"):
        peers.find_peers(["transformers"])
    assert peers.find_peers([]) == {}


CORE = """
import MultiScaleDeformableAttention as MSDA


def ms_deform_attn_core_pytorch(value, shapes, locations, weights):
    return "core"


class MSDeformAttnFunction:
    apply = None
"""


def test_a_checkout_is_loaded_with_a_stub_where_its_extension_is_not_built(tmp_path):
    path = tmp_path / peers.CHECKOUTS["deformable_detr"][1]
    path.parent.mkdir(parents=True)
    path.write_text(CORE)
    found = peers.find_peers([f"deformable_detr={tmp_path}"])
    assert peers.official_core(found["deformable_detr"])(None, None, None, None) == "core"
    assert peers.official_cuda_op(found["deformable_detr"]) is None
    assert peers.EXTENSION not in sys.modules
    versions = peers.peer_versions({"deformable_detr": tmp_path})
    assert versions["deformable_detr"] == "fundamentalvision/Deformable-DETR of unknown commit"
    assert versions["cpvt_det"].startswith(cpvt_det.__version__)
    command = command_of("op", Options(size="all", peers=found), "*q300*", memory=False)
    assert command == (
        "python benchmarks/run.py --suite op --peer deformable_detr=PATH --device cpu --threads 1 --all --case '*q300*' --no-memory"
    )


def test_peak_memory_is_measured_where_freed_blocks_go_back_at_once(monkeypatch):
    seen = {}

    def run(command, env, **_):
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, "a word\n123\n", "")

    monkeypatch.setattr(memory.subprocess, "run", run)
    case = Case("work", {}, lambda: None)
    assert memory.peak_bytes("op", case, Contender("cpvt_det", lambda: None), Options()) == 123
    assert seen["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert "PATH" in seen


def test_detrex_s_core_is_loaded_from_its_file_alone(tmp_path):
    path = tmp_path / peers.CHECKOUTS["detrex"][1]
    path.parent.mkdir(parents=True)
    path.write_text("def multi_scale_deformable_attn_pytorch(*args):\n    return 'core'\n")
    assert peers.detrex_core(tmp_path)() == "core"
    path.write_text("import no_such_module\n")
    peers.detrex_core.cache_clear()
    with pytest.raises(BadInputError, match="multi_scale_deform_attn.py cannot be imported: No module named 'no_such_module'"):
        peers.detrex_core(tmp_path)


def test_packages_of_one_name_come_from_their_own_checkout_and_are_gone_after(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PACKAGES", ("benchmarked_models",))
    found = []
    for number in (1, 2):
        package = tmp_path / str(number) / "benchmarked_models"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"import torchvision\nNUMBER, VERSION = {number}, torchvision.__version__\n")
        with peers.packages_of(package.parent):
            found.append(importlib.import_module("benchmarked_models"))
    assert [(module.NUMBER, module.VERSION) for module in found] == [(1, "0.9.0"), (2, "0.9.0")]
    assert "benchmarked_models" not in sys.modules
    assert not list(tmp_path.rglob("__pycache__"))
    assert torchvision.__version__ != "0.9.0"


def test_the_gpu_gather_in_tritons_interpreter():
    pytest.importorskip("triton")
    code = (
        "import torch; from benchmarks.gather_triton import gather\n"
        "values, rows = torch.randn(50, 30), torch.randint(0, 50, (37, 16)).int()\n"
        "assert torch.allclose(gather(values, rows), values[rows.long()].sum(1), atol=1e-4)"
    )
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    Command([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"], environment)()


def test_the_script_runs_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/run.py", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--suite op --quick" in done.stdout
    with pytest.raises(UnknownNameError):
        suites.find_suite("nothing")


def test_figures_have_three_digits():
    spread = Spread(12.345, 1.234, 123.4, 0.01, 1000)
    assert report._times(spread) == "12.3 (1.23-123)"
