"""Loads a Hugging Face kernel beside the installed package, and compares the two.

    python hub_process.py VARIANT {installed,kernel,enabled}

The second argument says what is imported first. With ``enabled``, the installed package has called ``enable_stock``
before the kernel is imported.
"""

import gc
import importlib
import io
import os
import pickle
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[1]))

import hub_client  # noqa: E402

hub_client.make_importable()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping  # noqa: E402
from kernels import use_kernel_forward_from_hub as replaceable  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import scatter_gather  # noqa: E402
from torch.utils import _pytree  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

ROWS, CLASSES, WIDTH = 6, 37, 3
torch.set_num_threads(1)
torch.manual_seed(0)


def entries(rows=ROWS, classes=CLASSES):
    return torch.stack([torch.randperm(classes)[:WIDTH] for _ in range(rows)]), torch.rand(rows, WIDTH)


def value_and_grads(loss, *leaves):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    value = loss(*leaves)
    value.backward()
    return [value.detach(), *(t.grad for t in leaves)]


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b), (a, b)


def check_namespaces(copies):
    namespaces = [copy.ops.registration.NAMESPACE for copy in copies]
    assert namespaces[0] == "sparse_ce" and namespaces[1].startswith("_sparse_ce_cpu_"), namespaces
    names = [{name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()
              if name.startswith(namespace + "::")} for namespace in namespaces]
    assert names[0] == names[1] and len(names[0]) > 40
    assert all(copy.ops.logits.small_calls._function is not None for copy in copies)
    assert len({copy.ops.registration.cpu_library for copy in copies}) == 2
    types = [copy.SparseTarget for copy in copies]
    assert types[0] is not types[1]
    for copy, namespace in zip(copies, namespaces):
        assert _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[f"{namespace}.SparseTarget"] is copy.SparseTarget
        assert _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[f"{namespace}.LogProbs"].__mro__.index(copy.LogProbs) < 2


def check_values(copies):
    indices, values = entries()
    large = torch.randn(ROWS, 20000)
    hidden, weight = torch.randn(ROWS, 8), torch.randn(CLASSES, 8)
    calls = {
        "small": lambda c: value_and_grads(lambda x: c.cross_entropy(x, (indices, values)), torch.randn(ROWS, CLASSES)),
        "large": lambda c: value_and_grads(lambda x: c.cross_entropy(x, (indices, values), label_smoothing=0.1), large),
        "head": lambda c: value_and_grads(lambda x, w: c.linear_cross_entropy(x, w, indices[:, 0]), hidden, weight),
        "selected": lambda c: value_and_grads(
            lambda x: c.selected_log_probs(x, indices, return_entropy=True).log_probs.sum(), large),
        "mean": lambda c: value_and_grads(lambda x: c.masked_mean(x, x > 0), large),
        "top-k": lambda c: [c.topk_log_probs(large, 5).values],
    }
    for call in calls.values():
        results = []
        for copy in copies:
            torch.manual_seed(1)
            results.append(call(copy))
        assert_equal(*results)


def check_targets_of_the_other_copy(copies):
    indices, values = entries()
    logits = torch.randn(ROWS, CLASSES)
    for own, other in (copies, copies[::-1]):
        target = other.SparseTarget.from_topk(indices, values)
        expected = value_and_grads(lambda x: own.cross_entropy(x, (indices, values)), logits)
        assert_equal(value_and_grads(lambda x: own.cross_entropy(x, target), logits), expected)
        assert not isinstance(target, own.SparseTarget)
        try:
            own.SparseTarget.cat([target, target])
        except TypeError as error:
            assert "another copy" in str(error) and other.SparseTarget.__module__ in str(error), error
        else:
            raise AssertionError("cat must refuse targets of another copy")


def check_collation(copies):
    indices, values = entries()
    for workers in (0, 1):
        for copy in copies:
            samples = [{"x": torch.ones(2), "y": copy.SparseTarget.from_topk(i, v)} for i, v in zip(indices, values)]
            batch, = DataLoader(samples, batch_size=ROWS, num_workers=workers)
            assert type(batch["y"]) is copy.SparseTarget and torch.equal(batch["y"].values, values)
            assert type(copy.collate(samples)["y"]) is copy.SparseTarget


