"""Trains a text classifier with 100,000 labels, any number of which apply to a document.

    python examples/train_many_labels.py [--labels 100000] [--epochs 3] [--quick] [--compare]

The labels are a SciPy CSR matrix, and the logits (documents, labels) are never materialized. The corpus is synthetic:
replace `corpus` by your own matrices, such as those of the Extreme Classification Repository. On one CPU core, P@1
rises from 0.01 (the most frequent labels) to 0.80 in 90 seconds. `--compare` also takes a few steps with PyTorch's
dense loss.
"""

import argparse
import copy
import resource
import time
from typing import Callable, Dict, List, NamedTuple, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--labels", type=int, default=100_000)
parser.add_argument("--documents", type=int, default=30_000, help="documents of the training set")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--quick", action="store_true", help="5,000 labels and 6,000 documents")
parser.add_argument("--compare", action="store_true", help="take a few steps with the dense loss, too")
parser.add_argument("--device", help="by default a GPU if there is one")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import sparse_ce
from sparse_ce import SparseTarget, metrics


def corpus(documents: int, labels: int, words: int = 20_000) -> Tuple[csr_matrix, csr_matrix]:
    """Returns the word counts (documents, words) and the labels (documents, labels) of a synthetic corpus, float32.

    Label frequencies follow a power law: most labels have one document or none. A label belongs to a topic and has four
    words of its own, each of which about 20 labels share. A document has about five labels of one topic, words of these
    labels, words of the topic, and frequent words that carry no information.
    """
    draw = np.random.default_rng(0)
    topics = max(1, labels // 200)
    topic_of_label = np.sort(draw.integers(topics, size=labels))  # The labels of a topic are adjacent.
    frequency = draw.permutation(1 / (np.arange(labels) + 20.0))
    cumulative = np.append(0.0, np.cumsum(frequency))
    begin = cumulative[np.searchsorted(topic_of_label, np.arange(topics + 1))]

    topic = np.searchsorted(begin, draw.uniform(0, cumulative[-1], documents), "right") - 1
    document = np.repeat(np.arange(documents), 1 + draw.poisson(4, documents))
    place = draw.uniform(begin[topic[document]], begin[topic[document] + 1])
    label = np.clip(np.searchsorted(cumulative, place, "right") - 1, 0, labels - 1)

    words_of_label, words_of_topic = draw.integers(words, size=(labels, 4)), draw.integers(words, size=(topics, 40))
    of_labels = words_of_label[label[:, None], draw.integers(4, size=(len(label), 4))]
    of_topic = words_of_topic[topic[:, None], draw.integers(40, size=(documents, 6))]
    frequent = (words ** draw.uniform(size=(documents, 20))).astype(np.int64) - 1  # Zipf's law
    columns = np.concatenate((of_labels.ravel(), of_topic.ravel(), frequent.ravel()))
    rows = np.concatenate([np.repeat(document, 4), *(np.repeat(np.arange(documents), n) for n in (6, 20))])
    counts = csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (documents, words))
    relevant = csr_matrix((np.ones(len(label), np.float32), (document, label)), (documents, labels))
    relevant.data[:] = 1.0  # The constructor adds up labels that were drawn twice.
    return counts, relevant


def tf_idf(counts: csr_matrix, document_frequency: np.ndarray) -> csr_matrix:
    """Weights words by their rarity. Each row gets length 1."""
    rarity = np.log(counts.shape[0] / (1 + document_frequency)).astype(np.float32)
    values = np.log1p(counts.data) * rarity[counts.indices]
    lengths = np.sqrt(np.add.reduceat(values**2, counts.indptr[:-1]))  # No document is empty.
    return csr_matrix((values / np.repeat(lengths, np.diff(counts.indptr)), counts.indices, counts.indptr),
                      counts.shape)


class Batch(NamedTuple):
    """Stores documents in the format of ``nn.EmbeddingBag``, and their labels."""

    words: Tensor  # (entries,)
    weights: Tensor  # (entries,)
    offsets: Tensor  # (documents + 1,)
    target: SparseTarget  # (documents,)


class Rows:
    """Collates row numbers into batches. Slicing a matrix once per batch is faster than once per document."""

    def __init__(self, text: csr_matrix, labels: csr_matrix):
        self.text, self.target = text, SparseTarget.from_scipy(labels)

    def __call__(self, rows: List[int]) -> Batch:
        text = self.text[rows]
        return Batch(*map(torch.from_numpy, (text.indices, text.data, text.indptr)), self.target[rows])

    def loader(self, batch: int, workers: int = 0, shuffle: bool = False) -> DataLoader:
        return DataLoader(range(self.text.shape[0]), batch, shuffle=shuffle, num_workers=workers, collate_fn=self)


class Classifier(nn.Module):
    """Maps the mean of word embeddings to labels.

    Args:
        words, width, labels: sizes.
        prior: probability of each label (labels,).
    """

    def __init__(self, words: int, width: int, labels: int, prior: Tensor):
        super().__init__()
        self.embedding = nn.EmbeddingBag(words, width, mode="sum", include_last_offset=True)
        self.head = nn.Linear(width, labels)
        # The loss starts at the entropy of the label frequencies. With a bias of 0 each label would have a probability
        # of 1/2, and for many steps the gradient would only lower the logits of 100,000 negatives.
        with torch.no_grad():
            self.head.bias.copy_(prior.logit())
        nn.init.zeros_(self.head.weight)

    def hidden(self, batch: Batch) -> Tensor:
        """Returns the input of the head, (documents, width)."""
        mean = self.embedding(batch.words, batch.offsets, per_sample_weights=batch.weights)
        return F.normalize(mean, dim=1) * mean.shape[1]**0.5


