# SPDX-License-Identifier: Apache-2.0
"""PEGDetection against an explicit sum, against the authors' arithmetic, and blind to what lies under the padding."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import padding_mask_of
from cpvt_det.position import PEGDetection

SHAPE = (5, 7)
SIZES = [(5, 7), (4, 3), (2, 6)]  # valid (h, w) of the images of a batch; the first is not padded
CHANNELS = 8


def make_peg(norm="BN", kernel_size=3, **options):
    """A float64 PEG whose parameters and statistics are all unlike their initial values."""
    torch.manual_seed(1)
    peg = PEGDetection(CHANNELS, kernel_size, norm, **options).double()
    with torch.no_grad():
        for tensor in [*peg.parameters(), *peg.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape).double() + 0.5 if tensor.dim() == 1 else torch.randn(tensor.shape).double())
    return peg


def make_batch(shape=SHAPE, sizes=SIZES, seed=0):
    """Tokens (B, N, C) float64, the same for the same valid cell whatever the shape, and their mask (B, N)."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(len(sizes), 16, 16, CHANNELS, generator=generator, dtype=torch.float64)
    tokens = content[:, : shape[0], : shape[1]].reshape(len(sizes), -1, CHANNELS)
    return tokens, padding_mask_of(sizes, shape).flatten(1)


def slow_convolution(peg, tokens, mask, shape):
    """The explicit sum over the k x k neighbours of every token: (B, H, W, C)."""
    (height, width), weight = shape, peg.conv.weight.detach()
    reach = peg.conv.kernel_size[0] // 2
    convolved = torch.zeros(len(tokens), height, width, tokens.shape[-1], dtype=torch.float64)
    for b in range(len(tokens)):
        for y in range(height):
            for x in range(width):
                for i in range(-reach, reach + 1):
                    for j in range(-reach, reach + 1):
                        row, column = y + i, x + j
                        if not (0 <= row < height and 0 <= column < width):
                            continue
                        if peg.mask_input and mask[b, row * width + column]:
                            continue
                        convolved[b, y, x] += weight[:, 0, i + reach, j + reach] * tokens[b, row * width + column]
    return convolved


