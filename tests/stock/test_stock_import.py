"""Tests what the import alone changes in PyTorch: sparse COO targets have a gradient, and nothing else changes."""

import json
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forked
from cases import DTYPES, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from sparse_ce.patches import stock_cross_entropy as stock
from stock_cases import assert_equals_dense, loss_and_grad, problem, sparse

backward = torch._log_softmax_backward_data


# ----------------------------------------------------------------------------------------------------------- user code


def train(build, steps=30):
    """Returns the final parameters of a plain training loop and its losses. ``build`` makes the labels."""
    torch.manual_seed(0)
    draw = Draw("cpu")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11)).double()
    loss_fn, optimizer, losses = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.02), []
    features, (_, dense) = draw.normal(6, 8, dtype=torch.float64), problem((6, 11), draw)
    labels = build(dense.abs().double() / (1 + dense.abs().sum(1, keepdim=True).double()))
    for _ in range(steps):
        loss = loss_fn(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*model.parameters(), torch.tensor(losses, dtype=torch.float64)]


@pytest.mark.parametrize("enable", [False, True])
def test_a_training_loop_with_sparse_labels_equals_the_dense_one(enable):
    expected = train(lambda dense: dense)
    assert expected[-1][-1] < 0.8 * expected[-1][0]  # the model learns
    for layout in ("coo", "coo-uncoalesced", "csr", "csc") if enable else ("coo", "coo-uncoalesced"):
        if enable:
            with stock.enable_stock():
                got = train(lambda dense: sparse(dense, layout))
        else:
            got = train(lambda dense: sparse(dense, layout))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", ["coo", "coo-uncoalesced"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(11,), (6, 11), (3, 11, 4), (2, 11, 3, 2)])
def test_the_import_alone_makes_coo_targets_work(shape, weighted, reduction, layout, device):
    draw = Draw(device)
    logits, dense = problem(shape, draw)
    weight = draw.uniform(11, low=0.2, high=2) if weighted else None
    assert_equals_dense(logits, sparse(dense, layout), dense, weight, reduction=reduction)


def test_the_import_alone_makes_single_losses_work(device):
    """Checks that PyTorch's losses are sparse there, stay sparse, and accept a dense ``grad_output``."""
    logits, dense = problem((6, 11), Draw(device))
    grad_output = torch.randn(6, dtype=torch.float64).to(device)
    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x, dense.to_sparse(), reduction="none")
    assert loss.layout == torch.sparse_coo
    loss.backward(grad_output.float())
    _, peer, _ = loss_and_grad(logits, dense, grad_output, reduction="none")
    exact_loss, exact, _ = loss_and_grad(logits.double(), dense.double(), grad_output, reduction="none")
    assert_close_to_float64(x.grad, peer, exact)
    torch.testing.assert_close(loss.to_dense(), exact_loss.float())


