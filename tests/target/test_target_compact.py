"""Tests that rows of a jagged target take only their own entries along when they are copied, not those of the whole
corpus."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils.data import DataLoader

from cases import Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, collate, cross_entropy
from sparse_ce.integrations.data_parallel import split

VOCAB, SAMPLES, ROWS, ENTRIES = 50, 40, 6, 3


def corpus(form, device="cpu"):
    """Returns a jagged target of many rows, whose samples are indexed by a key."""
    draw = Draw(device)
    rows = SAMPLES * ROWS
    indices, values = draw.integers(VOCAB, rows * ENTRIES), draw.uniform(rows * ENTRIES)
    offsets = torch.arange(0, rows * ENTRIES + 1, ENTRIES, device=device)
    ranges = torch.stack((offsets[:-1], offsets[1:]), -1)
    if form == "ends":
        return SparseTarget.from_jagged(indices, values, offsets, num_classes=VOCAB)
    if form == "ranges":
        return SparseTarget.from_jagged(indices, values, ranges.reshape(SAMPLES, ROWS, 2), num_classes=VOCAB)
    if form == "unweighted":
        return SparseTarget.from_jagged(indices, None, ranges.reshape(SAMPLES, ROWS, 2).int(), num_classes=VOCAB)
    if form == "scattered":  # the entries of a sample lie apart
        return SparseTarget.from_jagged(indices, values, ranges.reshape(ROWS, SAMPLES, 2).transpose(0, 1),
                                        num_classes=VOCAB)
    # Rows without entries have the range [0, 0), as padding has.
    keep = torch.arange(rows, device=device).remainder(4).ne(0)
    return SparseTarget.from_jagged(indices, values, (ranges * keep[:, None]).reshape(SAMPLES, ROWS, 2),
                                    num_classes=VOCAB)


FORMS = ["ends", "ranges", "unweighted", "scattered", "holes"]


def used(target):
    ranges = target[...].offsets
    return int((ranges[1:] - ranges[:-1] if ranges.dim() == 1 else ranges[..., 1] - ranges[..., 0]).sum())


def saved(target):
    file = io.BytesIO()
    torch.save({"target": target}, file)
    return file


def loaded(file):
    file.seek(0)
    return torch.load(file)["target"]


def stored(target):
    """Returns the bytes of all storages that the target's tensors keep."""
    parts = (target.indices, target.values, target.offsets, target.row_mask)
    return sum(t.untyped_storage().nbytes() for t in parts if t is not None)


KEYS = [slice(3, 5), slice(None, None, 7), slice(2, 2), slice(38, None), (slice(4, 6), slice(1, 3))]


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_travels_is_the_rows_own(form, key, device):
    target = corpus(form, device)
    if isinstance(key, tuple) and target.dim() < 2:
        key = key[0]
    part = target[key]
    assert part.nnz == used(part) < target.nnz == used(target)
    if part.shape.numel() > 0:
        assert part.indices.data_ptr() == target.indices.data_ptr()  # a slice itself is a view
    else:
        assert part.indices.numel() == 0
    copies = {"pickle": pickle.loads(pickle.dumps(part)), "cpu": part.cpu(), "save": loaded(saved(part)),
              "cpu of its own": part.cpu().cpu()}
    if device == "cpu":
        copies.update({"deepcopy": copy.deepcopy(part), "meta": part.to("meta"),
                       "forked": pickle.loads(bytes(ForkingPickler.dumps(part))), "shared": part.share_memory()})
    logits = torch.randn(*part.shape, VOCAB, device=device)
    expected = cross_entropy(logits, part, reduction="none")
    for how, other in copies.items():
        assert other.indices.numel() == part.nnz and (part.values is None or other.values.numel() == part.nnz), how
        assert other.shape == part.shape and other.offsets.dtype == part.offsets.dtype
        if how == "meta":
            continue
        other = other.cpu()
        assert_bitwise_equal(cross_entropy(logits, other.to(device), reduction="none"), expected)
        assert_bitwise_equal(other.to_dense(), part.to_dense().cpu())
        if how not in ("cpu", "cpu of its own", "forked", "shared"):  # these may share memory with others
            assert stored(other) == stored(copy.deepcopy(other))
            assert other.indices.untyped_storage().nbytes() == part.nnz * part.indices.element_size()
    assert all(t.is_shared() for t in (part.share_memory().indices, part.share_memory().offsets))


def test_one_sample_of_any_form_is_pickled_alone(device):
    draw = Draw(device)
    indices, values = draw.integers(VOCAB, 5000, 4), draw.uniform(5000, 4)
    mask = torch.ones(5000, dtype=torch.bool, device=device)
    for target in (SparseTarget.from_topk(indices, values, row_mask=mask),
                   SparseTarget.from_index(indices[:, 0], row_mask=mask),
                   SparseTarget.from_jagged(indices.flatten(), values.flatten(),
                                            torch.arange(0, 20001, 4, device=device), row_mask=mask)):
        for part in (target[7:9], target[7]):
            assert len(pickle.dumps(part)) < 5000 < len(pickle.dumps(target))
            assert len(saved(part).getvalue()) < 10000 < len(saved(target).getvalue())
            assert stored(copy.deepcopy(part)) < 1000 or device == "cuda" and part.form == "jagged"
            assert_bitwise_equal(pickle.loads(pickle.dumps(part)).ne(-100), part.ne(-100))


