"""Tests that the Trainer trains and evaluates a multi-label classifier on sparse labels."""

import json

import pytest

import forked

pytest.importorskip("transformers", minversion="5.24")

PROGRAM = """
import json
import {first}
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import sparse_ce.integrations.transformers
from sparse_ce import SparseTarget
from sparse_ce.metrics import precision_at_k

V, N = 50, 11
dense = (torch.rand(N, V) < 0.1).float()
dense[4] = 0  # no labels
jagged = SparseTarget.from_dense(dense)
most = dense.topk(12)
padded = SparseTarget.from_topk(torch.where(most.values > 0, most.indices, 0), most.values, num_classes=V)
FORMS = dict(jagged=[jagged[i] for i in range(N)], topk=[padded[i] for i in range(N)],
             mixed=[(jagged if i < 5 else padded)[i] for i in range(N)])


def loss(outputs, labels, num_items_in_batch=None):
    return sparse_ce.binary_cross_entropy_with_logits(outputs.logits, labels, reduction="batchmean",
                                                      normalizer=num_items_in_batch)


def metrics(prediction):
    ids = torch.from_numpy(prediction.predictions)
    return {{f"P@{{k}}": p.item() for k, p in precision_at_k(ids, prediction.label_ids, (1, 5)).items()}}


config = BertConfig(
    vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=V,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
tokens, results = torch.randint(20, (N, 6)), {{}}
for form, labels in FORMS.items():
    samples = [dict(input_ids=tokens[i], labels=labels[i]) for i in range(N)]
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    args = TrainingArguments(form, max_steps=6, learning_rate=0.03, per_device_train_batch_size=2,
                             gradient_accumulation_steps=3, per_device_eval_batch_size=4, use_cpu=True,
                             report_to="none", disable_tqdm=True, logging_steps=1, eval_accumulation_steps=2)
    trainer = Trainer(model, args, train_dataset=samples, eval_dataset=samples, data_collator=sparse_ce.collate,
                      compute_loss_func=loss, compute_metrics=metrics,
                      preprocess_logits_for_metrics=lambda logits, labels: logits.topk(5).indices)
    before = trainer.evaluate()
    trainer.train()
    after, predicted = trainer.evaluate(), trainer.predict(samples)
    with torch.no_grad():
        logits = model(tokens).logits
    hits = dense.gather(1, logits.topk(5).indices)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, reduction="none").sum(1)
    results[form] = dict(
        losses=[line["loss"] for line in trainer.state.log_history if "loss" in line], before=before["eval_loss"],
        eval_loss=after["eval_loss"], exact_loss=each.mean().item(), label_ids=type(predicted.label_ids).__name__,
        found=[after["eval_P@1"], after["eval_P@5"], predicted.metrics["test_P@5"]],
        exact=[hits[:, 0].mean().item(), hits.mean().item(), hits.mean().item()])
print("results", json.dumps(results))
"""


@pytest.mark.parametrize("first", ["sparse_ce.integrations.transformers", "transformers.trainer"])
def test_training_evaluation_and_prediction(first, tmp_path):
    done = forked.run("-c", PROGRAM.format(first=first), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.split("results ")[-1])
    assert list(results) == ["jagged", "topk", "mixed"]
    for found in results.values():
        assert found["label_ids"] == "SparseTarget"
        assert found["found"] == pytest.approx(found["exact"], rel=1e-6) and found["exact"][1] > 0.1
        assert found["eval_loss"] == pytest.approx(found["exact_loss"], rel=0.05)  # batches have equal weights
        assert found["exact_loss"] < 0.7 * found["before"]
        assert found["losses"] == pytest.approx(results["jagged"]["losses"], rel=1e-4)
