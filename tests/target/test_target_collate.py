"""Tests ``collate``: batches of samples with sparse targets, through a ``DataLoader`` and by hand."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sparse_ce import SparseTarget, collate, cross_entropy
from sparse_ce.targets import storage as parts

VOCAB = 9
Sample = namedtuple("Sample", "x target")


def sparse_rows(rows, seed):
    dense = torch.zeros(rows, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    for r in range(rows):
        if r != 1:
            classes = torch.randperm(VOCAB, generator=generator)[:1 + (r + seed) % 3]
            dense[r, classes] = torch.rand(1, generator=generator)
    return dense


def sample(form, rows, seed):
    """Returns a target of ``rows`` rows, and its dense form."""
    dense = sparse_rows(rows, seed)
    top = dense.topk(2 + seed % 2 + (dense > 0).sum(1).max() // 3)
    labels = dense.argmax(1)
    return {
        "labels": lambda: (SparseTarget.from_index(labels), torch.nn.functional.one_hot(labels, VOCAB).float()),
        "topk": lambda: ((top.indices, top.values), torch.zeros_like(dense).scatter(1, top.indices, top.values)),
        "topk target": lambda: (SparseTarget.from_topk(top.indices, top.values, num_classes=VOCAB),
                                torch.zeros_like(dense).scatter(1, top.indices, top.values)),
        "coo": lambda: (dense.to_sparse(), dense),
        "csr": lambda: (dense.to_sparse_csr(), dense),
        "jagged target": lambda: (SparseTarget.from_csr(dense.to_sparse_csr()), dense),
    }[form]()


FORMS = ["labels", "topk", "topk target", "coo", "csr", "jagged target"]


def assert_stands_for(batch, denses, lengths):
    """Checks that the batch is a target of shape (samples, longest) and ignores rows beyond a sample's length."""
    assert isinstance(batch, SparseTarget) and batch.shape == (len(denses), max(lengths))
    logits = torch.randn(*batch.shape, VOCAB)
    loss = cross_entropy(logits, batch, reduction="none")
    counts = batch.ne(-100)
    for i, (dense, length) in enumerate(zip(denses, lengths)):
        expected = (-torch.log_softmax(logits[i, :length], -1) * dense).sum(-1)
        torch.testing.assert_close(loss[i, :length], expected)
        assert counts[i].tolist() == [True] * length + [False] * (max(lengths) - length)
    torch.testing.assert_close(cross_entropy(logits, batch), loss.sum() / sum(lengths))


@pytest.mark.parametrize("lengths", [(3, 3, 3), (2, 5, 3)], ids=["one length", "different lengths"])
@pytest.mark.parametrize("form", FORMS)
def test_targets_of_every_form_become_one(form, lengths):
    targets, denses = zip(*(sample(form, n, i) for i, n in enumerate(lengths)))
    batch = collate([{"x": torch.zeros(2), "target": t} for t in targets])
    assert batch["x"].shape == (3, 2)
    assert_stands_for(batch["target"], denses, lengths)


def test_rows_without_entries_count_after_padding():
    """Checks K = 0 beside K = 1, and a sample of padding alone."""
    none = SparseTarget.from_topk(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))
    one = SparseTarget.from_topk(torch.tensor([[1], [2]]), torch.ones(2, 1))
    batch = collate([none, one])
    assert none.ne(-100).all() and batch.ne(-100).tolist() == [[True, True], [True, True]]


@pytest.mark.parametrize("first", ["topk", "jagged"])
def test_ignored_rows_stay_ignored_when_forms_are_mixed(first):
    topk = SparseTarget.from_topk(torch.tensor([[1, 2], [-100, -100]]), torch.ones(2, 2), num_classes=VOCAB)
    jagged = SparseTarget.from_csr(torch.eye(2, VOCAB).to_sparse_csr())
    samples = [topk, jagged] if first == "topk" else [jagged, topk]
    batch = collate(samples)
    assert batch.ne(-100).tolist() == [t.ne(-100).tolist() for t in samples]
    torch.testing.assert_close(batch.to_dense(), torch.stack([t.to_dense() for t in samples]))


def test_row_masks_survive():
    mask = torch.tensor([True, False, True])
    for make in (lambda m: SparseTarget.from_index(torch.arange(3), row_mask=m),
                 lambda m: SparseTarget.from_topk(torch.arange(6).view(3, 2), torch.ones(3, 2), row_mask=m),
                 lambda m: SparseTarget.from_csr(torch.eye(3, VOCAB).to_sparse_csr(), row_mask=m)):
        batch = collate([make(mask), make(None), make(mask)[:2]])
        assert batch.ne(-100).tolist() == [[True, False, True], [True, True, True], [True, False, False]]
        assert collate([make(None), make(None)]).row_mask is None


