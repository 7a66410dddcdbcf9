"""Runs one of several processes of test_sharded_logits.py: values and gradients, errors, autograd modes.

    RANK=r WORLD_SIZE=n python sharded_cases.py FOLDER CASE ...

Runs the cases in order with the other processes and saves the failures to FOLDER/RANK.pt: a dictionary by the name of
the case, "" if it passed.
"""

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from cases import FORMS, Draw
from linear_sharded_cases import Collectives
from sharded_problems import Problem, assert_same, assert_the_same_everywhere, compare, share
from sparse_ce import SparseTarget

COMMON = dict(dtype=torch.float64, infinite=False)
PROBLEMS: Dict[str, Dict[str, Any]] = {
    "V = 50257": dict(COMMON, classes=50257, form="tuple", shape=(6,), cuts="any", values_grad=True),
    "V = 50257, labels in bfloat16": dict(classes=50257, form="labels-int64", shape=(3, 4), cuts="any", size=1,
                                          dtype=torch.bfloat16, label_smoothing=0.1),
    "first shard empty": dict(COMMON, cuts="first empty", form="coo", values_grad=True),
    "last shard empty": dict(COMMON, cuts="last empty", form="csr-int64", values_grad=True),
    "one shard has all": dict(COMMON, cuts="all in one", form="jagged-log_probs", values_grad=True),
    "one shard is padding": dict(COMMON, cuts="padding", form="topk-log_probs", select=False, values_grad=True),
    "one shard is padding, log-probabilities": dict(COMMON, cuts="padding", form="topk-ids", select=True),
    "shards of -inf": dict(dtype=torch.float64, infinite=True, form="jagged-ranges", select=False, values_grad=True),
    "shards of -inf, log-probabilities": dict(dtype=torch.float64, infinite=True, select=True, log_tail=True,
                                              entropy=True, argmax=True),
    "large logits": dict(dtype=torch.float32, size=600, infinite=False, label_smoothing=0.1, select=False, form="coo"),
    **{f"reduction {name}": dict(COMMON, reduction=name, select=False, row_weight=True, form="topk-target")
       for name in ("none", "sum", "mean")},
    "weighted labels": dict(COMMON, weight=True, form="labels-target", select=False, reduction="mean", z_loss=0.01),
    "weights and smoothing": dict(COMMON, weight=True, form="topk-masked", select=False, label_smoothing=0.1,
                                  values_grad=True),
    "smoothing of 1": dict(COMMON, label_smoothing=1.0, form="coo-uncoalesced", select=False, values_grad=True),
    "every output": dict(COMMON, select=True, log_tail=True, entropy=True, mean_logit=True, argmax=True,
                         collision=True, rank=True, form="jagged",
                         softcap=True, scale="learned"),
    "learned scale": dict(COMMON, scale="learned", select=False, lse=True, entropy=True, softcap=True, form="jagged"),
    "scale of each row": dict(COMMON, scale="rows", select=False, form="csr-target-ignore-empty", values_grad=True),
    "overwritten in backward": dict(COMMON, inplace="backward", layout="strided", scale="learned", shape=(2, 3, 2)),
}
OF_FORMS = {f"every form, {form}": dict(COMMON, form=form, select=False, values_grad=True) for form in FORMS}
PROBLEMS.update(OF_FORMS)