def test_the_example_shows_the_failure_and_the_repair():
    example = Path(__file__).resolve().parents[2] / "examples" / "stock_pytorch.py"
    done = forked.run(example, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    before, imported, enabled = re.split("after import.*|with enable_stock.*", done.stdout)
    dense = re.search("loss .*", before)[0]
    assert "COO labels            NotImplementedError" in before and imported.count(dense) == 1
    assert enabled.count(dense) == 2 and "Error" not in enabled


# -------------------------------------------------------------------------------------------------------------- kernel


def coo(dense, sparse_dim, coalesced):
    """Returns ``dense`` with ``sparse_dim`` sparse dimensions. If not coalesced, entries are split in two and
    unsorted."""
    t = dense.to_sparse(sparse_dim)
    if coalesced:
        return t
    order = torch.randperm(2 * t._nnz()).to(dense.device)
    values = torch.cat([t.values() / 4, 3 * t.values() / 4])
    return torch.sparse_coo_tensor(t.indices().repeat(1, 2)[:, order], values[order], t.shape)


def kernel_problem(shape, dim, draw, dtype, grad_dtype):
    grad = draw.normal(*shape, dtype=torch.float64) * (draw.uniform(*shape) < 0.5)
    # The logits are peaked: the row's sum must matter beside the entries.
    output = torch.log_softmax(4 * draw.normal(*shape, dtype=torch.float64), dim)
    return grad.to(grad_dtype), output.to(dtype)


def assert_kernel(grad, output, dim, target):
    exact = backward(grad.double(), output.double(), dim, torch.float64)
    peer = backward(grad.to(output.dtype), output, dim, output.dtype)
    ours = backward(target, output, dim, output.dtype)
    assert ours.layout == torch.strided
    # The entries of the halves are rounded to the dtype of the gradient.
    assert_close_to_float64(ours, peer, exact, arithmetic=grad.dtype)


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("shape,sparse_dim,dim", [
    (shape, sparse_dim, dim) for shape in [(9,), (5, 9), (3, 7, 4), (2, 3, 5, 4)]
    for sparse_dim in range(1, len(shape) + 1) for dim in range(-len(shape), len(shape))])
def test_any_dimension_of_any_coo_gradient(shape, sparse_dim, dim, coalesced, device):
    grad, output = kernel_problem(shape, dim, Draw(device), torch.float32, torch.float32)
    assert_kernel(grad, output, dim, coo(grad, sparse_dim, coalesced))


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype, grad_dtype, device):
    grad, output = kernel_problem((6, 9), 1, Draw(device), dtype, grad_dtype)
    for sparse_dim in (1, 2):
        assert_kernel(grad, output, 1, coo(grad, sparse_dim, False))


def test_the_result_has_the_dtype_that_is_asked_for(device):
    grad, output = kernel_problem((6, 9), 1, Draw(device), torch.float32, torch.float32)
    asked = backward(grad.to_sparse(), output, 1, torch.bfloat16)
    assert_bitwise_equal(asked, backward(grad.to_sparse(), output, 1, torch.float32).bfloat16())


def test_a_permuted_gradient_and_strided_outputs(device):
    grad, output = kernel_problem((3, 4, 7), 2, Draw(device), torch.float32, torch.float32)
    permuted = grad.movedim(-1, 1).contiguous().to_sparse().movedim(1, -1)  # out of order, yet marked as coalesced
    assert_kernel(grad, output, 2, permuted)
    assert_kernel(grad, output.transpose(0, 1).contiguous().transpose(0, 1), 2, grad.to_sparse())


