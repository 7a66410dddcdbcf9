"""Tests the records that losses and log-probabilities return: what they hold, and who may rebuild them."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch.nn.parallel import scatter_gather
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import Draw
from refusals import assert_refused
from sparse_ce import CrossEntropyOutput, LogProbs, cross_entropy, selected_log_probs

OF_LOSS, OF_SELECT = ("lse", "entropy", "argmax"), ("log_tail", "entropy", "mean_logit", "argmax", "collision", "rank")


def flags(names):
    return {f"return_{name}": True for name in names}


def calls(device):
    """Yields (names of the outputs, a function of logits that returns them)."""
    labels, head = Draw(device).integers(5, 3), Draw(device).normal(5, 5)
    for count in range(4):
        for names in itertools.combinations(OF_LOSS, count):
            if names:
                yield ("loss", *names), lambda x, names=names: cross_entropy(x, labels, **flags(names))
                yield ("loss", *names), lambda x, names=names: sparse_ce.linear_cross_entropy(
                    x, head, labels, **flags(names))
    for names in ((), ("entropy",), ("mean_logit", "rank"), ("log_tail", "argmax"), OF_SELECT):
        yield ("log_probs", "lse", *names), lambda x, names=names: selected_log_probs(x, labels, **flags(names))
        yield ("log_probs", "lse", *names), lambda x, names=names: sparse_ce.linear_selected_log_probs(
            x, head, labels, **flags(names))


def same(out, expected):
    assert type(out) is type(expected)
    torch.testing.assert_close(tuple(out), tuple(expected))


def test_they_hold_what_was_requested_in_the_order_of_the_signature(device):
    x = Draw(device).normal(3, 5)
    for names, call in calls(device):
        out = call(x)
        assert isinstance(out, CrossEntropyOutput if names[0] == "loss" else LogProbs) and len(out) == len(names)
        assert all(getattr(out, name) is item for name, item in zip(names, out, strict=True))
        assert repr(out) == f"{type(out).__name__}({', '.join(f'{n}={t!r}' for n, t in zip(names, out))})"
        for absent in {*(OF_LOSS if names[0] == "loss" else OF_SELECT)} - {*names}:
            assert not hasattr(out, absent) and absent not in dir(out)
            assert_refused(lambda: getattr(out, absent), f"{absent} must be requested", type(out).__name__,
                           f"return_{absent}=True", error=AttributeError)
        with pytest.raises(AttributeError, match="no attribute 'loess'"):
            out.loess
        with pytest.raises(AttributeError):
            out.lse = x
    loss, lse = cross_entropy(x, torch.tensor([0, 1, 2], device=device), return_lse=True)
    torch.testing.assert_close(lse, x.logsumexp(1))


def test_a_caller_may_construct_them():
    a, b, c = torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)
    out = LogProbs(a, b, rank=c, log_tail=None)
    assert isinstance(out, LogProbs) and tuple(out) == (a, b, c) and out.rank is c and not hasattr(out, "log_tail")
    assert tuple(CrossEntropyOutput(a, entropy=b)) == (a, b)


def test_copies_and_pytrees_have_the_same_fields(device, monkeypatch):
    x = Draw(device).normal(3, 5)

    class Concatenated:  # the part of a gather that needs GPUs
        @staticmethod
        def apply(_, dim, *parts):
            return torch.stack(parts)

    monkeypatch.setattr(scatter_gather, "Gather", Concatenated)
    for names, call in calls(device):
        out = call(x)
        leaves, spec = pytree.tree_flatten(out)
        for other in (pickle.loads(pickle.dumps(out)), copy.copy(out), copy.deepcopy(out),
                      pytree.tree_unflatten(leaves, spec), pytree.tree_map(torch.clone, out),
                      pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))),
                      checkpoint(call, x, use_reentrant=False)):
            same(other, out)
        assert [key.name for (key,), _ in pytree.tree_leaves_with_path(out)] == [*names]
        same(torch.func.vmap(call)(x[None]), pytree.tree_map(lambda t: t[None], out))
        same(scatter_gather.gather([out, out], device), pytree.tree_map(lambda t: torch.stack([t, t]), out))
        primal, tangent = torch.func.jvp(lambda x: call(x)[:2], (x,), (x,))
        assert primal[1].shape == tangent[1].shape == (3,)


def test_compiled_code_unpacks_and_returns_them(device, fresh_compiler, monkeypatch):
    """Checks that a graph defines the classes that are new, and does not depend on others."""
    for kind in (LogProbs, CrossEntropyOutput):
        for name in [name for name in vars(kind) if name.startswith("_with_")]:
            monkeypatch.delattr(kind, name)
    x, labels = Draw(device).normal(3, 5), torch.tensor([0, 1, 2], device=device)

    def f(x):
        loss, lse, argmax = out = cross_entropy(x, labels, return_lse=True, return_argmax=True)
        log_probs, of_select, rank = scores = selected_log_probs(x, labels, return_rank=True)
        given = LogProbs(log_probs, of_select, entropy=None if hasattr(scores, "entropy") else lse)
        return out, scores, given, loss + out.lse.sum() + (argmax + rank).sum() + len(given)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), f(x))
    LogProbs(x, x, jsd=x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [type(t) for t in compiled(x)] == [type(t) for t in f(x)]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_return_them(strict, device, fresh_compiler):
    x, labels = Draw(device).normal(3, 5), torch.tensor([0, 1, 2], device=device)

    class Model(torch.nn.Module):
        def forward(self, x):
            return selected_log_probs(x, labels, return_entropy=True), cross_entropy(x, labels, return_lse=True)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x,), strict=strict), file)
    selected_log_probs(x, labels, return_mean_logit=True)  # The file names its own fields, not those of the last call.
    file.seek(0)
    for ours, eager in zip(torch.export.load(file).module()(x), Model()(x), strict=True):
        assert type(ours) is type(eager)
        torch.testing.assert_close(ours, eager)


def test_the_largest_logits_are_those_of_torch_topk(device, fresh_compiler):
    hidden, head = Draw(device).normal(3, 4), Draw(device).normal(7, 4)
    expected = (hidden @ head.T).topk(2)
    for call in (sparse_ce.linear_topk_logits, torch.compile(sparse_ce.linear_topk_logits, backend="aot_eager")):
        out = call(hidden, head, 2)
        assert type(out) is type(expected) and torch.equal(out.indices, expected.indices)
        torch.testing.assert_close(out.values, expected.values)
