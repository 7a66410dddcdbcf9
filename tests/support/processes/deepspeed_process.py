"""Runs one of the two processes of test_trainer_deepspeed: ``python deepspeed_process.py OUTPUT``; rank 0 writes what
was trained."""

import with_deepspeed  # noqa: F401, first

# isort: split
import contextlib
import os
import sys

import deepspeed
import peft
import torch
from transformers.modeling_outputs import CausalLMOutput

import sparse_ce
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import Samples, collate, make_model

STEPS = 3
PARTITIONED = dict(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0,
                   stage3_max_live_parameters=0)  # parameters are complete in the forward of their module alone


class Linear(torch.nn.Module):
    """Computes the loss from the weight of another module, which DeepSpeed gathers when it is read."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, labels, **inputs):
        hidden = self.model.base_model(**inputs).last_hidden_state
        target = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return CausalLMOutput(loss=sparse_ce.linear_cross_entropy(hidden, self.model.lm_head.weight, target))


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))


CASES = {  # a model, the stage, and what else is done
    "stage 1": ("llama", 1, {}),
    "stage 2, accumulation and clipping": ("gpt2, tied", 2, dict(accumulation=2, gradient_clipping=0.05)),
    "stage 3": ("llama", 3, {}),
    "stage 3, tied": ("gpt2, tied", 3, {}),
    "stage 3, bias": ("phi, bias", 3, {}),
    "stage 3, softcap and options": ("gemma2, softcap", 3, dict(options=dict(label_smoothing=0.1, z_loss=1e-2))),
    "stage 3, accumulation and clipping": ("llama", 3, dict(accumulation=2, gradient_clipping=0.05)),
    "stage 3, F.linear kept": ("llama", 3, dict(memory_efficient_linear=False)),
    "stage 3, LoRA": ("llama", 3, dict(wrap=lora)),
    "stage 3, checkpointing": ("llama", 3, dict(checkpointing=True)),
    "stage 3, fused at last": ("llama", 3, dict(late=True)),
    "stage 2, causal_lm_loss": ("llama", 2, dict(loss=causal_lm_loss())),
    "stage 3, causal_lm_loss": ("gpt2, tied", 3, dict(loss=causal_lm_loss())),
    "stage 3, linear_cross_entropy": ("llama", 3, dict(wrap=Linear)),
    "stage 3, linear_cross_entropy, tied": ("gpt2, tied", 3, dict(wrap=Linear)),
}


def trained(fused, name, stage, *, accumulation=1, gradient_clipping=0.0, memory_efficient_linear=True, options=None,
            wrap=None, checkpointing=False, late=False, loss=None):
    """Returns the mean loss of each step over both processes, and the parameters at the end."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = make_model(name)
    patched = fused and loss is None and wrap is not Linear
    if options and not fused:
        fuse_lm_head(model, **options)  # compared with a head that is not partitioned
        stage = 2
    if patched and not late:
        fuse_lm_head(model, **(options or {}))
    if wrap is not None and (fused or wrap is not Linear):
        model = wrap(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    zero = dict(stage=stage, memory_efficient_linear=memory_efficient_linear, **(PARTITIONED if stage == 3 else {}))
    config = dict(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=accumulation, zero_optimization=zero,
                  gradient_clipping=gradient_clipping, zero_allow_untested_optimizer=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    if fused and late:
        fuse_lm_head(engine.module)
    samples, losses = [s for i, s in enumerate(Samples("labels", 16)) if i != 5], []
    for step in range(STEPS * accumulation):
        first = 2 * (step * world + rank) % 12
        batch = collate(samples[first:first + 2])
        if fused and loss is not None:
            labels = batch.pop("labels")
            value = loss(engine(**batch), labels)
        else:
            value = engine(**batch).loss
        engine.backward(value)
        engine.step()
        mean = value.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    inner = engine.module.model if isinstance(engine.module, Linear) else engine.module
    parameters = dict(inner.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())) if stage == 3 else contextlib.nullcontext():
        weights = {key: p.detach().clone() for key, p in parameters.items()}
    engine.destroy()
    return losses, weights


def main(output):
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    made = {case: [trained(fused, name, stage, **named) for fused in (False, True)]
            for case, (name, stage, named) in CASES.items()}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