def slow_peg(peg, tokens, mask, shape):
    """The whole module by loops. Batch statistics are over the valid cells, or all of them without ``mask_input``."""
    height, width = shape
    convolved = slow_convolution(peg, tokens, mask, shape)
    counted = ~mask.view(-1, height, width) if peg.mask_input else torch.ones(len(tokens), height, width, dtype=torch.bool)
    if isinstance(peg.norm, nn.BatchNorm2d):
        mean, variance = peg.norm.running_mean, peg.norm.running_var
        if peg.training:
            cells = torch.stack([convolved[b, y, x] for b, y, x in counted.nonzero().tolist()])
            mean = cells.sum(0) / len(cells)
            variance = (cells - mean).square().sum(0) / len(cells)
        convolved = (convolved - mean) / (variance + peg.norm.eps).sqrt() * peg.norm.weight + peg.norm.bias
    elif isinstance(peg.norm, nn.GroupNorm):
        normalised = torch.zeros_like(convolved)
        step = CHANNELS // peg.norm.num_groups
        for b in range(len(tokens)):
            for first in range(0, CHANNELS, step):
                group = convolved[b, ..., first : first + step]
                cells = group[counted[b]]
                mean = cells.sum() / cells.numel()
                variance = (cells - mean).square().sum() / cells.numel()
                normalised[b, ..., first : first + step] = (group - mean) / (variance + peg.norm.eps).sqrt()
        convolved = normalised * peg.norm.weight + peg.norm.bias
    branch = convolved.clamp(min=0)
    if peg.scale is not None:
        branch = branch * peg.scale
    encoded = tokens.clone()
    for b, n in (~mask).nonzero().tolist():
        encoded[b, n] += branch[b, n // width, n % width]
    return encoded.detach()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "none"])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_peg_is_the_explicit_sum_over_neighbours(kernel_size, norm, training):
    """Nine terms a token for the 3x3 kernel, on a padded map that is not square."""
    peg = make_peg(norm, kernel_size).train(training)
    tokens, mask = make_batch()
    expected = slow_peg(peg, tokens, mask, SHAPE)
    assert (peg(tokens, mask, SHAPE) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", ["BN", "GN", "none"])
def test_peg_without_input_mask_is_the_explicit_sum_too(norm, training):
    peg = make_peg(norm, mask_input=False).train(training)
    tokens, mask = make_batch()
    expected = slow_peg(peg, tokens, mask, SHAPE)
    assert (peg(tokens, mask, SHAPE) - expected).abs().max() < 1e-12


def test_scale_multiplies_the_branch_after_the_activation():
    peg = make_peg(zero_init=True)
    tokens, mask = make_batch()
    expected = slow_peg(peg, tokens, mask, SHAPE)
    assert (peg(tokens, mask, SHAPE) - expected).abs().max() < 1e-12


def test_nine_terms_by_hand():
    """One channel, a 2 x 3 map of ones, a kernel of ones, no norm: a corner has 4 neighbours with itself, an edge 6.

    With the last column padded two columns are left, and every token is a corner of a 2 x 2 map: 4 neighbours.
    """
    peg = PEGDetection(1, norm="none")
    nn.init.ones_(peg.conv.weight)
    mask = torch.tensor([[False] * 6, [False, False, True] * 2])
    encoded = peg(torch.ones(2, 6, 1), mask, (2, 3))
    assert encoded[0, :, 0].tolist() == [5, 7, 5, 5, 7, 5]
    assert encoded[1, :, 0].tolist() == [5, 5, 1, 5, 5, 1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_two_forward_passes_before_one_backward_pass(order):
    """With padding and without: what one pass does to the running statistics must not disturb the other's gradients."""
    peg = PEGDetection(4)
    masks = [torch.zeros(2, 8, dtype=torch.bool), torch.arange(8).expand(2, -1) == 7]
    total = sum(peg(torch.randn(2, 8, 4), masks[padded], (2, 4)).square().sum() for padded in order)
    total.backward()
    assert peg.norm.num_batches_tracked == 2


def test_running_statistics_are_those_of_the_valid_tokens():
    """Momentum 0.1, and n / (n - 1) for the running variance, with n = 5 * 7 + 4 * 3 + 2 * 6 = 59 valid tokens."""
    peg = make_peg()
    tokens, mask = make_batch()
    cells = slow_convolution(peg, tokens, mask, SHAPE).flatten(1, 2)[~mask]
    assert len(cells) == 59
    mean_before, variance_before = peg.norm.running_mean.clone(), peg.norm.running_var.clone()
    tracked_before = int(peg.norm.num_batches_tracked)
    peg(tokens, mask, SHAPE)
    expected_mean = 0.9 * mean_before + 0.1 * cells.sum(0) / 59
    expected_variance = 0.9 * variance_before + 0.1 * (cells - cells.sum(0) / 59).square().sum(0) / 58
    assert (peg.norm.running_mean - expected_mean).abs().max() < 1e-12
    assert (peg.norm.running_var - expected_variance).abs().max() < 1e-12
    assert int(peg.norm.num_batches_tracked) == tracked_before + 1


class AuthorsPEG(nn.Module):
    """``x + ReLU(BN(conv(x)))`` on the whole map, then the padded tokens put back."""

    def __init__(self, peg):
        super().__init__()
        channels = peg.conv.in_channels
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.load_state_dict(peg.state_dict())

    def forward(self, tokens, padding_mask, shape):
        x = tokens.transpose(1, 2).reshape(len(tokens), -1, *shape)
        x = x + torch.relu(self.norm(self.conv(x)))
        encoded = x.flatten(2).transpose(1, 2)
        return torch.where(padding_mask[..., None], tokens, encoded)


@pytest.mark.parametrize("channels", [8, 64])
@pytest.mark.parametrize("shape", [SHAPE, (20, 27)])
def test_peg_without_input_mask_is_bit_equal_to_the_authors_in_evaluation(shape, channels):
    torch.manual_seed(0)
    peg = PEGDetection(channels, mask_input=False)
    for tensor in (peg.norm.weight, peg.norm.bias, peg.norm.running_mean, peg.norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    authors = AuthorsPEG(peg)
    tokens, mask = torch.randn(3, shape[0] * shape[1], channels), padding_mask_of(SIZES, shape).flatten(1)
    assert torch.equal(peg.eval()(tokens, mask, shape), authors.eval()(tokens, mask, shape))


def test_peg_without_input_mask_is_the_authors_in_training():
    torch.manual_seed(0)
    peg = PEGDetection(16, mask_input=False)
    authors = AuthorsPEG(peg)
    tokens, mask = torch.randn(3, 35, 16), padding_mask_of(SIZES, SHAPE).flatten(1)
    assert (peg(tokens, mask, SHAPE) - authors(tokens, mask, SHAPE)).abs().max() <= 1e-5
    for name, value in authors.norm.named_buffers():
        assert torch.allclose(getattr(peg.norm, name), value, atol=1e-6, rtol=0), name


def test_without_input_mask_padding_leaks_into_valid_tokens():
    """The negative control of the tests below: what mask_input is there for."""
    tokens, mask = make_batch()
    changed = tokens.masked_fill(mask[..., None], 3.0)
    for training in (False, True):
        peg = make_peg(mask_input=False).train(training)
        difference = (peg(tokens, mask, SHAPE) - peg(changed, mask, SHAPE)).abs()[~mask]
        assert difference.max() > 0.1


@pytest.mark.parametrize("content", [0.0, 1e30, -1e300, float("nan"), float("inf")])
@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "none"])
@pytest.mark.parametrize("training", [False, True])
def test_peg_does_not_see_under_the_padding(training, norm, content):
    """Valid outputs, running statistics and gradients differ by 0.0 whatever the padded tokens hold."""
    tokens, mask = make_batch()
    results = []
    for tokens_of_run in (tokens, tokens.masked_fill(mask[..., None], content)):
        peg = make_peg(norm).train(training)
        encoded = peg(tokens_of_run, mask, SHAPE)
        encoded[~mask].square().sum().backward()
        gradients = [parameter.grad for parameter in peg.parameters()]
        results.append([encoded[~mask], *peg.buffers(), *gradients])
    for first, second in zip(*results, strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "none"])