@pytest.mark.parametrize("shape,dim", [((), 0), ((), -1), ((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((2, 0, 3), 2)])
def test_scalars_and_nothing(shape, dim, device):
    output = torch.full(shape, -0.5, device=device)
    grad = torch.ones(shape, device=device)
    empty = torch.sparse_coo_tensor(size=shape, device=device)
    assert_bitwise_equal(backward(empty, output, dim, torch.float32), torch.zeros(shape, device=device))
    if not shape:
        twice = torch.sparse_coo_tensor(torch.zeros(0, 2, dtype=torch.int64, device=device),
                                        torch.tensor([0.25, 0.75], device=device), ())
        torch.testing.assert_close(backward(twice, output, dim, torch.float32), 1 - output.exp())
    else:
        assert_bitwise_equal(backward(grad.to_sparse(), output, dim, torch.float32), grad)


def test_duplicates_add_up_in_their_order(device):
    draw = Draw(device)
    output = torch.log_softmax(draw.normal(3, 5), 1)
    values = draw.normal(300) * 10.0 ** draw.integers(8, 300)  # any other order gives other bits
    indices = torch.stack([draw.integers(3, 300), draw.integers(2, 300)])
    grads = [backward(torch.sparse_coo_tensor(indices, values, (3, 5)), output, 1, torch.float32) for _ in range(5)]
    for grad in grads[1:]:
        assert_bitwise_equal(grad, grads[0])
    by_row = torch.sort(indices[0], stable=True).indices
    ordered = torch.sparse_coo_tensor(indices[:, by_row], values[by_row], (3, 5))
    assert_bitwise_equal(backward(ordered, output, 1, torch.float32), grads[0])


def test_an_index_outside_is_refused():
    output = torch.log_softmax(torch.randn(4, 6), 1)
    for row, column, words in ((1, 6, "got 6 in row 1"), (1, -1, "got -1 in row 1"), (1, -100, "got -100 in row 1"),
                               (4, 0, r"inside \[4\], got \[4\]"), (-1, 0, r"inside \[4\], got \[-1\]")):
        grad = torch.sparse_coo_tensor([[0, row], [2, column]], [1.0, 1.0], (4, 6), check_invariants=False)
        with pytest.raises(RuntimeError, match="sparse_ce: .*" + words):
            backward(grad, output, 1, torch.float32)


def test_other_arguments_are_refused():
    output = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match=r"sparse_ce: grad_output must have the shape .*\[4, 6\], got \[4, 5\]"):
        backward(torch.ones(4, 5).to_sparse(), output, 1, torch.float32)
    with pytest.raises(NotImplementedError, match="sparse_ce: grad_output must be sparse COO"):
        backward(output, output.to_sparse(), 1, torch.float32)
    with pytest.raises(IndexError):
        backward(output.to_sparse(), output, 2, torch.float32)


def test_second_derivatives_are_refused_because_pytorch_gets_them_wrong():
    logits, dense = problem((4, 5), Draw("cpu"))
    target = dense.to_sparse()
    # PyTorch's formula multiplies the row sums, COO (N, 1), by the probabilities, (N, V). If this were ever right ...
    product = torch.mul(torch.ones(2, 1).to_sparse(), torch.ones(2, 3)).to_dense()
    assert not torch.equal(product, torch.ones(2, 3)), "... the refusal could go"

    def loss(z):
        return F.cross_entropy(z, target)

    x = logits.clone().requires_grad_()
    twice = [lambda: torch.autograd.grad(loss(x), x, create_graph=True),
             lambda: torch.func.grad(lambda z: torch.func.grad(loss)(z).square().sum())(logits),
             lambda: torch.func.jacrev(torch.func.jacrev(loss))(logits),
             lambda: torch.autograd.functional.hessian(loss, logits)]
    for derivative in twice:
        with pytest.raises(NotImplementedError, match="sparse_ce: backward .* must not be diff.*enable_stock"):
            derivative()
        with torch.no_grad(), pytest.raises((NotImplementedError, RuntimeError)):
            derivative()
    for forward_mode in (lambda: torch.func.hessian(loss)(logits),
                         lambda: torch.func.jvp(loss, (logits,), (logits.cos(),))):
        with pytest.raises(NotImplementedError):
            forward_mode()
    loss(x).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.func.jacrev(loss)(logits))


# ------------------------------------------------------------------------------------------------ PyTorch is unchanged


def python(script, *arguments, expect=0):
    done = forked.run("-c", textwrap.dedent(script), *arguments, cwd="/")
    assert done.returncode == expect, done.stderr[-3000:]
    return done