class Chunks:
    """Splits tensors without the copy to devices, the only part of PyTorch's scatter that needs GPUs."""

    @staticmethod
    def apply(target_gpus, chunk_sizes, dim, input):
        return input.chunk(len(target_gpus), dim)


def check_data_parallel(copies):
    for copy in copies:
        importlib.import_module(copy.__name__ + ".integrations.data_parallel")
    indices, values = entries()
    targets, whole = [copy.SparseTarget.from_topk(indices, values) for copy in copies], scatter_gather.Scatter
    scatter_gather.Scatter = Chunks
    try:
        for given in ([targets[0]], [targets[1]], targets):
            parts = nn.parallel.scatter((torch.arange(ROWS), *given), ["cpu", "cpu"])
            for part, rows in zip(parts, (slice(0, 3), slice(3, 6)), strict=True):
                for target, piece in zip(given, part[1:], strict=True):
                    assert type(piece) is type(target) and torch.equal(piece.values, values[rows])
    finally:
        scatter_gather.Scatter = whole


def check_accelerate(copies):
    for copy in copies:
        importlib.import_module(copy.__name__ + ".integrations.accelerate")
    operations = importlib.import_module("accelerate.utils.operations")
    indices, values = entries()
    for copy in copies:
        target = copy.SparseTarget.from_topk(indices, values)
        joined = operations.concatenate([{"y": target}, {"y": target[:2, ]}])["y"]
        assert type(joined) is copy.SparseTarget and torch.equal(joined.values, torch.cat((values, values[:2])))
        assert operations.find_batch_size({"y": target}) == ROWS


def check_pickles(copies):
    indices, values = entries()
    for copy in copies:
        target, file = copy.SparseTarget.from_topk(indices, values), io.BytesIO()
        torch.save(target, file)
        file.seek(0)
        for found in (pickle.loads(pickle.dumps(target)), torch.load(file, weights_only=True)):
            assert type(found) is copy.SparseTarget and torch.equal(found.values, values)


def stock_works():
    """Returns True if PyTorch's cross entropy has a gradient for a CSR target, which only the fused kernels have."""
    logits = torch.zeros(ROWS, CLASSES, requires_grad=True)
    try:
        F.cross_entropy(logits, torch.eye(ROWS, CLASSES).to_sparse_csr()).backward()
    except (RuntimeError, NotImplementedError):
        return False
    return bool(logits.grad.abs().max() > 0)


def check_stock(copies):
    assert not stock_works()
    for first, second in (copies, copies[::-1]):
        handle = first.enable_stock()
        with second.enable_stock():
            assert stock_works()
            handle.remove()
            assert stock_works()
            handle = first.enable_stock()
        assert stock_works()
        handle.remove()
        assert not stock_works()
        patch, stock = second.patches.stock_cross_entropy, second.patches.stock_cross_entropy._stock
        patch._stock = None  # dense calls must not pass through the other copy
        with first.enable_stock():
            check_dense_stock()
        patch._stock = stock
    check_dense_stock()


def check_dense_stock():
    logits, labels = torch.randn(ROWS, CLASSES), torch.arange(ROWS)
    torch.testing.assert_close(F.cross_entropy(logits, labels), F.nll_loss(logits.log_softmax(1), labels))


def check_coo_backward():
    logits, target = torch.randn(ROWS, CLASSES), torch.rand(ROWS, CLASSES)
    assert_close(value_and_grads(lambda x: F.cross_entropy(x, target.to_sparse()), logits),
                 value_and_grads(lambda x: F.cross_entropy(x, target), logits))


def assert_close(first, second):
    for a, b in zip(first, second, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b)


def check_compiled(copies):
    indices, values = entries()
    logits = torch.randn(ROWS, CLASSES)
    for copy in copies:
        torch._dynamo.reset()
        target = copy.SparseTarget.from_topk(indices, values)
        compiled = torch.compile(lambda x, t: copy.cross_entropy(x, t, label_smoothing=0.1), fullgraph=True,
                                 backend="aot_eager")
        assert_close(value_and_grads(lambda x: compiled(x, target), logits),
                     value_and_grads(lambda x: copy.cross_entropy(x, target, label_smoothing=0.1), logits))