@pytest.mark.parametrize("training", [False, True])
def test_amount_of_padding_does_not_matter(training, norm):
    results = []
    for shape in (SHAPE, (8, 11), (5, 16)):
        peg = make_peg(norm).train(training)
        tokens, mask = make_batch(shape)
        encoded = peg(tokens, mask, shape).unflatten(1, shape)
        results.append([*(encoded[b, :h, :w] for b, (h, w) in enumerate(SIZES)), *peg.buffers()])
    for first, *others in zip(*results, strict=True):
        for other in others:
            assert (first - other).abs().max() <= 1e-12


@pytest.mark.parametrize("mask_input", [True, False])
@pytest.mark.parametrize("training", [False, True])
def test_padded_tokens_leave_bit_for_bit_as_they_came(training, mask_input):
    tokens, mask = make_batch()
    tokens[mask] *= 1e8
    encoded = make_peg(mask_input=mask_input).train(training)(tokens, mask, SHAPE)
    assert torch.equal(encoded[mask], tokens[mask])
    assert not torch.equal(encoded[~mask], tokens[~mask])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "none"])
def test_zero_init_starts_as_the_identity(norm, training):
    peg = PEGDetection(CHANNELS, norm=norm, zero_init=True).double().train(training)
    tokens, mask = make_batch()
    assert torch.equal(peg(tokens, mask, SHAPE), tokens)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_zero_init_learns_its_scale_at_the_first_step_and_the_rest_by_the_second(optimizer):
    torch.manual_seed(0)
    peg = PEGDetection(CHANNELS, zero_init=True).double()
    tokens, mask = make_batch()
    wanted = torch.randn_like(tokens)
    steps = optimizer(peg.parameters(), lr=0.1, weight_decay=0.0)
    history = [{name: value.detach().clone() for name, value in peg.named_parameters()}]
    for _ in range(2):
        steps.zero_grad()
        (peg(tokens, mask, SHAPE) - wanted).square().mean().backward()
        steps.step()
        history.append({name: value.detach().clone() for name, value in peg.named_parameters()})
    assert set(history[0]) == {"conv.weight", "norm.weight", "norm.bias", "scale"}
    assert (history[1]["scale"] != 0).any()
    for name in ("conv.weight", "norm.weight", "norm.bias"):
        assert torch.equal(history[1][name], history[0][name])
        assert not torch.equal(history[2][name], history[0][name]), name


def test_scale_exists_only_with_zero_init():
    assert "scale" not in PEGDetection(8).state_dict()
    assert PEGDetection(8, zero_init=True).state_dict()["scale"].tolist() == [0.0] * 8


@pytest.mark.parametrize(("channels", "weights"), [(192, 1728), (256, 2304)])
def test_peg_has_nine_weights_a_channel(channels, weights):
    assert sum(parameter.numel() for parameter in PEGDetection(channels, norm="none").parameters()) == weights
    assert PEGDetection(channels).conv.weight.numel() == weights
    assert PEGDetection(channels).conv.bias is None


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "none"])
@pytest.mark.parametrize("options", [{}, {"zero_init": True}, {"mask_input": False}])
def test_fold_keeps_the_outputs(options, norm):
    peg = make_peg(norm, **options).eval()
    tokens, mask = make_batch()
    before = peg(tokens, mask, SHAPE)
    folded = peg.fold()
    assert folded is peg
    assert not any(isinstance(module, nn.BatchNorm2d) for module in peg.modules())
    assert (peg(tokens, mask, SHAPE) - before).abs().max() < 1e-12
    assert (peg.fold()(tokens, mask, SHAPE) - before).abs().max() < 1e-12  # twice is once


