"""Distills a student in TRL in three ways: from all classes of a teacher in the loop, from its cached top-k, and on the
student's own text.

    python examples/trl_distill.py      # half a minute, on the CPU
"""

import argparse
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="5 steps")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer

import sparse_ce
import trl_words
from sparse_ce.data import CacheWriter
from sparse_ce.integrations.transformers import fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer


def teacher_of(dataset: Dataset, folder: str):
    teacher = trl_words.model(128, seed=1)
    handle = fuse_lm_head(teacher)
    trainer = SFTTrainer(teacher, trl_words.settings(SFTConfig, folder, max_steps=80), train_dataset=dataset,
                         processing_class=trl_words.tokenizer())
    trainer.train()
    handle.remove()
    print("teacher:", trl_words.log_of(trainer, "loss"))
    return teacher.eval()


def cached(teacher, dataset: Dataset, path: str) -> Dataset:
    with CacheWriter(path, num_classes=teacher.config.vocab_size, k=8) as writer, torch.no_grad():
        for begin in range(0, len(dataset), 32):
            tokens = torch.tensor(dataset[begin:begin + 32]["input_ids"])
            top, log_tail = sparse_ce.topk_log_probs(teacher(tokens).logits, 8, return_log_tail=True)
            writer.add(top, tokens=tokens, log_tail=log_tail)
    return load_dataset("parquet", data_files=path, split="train", cache_dir=path + ".datasets")


def distil(what: str, dataset: Dataset, folder: str, **options) -> None:
    trainer = DistillationTrainer(
        trl_words.model(), args=trl_words.settings(SFTConfig, folder, packing="teacher" in what, max_length=64),
        train_dataset=dataset, processing_class=trl_words.tokenizer(), **options)
    trainer.train()
    print(f"{what}: {trl_words.log_of(trainer, 'loss', 'entropy', 'mean_token_accuracy')}")


def main() -> None:
    torch.set_num_threads(1)
    dataset = Dataset.from_list(trl_words.rows(256)).select_columns(["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        teacher = teacher_of(dataset, folder)
        distil("teacher in the loop, packed", dataset, folder, teacher_model=teacher, kind="jsd")
        distil("its cache, packed, from the teacher's top 8", cached(teacher, dataset, f"{folder}/cache.parquet"),
               folder, kind="forward_kl")
        prompted = dataset.map(lambda row: {"labels": [-100] * 8 + row["input_ids"][8:]})
        distil("half on its own text", prompted, folder, teacher_model=teacher, kind="reverse_kl", on_policy=0.5,
               max_new_tokens=16)


if __name__ == "__main__":
    main()
