"""One of the two processes that test_training_accelerate starts: ``python accelerate_process.py FOLDER``.

Saves what accelerate made of targets on their way to ``FOLDER/RANK.pt``: a dictionary by the name of the case.
"""

import os
import sys

import torch

# In one process the package comes first, in the other accelerate does. Nobody imports an integration.
if os.environ["RANK"] == "0":
    from accelerate import Accelerator

    import sparse_ce
else:
    from accelerate import Accelerator

    import sparse_ce

from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

SAMPLES, ROWS, VOCAB = 10, 3, 11
FORMS = ["labels", "topk", "jagged", "jagged flat"]
LOADERS = {"shard": {}, "dispatch": {"dispatch_batches": True},
           "dispatch split": {"dispatch_batches": True, "split_batches": True}}


def dense_rows():
    g = torch.Generator().manual_seed(3)
    dense = torch.rand(SAMPLES, ROWS, VOCAB, generator=g)
    return dense * (torch.rand(SAMPLES, ROWS, VOCAB, generator=g) < torch.linspace(0.05, 0.9, SAMPLES)[:, None, None])


def dataset(form):
    dense = dense_rows()
    if form == "labels":
        target = sparse_ce.SparseTarget.from_index(dense.argmax(-1), num_classes=VOCAB)
    elif form == "topk":
        target = sparse_ce.SparseTarget.from_dense(dense, 4)
    elif form == "jagged":
        counts = torch.arange(ROWS) != torch.arange(SAMPLES)[:, None] % 4
        target = sparse_ce.SparseTarget.from_dense(dense, row_mask=counts)
    else:
        target = sparse_ce.SparseTarget.from_dense(dense[:, 0])
    return target


def through(loader, form):
    """Of all batches: the number of the sample, its target dense, and which rows count."""
    Accelerator._shared_state = {}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**LOADERS[loader]))
    target = dataset(form)
    samples = [(torch.tensor(float(i)), target[i]) for i in range(SAMPLES)]
    batches = accelerator.prepare(DataLoader(samples, batch_size=4 if "split" in loader else 2,
                                             collate_fn=sparse_ce.collate))
    found, own = [], 0
    for x, part in batches:
        own += len(x)
        assert isinstance(part, sparse_ce.SparseTarget) and torch.equal(part.to_dense(), target.to_dense()[x.long()])
        x, part = accelerator.gather_for_metrics((x, part))
        found.append((x, part.to_dense(), part.ne(-100)))
    assert own < SAMPLES, "each process has a share"
    return [torch.cat(parts) for parts in zip(*found)]


def main(folder):
    torch.set_num_threads(1)
    found = {f"{loader},{form}": through(loader, form) for loader in LOADERS for form in FORMS}
    assert not [m for m in sys.modules if m.startswith("sparse_ce.integrations.")]
    torch.save(found, f"{folder}/{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