def test_targets_of_two_dimensions_and_of_single_rows():
    grid = [SparseTarget.from_index(torch.arange(n * 3).view(n, 3) % VOCAB) for n in (2, 4)]
    assert collate(grid).shape == (2, 4, 3) and collate(grid).ne(-100).sum() == 18
    rows = list(SparseTarget.from_csr(sparse_rows(4, 0).to_sparse_csr()))
    batch = collate(rows)
    assert batch.shape == (4,)
    torch.testing.assert_close(batch.to_dense(), sparse_rows(4, 0))
    dense = sparse_rows(6, 1).view(2, 3, VOCAB)
    torch.testing.assert_close(collate([dense.to_sparse(), dense.to_sparse()]).to_dense(), torch.stack([dense, dense]))


def test_values_of_different_dtypes_and_without():
    half = SparseTarget.from_topk(torch.tensor([[1]]), torch.ones(1, 1).half())
    single = SparseTarget.from_topk(torch.tensor([[1]]), torch.full((1, 1), 0.1))
    assert collate([half, single]).values[1, 0, 0] == torch.tensor(0.1)
    offsets = torch.tensor([0, 1])
    batch = collate([SparseTarget.from_jagged(torch.tensor([1]), None, offsets, num_classes=VOCAB),
                     SparseTarget.from_jagged(torch.tensor([2]), torch.tensor([0.5]), offsets, num_classes=VOCAB)])
    assert batch.to_dense()[0, 0, 1] == 1 and batch.to_dense()[1, 0, 2] == 0.5
    narrow = SparseTarget.from_jagged(torch.tensor([1], dtype=torch.int32), None, offsets.int(), num_classes=VOCAB)
    batch = collate([narrow, SparseTarget.from_jagged(torch.tensor([2]), None, offsets)])
    assert batch.to_dense()[:, 0].argmax(-1).tolist() == [1, 2]


# --------------------------------------------------------------------------------------------------------- containers


def test_nested_containers_keep_their_types():
    def one(i):
        target, _ = sample("coo", 2, i)
        pair = sample("topk", 2, i)[0]
        return OrderedDict(a=Sample(torch.ones(3) * i, target), b=[i, (pair, "text"), {"deep": {"target": target}}],
                           c=0.5 * i)

    batch = collate([one(i) for i in range(3)])
    assert isinstance(batch, dict) and isinstance(batch["a"], Sample)
    assert batch["a"].x.shape == (3, 3) and batch["a"].target.shape == (3, 2)
    assert isinstance(batch["b"], list) and batch["b"][0].tolist() == [0, 1, 2]
    assert isinstance(batch["b"][1], tuple) and isinstance(batch["b"][1][0], SparseTarget)
    assert list(batch["b"][1][1]) == ["text"] * 3
    assert batch["b"][2]["deep"]["target"].shape == (3, 2) and batch["c"].dtype == torch.float64


def test_a_sample_that_is_a_pair_of_tensors_is_an_input_and_a_label():
    pair = torch.tensor([1, 2]), torch.tensor([0.5, 0.5])
    batch = collate([pair] * 3)
    assert isinstance(batch, (tuple, list)) and batch[0].shape == (3, 2) and batch[1].shape == (3, 2)
    assert isinstance(collate([(pair, 1)] * 3)[0], SparseTarget)


class Rows(Dataset):
    """Holds ten samples (x, target) of different lengths."""

    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.full((3,), float(i)), "target": sample(self.form, 2 + i % 3, i)[0]}


@pytest.mark.parametrize("workers,form", [(0, "coo"), (2, "coo"), (0, "csr"), (2, "topk")])
def test_a_data_loader_with_workers_and_pinned_memory(workers, form):
    pin = torch.cuda.is_available()
    loader = DataLoader(Rows(form), batch_size=4, collate_fn=collate, num_workers=workers, pin_memory=pin)
    seen = 0
    for batch in loader:
        rows = batch["x"][:, 0].int().tolist()
        assert_stands_for(batch["target"], [sample(form, 2 + i % 3, i)[1] for i in rows], [2 + i % 3 for i in rows])
        assert batch["target"].is_pinned() == pin
        seen += len(rows)
    assert seen == 10


def test_a_data_loader_may_convert_sparse_tensors_in_the_main_process_alone():
    tensors = [sparse_rows(3, i).to_sparse() for i in range(4)]
    batch, = DataLoader(tensors, batch_size=4, collate_fn=collate)
    torch.testing.assert_close(batch.to_dense(), torch.stack([t.to_dense() for t in tensors]))


# -------------------------------------------------------------------------------------------- the same sample twice

