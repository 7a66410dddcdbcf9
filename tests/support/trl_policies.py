"""Trains with TRL's policy trainers, with a fused head or with their own."""

import trl_cases as cases  # first: skips the test modules that import this one if TRL is missing

# isort: split
import torch
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from sparse_ce.integrations.transformers import fuse_lm_head
from trl_cases import logged, saved_model, tokenizer

SAMPLED = dict(num_generations=4, max_completion_length=5)
RUNS = {
    "dpo": (DPOTrainer, DPOConfig, cases.preferences, {},
            ("loss", "rewards/margins", "logps/chosen", "logits/chosen", "entropy", "mean_token_accuracy",
             "grad_norm")),
    "dpo, weighted": (DPOTrainer, DPOConfig, cases.preferences, dict(use_weighting=True),
                      ("loss", "rewards/margins", "logps/rejected", "grad_norm")),
    "kto": (KTOTrainer, KTOConfig, cases.judged, {}, ("loss", "logps/chosen", "logits/chosen", "kl", "grad_norm")),
    "grpo": (GRPOTrainer, GRPOConfig, cases.prompts, dict(SAMPLED, num_iterations=2),
             ("loss", "reward", "entropy", "grad_norm")),
    "grpo, temperature": (GRPOTrainer, GRPOConfig, cases.prompts,
                          dict(SAMPLED, temperature=0.7, beta=0.1, entropy_coef=0.01),
                          ("loss", "reward", "entropy", "kl", "grad_norm")),
    "grpo, float32 head": (GRPOTrainer, GRPOConfig, cases.prompts,
                           dict(SAMPLED, cast_lm_head_to_fp32=True, bf16=True), ("reward", "entropy")),
    "rloo": (RLOOTrainer, RLOOConfig, cases.prompts, SAMPLED, ("reward", "entropy", "kl", "grad_norm")),
}


def train(path, run, fuse, name="llama", changes=None, peft_config=None, **options):
    """Returns what the trainer ``run`` logs. ``options`` are those of ``fuse_lm_head``."""
    trainer, config, data, own, names = RUNS[run]
    model = saved_model(path / "model", name)
    if fuse == "before":
        fuse_lm_head(model, **options)
    reward = {"reward_funcs": cases.different_words} if "reward" in names else {}
    torch.manual_seed(3)
    made = trainer(model, args=cases.arguments(config, path, **own, **(changes or {})), train_dataset=data(),
                   processing_class=tokenizer(), peft_config=peft_config, **reward)
    if fuse == "after":
        fuse_lm_head(made.model, **options)
    made.train()
    return logged(made, *names)
