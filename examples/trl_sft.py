"""Trains with TRL's SFTTrainer and a fused head: hard and soft labels in one batch, LoRA, and a head that PEFT trains.

    python examples/trl_sft.py      # seconds, on the CPU

Every second sequence has the distributions that its tokens were drawn from, in the form of a teacher's cached top-k.
The other sequences have only their tokens. The (tokens, vocabulary) logits are never materialized.
"""

import argparse
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="5 steps")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import trl_words
from sparse_ce.integrations.transformers import TopKCollator, fuse_lm_head


def train(what: str, model, dataset: Dataset, collator, **options) -> None:
    fuse_lm_head(model, z_loss=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model, trl_words.settings(SFTConfig, folder, remove_unused_columns=False), train_dataset=dataset,
            processing_class=trl_words.tokenizer(), data_collator=collator, **options)
        trainer.train()
    print(f"{what}: {trl_words.log_of(trainer, 'loss', 'entropy', 'mean_token_accuracy')}")


def main() -> None:
    torch.set_num_threads(1)  # the tensors are too small for more threads
    rows = trl_words.rows(256)
    mixed = [{**row, "labels": row["input_ids"]} if i % 2 else
             {"input_ids": row["input_ids"], "labels": row["input_ids"], "teacher_ids": None, "teacher_log_probs": None}
             for i, row in enumerate(rows)]
    collator = TopKCollator(predicts="token", fill_with_labels=True)
    train("hard labels", trl_words.model(), Dataset.from_list(rows).select_columns(["input_ids"]), None)
    train("hard and soft labels", trl_words.model(), Dataset.from_list(mixed), collator)
    lora = LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], r=16, modules_to_save=["lm_head", "embed_tokens"],
                      task_type="CAUSAL_LM")
    train("the same with LoRA", trl_words.model(), Dataset.from_list(mixed), collator, peft_config=lora)


if __name__ == "__main__":
    main()
