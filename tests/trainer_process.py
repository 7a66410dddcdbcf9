"""One process of a distributed Trainer: ``python trainer_process.py CASE OUTPUT``, started by test_trainer_distributed."""

import sys

import torch

import tiny_lm
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import Samples, make_model
from torch.utils.data import IterableDataset

torch.set_num_threads(1)


class Stream(IterableDataset):
    """Read by one process alone, which sends each of the others its part of a batch."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Order(Samples):
    """In batches of 2, dealt to two processes in turn, the second meets nothing but sample 5, which is padding."""

    def __getitem__(self, i):
        return super().__getitem__({2: 5, 3: 5, 6: 5, 7: 5}.get(i, i))


def main(case: str, output: str) -> None:
    route, form, data, average = case.split(",")
    model = make_model()
    loss = causal_lm_loss() if route == "loss" else None
    if route == "fused":
        fuse_lm_head(model)
    samples = {"map": Samples, "stream": lambda form: Stream(Samples(form)), "padding": Order}[data](form)
    seen = []
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, per_device_eval_batch_size=2,
                   average_tokens_across_devices=average == "average", ddp_find_unused_parameters=False,
                   train_sampling_strategy="sequential")
    if data == "stream":
        options["accelerator_config"] = {"dispatch_batches": True, "split_batches": True}
        options["per_device_train_batch_size"] = options["per_device_eval_batch_size"] = 4  # of both processes then
    trainer = tiny_lm.make_trainer(output, model, samples, eval_samples=Samples(form), compute_loss_func=loss,
                                   compute_metrics=lambda p: seen.append(p) or {"rows": len(p.predictions)}, **options)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        gathered = seen[-1].label_ids
        parts = gathered if not hasattr(gathered, "items") else {str(k): torch.as_tensor(v) for k, v in gathered.items()}
        torch.save({"gradients": {k.removeprefix("module."): g for k, g in tiny_lm.recorded(trainer)[0].items()},
                    "parameters": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
                    "labels": torch.as_tensor(parts) if not isinstance(parts, dict) else parts,
                    "eval_loss": metrics["eval_loss"]}, f"{output}/result.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
