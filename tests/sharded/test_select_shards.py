"""Tests the statistics of a shard of the classes and their combination, by ops in one process.

Tests with several processes are in test_sharded_logits.py.
"""

import functools
import math

import pytest
import torch

import loss_cases
from sparse_ce import reference
from sparse_ce._core.arguments import Arguments
from sparse_ce._core.outputs import Outputs, Selected
from sparse_ce.ops.logits.sharded_select import numbers_of

ops = torch.ops.sparse_ce
ROWS = 9
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = ("labels", "topk", "csr", "ids")
WANTED = {
    "loss": Outputs(loss=True, log_probs=False),
    "log_probs": Outputs(padding_value=-7.0),
    "tail": Outputs(log_probs=False, log_tail=True),
    "no sums": Outputs(log_probs=False, mean_logit=True, argmax=True),
    "all": Outputs(loss=True, log_tail=True, entropy=True, mean_logit=True, argmax=True, collision=True, rank=True),
    "collision": Outputs(log_probs=False, collision=True),
    "rank": Outputs(log_probs=False, rank=True),
}
NUMBERS = set(Arguments._fields[5:]) - {"ignore_index", "num_classes", "logprobs", "row_scale"}
OPTIONS = {
    "plain": {},
    "every number": {name: number for options in loss_cases.OPTIONS.values() for name, number in options.items()
                     if name in NUMBERS},
    "smoothed": dict(label_smoothing=0.1, z_loss=0.01),
    "weighted": dict(label_smoothing=0.2, weight=True),
    "transformed": dict(softcap=10.0, logit_scale=0.8, row_scale=True),
}


def problem(form, dtype, options, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    classes = max(1, vocab - seed % 3)
    logits = (4 * torch.randn(ROWS, vocab, generator=g, dtype=torch.float64)).round(decimals=seed % 2).to(dtype)
    logits[0], logits[1, :vocab // 2], logits[2, 0] = -torch.inf, -torch.inf, -torch.inf
    logits[3] = torch.nan  # an ignored row may hold anything, like columns that are not classes

    def ids(*shape):
        return torch.randint(0, classes, shape, generator=g)

    given = dict(row_mask=torch.arange(ROWS) != 3)
    if form == "labels":
        given.update(indices=ids(ROWS))
        given["indices"][4] = -100
    elif form == "topk":
        given.update(indices=ids(ROWS, 5), values=torch.rand(ROWS, 5, generator=g))
        given["indices"][5, 1], given["values"][6, 2] = -100, 0
    elif form == "csr":
        offsets = torch.randint(0, 7, (ROWS,), generator=g).cumsum(0)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), offsets))
        count = int(offsets[-1]) + 2  # and entries that belong to no row
        given.update(indices=ids(count), values=torch.randn(count, generator=g), offsets=offsets, logprobs=True)
    else:
        given.update(indices=ids(ROWS, 3))
    options = dict(options)
    if options.pop("weight", False):
        given["weight"] = torch.rand(classes, generator=g).to(real)
        given["weight"][0] = 0
    if options.pop("row_scale", False):
        given["row_scale"] = torch.rand(ROWS, generator=g).to(real) + 0.5
    cuts = torch.randint(0, vocab + 1, (2,), generator=g).sort().values.tolist()
    return logits, Arguments(**given, **options, num_classes=classes), [0, *cuts, vocab]


