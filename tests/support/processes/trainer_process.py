"""Runs one of the processes of test_trainer_distributed: ``python trainer_process.py OUTPUT CASE...``.

A case is ``trainer,ROUTE,FORM,DATA,AVERAGE`` or ``wrapper,KIND``; rank 0 writes its result to ``OUTPUT/CASE.pt``.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer

import tiny_lm
from sparse_ce.integrations.transformers import TokenMetrics, causal_lm_loss, fuse_lm_head
from tiny_lm import Samples, collate, make_model

torch.set_num_threads(1)


class Stream(IterableDataset):
    """Yields samples in one process only, which sends the others their parts of each batch."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Lopsided(Samples):
    """Contains samples of which the second process receives only sample 5, padding, if batches of 2 alternate between
    two processes."""

    def __getitem__(self, i):
        return super().__getitem__({2: 5, 3: 5, 6: 5, 7: 5}.get(i, i))


class LoggingTrainer(TokenMetrics, Trainer):
    pass


def train(output, route, form, data, average):
    model = make_model()
    loss = causal_lm_loss() if route == "loss" else None
    if route != "loss":
        fuse_lm_head(model, report_metrics=route == "reporting")
    samples = {"map": Samples, "stream": lambda form: Stream(Samples(form)), "lopsided": Lopsided}[data](form)
    seen = []
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, per_device_eval_batch_size=2,
                   average_tokens_across_devices=average == "average", train_sampling_strategy="sequential")
    if data == "stream":
        options["accelerator_config"] = {"dispatch_batches": True, "split_batches": True}
        options["per_device_train_batch_size"] = options["per_device_eval_batch_size"] = 4  # of both processes
    trainer = tiny_lm.make_trainer(output, model, samples, eval_samples=Samples(form), compute_loss_func=loss,
                                   trainer_class=LoggingTrainer if route == "reporting" else Trainer,
                                   compute_metrics=lambda p: seen.append(p) or {"rows": len(p.predictions)}, **options)
    trainer.train()
    trainer.evaluate()
    labels = seen[-1].label_ids
    labels = torch.from_numpy(labels) if form == "labels" else {str(k): torch.from_numpy(v) for k, v in labels.items()}
    return {"gradients": {k.removeprefix("module."): g for k, g in tiny_lm.recorded(trainer)[0].items()},
            "parameters": trainer.accelerator.unwrap_model(trainer.model).state_dict(), "labels": labels,
            "log": trainer.state.log_history}


def wrap(output, kind):
    rank, world, samples, model = dist.get_rank(), dist.get_world_size(), Samples("coo"), make_model()
    if kind == "ddp":
        fuse_lm_head(model)
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if kind == "fsdp with a sharded head":
            fully_shard(model.lm_head, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        fuse_lm_head(wrapped)
    items = collate(list(samples))["labels"][:, 1:].ne(-100).sum()
    for _ in range(2):  # the second step uses the state of the first
        wrapped.zero_grad()
        for i in range(rank, 8, 2 * world):
            loss = wrapped(**collate([samples[i], samples[i + world]]), num_items_in_batch=items).loss
            (loss * world).backward()  # both wrappers average over the processes
    return {"gradients": {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                          for name, p in model.named_parameters()}}


def main(output, *cases):
    for case in cases:
        kind, *arguments = case.split(",")
        result = (train if kind == "trainer" else wrap)(output, *arguments)
        if dist.get_rank() == 0:
            torch.save(result, f"{output}/{case}.pt")
    gc.collect()  # DDP's reducer must not free the group: that waits for threads that need the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
