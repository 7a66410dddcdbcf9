"""Runs one of the two processes of test_training_accelerate: ``python accelerate_process.py FOLDER``.

Saves what accelerate returned for targets to ``FOLDER/RANK.pt``: a dictionary by the name of the case.
"""

import os
import sys

import torch

# One process imports the integration first, the other accelerate.
if os.environ["RANK"] == "0":
    import sparse_ce.integrations.accelerate  # isort: skip
    from accelerate import Accelerator
else:
    from accelerate import Accelerator

    import sparse_ce.integrations.accelerate

from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

SAMPLES, ROWS, VOCAB = 10, 3, 11
# Of two formats the batches of one process have the first, those of the other the second.
FORMS = ["labels", "topk", "jagged", "jagged flat", "labels topk", "topk16 labels", "labels jagged", "ids topk",
         "labels ids", "jagged topk16", "labels log_probs", "topk16 topk"]
LOADERS = {"shard": {}, "dispatch": {"dispatch_batches": True},
           "dispatch split": {"dispatch_batches": True, "split_batches": True}}


def dense_rows():
    g = torch.Generator().manual_seed(3)
    dense = torch.rand(SAMPLES, ROWS, VOCAB, generator=g)
    return dense * (torch.rand(SAMPLES, ROWS, VOCAB, generator=g) < torch.linspace(0.05, 0.9, SAMPLES)[:, None, None])


def of_form(form):
    dense = dense_rows()
    if form == "labels":
        return sparse_ce.SparseTarget.from_index(dense.argmax(-1), num_classes=VOCAB)
    if form == "jagged":
        counts = torch.arange(ROWS) != torch.arange(SAMPLES)[:, None] % 4
        return sparse_ce.SparseTarget.from_dense(dense, row_mask=counts)
    if form == "flat":
        return sparse_ce.SparseTarget.from_dense(dense[:, 0])
    target = sparse_ce.SparseTarget.from_dense(dense, 4)
    if form == "ids":
        return sparse_ce.SparseTarget.from_topk(target.indices, None, num_classes=VOCAB)
    if form == "topk16":  # as stored in caches
        return sparse_ce.SparseTarget.from_topk(target.indices.int(), target.values.half(), num_classes=VOCAB)
    return target.log_probs() if form == "log_probs" else target


def dataset(form):
    """Returns the targets of the samples."""
    forms = [of_form(part) for part in form.removeprefix("jagged " * (form == "jagged flat")).split()]
    return [forms[i // 2 % len(forms)][i] for i in range(SAMPLES)]


def meaning(target):
    """Returns the dense target of each sample, and the mask of active rows."""
    return torch.stack([t.to_dense(torch.float64) for t in target]), torch.stack([t.ne(-100) for t in target])


def through(loader, form):
    """Returns for all batches the number of each sample, its dense target, and the mask of active rows."""
    Accelerator._shared_state = {}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**LOADERS[loader]))
    targets = dataset(form)
    samples, dense = [(torch.tensor(float(i)), target) for i, target in enumerate(targets)], meaning(targets)[0]
    batches = accelerator.prepare(DataLoader(samples, batch_size=4 if "split" in loader else 2,
                                             collate_fn=sparse_ce.collate))
    found, own = [], 0
    for x, part in batches:
        own += len(x)
        assert isinstance(part, sparse_ce.SparseTarget)
        assert torch.equal(part.to_dense(torch.float64), dense[x.long()])
        x, part = accelerator.gather_for_metrics((x, part))
        found.append((x, part.to_dense(torch.float64), part.ne(-100)))
    assert own < SAMPLES, "each process has a share"
    return [torch.cat(parts) for parts in zip(*found)]


def padded(rank):
    """Returns what is gathered from sequences of 2 labels in one process and of 3 top-k entries in the other."""
    dense = dense_rows()[:2]
    target = sparse_ce.SparseTarget.from_index(dense.argmax(-1)[:, :2], num_classes=VOCAB)
    if rank == 1:
        target = sparse_ce.SparseTarget.from_dense(dense, 4)
    accelerator = Accelerator(cpu=True)
    target = accelerator.gather(accelerator.pad_across_processes(target, dim=1, pad_index=-100))
    return target.to_dense(torch.float64), target.ne(-100)


def refusal(rank):
    """Returns the error if one process has weights and the other log-probabilities."""
    target = of_form("topk" if rank else "log_probs")
    try:
        Accelerator(cpu=True).gather(target)
    except ValueError as error:
        return str(error)


def main(folder):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    found = {f"{loader},{form}": through(loader, form) for loader in LOADERS for form in FORMS}
    found.update(padded=padded(rank), refusal=refusal(rank))
    torch.save(found, f"{folder}/{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
