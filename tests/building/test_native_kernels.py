"""Tests what no op exposes: statistics merge equally in any grouping, and the loops agree on every instruction set."""

import math
import random

import pytest
import torch

import native_modules
from cases import DTYPES, Draw
from flavours import available_instruction_sets

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
# Tolerance of a gradient, relative to its largest element: rounding to storage, or some units of the arithmetic.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 4e-6, torch.float64: 4e-14}
SIZES = [1, 15, 16, 255, 257, 1024, 1031, 5000]
OPTIONS = {"plain": (1.0, 0.0, 0.0), "scaled": (0.37, 0.0, 0.0), "negative scale": (-1.5, 0.0, 0.0),
           "capped": (1.7, 5.0, 0.0), "smoothed": (1.0, 0.0, 0.2), "all": (1.3, 7.0, 0.1)}  # scale, softcap, smoothing


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    return {name: native_modules.kernels(name, folder) for name in available_instruction_sets()}


def of(module, what, dtype):
    return getattr(module, f"{what}_{NAMES[dtype]}")


# --------------------------------------------------------------------------------------------------------- monoids


def in_any_grouping(merge, parts, choose):
    """Merges all parts in order, two random neighbors at a time."""
    parts = list(parts)
    while len(parts) > 1:
        at = choose.randrange(len(parts) - 1)
        parts[at:at + 2] = [merge(parts[at], parts[at + 1])]
    return parts[0]