def test_fold_refuses_training_and_group_norm():
    with pytest.raises(ValueError, match="evaluation mode"):
        make_peg().train().fold()
    with pytest.raises(ValueError, match="MaskedGroupNorm"):
        make_peg("GN").eval().fold()


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN"])
def test_one_valid_token_is_enough(norm):
    """Its variance is 0, so the norm gives its bias; the running variance takes the 0 without dividing by n - 1 = 0."""
    peg = make_peg(norm)
    before = {name: value.clone() for name, value in peg.named_buffers()}
    tokens, mask = make_batch(sizes=[(1, 1)])
    encoded = peg(tokens, mask, SHAPE)
    assert torch.isfinite(encoded).all()
    assert all(torch.isfinite(value).all() for value in peg.buffers())
    if norm != "GN":
        assert torch.allclose(encoded[0, 0], tokens[0, 0] + peg.norm.bias)
        assert torch.allclose(peg.norm.running_var, 0.9 * before["norm.running_var"], rtol=1e-12)


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN"])
def test_no_valid_token_leaves_the_running_statistics_alone(norm):
    peg = make_peg(norm)
    before = {name: value.clone() for name, value in peg.named_buffers() if value.is_floating_point()}
    tokens, mask = make_batch(sizes=[(0, 0), (0, 0)])
    tokens.requires_grad_()
    encoded = peg(tokens, mask, SHAPE)
    encoded.sum().backward()
    assert torch.equal(encoded, tokens)
    assert torch.isfinite(tokens.grad).all()
    for name, value in before.items():
        assert torch.equal(dict(peg.named_buffers())[name], value), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_size": 2}, "odd and at least 1.*got 2"),
        ({"kernel_size": 0}, "got 0"),
        ({"kernel_size": -3}, "got -3"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PEGDetection(**{"channels": 8, **arguments})


def test_unknown_norm_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown norm 'LN'.*known: BN, GN, SyncBN, none"):
        PEGDetection(8, norm="LN")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_mask_that_is_not_bool_is_refused(dtype):
    tokens, mask = make_batch()
    with pytest.raises(TypeError, match="must be bool with True = padded"):
        make_peg()(tokens, mask.to(dtype), SHAPE)


def test_shapes_that_disagree_are_refused():
    tokens, mask = make_batch()
    for arguments in (
        (tokens, mask, (5, 8)),
        (tokens, mask[:, 1:], SHAPE),
        (tokens[0], mask[0], SHAPE),
        (tokens, mask[:1], SHAPE),
    ):
        with pytest.raises(ValueError, match="disagree; expected"):
            make_peg()(*arguments)


# Two processes


def run_synchronised(rank, world_size, folder, batches):
    """One process of a group: its outputs, input gradients, statistics and weight gradients into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world_size)
    results = [run_once(*batch) for batch in batches[rank]]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_once(tokens, mask):
    peg = make_peg("SyncBN")
    tokens = tokens.clone().requires_grad_()
    encoded = peg(tokens, mask, SHAPE)
    weights = torch.linspace(-1, 1, encoded.numel() // len(encoded), dtype=torch.float64).view(encoded.shape[1:])
    (encoded.square() * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in peg.named_parameters()}
    return {"encoded": encoded.detach(), "gradient": tokens.grad, "buffers": dict(peg.named_buffers()), "gradients": gradients}


def test_synchronised_statistics_are_those_of_the_batch_in_one_process(tmp_path, monkeypatch):
    """Two gloo processes, first with valid tokens in both, then with none in the second, then with none anywhere."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    sizes_of_runs = [
        ([(5, 7), (4, 3)], [(2, 6)]),
        ([(5, 7), (4, 3)], [(0, 0)]),
        ([(0, 0)], [(0, 0)]),
    ]
    batches = [[make_batch(sizes=sizes[rank], seed=rank) for sizes in sizes_of_runs] for rank in range(2)]
    torch.multiprocessing.start_processes(run_synchronised, (2, tmp_path, batches), nprocs=2, start_method="forkserver")
    processes = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for run in range(len(sizes_of_runs)):
        together = run_once(*(torch.cat([batches[rank][run][part] for rank in range(2)]) for part in range(2)))
        apart = [process[run] for process in processes]
        for key in ("encoded", "gradient"):
            assert (torch.cat([part[key] for part in apart]) - together[key]).abs().max() <= 1e-10, (run, key)
        for name, expected in together["buffers"].items():
            for part in apart:
                assert (part["buffers"][name] - expected).abs().max() <= 1e-10, (run, name)
        for name, expected in together["gradients"].items():
            summed = apart[0]["gradients"][name] + apart[1]["gradients"][name]
            assert (summed - expected).abs().max() <= 1e-10, (run, name)