def check_values(target: Callable[[Tensor], Any], values: Tensor, rows: int = 2, logits: Any = None,
                 grad_output: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Compares the gradient for the entries' values, and the loss, with those of one process."""
    x = Draw("cpu").normal(rows, 200, dtype=torch.float64) * 3 if logits is None else logits
    x = x.to(dtype)
    grad_output = torch.linspace(0.5, 1.5, rows) if grad_output is None else grad_output
    found = []
    for logits, keywords in ((x, {}), share(x)):
        leaf = values.clone().requires_grad_()
        loss = sparse_ce.cross_entropy(logits, target(leaf), reduction="none", **options, **keywords)
        found.append((loss.detach(), torch.autograd.grad(loss, leaf, grad_output.to(loss.dtype))[0]))
    assert_same(found[1], found[0], 1e-12 if dtype == torch.float64 else 1e-5)
    assert_the_same_everywhere({"loss": found[1][0], "values": found[1][1]})
    assert found[1][1].dtype == values.dtype


# -------------------------------------------------------------------------------------- the gradient of entries' values

def values_of_rows_that_do_not_count() -> None:
    """Tests ignored rows with any entries, weights and ``grad_output``."""
    mask, indices = torch.tensor([False, True]), torch.tensor([[3, 150], [3, 60]])
    weight = torch.ones(200, dtype=torch.float64)
    weight[150] = torch.inf
    for bad in (torch.nan, torch.inf, -torch.inf, 2.0):
        for kind in ("probs", "log_probs"):
            values = torch.tensor([[bad, 0.5], [-0.3, -0.7]], dtype=torch.float64)
            for grad_output in (None, torch.tensor([torch.nan, 1.0]), torch.tensor([torch.inf, 1.0])):
                for options in ({}, dict(weight=weight)):
                    check_values(lambda v: SparseTarget.from_topk(indices, v, values_are=kind, row_mask=mask), values,
                                 grad_output=grad_output, **options)
                    check_values(lambda v: SparseTarget.from_jagged(
                        indices.flatten(), v.flatten(), torch.tensor([0, 2, 4]), values_are=kind, row_mask=mask),
                        values, grad_output=grad_output, **options)


def values_of_no_row() -> None:
    """Tests gaps before, between and after the entries of rows in any order; the gaps hold arbitrary values."""
    offsets, classes = torch.tensor([[5, 7], [1, 3], [7, 7]]), torch.tensor([3, 5, 150, 199, 7, 8, 150, 3, 0])
    weight = torch.ones(200, dtype=torch.float64)
    weight[[3, 199]] = torch.inf
    values = torch.tensor([torch.nan, -0.5, -0.2, torch.nan, torch.inf, -2, -3, torch.inf, -torch.inf],
                          dtype=torch.float64)
    for kind in ("probs", "log_probs"):
        for options in ({}, dict(weight=weight), dict(label_smoothing=1.0)):
            for grad_output in (None, torch.tensor([torch.nan, 1.0, torch.inf])):
                check_values(lambda v: SparseTarget.from_jagged(classes, v, offsets, values_are=kind), values, rows=3,
                             grad_output=grad_output, **options)


def values_of_padding() -> None:
    indices = torch.tensor([[3, -1, 150, 9000], [7, 7, -100, 60], [-100, -100, -100, -100]])
    for kind, none in (("probs", 0.0), ("log_probs", -torch.inf)):
        values = torch.tensor([[0.0, none, -1, none], [-0.25, -0.75, -0.5, none], [-1, -2, -3, none]],
                              dtype=torch.float64)
        weight = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        weight[7] = 0
        logits = Draw("cpu").normal(3, 200, dtype=torch.float64)
        logits[0, 150] = logits[1, 7] = -torch.inf
        logits[2] = torch.nan
        for options in ({}, dict(weight=weight), dict(label_smoothing=0.3), dict(label_smoothing=1.0, weight=weight)):
            for grad_output in (None, torch.tensor([0.0, 0.0, 1.0])):
                check_values(lambda v: SparseTarget.from_topk(indices, v, values_are=kind), values, rows=3,
                             logits=logits, grad_output=grad_output, **options)
    # A log-probability whose weight underflows is not padding and has a zero derivative.
    tiny = torch.tensor([[-0.5, -110.0], [-200.0, -1e30]])
    check_values(lambda v: SparseTarget.from_topk(indices[:2, :2].abs(), v, values_are="log_probs"), tiny,
                 dtype=torch.float32)


def values_with_any_dtype_of_indices() -> None:
    """Tests padding markers that wrap: 156 is -100 in 8 bits, 0 is 2^32 in 32."""
    values = torch.tensor([[0.5, 0.25], [0.125, 1.0]], dtype=torch.float64)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for ignore_index in (-100, 1 << 32, 3):
            indices = torch.tensor([[156, 0], [3, 101]]).to(dtype)
            check_values(lambda v: (indices, v), values, ignore_index=ignore_index)


def values_of_any_dtype() -> None:
    indices = torch.tensor([[150, 0], [3, 101]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = torch.tensor([[0.5, 0.25], [0.125, 1.0]], dtype=dtype)
        check_values(lambda v: (indices, v), values)
        check_values(lambda v: SparseTarget.from_jagged(indices.flatten(), v.flatten(), torch.tensor([0, 3, 4])),
                     values)
    check_values(lambda v: (indices, v), values.double(), dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------- modes

def no_rows() -> None:
    x = torch.zeros(0, 10, dtype=torch.float64, requires_grad=True)
    local, keywords = share(x)
    for target in (torch.zeros(0, dtype=torch.int64),
                   (torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, requires_grad=True)),
                   SparseTarget.from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1).long())):
        for reduction in ("none", "mean"):
            out = sparse_ce.cross_entropy(local, target, reduction=reduction, return_entropy=True, return_argmax=True,
                                          **keywords)
            assert out.loss.sum() == 0 and out.argmax.shape == (0,)
            out.loss.sum().backward()
            assert local.grad.shape == local.shape
        found = sparse_ce.selected_log_probs(local, target, return_log_tail=True, **keywords)
        assert found.lse.shape == (0,) and found.log_tail.shape == (0,)


def ties() -> None:
    """Checks that argmax returns the lowest class of the largest logit."""
    x = torch.zeros(4, 10)
    x[1, 5:], x[2] = 2.0, -torch.inf
    x[3, 9] = 1.0
    local, keywords = share(x)
    out = sparse_ce.cross_entropy(local, torch.tensor([1, 2, 3, -100]), return_argmax=True, **keywords)
    assert out.argmax.tolist() == [0, 5, 0, -1]


def errors_come_to_every_rank() -> None:
    """Checks that all ranks raise an error before the collectives, so that the next call is correct."""
    x = torch.randn(2, 10, dtype=torch.float64)
    local, keywords = share(x)
    bad: List[Tuple[Any, Any]] = [
        (torch.tensor([1, 10]), {}), (torch.tensor([-1, 1]), {}),
        ((torch.tensor([[1, 12], [2, 3]]), torch.ones(2, 2)), {}),
        (SparseTarget.from_jagged(torch.tensor([1, 11]), torch.ones(2), torch.tensor([0, 1, 2])), {}),
        (torch.tensor([1, 2]), dict(weight=torch.ones(9))), (torch.tensor([1, 2, 3]), {}),
        (torch.tensor([1, 2]), dict(num_classes=None)), (torch.tensor([1, 2]), dict(num_classes=0)),
        (torch.tensor([1, 2]), dict(vocab_start=-1)), (torch.tensor([1, 2]), dict(vocab_start=1.5)),
        (torch.tensor([1, 2]), dict(vocab_start=None, num_classes=1000)),
        (torch.tensor([1, 2]), dict(group=None)), (torch.tensor([1, 2]), dict(group="tensor")),
    ]
    for target, other in bad:
        try:
            sparse_ce.cross_entropy(local, target, **{**keywords, **other})
        except (RuntimeError, ValueError, TypeError) as error:
            assert "sparse_ce: " in str(error), error
        else:
            raise AssertionError(f"{target}, {other}")
    labels = torch.tensor([1, 9])
    assert_same(sparse_ce.cross_entropy(local, labels, **keywords), F.cross_entropy(x, labels))


def derivatives_that_are_refused() -> None:
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    local, keywords = share(x)
    labels = torch.tensor([1, 2, 3, 9])

    def loss(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, labels, **keywords)

    def expect(text: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error with {text}")

    expect("create_graph must be False", lambda: torch.autograd.grad(loss(local), local, create_graph=True))
    with Collectives():
        expect("create_graph must be False", lambda: torch.autograd.grad(loss(local), local, create_graph=True))
    given = local.detach()
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vmap(f)(x[None]),
                      lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        expect("torch.func", lambda: transform(loss)(given))


def several_gradients_at_once() -> None:
    """Tests ``is_grads_batched``."""
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    labels, several = torch.tensor([1, 2, 3, 9]), torch.randn(3, 4, dtype=torch.float64)
    local, keywords = share(x)
    begin = keywords["vocab_start"]
    found = []
    for logits, named in ((x, {}), (local, keywords), (local, {**keywords, "inplace": "backward"})):
        rows = sparse_ce.cross_entropy(logits, labels, reduction="none", **named)
        found.append(torch.autograd.grad(rows, logits, several, is_grads_batched=True)[0])
    for own in found[1:]:
        assert_same(own, found[0][..., begin:begin + local.shape[1]])
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    rows = sparse_ce.cross_entropy(local, labels, reduction="none", logit_scale=scale, **keywords)
    try:
        torch.autograd.grad(rows, scale, several, is_grads_batched=True)
    except RuntimeError as error:
        assert "is_grads_batched must be False if logit_scale requires grad" in str(error), error
    else:
        raise AssertionError("collectives of several gradients at once")


def gradients_are_not_asked_for() -> None:
    x = torch.randn(5, 11, dtype=torch.float64)
    labels = torch.tensor([0, 10, 5, -100, 3])
    local, keywords = share(x)
    expected = F.cross_entropy(x, labels)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same(sparse_ce.cross_entropy(local, labels, **keywords), expected)
            found = sparse_ce.selected_log_probs(local.clone(), labels, return_entropy=True, **keywords)
            assert not found.log_probs.requires_grad
    assert not sparse_ce.cross_entropy(local, labels, **keywords).requires_grad


def one_gradient_alone() -> None:
    """Tests every combination of logits, values and scale that require grad."""
    x, indices = torch.randn(3, 11, dtype=torch.float64), torch.tensor([[0, 10], [5, 5], [3, -100]])
    for number in range(1, 8):
        found = []
        for logits, keywords in ((x, {}), share(x)):
            leaves = [logits.clone(), torch.full((3, 2), 0.4, dtype=torch.float64), torch.tensor(0.7).double()]
            asked = [t.requires_grad_() for i, t in enumerate(leaves) if number >> i & 1]
            loss = sparse_ce.cross_entropy(leaves[0], (indices, leaves[1]), logit_scale=leaves[2], **keywords)
            found.append(list(torch.autograd.grad(loss, asked)))
        if number & 1:
            begin = keywords["vocab_start"]
            found[0][0] = found[0][0][:, begin:begin + logits.shape[1]]
        assert_same(found[1], found[0])


def training() -> None:
    """Compares accumulation, checkpointing and autocast of a sharded head with the gradients of one process."""
    draw = Draw("cpu")
    hidden, head = draw.normal(8, 6, dtype=torch.float64), draw.normal(13, 6, dtype=torch.float64)
    labels = torch.tensor([0, 12, 5, -100, 3, 7, 1, 11])
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    F.cross_entropy(h @ w.T, labels).backward()
    local, keywords = share(head.T)
    begin, rows = keywords["vocab_start"], local.shape[1]

    def loss(h: Tensor, w: Tensor, at: slice) -> Tensor:
        return sparse_ce.cross_entropy(h[at] @ w, labels[at], normalizer=7, **keywords)

    for checkpointed in (False, True):
        for parts in (1, 4):
            mine, his = local.clone().requires_grad_(), hidden.clone().requires_grad_()
            for i in range(parts):
                given = his, mine, slice(i * 8 // parts, (i + 1) * 8 // parts)
                (torch.utils.checkpoint.checkpoint(loss, *given, use_reentrant=False) if checkpointed
                 else loss(*given)).backward()
            assert_same(mine.grad, w.grad[begin:begin + rows].T)
            whole = his.grad.clone()
            dist.all_reduce(whole)
            assert_same(whole, h.grad)
    with torch.autocast("cpu", torch.bfloat16):
        mine = local.float().requires_grad_()
        out = loss(hidden.float(), mine, slice(0, 8))
        assert out.dtype == torch.float32
    out.backward()
    torch.testing.assert_close(mine.grad.double(), w.grad[begin:begin + rows].T, rtol=0, atol=0.02)


def overwritten_logits() -> None:
    """Checks that ``inplace`` overwrites the logits with their gradient, and that autograd detects it."""
    x = torch.randn(5, 11, dtype=torch.float64)
    labels = torch.tensor([0, 10, 5, -100, 3])
    local, keywords = share(x.requires_grad_())
    expected, = torch.autograd.grad(sparse_ce.cross_entropy(local, labels, **keywords), local)
    for inplace in ("backward", "forward"):
        logits = local * 1
        loss = sparse_ce.cross_entropy(logits, labels, inplace=inplace, **keywords)
        assert torch.equal(logits, local)
        grad, = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.equal(grad, expected) and grad.data_ptr() == logits.data_ptr()
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("a second backward reads its own gradient")


def some_of_the_processes() -> None:
    """Tests a group of fewer ranks whose numbers differ from the world's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, world))
    group = dist.new_group(members)
    if rank in members:
        x = torch.randn(4, 3 * len(members), dtype=torch.float64)
        labels = torch.tensor([0, 2, x.shape[1] - 1, -100])
        at = members.index(rank)
        found = sparse_ce.cross_entropy(x[:, 3 * at:3 * at + 3], labels, group=group)
        assert_same(found, F.cross_entropy(x, labels))
    else:
        try:
            sparse_ce.cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 2]), group=group)
        except TypeError as error:
            assert "group must be a torch.distributed.ProcessGroup" in str(error)
        else:
            raise AssertionError("a process that is not in the group has a loss")


def random(first: int, last: int) -> None:
    wrong = []
    for seed in range(first, last):
        try:
            compare(Problem(seed, dist.get_world_size()), dist.get_rank(), dist.get_world_size())
        except AssertionError as error:
            wrong.append(f"{seed}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {last - first}", *wrong[:5]])


CASES: Dict[str, Callable[[], None]] = {f.__name__.replace("_", " "): f for f in (
    values_of_rows_that_do_not_count, values_of_no_row, values_of_padding, values_with_any_dtype_of_indices,
    values_of_any_dtype, no_rows, ties, errors_come_to_every_rank, derivatives_that_are_refused,
    several_gradients_at_once, gradients_are_not_asked_for, one_gradient_alone, training, overwritten_logits,
    some_of_the_processes)}


def run(name: str) -> None:
    if name.startswith("random "):
        random(*map(int, name.split()[1:]))
    elif name in PROBLEMS:
        for seed in range(3):
            problem = Problem(seed, dist.get_world_size(), **PROBLEMS[name])
            compare(problem, dist.get_rank(), dist.get_world_size())
    else:
        CASES[name]()


def connect() -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes run on this host, whatever its name resolves to
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def main(run: Callable[[str], None]) -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    connect()
    found = {}
    for name in names:
        print(name, flush=True)  # identifies the case of a process that hangs
        torch.manual_seed(1)
        begun = time.monotonic()
        try:
            run(name)
            found[name] = ""
        except Exception as error:
            found[name] = f"{error}\n{''.join(traceback.format_exc())}"
        print(f"{time.monotonic() - begun:.2f}", flush=True)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run)
