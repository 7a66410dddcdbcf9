"""Tests ``nn.DataParallel``: targets are split like the other inputs, and a normalizer reaches every device."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather

from cases import FORMS, Draw
from close import assert_bitwise_equal
from loops import SEQUENCES, TinyLM, batch, gradients, reference_step
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce.integrations.data_parallel import split
from sparse_ce.targets.convert import as_target

LAYOUTS = ["labels-target", "topk-target", "topk-masked", "coo-target", "csr-target-ignore-empty", "jagged",
           "jagged-ranges"]
CPUS = ["cpu", "cpu"]


@pytest.fixture
def on_cpu(monkeypatch):
    """Patches PyTorch's scatter to skip the copy of a tensor's chunks, the only part that needs GPUs."""
    class Chunks:
        @staticmethod
        def apply(target_gpus, chunk_sizes, dim, input):
            return input.chunk(len(target_gpus), dim)
    monkeypatch.setattr(scatter_gather, "Scatter", Chunks)


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 7, 20])
def test_a_target_is_cut_as_logits_are(form, devices, device):
    draw = Draw(device)
    case = FORMS[form]((7, 2), 37, draw)
    logits = draw.normal(*case.shape, 37)
    target = as_target(case.target, logits.shape)
    for dim in range(-len(case.shape), len(case.shape)):
        chunks = logits.chunk(devices, dim if dim >= 0 else dim - 1)
        pieces = split(target, [device] * devices, dim)
        assert len(pieces) == len(chunks)
        whole = cross_entropy(logits, target, reduction="none")
        parts = [cross_entropy(x, piece, reduction="none") for x, piece in zip(chunks, pieces)]
        assert_bitwise_equal(torch.cat(parts, dim), whole)


def test_an_empty_batch_is_cut_as_tensors_are():
    pieces = split(SparseTarget.from_index(torch.zeros(0, 3, dtype=torch.int64)), ["cpu"] * 3)
    assert [piece.shape for piece in pieces] == [x.shape for x in torch.zeros(0, 3).chunk(3)]


def test_what_holds_no_target_is_torchs_own(on_cpu):
    x = torch.arange(5)
    assert isinstance(scatter_gather.scatter(x, CPUS), tuple)
    first, second = scatter_gather.scatter({"x": x, "n": 3, "none": None, "pair": (x, "text")}, CPUS)
    assert first["x"].tolist() == [0, 1, 2] and second["pair"][0].tolist() == [3, 4] and second["n"] == 3
    assert nn.parallel.scatter is scatter_gather.scatter


def test_targets_anywhere_among_the_inputs(on_cpu):
    tokens, target = batch()
    inputs, kwargs = scatter_gather.scatter_kwargs((tokens, [target]), {"pair": {"a": target, "b": (target, 1)}}, CPUS)
    for i, share in enumerate((slice(0, SEQUENCES // 2), slice(SEQUENCES // 2, None))):
        for piece in (inputs[i][1][0], kwargs[i]["pair"]["a"], kwargs[i]["pair"]["b"][0]):
            assert_bitwise_equal(piece.to_dense(), target[share].to_dense())
        assert_bitwise_equal(inputs[i][0], tokens[share])


def test_inputs_without_a_tensor_have_as_many_parts_as_their_targets():
    target = SparseTarget.from_index(torch.arange(3))
    parts = scatter_gather.scatter((target, "text"), ["cpu"] * 4)
    assert [(part[0].indices.tolist(), part[1]) for part in parts] == [([0], "text"), ([1], "text"), ([2], "text")]


def normalizers(count, devices):
    """Returns the normalizers that DataParallel can distribute. PyTorch cannot split a 0-d tensor."""
    return {"int": count, "float": float(count), "n_gpu": torch.full((devices,), count),
            "n_gpu-1": torch.full((devices, 1), float(count)), "expanded": torch.tensor(count).expand(devices)}


@pytest.mark.parametrize("kind", ["int", "float", "n_gpu", "n_gpu-1", "expanded"])
@pytest.mark.parametrize("head,form", [("fused", "topk"), ("logits", "jagged"), ("tied", "labels")])
def test_21_the_parts_of_a_batch_add_up_with_a_normalizer_of_any_shape(kind, head, form, on_cpu):
    tokens, target = batch(form)
    normalizer = normalizers(int(target.ne(-100).sum()), 2)[kind]
    exact_loss, exact = reference_step(head, form, "unequal", torch.float64)
    model = TinyLM(head).double()
    inputs, kwargs = scatter_gather.scatter_kwargs((tokens, target), {"normalizer": normalizer}, CPUS)
    losses = [model(*args, **keywords) for args, keywords in zip(inputs, kwargs)]
    assert all(loss.shape == () for loss in losses)
    sum(losses).backward()
    torch.testing.assert_close(sum(losses).detach(), exact_loss)
    torch.testing.assert_close(gradients(model), exact)


def test_a_tensor_that_cannot_reach_every_device_is_refused(on_cpu):
    """Checks the error because PyTorch silently drops the second half of the batch."""
    tokens, target = batch()
    with pytest.raises(ValueError, match=r"sparse_ce: inputs must be split into 2 parts, as their target is, got 1: .*"
                       r"normalizer.expand\(n_gpu\)"):
        scatter_gather.scatter((tokens, target, torch.tensor([5])), CPUS)
    with pytest.raises(ValueError, match=r"sparse_ce: target must have the dimension along which .*, 2, got shape"):
        scatter_gather.scatter((tokens[..., None], target), CPUS, 2)


@pytest.mark.parametrize("gpus", [n for n in [torch.cuda.device_count()] if n >= 2])
@pytest.mark.parametrize("kind", ["int", "float", "n_gpu", "n_gpu-1", "expanded"])
@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
@pytest.mark.parametrize("head,form", [("fused", "topk"), ("logits", "jagged"), ("tied", "labels")])
def test_data_parallel_on_gpus(gpus, kind, where, head, form):
    tokens, target = batch(form)
    normalizer = normalizers(int(target.ne(-100).sum()), 2)[kind]
    if isinstance(normalizer, torch.Tensor):
        normalizer = normalizer.to(where)
    exact_loss, exact = reference_step(head, form, "unequal", torch.float64)
    model = TinyLM(head).double().cuda()
    losses = nn.DataParallel(model, [0, 1])(tokens.to(where), target.to(where), normalizer=normalizer)
    assert losses.shape == (2,)
    losses.sum().backward()
    torch.testing.assert_close(losses.sum().detach().cpu(), exact_loss)
    torch.testing.assert_close(gradients(model), exact)
