"""Runs one of several processes of test_sharded_logits.py: compilers, traffic, and peers.

    RANK=r WORLD_SIZE=n python sharded_modes.py FOLDER CASE ...

It accepts the cases of sharded_cases.py too.
"""

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile

import sparse_ce
from sharded_cases import main, run
from sharded_problems import assert_same, assert_the_same_everywhere, share
from sparse_ce import SparseTarget

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from models.collectives import Collective, collectives  # noqa: E402

CLASSES = 23


def indices_of(rows: int) -> Tensor:
    return torch.randint(CLASSES, (rows, 3), generator=torch.Generator().manual_seed(rows))


def target_of(kind: str, rows: int, values: Tensor, indices: Optional[Tensor] = None) -> Any:
    indices = indices_of(rows) if indices is None else indices
    if kind == "labels":
        return indices[:, 0]
    if kind == "topk":
        return indices, values
    return SparseTarget.from_jagged(indices.flatten(), values.flatten(), torch.arange(0, 3 * rows + 1, 3))


def drawn(rows: int, dtype: torch.dtype = torch.float64) -> Tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 1)
    return (torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
            torch.rand(rows, 3, generator=generator, dtype=torch.float64).requires_grad_())


MEAN, MORE = dict(reduction="mean"), dict(reduction="none", label_smoothing=0.1, return_entropy=True)


def compiled_once_and_for_other_sizes(backend: str = "aot_eager", kinds: Sequence[str] = ("jagged",),
                                      several: Sequence[Dict[str, Any]] = (MORE,)) -> None:
    for kind in kinds:
        for options in several:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()

            def loss(x: Tensor, target: Any, scale: Tensor, keywords: Dict[str, Any]) -> Tensor:
                out = sparse_ce.cross_entropy(x, target, logit_scale=scale, **keywords)
                out = out if isinstance(out, tuple) else (out,)
                return sum((t * 1.5).sum() for t in out if t.is_floating_point())

            compiled = torch.compile(loss, backend=backend, fullgraph=True)
            for rows in (4, 7, 9):
                x, values = drawn(rows)
                local, keywords = share(x, **options)
                found = []
                for f in (loss, compiled):
                    scale = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
                    out = f(local, target_of(kind, rows, values), scale, keywords)
                    leaves = [local, scale] if kind == "labels" else [local, scale, values]
                    found.append((out.detach(), *torch.autograd.grad(out, leaves)))
                assert_same(found[1], found[0])
            compilations = torch._dynamo.utils.counters["frames"]["ok"]  # the first attempt of a backend does not count
            assert compilations <= 2, f"{kind}: {compilations} compilations"
    torch._dynamo.reset()


def compiled_with_every_form() -> None:
    compiled_once_and_for_other_sizes("aot_eager", ("labels", "topk", "jagged"), (MEAN, MORE))


HEADS: Dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, w, ids, by, **shard: sparse_ce.linear_cross_entropy(x, w, ids, **shard),
    "none": lambda x, w, ids, by, **shard: sparse_ce.linear_cross_entropy(x, w, ids, reduction="none", **shard),
    "selected": lambda x, w, ids, by, **shard: sparse_ce.linear_selected_log_probs(x, w, ids, **shard).log_probs,
    "rows": lambda x, w, ids, by, **shard: sparse_ce.linear_row_loss(
        lambda out, _, by: out.entropy - by * out.log_probs, x, w, ids, by, return_entropy=True, **shard),
    "distillation": lambda x, w, ids, by, **shard: sparse_ce.linear_distillation_loss(
        x, w, (ids[:, None], by[:, None]), ids, alpha=0.3, **shard),
    "dense": lambda x, w, ids, by, **shard: sparse_ce.linear_distillation_loss(
        x, w, (x.detach().cos(), w.detach()), ids, alpha=0.3, row_mask=ids > 2, kind="jsd", **shard),
    "dense_rows": lambda x, w, ids, by, **shard: sparse_ce.linear_row_loss(
        lambda out, _, by: out.tv - by * out.log_probs, x, w, ids, by, teacher=(x.detach().cos(), w.detach()),
        return_tv=True, **shard),
    "binary": lambda x, w, ids, by, chunk_rows=None, **shard: sparse_ce.linear_binary_cross_entropy(
        x, w, ids, gamma=2.0, chunk_classes=chunk_rows, **shard),
    "topk": lambda x, w, ids, by, **shard: sparse_ce.linear_topk_log_probs(x, w, 3, **shard).values,
}