def three_entries():
    return SparseTarget.from_jagged([1, 2, 3], torch.tensor([0.5, 0.5, 1.0]), [0, 2, 3], num_classes=7)


@pytest.mark.parametrize("join", [SparseTarget.cat, torch.cat, collate, torch.stack],
                         ids=["cat", "torch.cat", "collate", "stack"])
def test_a_jagged_target_that_comes_twice_has_its_entries_twice(join):
    target, labels = three_entries(), torch.tensor([1, 3, 1, 3])
    found = join([target, target]).flatten()
    assert torch.equal(found.to_dense(), torch.cat([target.to_dense()] * 2))
    assert found.tolist() == target.tolist() * 2 and len(found.indices) == 6
    assert found.is_top_class(labels).all()
    logits = torch.randn(4, 7, requires_grad=True)
    grad, = torch.autograd.grad(cross_entropy(logits, found), logits, create_graph=True)
    expected, = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, found.to_dense()), logits)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(torch.func.grad(lambda x: cross_entropy(x, found))(logits.detach()), expected)


def test_a_sampler_that_draws_a_sample_twice():
    samples = [(torch.zeros(2), three_entries()) for _ in range(2)]
    for _, target in DataLoader(samples, batch_size=4, sampler=[0, 0, 1, 1], collate_fn=collate):
        assert torch.equal(target.to_dense().sum(-1), torch.ones(4, 2))


def test_views_of_one_target_share_its_entries_where_no_row_comes_twice(monkeypatch):
    """Checks this without reading offsets, as on CUDA."""
    target = three_entries()
    monkeypatch.setattr(parts, "readable", lambda *given, **named: False)
    for pieces, shared in (([target[:1], target[1:]], True), ([target[1:], target[:1]], True),
                           ([target[:2], target[1:]], False), ([target[:1], target[:1]], False),
                           ([target[None][:, :1], target[None][:, 1:]], False)):
        flat = [piece.flatten() for piece in pieces]
        found = SparseTarget.cat(flat)
        assert len(found.indices) == (3 if shared else 6)
        assert torch.equal(found.to_dense(), torch.cat([piece.to_dense() for piece in flat]))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_autocast", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_has_no_part_in_what_is_copied(of_autocast, half):
    """Checks float16 caches under bfloat16 autocast, whose ``cat`` and ``stack`` do not support them."""
    x, values = torch.randn(2, VOCAB), torch.tensor([[0.3, 0.2], [0.1, 0.5]]).to(half)
    topk = SparseTarget.from_topk(torch.tensor([[1, 2], [3, 4]]), values)
    jagged = SparseTarget.from_jagged(torch.tensor([1, 2, 3]), values.flatten()[:3], torch.tensor([0, 2, 3]))
    coo = torch.sparse_coo_tensor([[1, 2]], values[0], (VOCAB,))
    made = {
        "cat": lambda: SparseTarget.cat([topk, topk]), "jagged cat": lambda: SparseTarget.cat([jagged, jagged]),
        "stack": lambda: torch.stack([topk, topk]), "of two forms": lambda: SparseTarget.cat([topk, jagged]),
        "collate": lambda: collate([topk[0], topk[1]]), "pairs": lambda: collate([(x, (topk.indices, values))] * 2)[1],
        "row": lambda: jagged[0], "rows": lambda: jagged[1:], "COO": lambda: collate([coo, coo]),
        "loss": lambda: cross_entropy(x[0], coo), "row's loss": lambda: cross_entropy(x[0], jagged[0]),
    }
    for make in made.values():
        expected = make()
        with torch.autocast("cpu", of_autocast):
            found = make()
        if isinstance(expected, SparseTarget):
            assert found.equal(expected) and found.values.dtype == half
        else:
            assert torch.equal(found, expected)


def test_targets_of_several_forms_in_one_batch():
    dense = sparse_rows(3, 0)
    top = dense.topk(3)
    forms = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "pair": (top.indices, top.values),
             "target": SparseTarget.from_topk(top.indices, top.values, num_classes=VOCAB),
             "jagged": SparseTarget.from_csr(dense.to_sparse_csr())}
    for a, first in forms.items():
        for b, second in forms.items():
            batch = collate([{"y": first}, {"y": second}])["y"].with_num_classes(VOCAB)
            torch.testing.assert_close(batch.to_dense(), torch.stack((dense, dense)), msg=f"{a} before {b}")
    for other in (torch.zeros(3), 5, "text"):
        for samples in ([{"y": forms["coo"]}, {"y": other}], [{"y": other}, {"y": forms["target"]}]):
            with pytest.raises(ValueError, match="samples must all be targets if one is a target, got also "):
                collate(samples)
