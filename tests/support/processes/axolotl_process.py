"""Trains tiny models through ``axolotl train`` with the plugin, and repeats each step in float64 with dense losses.

    axolotl_process.py FOLDER    # with FOLDER/cases.json: {"trained": {name: keys}, "refused": {name: keys}}

It writes FOLDER/results.json. Several processes, started as torchrun does, train with DDP and write results0.json and
so on. Of each training these are the losses of the trainer and in float64, and how far its weights are from those in
float64 and from the first. Of each refused configuration it is the error.
"""

import copy
import json
import os
import sys
from pathlib import Path

import axolotl_client

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
axolotl_client.make_importable()
VOCAB, K = 50, 3
CONFIG = dict(sequence_len=32, micro_batch_size=2, gradient_accumulation_steps=2, max_steps=3, num_epochs=3,
              learning_rate=0.5, optimizer="sgd", lr_scheduler="constant", warmup_steps=0, max_grad_norm=1000.0, seed=7,
              val_set_size=0, bf16=False, fp16=False, tf32=False, logging_steps=1, save_strategy="no",
              dataset_num_proc=1, dataloader_num_workers=0, pad_to_sequence_len=False)


def write_model(folder):
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def samples(predicts):
    """Returns samples with a teacher. Their first four tokens differ."""
    import torch

    draw = torch.Generator().manual_seed(1)
    for i in range(14):
        length = 6 + i % 5
        ids = torch.randint(3, VOCAB, (length,), generator=draw).tolist()
        rows = torch.stack([torch.randperm(VOCAB, generator=draw)[:K] for _ in range(length)])
        log_probs = torch.randn(length, K, generator=draw).log_softmax(-1)
        mask = torch.ones(length, K, dtype=torch.int64)
        mask[0 if predicts == "token" else -1] = 0
        yield {"input_ids": ids, "attention_mask": [1] * length, "labels": [-100] * (1 + i % 3) + ids[1 + i % 3:],
               "target_token_ids": rows.tolist(), "target_logprobs": log_probs.tolist(), "target_mask": mask.tolist()}


def sequences(batch, known):
    """Yields (row, first position, sample) for each sequence of a batch, whose rows may be packed."""
    for row, ids in enumerate(batch["input_ids"].tolist()):
        at = 0
        while at < len(ids) and (sample := known.get(tuple(ids[at:at + 4]))):
            yield row, at, sample
            at += len(sample["input_ids"])


def of_position(z, sample, i, cfg):
    """Returns the loss of token ``i`` of a sample, whose logits are z (V,)."""
    import torch

    label, options = sample["labels"][i], cfg.sparse_ce or {}
    if not cfg.kd_trainer:
        smoothing = options.get("label_smoothing", 0.0)
        lse = z.logsumexp(0)
        return lse - (1 - smoothing) * z[label] - smoothing * z.mean() + options.get("z_loss", 0.0) * lse ** 2
    row, temperature, beta = i if cfg.kd_predicts == "token" else i - 1, cfg.kd_temperature, cfg.kd_beta
    assert all(sample["target_mask"][row])
    ids, log_p = sample["target_token_ids"][row], z.new_tensor(sample["target_logprobs"][row])
    log_q = (z / temperature)[ids].log_softmax(0) if cfg.kd_normalize_topk else (z / temperature).log_softmax(0)[ids]
    kl = torch.nn.functional.kl_div
    if beta in (0, 1):
        divergence = kl(*((log_q, log_p) if beta == 0 else (log_p, log_q)), reduction="sum", log_target=True)
    else:
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        divergence = (beta * kl(log_m, log_p, reduction="sum", log_target=True)
                      + (1 - beta) * kl(log_m, log_q, reduction="sum", log_target=True))
    return cfg.kd_alpha * temperature ** 2 * divergence - (1 - cfg.kd_alpha) * z.log_softmax(0)[label]