def loss(model: Classifier, batch: Batch) -> Tensor:
    """Returns the sum of the losses of all labels, averaged over documents."""
    # reduction="mean" would also divide by the number of labels, and the gradients would be 100,000 times smaller.
    return sparse_ce.linear_binary_cross_entropy(model.hidden(batch), model.head.weight, batch.target,
                                                 linear_bias=model.head.bias, reduction="batchmean")


def dense_loss(model: Classifier, batch: Batch) -> Tensor:
    """Computes the same from the logits and a dense target, (documents, labels) each.

    In float32 it may differ by 0.1 %: PyTorch computes the loss of a negative as z - logsigmoid(z), which rounds the
    small loss of an unlikely label to a multiple of the last bit of z.
    """
    logits = model.head(model.hidden(batch))
    return F.binary_cross_entropy_with_logits(logits, batch.target.to_dense(), reduction="sum") / len(logits)


@torch.no_grad()
def evaluate(model: Classifier, loader: DataLoader, labels: csr_matrix, propensity: Tensor,
             device: str) -> Dict[str, float]:
    """Returns P@1 and P@5, and PSP@5, in which rare labels count more."""
    predicted = []
    for batch in loader:
        hidden = model.hidden(on(device, batch))
        top = sparse_ce.linear_topk_logits(hidden, model.head.weight, 5, linear_bias=model.head.bias).indices
        predicted.append(top.cpu())
    top = torch.cat(predicted)
    precision = metrics.precision_at_k(top, labels, (1, 5))
    scored = metrics.propensity_scored_precision_at_k(top, labels, propensity, 5)
    return {"P@1": precision[1].item(), "P@5": precision[5].item(), "PSP@5": scored.item()}


def on(device: str, batch: Batch) -> Batch:
    return Batch(*(t.to(device) for t in batch))


def compare(model: Classifier, batches: List[Batch], device: str, lr: float) -> None:
    """Prints the losses, the time of a step and the memory of both implementations, from the same start.

    The dense loss in float64 shows which digits of the first losses are correct.
    """
    before = peak_memory(device)
    for name, function in (("sparse_ce", loss), ("dense", dense_loss)):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.Adam(trained.parameters(), lr=lr, fused=True)
        losses, times = [], []
        for batch in tqdm(batches, desc=f"{name} steps", leave=False):
            start = time.perf_counter()
            losses.append(step(trained, function, optimizer, batch))
            times.append(time.perf_counter() - start)
        print(f"{name}: losses {' '.join(f'{value:.4f}' for value in losses)}  "
              f"({1000 * sorted(times)[len(times) // 2]:.0f} ms per step, "
              f"{(peak_memory(device) - before) / 2**20:.0f} MiB more memory)")
    first = batches[0]._replace(weights=batches[0].weights.double())
    with torch.no_grad():
        print(f"dense in float64: losses {dense_loss(copy.deepcopy(model).double(), first):.4f}")


def peak_memory(device: str) -> int:
    """Returns the peak memory in bytes, of the GPU or else of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(model: Classifier, function: Callable[[Classifier, Batch], Tensor], optimizer: torch.optim.Optimizer,
         batch: Batch) -> float:
    value = function(model, batch)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.quick:
        args.labels, args.documents = 5_000, 6_000
    torch.manual_seed(0)

    count = args.documents
    text, labels = corpus(count + count // 10, args.labels)
    text = tf_idf(text, text[:count].getnnz(0))
    train, held_out = (Rows(text[part], labels[part]) for part in (slice(count), slice(count, None)))
    documents_of_label = torch.from_numpy(labels[:count].getnnz(0))
    print(f"{args.labels:,} labels, {documents_of_label.gt(0).sum():,} of which occur in {count:,} documents")
    prior = (documents_of_label + 0.5) / (count + 1)
    model = Classifier(text.shape[1], args.width, args.labels, prior).to(args.device)

    loader = train.loader(args.batch, args.workers, shuffle=True)
    if args.compare:
        compare(model, [on(args.device, batch) for batch, _ in zip(loader, range(5))], args.device, args.lr)

    propensity = metrics.label_propensities(documents_of_label, count)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    def report(name: str) -> None:
        found = evaluate(model, held_out.loader(args.batch), labels[count:], propensity, args.device)
        print(name + "".join(f"  {metric} {value:.4f}" for metric, value in found.items()), flush=True)

    report("most frequent labels:")  # The bias alone orders the labels.
    for epoch in range(1, args.epochs + 1):
        total, start = 0.0, time.perf_counter()
        with tqdm(loader, desc=f"epoch {epoch}", unit="step") as progress:
            for batch in progress:
                value = step(model, loss, optimizer, on(args.device, batch))
                total += value
                progress.set_postfix(loss=f"{value:.2f}")
        report(f"epoch {epoch}: loss {total / len(loader):.3f}  {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