def ranked_logits(logits, a):
    """Returns the logit of the first entry of each row that is not padding, 0 if there is none."""
    entries = reference.entries_of(a, a.num_classes, torch.float64)
    found = torch.zeros(ROWS, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    for r in range(ROWS):
        own = (entries.rows == r) & entries.within if entries.rows is not None else r
        columns = entries.columns[own][entries.valid[own]]
        if len(columns):
            found[r] = logits[r, columns[0]]
    return found.to(logits.device)


def close(ours, exact, dtype):
    tolerance = dict(rtol=1e-11, atol=1e-11) if dtype == torch.float64 else dict(rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(ours, exact, equal_nan=True, **tolerance)


def integers(t):
    return t.contiguous().view(torch.int64 if t.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_shards_make_what_one_read_of_all_classes_makes(form, options, wanted, device):
    wanted = WANTED[wanted]
    for seed, dtype in enumerate(DTYPES * 2):
        logits, a, cuts = problem(form, dtype, OPTIONS[options], (5, 50, 700, 9000)[(seed + seed // 4) % 4], seed)
        a, logits = Arguments(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in a)), logits.to(device)
        told, plainly = [], []
        ranked = ranked_logits(logits, a)
        for begin, end in zip(cuts, cuts[1:]):
            told.append(ops.select_shard(logits[:, begin:end], *a, *wanted, begin, ranked))
            plainly.append(reference.select_shard(logits[:, begin:end], *a, *wanted, begin, ranked))
            (statistics, chosen), (exact, exact_chosen) = told[-1], plainly[-1]
            numbers = numbers_of(a, wanted)
            assert statistics.shape == (ROWS, numbers) and statistics.dtype == exact.dtype
            close(chosen, exact_chosen, dtype)
            columns = list(range(numbers))
            if wanted.rank:
                columns.pop()
            if wanted.argmax:  # before the collision
                columns.pop(-1 - wanted.collision)
            close(statistics[:, columns], exact[:, columns], dtype)
            of_integers = [i for i in range(numbers) if i not in columns]
            assert torch.equal(integers(statistics[:, of_integers]), integers(exact[:, of_integers]))
        whole = Selected(*ops.select(logits, *a, *wanted))
        for parts in (told, plainly):
            statistics, chosen = torch.cat([s for s, _ in parts]), functools.reduce(torch.add, (c for _, c in parts))
            for merge in (ops.select_merge, reference.select_merge):
                merged = Selected(*merge(statistics, 3, chosen, *a, *wanted))
                for name in Selected._fields:
                    if name != "lse_residual":
                        close(getattr(merged, name), getattr(whole, name), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_shard_is_that_of_its_columns(dtype, device):
    for seed in range(8):
        options, vocab = list(OPTIONS.values())[seed // 2], (5, 50, 700, 9000)[seed % 4]
        logits, a, cuts = problem(FORMS[seed % 4], dtype, options, vocab, seed)
        a, logits = Arguments(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in a)), logits.to(device)
        out = Selected(*ops.select(logits, *a, *WANTED["all"]))
        torch.manual_seed(seed)
        grads = [torch.randn_like(t) for t in (out.loss, out.lse, out.log_probs, out.log_tail, out.entropy,
                                               out.mean_logit, out.collision)]
        given = (out.lse, out.lse_residual, out.log_tail, out.entropy, out.collision, *a, True)
        whole, of_scale = ops.select_backward(*grads, logits, *given)
        sums = torch.zeros_like(of_scale)
        for begin, end in zip(cuts, cuts[1:]):
            part, of_part = ops.select_backward(*grads, logits[:, begin:end], *given, begin)
            close(part, whole[:, begin:end], dtype)
            sums += of_part
            written = logits[:, begin:end].clone()
            ops.select_backward_(*grads, written, *given, begin)
            assert torch.equal(written.nan_to_num(7), part.nan_to_num(7))
        close(sums, of_scale, dtype)


@pytest.mark.parametrize("classes", [90, 9000])
def test_the_scales_gradient_of_shards_does_not_take_what_all_logits_have_in_common(classes, device):
    g = torch.Generator().manual_seed(classes)
    x = (torch.randn(ROWS, classes, generator=g) + 300).to(device)
    a = Arguments(torch.randint(classes, (ROWS, 4), generator=g).to(device), num_classes=classes,
                  row_scale=torch.full((ROWS,), 1.3, device=device))
    cuts, found = (0, 0, classes // 3, classes // 2, classes), []
    for exact in (False, True):
        logits, given = (x.double(), a._replace(row_scale=a.row_scale.double())) if exact else (x, a)
        out = Selected(*ops.select(logits, *given, *WANTED["all"]))
        ones = [torch.ones_like(t) for t in (out.loss, out.log_probs, out.log_tail, out.entropy, out.collision)]
        made = (ones[0], None, *ones[1:4], None, ones[4])
        saved = (out.lse, out.lse_residual, out.log_tail, out.entropy, out.collision, *given, True)
        found.append(sum(ops.select_backward(*made, logits[:, begin:end], *saved, begin)[1]
                         for begin, end in zip(cuts, cuts[1:])))
    assert (found[0] - found[1]).abs().max() <= 4 * 300 * 2**-24 * 8


def test_a_class_beyond_what_float32_counts_is_told(device):
    """Checks an index beyond 2^24: float32 statistics hold the index as an integer, not as a float."""
    logits = torch.tensor([[0.0, 3.0, 1.0]], device=device)
    first = 2 ** 24 + 2
    a = Arguments(torch.tensor([first + 1], device=device), num_classes=first + 3)
    wanted = Outputs(argmax=True)
    statistics, chosen = ops.select_shard(logits, *a, *wanted, first)
    merged = Selected(*ops.select_merge(statistics, 1, chosen, *a, *wanted))
    assert merged.argmax.tolist() == [first + 1]
    torch.testing.assert_close(merged.log_probs, logits.log_softmax(1)[:, 1])


def refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_what_is_refused(device):
    logits, a, _ = problem("labels", torch.float32, {}, 50, 1)
    logits, a = logits.to(device), a._replace(indices=a.indices.to(device), row_mask=a.row_mask.to(device))
    wanted = Outputs()
    statistics, chosen = ops.select_shard(logits, *a, *wanted, 0)
    refused(lambda: ops.select_shard(logits, *a._replace(num_classes=None), *wanted, 0),
            "num_classes must be the number of classes of all shards if first_class is given, got None")
    refused(lambda: ops.select_shard(logits, *a, *wanted, -1), "first_class must be in .*, got -1")
    refused(lambda: ops.select_merge(statistics, 2, chosen, *a, *wanted), "statistics must be")
    refused(lambda: ops.select_merge(statistics, 1, None, *a, *wanted), "chosen must have the shape of indices")
    refused(lambda: ops.select_merge(statistics[:, :1], 1, chosen, *a, *wanted), "statistics must have 2 numbers")
    refused(lambda: ops.select_merge(statistics, 1, chosen, *a._replace(num_classes=None), *wanted),
            "num_classes must be the number of classes of all shards")
    assert math.isinf(ops.select_shard(logits[:, :0], *a, *wanted, 9)[0][0, 0]) is False  # no classes: a number
