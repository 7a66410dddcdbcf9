"""Tests the linear head under autocast, without grad, deterministic, in threads, checkpointed, on meta tensors,
copied."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import MIXED, double, example, fused, make_head, plain
from sparse_ce import LinearSparseCrossEntropyLoss


@pytest.mark.parametrize("given", ["all float32", "hidden", "head", "bias float32"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_multiplies_as_linear_would(half, given, device):
    head, labels = example(device)
    dtypes = {"all float32": [torch.float32] * 3, "hidden": [half, torch.float32, torch.float32],
              "head": [torch.float32, half, half], "bias float32": [half, half, torch.float32]}[given]
    head = [t.detach().to(d).requires_grad_() for t, d in zip(head, dtypes)]
    exact, peer = double(head), [t.detach().clone().requires_grad_() for t in head]
    expected = plain(exact, labels)
    with torch.autocast(device, half):
        loss, per_row = fused(head, labels, chunk_rows=4), fused(head, labels, reduction="none", chunk_rows=4)
        transformed = torch.func.grad(lambda x: fused((x, *head[1:]), labels))(head[0].detach())
        theirs = F.cross_entropy(F.linear(*peer).float(), labels)
    assert loss.dtype == per_row.dtype == torch.float32
    assert_close_to_float64(loss, theirs, expected, arithmetic=half)
    torch.testing.assert_close(per_row.sum() / (labels >= 0).sum(), loss)
    ours, expected, theirs = (torch.autograd.grad(*pair) for pair in ((loss, head), (expected, exact), (theirs, peer)))
    for a, e, p, t in zip(ours, expected, theirs, head):
        assert a.dtype == t.dtype
        assert_close_to_float64(a, p, e, arithmetic=half)
    assert transformed.dtype == head[0].dtype
    assert_close_to_float64(transformed, theirs[0], expected[0], arithmetic=half)


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_without_grad_the_result_is_the_same(reduction, dtypes, device):
    head, labels = example(device, *dtypes)
    expected = fused(head, labels, reduction=reduction, return_lse=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = fused(head, labels, reduction=reduction, return_lse=True)
            again = fused([t.clone() for t in head], labels, reduction=reduction, return_lse=True)
        for a, b, e in zip(results, again, expected):
            assert not a.requires_grad
            assert_bitwise_equal(a.clone(), e.detach())
            assert_bitwise_equal(b.clone(), e.detach())


@pytest.mark.parametrize("form", ["labels-target", "tuple", "coo-uncoalesced", "csr-int32", "jagged-ranges"])
def test_repeated_runs_in_deterministic_mode_are_bitwise_equal(form, device, threads):
    draw = Draw(device)
    case = FORMS[form]((6, 8), 501, draw)
    head = [t.requires_grad_() for t in make_head(case, draw, torch.float32)]

    def run(reduction):
        loss = fused(head, case.target, reduction=reduction, label_smoothing=0.1, chunk_rows=11)
        grad_output = Draw(device, 1).normal(*loss.shape) if reduction == "none" else torch.tensor(0.7, device=device)
        return loss, *torch.autograd.grad(loss, head, grad_output)

    threads(2)
    run("mean")  # from here on forward expects this grad_output
    plain = run("none"), run("mean")
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            for before, now in zip(plain, (run("none"), run("mean"))):
                for a, b in zip(before, now):
                    assert_bitwise_equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_losses_of_many_python_threads_do_not_disturb_each_other(device):
    head, labels = example(device, rows=64)

    def run(i):
        leaves = [(t * (1 + i % 3)).detach().requires_grad_() for t in head]
        (fused(leaves, labels, chunk_rows=10) * 2.0 ** (i % 5)).backward()
        return [t.grad for t in leaves]

    expected = [run(i) for i in range(15)]
    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(run, range(60))):
            for a, b in zip(result, expected[i % 15]):
                assert_bitwise_equal(a, b)


def test_a_module_can_be_copied_pickled_and_moved(device):
    module = LinearSparseCrossEntropyLoss(weight=torch.rand(33), label_smoothing=0.1, softcap=3.0).to(device)
    head, labels = example(device)
    assert module.weight.device.type == device
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        found, expected = (m(*head[:2], labels, linear_bias=head[2]) for m in (other, module))
        assert_bitwise_equal(found, expected)
