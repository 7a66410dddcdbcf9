"""Creates TRL's trainers with the models of ``tiny_lm``, a tokenizer, data and a log of numbers to compare."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL looks for a model card's templates

import pytest
import torch

import tiny_lm  # must come first: skips this module if transformers is missing
from tiny_lm import VOCAB, Samples, make_model, transformers

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
trl = pytest.importorskip("trl", minversion="1.16")

STEPS = dict(use_cpu=True, bf16=False, report_to="none", max_steps=3, per_device_train_batch_size=4, logging_steps=1,
             optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True)


def tokenizer():
    """Returns a tokenizer whose words are w3 ... w47."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>",
                                                eos_token="</s>")


def saved_model(path, name="llama"):
    """Returns a model loaded from disk, because trainers with a reference model load it a second time."""
    make_model(name).save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path).train()


def labels_dataset():
    return datasets.Dataset.from_list([{name: s[name].tolist() for name in ("input_ids", "labels")}
                                       for s in Samples("labels")])


def teacher_model(name="llama"):
    return make_model(name, seed=7).eval().requires_grad_(False)


def teacher_dataset(k=8, teacher=None, labels=True, log_tail=True):
    """Returns a dataset in which row i holds the teacher's prediction for token i + 1."""
    teacher, rows = teacher or teacher_model(), []
    for sample in Samples("labels"):
        log_probs = teacher(sample["input_ids"][None]).logits[0].log_softmax(-1)
        top = log_probs.topk(k)
        row = {"input_ids": sample["input_ids"].tolist(), "teacher_ids": top.indices.tolist(),
               "teacher_log_probs": top.values.tolist()}
        if labels:
            row["labels"] = sample["labels"].tolist()
        if log_tail:
            row["teacher_log_tail"] = log_probs.scatter(1, top.indices, -torch.inf).logsumexp(-1).tolist()
        rows.append(row)
    return datasets.Dataset.from_list(rows)


def words(ids):
    return " ".join(f"w{int(i)}" for i in ids)


def preferences():
    return datasets.Dataset.from_list([
        {"prompt": words(ids[:3]), "chosen": " " + words(ids[3:]), "rejected": " " + words(ids.flip(0)[:-2])}
        for ids in (s["input_ids"] for s in Samples("labels"))])


def judged():
    sequences = enumerate(s["input_ids"] for s in Samples("labels"))
    return datasets.Dataset.from_list([
        {"prompt": words(ids[:3]), "completion": " " + words(ids[3:]), "label": i % 2 > 0} for i, ids in sequences])


def prompts():
    return datasets.Dataset.from_list([{"prompt": words(s["input_ids"][:3])} for s in Samples("labels")])


def different_words(completions, **_):
    """Returns the number of different words of each completion, used as a reward."""
    return [float(len(set(text.split()))) for text in completions]


def logged(trainer, *names):
    """Returns for each step the logged numbers among ``names``."""
    return [{name: line[name] for name in names if name in line}
            for line in trainer.state.log_history if "loss" in line]


def assert_logs_close(ours, theirs, rtol=2e-5, atol=2e-6):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys() and a
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=rtol, abs=atol), name


def arguments(config, path, **changes):
    return config(str(path), **{**STEPS, **changes})


__all__ = ["Samples", "VOCAB", "make_model", "tiny_lm"]
