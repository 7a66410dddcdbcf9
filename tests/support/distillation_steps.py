"""Trains with ``DistillationTrainer``, and takes the same steps with dense logits and PyTorch's autograd."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import math

import torch
from transformers import Trainer
from trl import SFTConfig
from trl.experimental.gkd import GKDTrainer

from sparse_ce.integrations.trl import DistillationTrainer
from tiny_lm import VOCAB, make_model
from trl_cases import labels_dataset, logged, teacher_model, tokenizer

NAMES = ("loss", "entropy", "grad_norm")
K = 8


def train(path, data=None, name="llama", config=None, steps=3, **named):
    if named.get("teacher_model") is None:
        named = {"predicts": "next", **named}
    made = DistillationTrainer(make_model(name), args=cases.arguments(SFTConfig, path, **{"max_steps": steps,
                                                                                         **(config or {})}),
                               train_dataset=data or labels_dataset(), processing_class=tokenizer(), **named)
    if steps:
        made.train()
    return made


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def dense_steps(path, temperature=1.0, alpha=1.0, kind="forward_kl", tail="bucket", factor=1.0,
                name="llama", teacher=None, beta=None):
    """Returns the losses of the Trainer with both models' logits and PyTorch's autograd.

    ``beta`` selects the divergence of TRL. With ``tail="bucket"`` each distribution consists of the teacher's top K
    classes and the tail. With None it consists of all VOCAB classes, otherwise of the top K alone.
    """
    teacher = teacher or teacher_model()

    def loss(outputs, labels, num_items_in_batch=None, ids=None):
        counts = labels[:, 1:].ne(-100)
        student = (outputs.logits[:, :-1].double() / temperature).log_softmax(-1)
        with torch.no_grad():
            of_teacher = (teacher(outputs.ids).logits[:, :-1, :VOCAB].double() / temperature).log_softmax(-1)
        top = of_teacher.topk(K if tail else VOCAB).indices
        p, q = of_teacher.gather(-1, top), student.gather(-1, top)
        if tail == "bucket":
            p, q = (torch.cat((x, whole.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)), -1)
                    for x, whole in ((p, of_teacher), (q, student)))
        else:
            p, q = p.log_softmax(-1), q.log_softmax(-1)
        mixture = torch.logaddexp(p, q) - math.log(2)
        of_kind = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": (kl(p, mixture) + kl(q, mixture)) / 2}
        if beta is not None:
            of_kind[kind] = GKDTrainer.generalized_jsd_loss(q, p, beta=beta, reduction="none").sum(-1)
        divergence = of_kind[kind][counts].sum() * factor
        plain = outputs.logits[:, :-1].double().log_softmax(-1)
        hard = -plain.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0][counts].sum()
        return ((alpha * divergence + (1 - alpha) * hard) / num_items_in_batch).float()

    model = make_model(name)
    forward = model.forward

    def remembering(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.ids = kwargs["input_ids"]
        return output

    model.forward = remembering
    data = labels_dataset().filter(lambda row: any(label != -100 for label in row["labels"]))
    args = cases.arguments(cases.tiny_lm.TrainingArguments, path, remove_unused_columns=False)

    def collator(rows):
        return cases.tiny_lm.collate([{**{name: torch.tensor(row[name]) for name in ("input_ids", "labels")},
                                       "attention_mask": torch.ones(len(row["input_ids"]))} for row in rows])

    trainer = Trainer(model, args, train_dataset=data, data_collator=collator, compute_loss_func=loss)
    trainer.train()
    return logged(trainer, "loss", "grad_norm")