@pytest.mark.parametrize("form", FORMS)
def test_collation_keeps_what_the_samples_use(form, device):
    target = corpus(form, device)
    picked = [3, 17, 3, 39, 0]
    samples = [target[6 * i:6 * i + 6] if form == "ends" else target[i] for i in picked]
    batch = collate(samples)
    entries = sum(used(s) for s in samples)
    assert batch.nnz == batch.compact(wait=True).indices.numel() == entries
    # CUDA is not synchronized, so all entries are copied, again for the repeated sample, since no two rows may share
    # one. If the ranges of a sample lie apart, it is unknown whether they overlap.
    if device == "cuda":
        entries = target.indices.numel() * (len(picked) if form == "scattered" else 2)
    assert batch.indices.numel() == entries
    assert_bitwise_equal(batch.to_dense(), torch.stack([s.to_dense() for s in samples]))


def test_samples_of_a_coo_corpus():
    dense = torch.rand(200, 4, 100) * (torch.rand(200, 4, 100) < 0.05)
    target = SparseTarget.from_coo(dense.to_sparse())
    batch = collate([target[i] for i in range(8)])
    assert batch.indices.numel() == batch.nnz == int(dense[:8].ne(0).sum())
    assert_bitwise_equal(batch.to_dense(), dense[:8])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_carries_the_rows_own_entries(workers):
    target = corpus("ranges")
    seen = []
    for batch in DataLoader(target, batch_size=8, num_workers=workers, collate_fn=collate):
        assert batch.indices.numel() == batch.nnz == 8 * ROWS * ENTRIES
        assert batch.indices.untyped_storage().nbytes() < 2 * batch.indices.numel() * 8
        seen.append(batch.to_dense())
    assert_bitwise_equal(torch.cat(seen), target.to_dense())


def test_the_pieces_of_data_parallel_are_their_own():
    target = corpus("ends")
    assert [piece.indices.numel() for piece in split(target, ["meta"] * 2)] == [target.nnz // 2] * 2


@pytest.mark.parametrize("form", ["ends", "ranges", "scattered"])
def test_gradients_find_the_way_back(form, device):
    target = corpus(form, device)
    values = target.values.clone().requires_grad_()
    target = SparseTarget.from_jagged(target.indices, values, target.offsets)
    part = target[2:4]
    logits = torch.randn(*part.shape, VOCAB, device=device)
    expected, = torch.autograd.grad(cross_entropy(logits, part, reduction="sum"), values)
    for other in (part.cpu().to(device), collate([part])[0]):
        found, = torch.autograd.grad(cross_entropy(logits, other, reduction="sum"), values)
        assert_bitwise_equal(found, expected)
    for other in (pickle.loads(pickle.dumps(part)), copy.deepcopy(target)):
        assert other.values.requires_grad and other.values.is_leaf


@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [0, 2, 12], [-1, 2], [[0, 2], [5, 3]], [[0, 2], [8, 12]],
                                     [[-3, 2], [4, 6]]], ids=str)
def test_wrong_offsets_stay_wrong(offsets, device):
    broken = SparseTarget.from_jagged(torch.arange(9, device=device), None, torch.tensor(offsets, device=device))
    x = torch.randn(len(broken), VOCAB)
    for target in (pickle.loads(pickle.dumps(broken)).cpu(), broken.cpu(), collate([broken])[0].cpu()):
        with pytest.raises(RuntimeError, match="sparse_ce: target must have offsets with 0 <= begin <= end"):
            cross_entropy(x, target)


def test_nothing_is_read_where_nothing_can_be():
    target = corpus("ranges").to("meta")[:2]
    assert target.nnz == SAMPLES * ROWS * ENTRIES and "nnz" in repr(target)  # the upper bound
    assert collate([target, target]).shape == (2, 2, ROWS)
    whole, picks = corpus("ranges"), torch.randn(2, ROWS, VOCAB)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, target):
        part = target[1:3].cpu()
        return cross_entropy(x, collate([part[0:1], part[1:2]]).flatten(), reduction="none") + part.nnz * 0

    torch.testing.assert_close(step(picks.reshape(-1, VOCAB), whole),
                               cross_entropy(picks, whole[1:3], reduction="none").flatten())
    found = torch.func.vmap(lambda x: cross_entropy(x, collate([whole[0], whole[1]]).cpu()))(picks[None])
    torch.testing.assert_close(found[0], cross_entropy(picks, whole[:2]))