def heads_compiled_for_any_number_of_rows(names: Sequence[str] = ("mean",), ways: Sequence[str] = ("group",),
                                          numbers: Sequence[Optional[int]] = (None, 8)) -> None:
    """Checks that one graph is compiled for the first number of rows and one for all others.

    With ``chunk_rows`` each doubling compiles another graph.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh, whole = dist.init_device_mesh("cpu", (world,)), torch.randn(CLASSES, 5, dtype=torch.float64)
    for name, way, chunk_rows in product(names, ways, numbers):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        weight, shard = share(whole.T)
        weight, shard = weight.detach().T.contiguous().requires_grad_(), dict(shard, chunk_rows=chunk_rows)
        if way == "placed":
            weight = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            shard = dict(chunk_rows=chunk_rows)
        if way == "sequence":
            shard["group"] = sparse_ce.SequenceGroup(shard["group"])
        compiled = torch.compile(HEADS[name], backend="aot_eager", fullgraph=True)
        for rows in (8, 6, 4, 10, 12, 14, 16, 18, 24, 26, 32):
            draw = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, 5, generator=draw, dtype=torch.float64)
            ids, by = indices_of(rows)[:, 0], torch.rand(rows, generator=draw, dtype=torch.float64)
            ids[1] = -100
            if way == "sequence":
                x = x.chunk(world)[rank].clone()
            elif way == "placed":
                x = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
            x.requires_grad_()
            found = []
            for f in (HEADS[name], compiled):
                out = f(x, weight, ids, by, **shard)
                grads = () if name == "topk" else torch.autograd.grad((out * 1.5).sum(), [x, weight])
                found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (out.detach(), *grads)])
            assert_same(found[1], found[0])
        compilations = torch._dynamo.utils.counters["frames"]["ok"]
        assert compilations <= (2 if chunk_rows is None else 4), f"{name}, {way}: {compilations} compilations"
    torch._dynamo.reset()


def every_head_compiled_for_any_number_of_rows() -> None:
    heads_compiled_for_any_number_of_rows([*HEADS][1:], numbers=(None,))
    heads_compiled_for_any_number_of_rows(("mean", "rows", "dense", "dense_rows"), ("sequence", "placed"), (None,))
    heads_compiled_for_any_number_of_rows(("topk",), ("sequence",), (8,))


def compiled_by_inductor() -> None:
    compiled_once_and_for_other_sizes("inductor", ("labels", "topk"))


def compiled_log_probs() -> None:
    torch._dynamo.utils.counters.clear()

    def outputs(x: Tensor, ids: Tensor, keywords: Dict[str, Any]) -> Any:
        return sparse_ce.selected_log_probs(x, ids, return_log_tail=True, return_entropy=True, return_argmax=True,
                                            **keywords)

    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    for rows in (4, 7, 9):
        x, values = drawn(rows)
        local, keywords = share(x)
        ids = target_of("topk", rows, values)[0]
        found = []
        for f in (outputs, compiled):
            out = f(local, ids, keywords)
            loss = out.log_probs.sum() + out.log_tail.sum() - out.entropy.sum()
            found.append((out.lse.detach(), out.argmax, *torch.autograd.grad(loss, local)))
        assert_same(found[1], found[0])
    assert torch._dynamo.utils.counters["frames"]["ok"] <= 2
    torch._dynamo.reset()


def compiled_dense_divergence() -> None:
    torch._dynamo.reset()
    mask = torch.tensor([True, False, True, True])

    def loss(x: Tensor, keywords: Dict[str, Any]) -> Tensor:
        return sparse_ce.distillation_loss(x, x.detach().cos(), kind="reverse_kl", row_mask=mask, **keywords)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for options in (dict(reduction="none"), {}):
        local, keywords = share(drawn(4)[0], **options)
        found = []
        for f in (loss, compiled):
            out = f(local, keywords)
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), local)))
        with torch.no_grad():
            assert_same(compiled(local, keywords), found[0][0])
        assert_same(found[1], found[0])
    torch._dynamo.reset()


def compiled_binary() -> None:
    torch._dynamo.reset()
    indices, mask = indices_of(4), torch.tensor([True, False, True, True])
    by = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def of_logits(x: Tensor, scale: Tensor, keywords: Dict[str, Any]) -> Tensor:
        return sparse_ce.binary_cross_entropy_with_logits(x, (indices, by), row_mask=mask, logit_scale=scale,
                                                          gamma=(0.0, 2.0), **keywords)

    def of_head(x: Tensor, scale: Tensor, keywords: Dict[str, Any]) -> Tensor:
        return sparse_ce.linear_binary_cross_entropy(hidden, x.T, (indices, by), row_mask=mask, logit_scale=scale,
                                                     gamma=(0.0, 2.0), **keywords)

    hidden = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for loss in (of_logits, of_head):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        for options in (dict(reduction="none"), dict(reduction="batchmean")):
            local, keywords = share(drawn(4)[0], **options)
            found = []
            for f in (loss, compiled):
                scale = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
                out = f(local, scale, keywords)
                found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (local, scale))))
            assert_same(found[1], found[0])
    torch._dynamo.reset()


def traced_without_data() -> None:
    """Checks that tracing reads no data, because fake tensors have none."""
    for kind in ("labels", "topk", "jagged"):
        x, values = drawn(6)
        local, keywords = share(x)

        def step(local: Tensor, values: Tensor, scale: Tensor, indices: Tensor) -> Tuple[Tensor, ...]:
            local, values = local.detach().requires_grad_(), values.detach().requires_grad_()
            loss = sparse_ce.cross_entropy(local, target_of(kind, 6, values, indices), logit_scale=scale,
                                           label_smoothing=0.1, **keywords)
            leaves = [local] if kind == "labels" else [local, values]
            return (loss, *torch.autograd.grad(loss, leaves))

        given = (local, values, torch.tensor(0.5, dtype=torch.float64), indices_of(6))
        expected = step(*given)
        for mode in ("fake", "symbolic"):
            traced = make_fx(step, tracing_mode=mode)(*given)
            with torch.no_grad():  # the graph includes backward; some releases of PyTorch require detached tensors
                assert_same(traced(*given), expected)


def shapes_of_the_ops() -> None:
    """Checks that the shapes of the fake implementations equal those of the results."""
    x, values = drawn(6)
    indices = target_of("topk", 6, values)[0]
    given = (indices, values.detach(), None, None, None)
    for number in range(3, 32, 7):
        wanted = {name: bool(number >> i & 1) for i, name in enumerate(
            ("log_probs", "log_tail", "entropy", "mean_logit", "argmax", "collision"))}
        named = dict(num_classes=CLASSES, loss=number % 3 > 0, label_smoothing=0.1 * (number % 3 > 1), **wanted)
        checks = dict(test_utils=("test_schema", "test_faketensor"))
        ops, local = torch.ops.sparse_ce, x.detach()[:, 5:9].clone()
        torch.library.opcheck(ops.select_shard, (local, *given), dict(named, first_class=5), **checks)
        statistics, chosen = ops.select_shard(x.detach(), *given, first_class=0, **named)
        chosen = chosen if wanted["log_probs"] else None
        torch.library.opcheck(ops.select_merge, (statistics, 1, chosen, *given), named, **checks)


def exported() -> None:
    """Exports losses of local tensors with any number of rows; the loss of a head uses one chunk."""
    class Loss(torch.nn.Module):
        def __init__(self, weight: Optional[Tensor], keywords: Dict[str, Any]):
            super().__init__()
            self.weight, self.keywords = None if weight is None else torch.nn.Parameter(weight), keywords

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            if self.weight is None:
                return sparse_ce.cross_entropy(x, labels, **self.keywords)
            return sparse_ce.linear_cross_entropy(x, self.weight, labels, **self.keywords)

    hidden, (weight, keywords) = torch.randn(9, 5, dtype=torch.float64), share(torch.randn(CLASSES, 5).double().T)
    for strict in (False, True):
        for given in (None, weight.T.contiguous()):
            loss, exported = Loss(given, keywords if given is None else dict(keywords, chunk_rows=9)), None
            for count in (4, 7, 9):
                x = hidden[:count] if given is not None else share(drawn(count)[0])[0].detach()
                x, labels = x.clone().requires_grad_(), indices_of(count)[:, 0]
                if exported is None:
                    sizes = {0: torch.export.Dim("rows", max=None if given is None else 9)}
                    exported = torch.export.export(loss, (x, labels), strict=strict,
                                                   dynamic_shapes={"x": sizes, "labels": sizes}).module()
                leaves = [x, *loss.parameters()]
                expected = loss(x, labels)
                found = exported(x, labels)
                assert_same(found, expected)
                assert_same(torch.autograd.grad(found, [x, *exported.parameters()]),
                            torch.autograd.grad(expected, leaves))


# ----------------------------------------------------------------------------------------------------------------- sent

def sent_by(call: Callable[[], Any], number: int) -> Tuple[List[Collective], List[str]]:
    """Returns the collectives with the bytes that this rank sends, and the other ops of the call."""
    with profile(record_shapes=True) as seen:
        call()
    names = {"_c10d_functional::all_gather_into_tensor": "all_gather", "_c10d_functional::all_reduce": "all_reduce"}
    sent = [Collective(names[e.name], number * math.prod(e.input_shapes[0])) for e in seen.events() if e.name in names]
    return sent, [e.name for e in seen.events() if e.name not in names]


def as_planned() -> None:
    """Checks that the collectives equal those of ``benchmarks/models/collectives.py`` if no mode is active."""
    world, rows = dist.get_world_size(), 12
    asked = [(), ("label_smoothing",), ("entropy",), ("argmax",), ("label_smoothing", "entropy", "argmax")]
    for dtype, number in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)):
        x, values = drawn(rows, dtype)
        local, keywords = share(x)
        values = values.detach()
        for kind in ("labels", "topk", "jagged"):
            target = target_of(kind, rows, values)
            for outputs in asked:
                options = {f"return_{name}": True for name in outputs if name != "label_smoothing"}
                options.update({name: 0.1 for name in outputs if name == "label_smoothing"})
                out: List[Any] = []
                sent, others = sent_by(lambda: out.append(sparse_ce.cross_entropy(
                    local, target, z_loss=0.1, **options, **keywords)), number)
                planned = collectives("sparse_ce", rows, world, element=dtype.itemsize, outputs=outputs)
                assert sent == planned, f"{kind} {outputs} {dtype}: {sent}, planned {planned}"
                # On the CPU the values are read to see whether the weights look like log-probabilities.
                assert kind == "topk" or not {"aten::item", "aten::_local_scalar_dense"} & {*others}
                assert sum(name.startswith("c10d::") for name in others) == len(sent)
                loss = out[0][0] if isinstance(out[0], tuple) else out[0]
                sent, others = sent_by(lambda: loss.backward(), number)
                assert not sent and not {"aten::item", "aten::_local_scalar_dense"} & {*others}


def as_planned_of_log_probs() -> None:
    world, rows = dist.get_world_size(), 12
    for outputs in ((), ("log_tail",), ("mean_logit",), ("log_tail", "entropy", "mean_logit", "argmax", "collision")):
        x, values = drawn(rows, torch.float32)
        local, keywords = share(x)
        ids, out = target_of("topk", rows, values)[0], []
        sent, _ = sent_by(lambda: out.append(sparse_ce.selected_log_probs(
            local, ids, **{f"return_{name}": True for name in outputs}, **keywords)), 4)
        planned = collectives("sparse_ce", rows, world, outputs=outputs, entries=3)
        # The collective of a loss includes its two numbers.
        planned[0] = planned[0]._replace(bytes=planned[0].bytes - 8 * rows)
        assert sent == planned, f"{outputs}: {sent}, planned {planned}"
        assert not sent_by(lambda: out[0].log_probs.sum().backward(), 4)[0]


def bytes_of_a_row() -> None:
    """Checks the documented bytes per row: 16 in float32, 32 in float64, plus the requested outputs."""
    for dtype, number in ((torch.float32, 4), (torch.float64, 8)):
        x, values = drawn(5, dtype)
        local, keywords = share(x)
        labels = target_of("labels", 5, values)
        more = {"label_smoothing": 2, "return_entropy": 1, "return_argmax": 1}
        for name, numbers in {"": 0, **more}.items():
            options = {name: 0.1 if name == "label_smoothing" else True} if name else {}
            sent, _ = sent_by(lambda: sparse_ce.cross_entropy(local, labels, **options, **keywords), number)
            assert sent == [Collective("all_gather", 5 * number * (4 + numbers))]
        # The gradient for the entries' values sends their log-probabilities, that for a scale one number.
        target = target_of("topk", 5, values)
        scale = torch.tensor(1.5, dtype=dtype, requires_grad=True)
        out: List[Tensor] = []
        sent, _ = sent_by(lambda: out.append(sparse_ce.cross_entropy(local, target, logit_scale=scale, **keywords)),
                          number)
        assert sent == [Collective("all_gather", 5 * number * 4), Collective("all_reduce", 5 * number * 3)]
        assert sent_by(out[0].backward, number)[0] == [Collective("all_reduce", number)]


# ---------------------------------------------------------------------------------------------------------------- peers

def loss_parallel_of_pytorch() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh, n = dist.init_device_mesh("cpu", (world,)), 6
    x = torch.randn(7, n * world, dtype=torch.float64)
    labels = torch.tensor([0, n, n * world - 1, -100, 1, 2, n - 1])
    local = x[:, rank * n:rank * n + n].clone().requires_grad_()
    ours, = torch.autograd.grad(loss := sparse_ce.cross_entropy(local, labels, group=mesh.get_group()), local)
    sharded = DTensor.from_local(local, mesh, [Shard(1)])
    with loss_parallel():
        peer = F.cross_entropy(sharded, labels)
        peer.backward()
    assert_same(loss, peer.full_tensor())
    assert_same(ours, local.grad)


def smoothing_over_all_classes() -> None:
    """Compares label smoothing over all classes with Megatron-LM and Transformer Engine.

    Megatron-LM smooths over its K local classes with e K / (K - 1) and the mean of their log-probabilities. Transformer
    Engine adds its local logits times e / V. Neither loss is the same on all ranks. On one rank Megatron's equals ours
    with e V / (V - 1).
    """
    e, x = 0.1, torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
    labels = torch.tensor([0, 19, 7, 3, 12, 9])
    local, keywords = share(x)
    ours = sparse_ce.cross_entropy(local, labels, label_smoothing=e, reduction="none", **keywords)
    assert_same(ours, F.cross_entropy(x, labels, label_smoothing=e, reduction="none"))
    lse = torch.logsumexp(x, 1)
    nll = lse - x.gather(1, labels[:, None])[:, 0]

    def megatron(own: Tensor) -> Tensor:
        smoothing = e * own.shape[1] / (own.shape[1] - 1)
        return (1 - smoothing) * nll - smoothing * (own - lse[:, None]).mean(1)

    engine = (1 - e) * nll + e * lse - e / x.shape[1] * local.sum(1)
    for theirs in (megatron(local), engine):
        everybody = [torch.empty_like(theirs) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, theirs)
        assert not torch.allclose(everybody[0], everybody[1]) and not torch.allclose(theirs, ours)
    added = local.sum(1)
    dist.all_reduce(added)
    assert_same(ours, (1 - e) * nll + e * lse - e / x.shape[1] * added)
    assert_same(sparse_ce.cross_entropy(local, labels, label_smoothing=e * 20 / 19, reduction="none", **keywords),
                megatron(x))
    assert_the_same_everywhere({"loss": ours})


def gradients_of_log_probabilities() -> None:
    """Compares the gradients of log-probabilities with those of ``log_softmax`` of all classes, with weighted labels
    too."""
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    labels, weight = torch.tensor([0, 11, 5, 5, 2]), torch.rand(12, dtype=torch.float64)
    local, keywords = share(x)
    begin = keywords["vocab_start"]
    here = slice(begin, begin + local.shape[1])
    log_probs = x.log_softmax(1).gather(1, labels[:, None])[:, 0]
    expected, = torch.autograd.grad((log_probs.exp() * 3).sum() + log_probs[1], x)
    found = sparse_ce.selected_log_probs(local, labels, **keywords).log_probs
    assert_same(torch.autograd.grad((found.exp() * 3).sum() + found[1], local)[0], expected[:, here])
    loss = sparse_ce.cross_entropy(local, labels, weight, **keywords)
    peer = F.cross_entropy(x, labels, weight)
    assert_same(loss, peer)
    assert_same(torch.autograd.grad(loss, local)[0], torch.autograd.grad(peer, x)[0][:, here])


def by_name(*functions: Callable[[], None]) -> Dict[str, Callable[[], None]]:
    return {f.__name__.replace("_", " "): f for f in functions}


MODES = by_name(shapes_of_the_ops, as_planned, as_planned_of_log_probs, bytes_of_a_row, loss_parallel_of_pytorch,
                smoothing_over_all_classes, gradients_of_log_probabilities)
COMPILERS = by_name(compiled_binary, compiled_dense_divergence, compiled_log_probs, exported)
SLOW = by_name(compiled_once_and_for_other_sizes, heads_compiled_for_any_number_of_rows, traced_without_data,
               compiled_with_every_form, every_head_compiled_for_any_number_of_rows, compiled_by_inductor)

if __name__ == "__main__":
    ours = {**MODES, **COMPILERS, **SLOW}
    main(lambda name: ours[name]() if name in ours else run(name))
