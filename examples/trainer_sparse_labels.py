"""Trains with Hugging Face's Trainer on soft labels: each token's label is a distribution over a few next tokens.

    python examples/trainer_sparse_labels.py      # seconds, on the CPU

The labels are sparse COO tensors, one (length, vocabulary) tensor per sample. PyTorch's own cross entropy has no
gradient for them. The example shows a subclass of Trainer, and two ways without a subclass.
"""

import argparse
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="5 steps")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sparse_ce
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head

VOCAB, LENGTH, SUCCESSORS = 256, 32, 4


class MarkovText(Dataset):
    """Generates sequences of a Markov chain. The label of each token is the distribution it was drawn from."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(0)
        self.successors = torch.randint(VOCAB, (VOCAB, SUCCESSORS), generator=generator)
        self.weights = torch.softmax(2 * torch.randn(VOCAB, SUCCESSORS, generator=generator), 1)
        self.tokens = [self._sequence(generator) for _ in range(size)]

    def _sequence(self, generator: torch.Generator) -> Tensor:
        tokens = [int(torch.randint(VOCAB, (), generator=generator))]
        while len(tokens) < LENGTH:
            choice = torch.multinomial(self.weights[tokens[-1]], 1, generator=generator)
            tokens.append(int(self.successors[tokens[-1], choice]))
        return torch.tensor(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict:
        tokens = self.tokens[i]
        positions = torch.arange(1, LENGTH).repeat_interleave(SUCCESSORS)  # the first token has no distribution
        classes, weights = self.successors[tokens[:-1]].flatten(), self.weights[tokens[:-1]].flatten()
        labels = torch.sparse_coo_tensor(torch.stack((positions, classes)), weights, (LENGTH, VOCAB),
                                         check_invariants=True)
        return {"input_ids": tokens, "labels": labels}


class SparseLabelTrainer(Trainer):
    """Overrides ``compute_loss``, the common way to change the Trainer's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_fn = sparse_ce.SparseCrossEntropyLoss()  # in place of nn.CrossEntropyLoss()
        loss = loss_fn(outputs.logits, labels.shift(1), normalizer=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, max_position_embeddings=LENGTH))


def train(what: str, trainer_class: type, model: nn.Module, **options) -> None:
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            max_steps=5 if "--quick" in sys.argv else 40, learning_rate=5e-3, lr_scheduler_type="constant",
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True)
        trainer = trainer_class(model, arguments, data_collator=sparse_ce.collate, train_dataset=MarkovText(256),
                                eval_dataset=MarkovText(32), **options)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        print(f"{what}: loss {before:.3f} -> {trainer.evaluate()['eval_loss']:.3f}")


def main() -> None:
    torch.set_num_threads(1)  # the tensors are too small for more threads
    train("subclass", SparseLabelTrainer, small_model())
    train("compute_loss_func", Trainer, small_model(), compute_loss_func=causal_lm_loss())
    model = small_model()
    fuse_lm_head(model)  # the (tokens, VOCAB) logits are never materialized in training
    train("fuse_lm_head", Trainer, model)


if __name__ == "__main__":
    main()