CALLS = """
    import hashlib, json, sys, warnings
    import torch, torch.nn.functional as F
    if sys.argv[1] != "without":
        from sparse_ce.patches import stock_cross_entropy as stock
    if sys.argv[1] == "after":
        with stock.enable_stock():
            F.cross_entropy(torch.zeros(2, 3), torch.eye(2, 3).to_sparse())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, p, labels = torch.randn(6, 11), torch.rand(6, 11), torch.tensor([3, -100, 0, 10, 7, 7])
    p = p * (p > 0.5)
    w, m, images = torch.rand(11), torch.randn(11, 4), torch.randn(2, 5, 3, 4)
    coo, csr, csc = p.to_sparse(), p.to_sparse_csr(), p.to_sparse_csc()

    def grads(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = f(*leaves)
        out.sum().backward()
        return [out, *(t.grad for t in leaves)]

    calls = {
        "labels": lambda: grads(lambda z: F.cross_entropy(z, labels), x),
        "weighted labels": lambda: grads(lambda z: F.cross_entropy(z, labels, w, label_smoothing=0.1), x),
        "probabilities": lambda: grads(lambda z, q, v: F.cross_entropy(z, q, v, reduction="none"), x, p, w),
        "images": lambda: grads(lambda z: F.cross_entropy(z, images.argmax(1)), images),
        "nll": lambda: grads(lambda z: F.nll_loss(z, labels), x),
        "log_softmax": lambda: grads(lambda z: F.log_softmax(z, 0), x),
        "log_softmax in bfloat16": lambda: grads(lambda z: F.log_softmax(z, 1, torch.bfloat16), x),
        "its backward": lambda: [torch._log_softmax_backward_data(p, x.log_softmax(1), 1, torch.float32)],
        "softmax": lambda: grads(lambda z: F.softmax(z, 1) * p, x),
        "kl_div": lambda: grads(lambda z: F.kl_div(F.log_softmax(z, 1), p), x),
        "binary": lambda: grads(lambda z: F.binary_cross_entropy_with_logits(z, p), x),
        "sparse.mm": lambda: grads(lambda s, d: torch.sparse.mm(s, d), coo, m),
        "sparse.sum": lambda: grads(lambda s: torch.sparse.sum(s, 1).to_dense(), coo),
        "sparse.softmax": lambda: grads(lambda s: torch.sparse.softmax(s, 1).to_dense(), coo),
        "sparse.log_softmax": lambda: grads(lambda s: torch.sparse.log_softmax(s, 1).to_dense(), coo),
        "sparse times dense": lambda: [coo * x, x * coo, csr * x],
        "CSR matmul": lambda: grads(lambda s, d: s @ d, csr, m),
        "CSC matmul": lambda: [csc @ m],
        "sparse embedding": lambda: grads(lambda e: F.embedding(labels.clamp(min=0), e, sparse=True), m),
        "COO, no gradient": lambda: [F.cross_entropy(x, coo), F.cross_entropy(x, coo, w, reduction="none")],
        "COO, smoothed": lambda: [F.cross_entropy(x, coo, label_smoothing=0.1)],
        "CSR, no gradient": lambda: [F.cross_entropy(x, csr)],
        "CSR, single losses": lambda: [F.cross_entropy(x, csr, reduction="none")],
        "CSR, gradient": lambda: grads(lambda z: F.cross_entropy(z, csr), x),
        "CSC": lambda: [F.cross_entropy(x, csc)],
        "sparse logits": lambda: [F.cross_entropy(coo, labels)],
        "COO in inference mode": lambda: [torch.inference_mode()(F.cross_entropy)(x, coo)],
        "log_softmax of COO": lambda: [F.log_softmax(coo, 1)],
        "derivative of softmax, sparse": lambda: [torch._softmax_backward_data(coo, x, 1, torch.float32)],
        "the hole": lambda: grads(lambda z: F.cross_entropy(z, coo), x),
    }

    def bits(t):
        if t.layout == torch.sparse_coo:
            return [str(t.layout), t.is_coalesced(), bits(t._indices()), bits(t._values())]
        if t.layout == torch.sparse_csr:
            return [str(t.layout), bits(t.crow_indices()), bits(t.col_indices()), bits(t.values())]
        if t.layout == torch.sparse_csc:
            return [str(t.layout), bits(t.ccol_indices()), bits(t.row_indices()), bits(t.values())]
        raw = t.detach().contiguous().flatten().view(torch.uint8) if t.dim() else t.detach()[None].view(torch.uint8)
        return [str(t.dtype), list(t.shape), hashlib.sha256(bytes(raw.tolist())).hexdigest()]

    results = {}
    for name, call in calls.items():
        try:
            results[name] = [bits(t) for t in call()]
        except Exception as error:
            results[name] = type(error).__name__
    print(json.dumps(results))
"""


def test_nothing_else_changes():
    without, imported, after = (json.loads(python(CALLS, mode).stdout) for mode in ("without", "with", "after"))
    assert without.pop("the hole") == "NotImplementedError"
    assert isinstance(imported.pop("the hole"), list) and isinstance(after.pop("the hole"), list)
    assert len(without) >= 25 and sum(isinstance(result, list) for result in without.values()) >= 20
    assert imported == without
    assert after == without


