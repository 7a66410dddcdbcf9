"""Provides data for the TRL examples: sequences of a Markov chain as text, a tokenizer of its words, and small
models."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer_sparse_labels import LENGTH, VOCAB, MarkovText


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": VOCAB, "</s>": VOCAB + 1, **{f"w{i}": i for i in range(VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def model(size: int = 64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB + 2, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, pad_token_id=VOCAB, eos_token_id=VOCAB + 1))


def rows(size: int) -> list:
    """Returns ``input_ids`` with the classes that each token was drawn from and their log-probabilities."""
    text = MarkovText(size)
    made = []
    for tokens in text.tokens:
        ids, weights = text.successors[tokens[:-1]].tolist(), text.weights[tokens[:-1]].log().tolist()
        made.append({"input_ids": tokens.tolist(), "teacher_ids": [[], *ids], "teacher_log_probs": [[], *weights]})
    return made


def words(tokens: list) -> str:
    return " ".join(f"w{token}" for token in tokens)


def settings(config: type, folder: str, **changes: object) -> object:
    """Returns the trainer's arguments. ``changes`` override the defaults, but ``--quick`` always means 5 steps."""
    if "--quick" in sys.argv:
        changes["max_steps"] = 5
    return config(folder, **{**dict(
        per_device_train_batch_size=8, max_steps=30, learning_rate=5e-3, lr_scheduler_type="constant", logging_steps=5,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False), **changes})


def log_of(trainer: object, *names: str) -> str:
    lines = [line for line in trainer.state.log_history if names[0] in line]
    return ", ".join(f"{name} {lines[0][name]:.3f} -> {lines[-1][name]:.3f}" for name in names)
