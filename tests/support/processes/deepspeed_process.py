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
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import sparse_ce
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import VOCAB, Samples, collate, make_model

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
    "stage 3, Qwen2": ("qwen2", 3, {}),
    "stage 3, Qwen2 tied": ("qwen2, tied", 3, {}),
    "stage 3, zero.Init": ("qwen2", 3, dict(init=True)),
    "stage 3, zero.Init, tied": ("gpt2, tied", 3, dict(init=True)),
    "stage 2, parameter groups": ("qwen2, tied", 2, dict(groups=True, accumulation=2, gradient_clipping=0.05)),
    "stage 3, parameter groups": ("qwen2", 3, dict(groups=True, accumulation=2, gradient_clipping=0.05)),
    "stage 1, resumed": ("gpt2, tied", 1, dict(resumed=True)),
    "stage 3, resumed": ("qwen2", 3, dict(resumed=True, accumulation=2)),
    "stage 3, zero.Init, resumed": ("qwen2, tied", 3, dict(resumed=True, init=True)),
    "stage 2, optimizer offloaded": ("llama", 2, dict(offload=dict(offload_optimizer={"device": "cpu"}))),
    "stage 3, all offloaded": ("gpt2, tied", 3, dict(offload=dict(offload_optimizer={"device": "cpu"},
                                                                  offload_param={"device": "cpu"}))),
    "stage 2, causal_lm_loss": ("llama", 2, dict(loss=causal_lm_loss())),
    "stage 3, causal_lm_loss": ("gpt2, tied", 3, dict(loss=causal_lm_loss())),
    "stage 3, linear_cross_entropy": ("llama", 3, dict(wrap=Linear)),
    "stage 3, linear_cross_entropy, tied": ("gpt2, tied", 3, dict(wrap=Linear)),
}


def build(name, seed=0):
    if not name.startswith("qwen2"):
        return make_model(name, seed)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings="tied" in name))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.train()


def partitioned(name, config, seed):
    """Returns a model whose parameters are partitioned as they are created."""
    whole = dict(build(name, seed).named_parameters())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(name, seed)
    for key, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.data.copy_(whole[key].data)
    return model


def optimizer_of(model, groups):
    named = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    if not groups:
        return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)
    decayed = [p for key, p in named if "norm" not in key and "bias" not in key]
    kept = [p for _, p in named if not any(p is other for other in decayed)]
    return torch.optim.SGD([dict(params=decayed, weight_decay=0.1), dict(params=kept, lr=0.02)], lr=0.05, momentum=0.9)


def start(fused, name, stage, *, accumulation=1, gradient_clipping=0.0, memory_efficient_linear=True, options=None,
          wrap=None, checkpointing=False, late=False, loss=None, init=False, groups=False, offload=None, seed=0):
    """Returns an engine of DeepSpeed."""
    zero = dict(stage=stage, memory_efficient_linear=memory_efficient_linear, **(PARTITIONED if stage == 3 else {}),
                **(offload or {}))
    config = dict(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=accumulation, zero_optimization=zero,
                  gradient_clipping=gradient_clipping, zero_allow_untested_optimizer=True,
                  zero_force_ds_cpu_optimizer=False)  # which would be compiled first
    model = partitioned(name, config, seed) if init else build(name, seed)
    patched = fused and loss is None and wrap is not Linear
    if options and not fused:
        fuse_lm_head(model, **options)  # compared with a head that is not partitioned
        zero["stage"] = 2
    if patched and not late:
        fuse_lm_head(model, **(options or {}))
    if wrap is not None and (fused or wrap is not Linear):
        model = wrap(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer_of(model, groups))
    if fused and late:
        fuse_lm_head(engine.module)
    return engine


def steps(engine, numbers, loss):
    """Trains and returns the mean loss of each step over both processes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    samples, losses = [s for i, s in enumerate(Samples("labels", 16)) if i != 5], []
    for step in numbers:
        first = 2 * (step * world + rank) % 12
        batch = collate(samples[first:first + 2])
        if loss is not None:
            labels = batch.pop("labels")
            value = loss(engine(**batch), labels)
        else:
            value = engine(**batch).loss
        engine.backward(value)
        engine.step()
        mean = value.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def trained(output, fused, name, stage, resumed=False, **named):
    """Returns the mean loss of each step, and the parameters at the end."""
    engine, accumulation, loss = start(fused, name, stage, **named), named.get("accumulation", 1), None
    if fused:
        loss = named.get("loss")
    middle = (STEPS - 1) * accumulation
    losses = steps(engine, range(middle), loss)
    if fused and resumed:
        engine.save_checkpoint(output)
        engine.destroy()
        engine = start(fused, name, stage, seed=1, **named)
        engine.load_checkpoint(output)
    losses += steps(engine, range(middle, STEPS * accumulation), loss)
    inner = engine.module.model if isinstance(engine.module, Linear) else engine.module
    parameters = dict(inner.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())) if stage == 3 else contextlib.nullcontext():
        weights = {key: p.detach().clone() for key, p in parameters.items()}
    engine.destroy()
    return losses, weights


def main(output):
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    made = {case: [trained(output, fused, name, stage, **named) for fused in (False, True)]
            for case, (name, stage, named) in CASES.items()}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