REGISTRIES = """
    import json, os, sys, warnings
    import torch, torch.nn.parallel, torch.utils.flop_counter, torch.utils.data
    from torch.utils._pytree import SUPPORTED_NODES
    from torch.utils.data._utils.collate import default_collate_fn_map

    OPS = ("_log_softmax_backward_data", "_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_log_softmax",
           "_sparse_log_softmax_backward_data", "cross_entropy_loss", "_log_softmax", "_softmax_backward_data")
    KEYS = ("CPU", "SparseCPU", "SparseCsrCPU", "AutogradCPU", "SparseCUDA", "SparseCsrCUDA")

    def registered():
        names = lambda classes: {getattr(c, "__qualname__", str(c)) for c in classes}
        kernels = {f"{op} {key}" for op in OPS for key in KEYS
                   if torch._C._dispatch_has_kernel_for_dispatch_key("aten::" + op, key)}
        return {"collate": names(default_collate_fn_map), "pytree": names(SUPPORTED_NODES), "kernels": kernels,
                "load": names(torch.serialization.get_safe_globals()),
                "flops": {str(op) for op in torch.utils.flop_counter.flop_registry}}

    def everything_else():
        modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
        return {"environment": dict(os.environ), "warnings": list(warnings.filters), "finders": list(sys.meta_path),
                **{f"{name}.{key}": id(value) for name, module in modules.items()
                   for key, value in vars(module).items() if not key.startswith("__")}}

    before, others = registered(), everything_else()
    import sparse_ce
    after, changed = registered(), everything_else()
    new = {name: sorted(after[name] - before[name]) for name in before}
    new["others"] = [name for name in changed if others.get(name) != changed[name]]
    print(json.dumps(new))
"""


def test_the_import_registers_what_its_docstring_lists():
    new = json.loads(python(REGISTRIES).stdout)
    assert new["collate"] == ["SparseTarget"] and new["pytree"] == ["CrossEntropyOutput", "LogProbs", "SparseTarget"]
    assert {"SparseTarget", "SmoothedTarget"} <= {*new["load"]}
    assert {kernel for kernel in new["kernels"] if "CUDA" not in kernel} == {
        "_log_softmax_backward_data SparseCPU",
        *(f"_sparse_{op} SparseCsrCPU" for op in ("softmax", "log_softmax", "softmax_backward_data",
                                                  "log_softmax_backward_data"))}
    assert new["flops"] and all(op.startswith("sparse_ce.") for op in new["flops"])
    # The namespace of the ops, and the set that add_safe_globals makes anew.
    assert {*new["others"]} <= {"torch.ops.sparse_ce", "torch._weights_only_unpickler._marked_safe_globals_set"}


def test_a_pytorch_that_has_the_kernel_keeps_it():
    """Runs with a kernel registered first, as a future PyTorch would do. Warnings are errors."""
    script = """
        import sys, torch, torch.nn.functional as F, warnings
        library = torch.library.Library("aten", "IMPL")
        if sys.argv[1] == "theirs":
            library.impl("_log_softmax_backward_data", lambda grad, output, dim, dtype: output * 0 + 42, "SparseCPU")
        warnings.simplefilter("error")
        from sparse_ce.patches import stock_cross_entropy as stock
        x = torch.zeros(2, 3, requires_grad=True)
        with torch.sparse.check_sparse_tensor_invariants(False):
            F.cross_entropy(x, torch.eye(2, 3).to_sparse()).backward()
        stock.reopen_holes()
        stock.fill_holes()
        with stock.enable_stock():
            pass
        print(x.grad[0, 0].item())
    """
    theirs, ours = python(script, "theirs"), python(script, "ours")
    assert float(theirs.stdout) == 42
    assert math.isclose(float(ours.stdout), (1 / 3 - 1) / 2, rel_tol=1e-6)
    assert theirs.stderr == ours.stderr == ""


def test_the_filling_can_be_undone():
    x, target = torch.zeros(2, 3, requires_grad=True), torch.eye(2, 3).to_sparse()
    name, key = "aten::_log_softmax_backward_data", "SparseCPU"
    for _ in range(2):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        stock.reopen_holes()
        stock.reopen_holes()
        try:
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            with pytest.raises(NotImplementedError, match="_log_softmax_backward_data.*SparseCPU"):
                F.cross_entropy(x, target).backward()
        finally:
            stock.fill_holes()
            stock.fill_holes()
        F.cross_entropy(x, target).backward()
    assert x.grad[0, 0] < 0