def replay(model, batches, known, cfg):
    """Returns the loss of each step, and trains ``model``, float64, on the batches of all ranks."""
    import torch

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], cfg.learning_rate)
    losses, count = [], cfg.gradient_accumulation_steps
    for begin in range(0, len(batches), count):
        means = []
        for of_rank in zip(*batches[begin:begin + count]):
            step = []
            for batch in of_rank:
                logits = model(**batch).logits
                step.append([of_position(logits[row, at + i - 1], sample, i, cfg) for row, at, sample in sequences(
                    batch, known) for i in range(1, len(sample["labels"])) if sample["labels"][i] != -100])
            # axolotl averages the means of microbatches, except in a distillation.
            means.append(sum(map(sum, step)) / sum(map(len, step)) if cfg.kd_trainer
                         else sum(sum(each) / len(each) for each in step) / count)
        loss = sum(means) / len(means)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def written(folder, name, case, data):
    """Writes the configuration of a case, and returns its file."""
    import yaml

    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "base_model": str(folder / "model"), **case, "datasets": [
        {"path": str(data), "ds_type": "json", "type": None}], "output_dir": str(folder / name),
        "dataset_prepared_path": str(folder / "prepared")}))
    return file


def run(folder, name, case):
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.train import train
    from torch import distributed
    from transformers import Trainer

    PluginManager.get_instance().plugins.clear()
    data = folder / f"{case.get('kd_predicts', 'labels')}.jsonl"  # cases with the same data share what is prepared
    known = {tuple(sample["input_ids"][:4]): sample for sample in samples(case.get("kd_predicts"))}
    columns = None if case.get("kd_trainer") else ("input_ids", "attention_mask", "labels")
    if not data.exists():
        data.write_text("\n".join(json.dumps({column: sample[column] for column in columns or sample})
                                  for sample in known.values()))
    cfg = load_cfg(str(written(folder, name, case, data)))
    if cfg.world_size > 1:
        cfg.device_map = {"": "cpu"}  # axolotl chooses the GPU of the rank
    batches, before, own = [], [], Trainer.training_step

    def recorded(self, model, inputs, *args, **kwargs):
        if not before:
            before.append(copied(self.model))
        batch = {key: inputs[key].clone() for key in ("input_ids", "attention_mask", "position_ids") if key in inputs}
        batches.append([batch] * cfg.world_size)
        if cfg.world_size > 1:
            distributed.all_gather_object(batches[-1], batch)
        return own(self, model, inputs, *args, **kwargs)

    Trainer.training_step = recorded
    try:
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    finally:
        Trainer.training_step = own
    exact, = before
    start = copy.deepcopy(exact)
    expected = replay(exact, batches, known, cfg)
    pairs = list(zip(*(m.parameters() for m in (model, exact, start))))
    heads = [m for m in model.modules() if "_sparse_ce_head" in vars(m)]
    log = trainer.state.log_history
    return {"losses": [[entry["loss"] for entry in log if "loss" in entry], expected],
            "evaluated": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
            "weights": [max((a - b).abs().max().item() for a, b, _ in pairs),
                        max((a - b).abs().max().item() for a, _, b in pairs)],
            "fused": len(heads), "sequences in a row": max(
                sum(row == r for row, _, _ in sequences(batch, known)) for batch, *_ in batches
                for r in range(len(batch["input_ids"])))}


def error_of(folder, case):
    from axolotl.cli.config import load_cfg

    try:
        load_cfg(str(written(folder, "refused", case, folder / "labels.jsonl")))
    except ValueError as error:
        return str(error)


def copied(model):
    """Returns a copy in float64, in evaluation mode and with its own forward."""
    from sparse_ce.integrations.fused_head import FusedHead

    model = copy.deepcopy(model).double().eval()
    for module in model.modules():
        if "_sparse_ce_head" in vars(module):
            FusedHead.of(module).remove()
    return model


def main():
    folder = Path(sys.argv[1])
    if not (folder / "model").exists():
        write_model(folder / "model")
    cases = json.loads((folder / "cases.json").read_text())
    results = {"trained": {name: run(folder, name, case) for name, case in cases["trained"].items()},
               "refused": {name: error_of(folder, case) for name, case in cases["refused"].items()},
               "examples": examples()}
    (folder / f"results{os.environ.get('RANK', '')}.json").write_text(json.dumps(results))


def examples():
    """Returns how many examples of docstrings fail and run."""
    import doctest

    import sparse_ce.integrations.axolotl
    return list(doctest.testmod(sparse_ce.integrations.axolotl))


if __name__ == "__main__":
    main()