def row_parts(z, o):
    """Returns RowStats of logits and class weights; a part of only -inf equals a tile of -inf."""
    largest = z.max().item()
    if largest == -math.inf:
        return None
    kept = o != 0
    return largest, (z - largest).exp().sum().item(), (o * (z - largest))[kept].sum().item(), o.sum().item()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_of_a_row_merge_alike_in_any_grouping(dtype, seed, modules):
    module, draw, choose = next(iter(modules.values())), Draw("cpu", seed), random.Random(seed)
    identity, merge = of(module, "row_identity", dtype)(), of(module, "merge_rows", dtype)
    spread = [1.0, 30.0, 1000.0][seed % 3]
    logits = [(spread * draw.normal(5)).to(dtype).double() for _ in range(9)]
    weights = [draw.uniform(5, dtype=dtype).double() for _ in logits]
    for z, o in zip(logits[::3], weights[::3]):
        z[1], o[1] = -math.inf, 0.0
    parts = [row_parts(z, o) for z, o in zip(logits, weights)]
    parts[4:4] = [identity, identity]  # parts without a finite logit
    z, o = torch.cat(logits), torch.cat(weights)
    lse = z.logsumexp(0)
    smoothed = (o * (lse - z))[o != 0].sum()
    eps = torch.finfo(dtype).eps
    for _ in range(10):
        largest, total, weighted, weight = in_any_grouping(merge, parts, choose)
        assert largest == z.max() and weight == pytest.approx(o.sum().item(), rel=20 * eps)
        assert largest + math.log(total) == pytest.approx(lse.item(), abs=20 * eps * max(1.0, lse.abs().item()))
        assert weight * math.log(total) - weighted == pytest.approx(smoothed.item(), rel=40 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_merged_into_statistics_changes_no_bit(dtype, modules):
    module = next(iter(modules.values()))
    identity, merge = of(module, "row_identity", dtype)(), of(module, "merge_rows", dtype)
    for part in [(3.0, 1.5, -2.0, 4.0), (-80.0, 1.0, 0.0, 1.0), (0.0, 7.0, 0.0, 0.0), identity]:
        assert merge(part, identity) == part == merge(identity, part)


@pytest.mark.parametrize("what", ["targets", "means", "masked_sums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_merge_alike_in_any_grouping(dtype, what, modules):
    """Tests integers, whose sums are exact."""
    merge, choose = of(next(iter(modules.values())), f"merge_{what}", dtype), random.Random(1)
    parts = [(float(choose.randrange(-99, 99)), float(choose.randrange(99))) for _ in range(12)]
    assert merge(parts[0], (0.0, 0.0)) == parts[0] == merge((0.0, 0.0), parts[0])
    for _ in range(5):
        assert in_any_grouping(merge, parts, choose) == (sum(p[0] for p in parts), sum(p[1] for p in parts))


# ----------------------------------------------------------------------------------------------------------- tiles


def problem(dtype, n, options):
    """Returns (logits, class weights or None, z in float64, dz/dx, log-sum-exp)."""
    draw, (scale, softcap, smoothing) = Draw("cpu", n), OPTIONS[options]
    logits = (3 * draw.normal(n, dtype=torch.float64)).to(dtype)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weight = draw.uniform(n, low=0.2, high=2, dtype=arithmetic) if smoothing and n % 2 else None
    z = scale * logits.double()
    slope = torch.full_like(z, scale)
    if softcap:
        z = softcap * (z / softcap).tanh()
        slope = scale * (1 - (z / softcap).square())
    return logits, weight, z, slope, z.logsumexp(0)


def address(t):
    return 0 if t is None else t.data_ptr()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_statistics_of_a_tile(dtype, options, modules):
    scale, softcap, smoothing = OPTIONS[options]
    close = dict(rel=4e-13 if dtype == torch.float64 else 4e-6, abs=4e-13 if dtype == torch.float64 else 4e-6)
    for n in SIZES:
        logits, weight, z, _, lse = problem(dtype, n, options)
        o = torch.ones_like(z) if weight is None else weight.double()
        for name, module in modules.items():
            stats = of(module, "tile_stats", dtype)
            found = stats(logits.data_ptr(), n, scale, softcap, bool(smoothing), address(weight))
            assert found[0] + math.log(found[1]) == pytest.approx(lse.item(), **close), (name, n)
            if smoothing:
                assert found[3] * math.log(found[1]) - found[2] == pytest.approx((o * (lse - z)).sum().item(), **close)
            else:
                assert found[2:] == (0, 0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_gradient_of_a_tile(dtype, options, modules):
    """Tests logits without entries, out of place and in place, and logits with entries."""
    scale, softcap, smoothing = OPTIONS[options]
    grad, mass = 1.7, 0.6
    for n in SIZES:
        logits, weight, z, slope, lse = problem(dtype, n, options)
        o = torch.ones_like(z) if weight is None else weight.double()
        a, b, d = grad * ((1 - smoothing) * mass + smoothing), grad * smoothing / n, grad * (1 - smoothing)
        exact = (a * (z - lse).exp() - b * o) * slope
        entries = Draw("cpu", n + 1).uniform(n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        weight_of_row = entries.double().sum().item()
        with_entries = exact + (d * (weight_of_row - mass) * (z - lse).exp() - d * entries.double()) * slope
        for name, module in modules.items():
            shared = scale, softcap, smoothing, grad, mass, lse.item(), address(weight)
            out, inplace = torch.full_like(logits, math.nan), logits.clone()
            gradient = of(module, "tile_gradient", dtype)
            gradient(logits.data_ptr(), n, *shared, out.data_ptr(), False)
            gradient(inplace.data_ptr(), n, *shared, inplace.data_ptr(), False)
            assert torch.equal(out, inplace)
            assert_near(out, exact, dtype, (name, n))
            at = logits.to(entries.dtype, copy=True)
            shared = scale, softcap, smoothing, grad, weight_of_row, lse.item(), address(weight)
            of(module, "tile_entries", dtype)(at.data_ptr(), n, *shared, entries.data_ptr())
            assert_near(at, with_entries, at.dtype, (name, n), terms=d * float(entries.max()))


@pytest.mark.parametrize("options", ["plain", "capped", "smoothed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stores_around_the_caches_begin_and_end_anywhere(dtype, options, modules):
    """Checks that non-temporal stores write their range and nothing next to it."""
    scale, softcap, smoothing = OPTIONS[options]
    of_line = 64 // dtype.itemsize
    for n in (1, of_line, 3 * of_line + 1, 5000):
        logits, weight, _, _, lse = problem(dtype, n, options)
        shared = scale, softcap, smoothing, 1.7, 0.6, lse.item(), address(weight)
        for name, module in modules.items():
            gradient = of(module, "tile_gradient", dtype)
            expected, memory = torch.empty_like(logits), torch.empty(n + 3 * of_line, dtype=dtype)
            gradient(logits.data_ptr(), n, *shared, expected.data_ptr(), False)
            line = -(memory.data_ptr() // dtype.itemsize) % of_line + of_line
            for begin in range(line - 1, line + of_line, 3):
                memory.fill_(math.nan)
                gradient(logits.data_ptr(), n, *shared, memory[begin:].data_ptr(), True)
                assert torch.equal(memory[begin:begin + n], expected), (name, n, begin)
                assert memory.isnan().sum() == len(memory) - n, (name, n, begin)


def test_gradients_go_around_the_caches_where_they_are_large_and_not_in_place(modules):
    """Checks when gradients use non-temporal stores; caches count as at least 8 MiB.

    With AVX2, float64 gradients do not use them: their computation takes longer than loading the cache lines.
    """
    for name, module in modules.items():
        for size in (2, 4, 8):
            large, small = (33 << 20) // size, (3 << 20) // size
            assert module.use_nontemporal(64, 128, large, size) == (name == "avx512" or name == "avx2" and size < 8)
            assert not module.use_nontemporal(64, 64, large, size) and not module.use_nontemporal(64, 128, small, size)


def assert_near(found, exact, dtype, where, terms=1e-3):
    error = (found.double() - exact).abs().max()
    assert error <= TOLERANCE[dtype] * exact.abs().max().clamp(min=terms), (where, error)


# -------------------------------------------------------------------------------------------------------- plain loops


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compute_what_the_plain_loops_do(dtype, options, device):
    plain, ops = native_modules.load(native_modules.built("plain")), torch.ops.sparse_ce
    draw, (scale, cap, smoothing) = Draw(device), OPTIONS[options]
    logits, o = (3 * draw.normal(6, 300)).to(dtype), draw.uniform(300, low=0.2, high=2.0)
    classes, weights = draw.integers(300, 6, 4), draw.uniform(6, 4)
    o = o.double() if dtype == torch.float64 else o
    rest = dict(values=weights, weight=o, label_smoothing=smoothing, z_loss=0.01, logit_scale=scale,
                softcap=cap or None)
    loss, lse, residual = ops.forward_with_residual(logits, classes, **rest)
    grad = ops.backward(torch.ones_like(loss), None, logits, lse, residual, classes, **rest)
    for r in range(6):
        of_row = (logits[r].tolist(), classes[r].tolist(), weights[r].tolist(), o.tolist())
        of_loss, of_lse, of_grad = plain.cross_entropy(*of_row, smoothing, 0.01, scale, cap)
        assert loss[r].item() == pytest.approx(of_loss, rel=TOLERANCE[torch.promote_types(dtype, torch.float32)])
        assert lse[r].item() == pytest.approx(of_lse, rel=TOLERANCE[torch.promote_types(dtype, torch.float32)])
        expected = torch.tensor(of_grad, dtype=torch.float64)
        error = (grad[r].cpu().double() - expected).abs().max().item()
        assert error <= TOLERANCE[dtype] * expected.abs().max().item()
