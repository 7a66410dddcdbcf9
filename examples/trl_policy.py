"""Trains with GRPO and DPO in TRL, with log-probabilities from a fused head.

    python examples/trl_policy.py      # half a minute, on the CPU

The trainers request the log-probabilities of the sampled tokens. The fused head computes them, their entropies and
their gradients with ``linear_selected_log_probs``. The reward counts even words.
"""

import argparse
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="5 steps")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import trl_words
from sparse_ce.integrations.transformers import fuse_lm_head


def is_even(word: str) -> bool:
    return word.startswith("w") and int(word[1:]) % 2 == 0


def even_words(completions: list, **_) -> list:
    return [sum(map(is_even, text.split())) / 8 for text in completions]


def preferred(row: dict) -> dict:
    prompt, rest = row["input_ids"][:4], row["input_ids"][4:20]
    even, odd = ([token for token in rest if token % 2 == parity] for parity in (0, 1))
    return {"prompt": trl_words.words(prompt), "chosen": " " + trl_words.words(even),
            "rejected": " " + trl_words.words(odd)}


def main() -> None:
    torch.set_num_threads(1)
    dataset = Dataset.from_list(trl_words.rows(256)).select_columns(["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        model = trl_words.model()
        fuse_lm_head(model)
        trainer = GRPOTrainer(
            model, reward_funcs=even_words, processing_class=trl_words.tokenizer(),
            args=trl_words.settings(GRPOConfig, folder, num_generations=8, max_completion_length=8,
                                    per_device_train_batch_size=32, learning_rate=2e-2, max_steps=15),
            train_dataset=dataset.map(lambda row: {"prompt": trl_words.words(row["input_ids"][:4])},
                                      remove_columns="input_ids"))
        trainer.train()
        print("GRPO:", trl_words.log_of(trainer, "reward", "entropy"))

        trl_words.model().save_pretrained(f"{folder}/start")  # DPO loads its reference model from this folder
        model = type(model).from_pretrained(f"{folder}/start")
        fuse_lm_head(model)
        trainer = DPOTrainer(model, args=trl_words.settings(DPOConfig, folder), processing_class=trl_words.tokenizer(),
                             train_dataset=dataset.map(preferred, remove_columns="input_ids"))
        trainer.train()
        print("DPO:", trl_words.log_of(trainer, "loss", "rewards/margins"))


if __name__ == "__main__":
    main()