def check_flops(copies):
    counter_class = importlib.import_module("torch.utils.flop_counter").FlopCounterMode
    hidden, weight = torch.randn(ROWS, 8, requires_grad=True), torch.randn(CLASSES, 8, requires_grad=True)
    for copy in copies:
        with counter_class(display=False) as counter:
            copy.linear_cross_entropy(hidden, weight, torch.arange(ROWS)).backward()
        assert counter.get_total_flops() == 3 * 2 * ROWS * CLASSES * 8


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        loss = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss
        self.loss = replaceable("ForCausalLMLoss")(loss)

    def forward(self, tokens, **options):
        return self.loss(self.head(self.embedding(tokens)), tokens, CLASSES, **options)


def check_layer(variant, kernel):
    """Checks the loss that kernelize swaps into a model of float64, which transformers computes in float32."""
    model, tokens = Model().double(), torch.randint(CLASSES, (2, 9))
    tokens[0, 4] = -100
    inputs = tokens.clamp(min=0)
    shifted = F.pad(tokens, (0, 1), value=-100)[:, 1:]

    def formula(count, labels):
        logits = model.head(model.embedding(inputs))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count

    def step(f):
        model.zero_grad()
        loss = f()
        (3 * loss).backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    def forward(**options):
        return model.loss(model.head(model.embedding(inputs)), tokens, CLASSES, **options)

    active = int(shifted.ne(-100).sum())
    cases = {active: {}, 29: {"num_items_in_batch": torch.tensor(29)}, 31: {"num_items_in_batch": 31}}
    originals = [step(lambda: forward(**options)) for options in cases.values()]
    mapping = {"ForCausalLMLoss": {"cpu": LocalLayerRepository(variant, layer_name="ForCausalLMLoss")}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
    assert model.loss.forward.__func__ is kernel.layers.ForCausalLMLoss.forward
    for (count, options), original in zip(cases.items(), originals):
        assert_close(step(lambda: forward(**options)), step(lambda: formula(count, shifted)))
        for a, b in zip(step(lambda: forward(**options)), original, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-6)
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        assert_close(step(lambda: compiled(**options)), step(lambda: formula(count, shifted)))
    assert_close(step(lambda: forward(shift_labels=tokens)), step(lambda: formula(tokens.ne(-100).sum(), tokens)))
    sparse = kernel.SparseTarget.from_index(tokens)
    assert_close([model.loss(model.head(model.embedding(inputs)), sparse, CLASSES).detach()],
                 [formula(active, shifted).detach()])


def check_unloaded(copies, first):
    """Removes the copy that was imported first, which has registered the missing kernels of PyTorch."""
    other = copies[1 - first]
    prefix = copies[first].__name__
    for name in [name for name in sys.modules if name == prefix or name.startswith(prefix + ".")]:
        del sys.modules[name]
    copies[first] = None
    gc.collect()
    check_coo_backward()
    with other.enable_stock():
        assert stock_works()
    assert not stock_works()
    check_dense_stock()


def main():
    variant, order = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    if order == "kernel":
        kernel = get_local_kernel(variant)
        import sparse_ce
    else:
        import sparse_ce
        handle = sparse_ce.enable_stock() if order == "enabled" else None
        kernel = get_local_kernel(variant)
        if handle is not None:
            handle.remove()
    assert kernel.__version__ == sparse_ce.__version__ and kernel.__file__ != sparse_ce.__file__
    copies = [sparse_ce, kernel]
    check_namespaces(copies)
    check_values(copies)
    check_targets_of_the_other_copy(copies)
    check_collation(copies)
    check_data_parallel(copies)
    check_pickles(copies)
    check_stock(copies)
    check_coo_backward()
    check_flops(copies)
    warnings.simplefilter("default")  # of accelerate and of compilers
    check_accelerate(copies)
    check_compiled(copies)
    check_layer(variant, kernel)
    check_unloaded(copies, first=int(order == "kernel"))


if __name__ == "__main__":
    main()
