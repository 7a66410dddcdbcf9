"""Runs one of two processes with a tiny Llama parallelized by the plan of transformers, for
test_placements_transformers.py.

    python placement_transformers.py FOLDER

RANK, WORLD_SIZE and the others are set as by torchrun. Saves {way: {result: largest difference from one process}} to
FOLDER/RANK.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

import sparse_ce
from sparse_ce import SparseTarget

VOCAB, STEPS = 97, 5
CONFIG = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False)


def of_logits(model, tokens, target):
    """Returns the loss of logits, which are gathered by the plan, or a DTensor."""
    return sparse_ce.cross_entropy(model(tokens).logits, target, label_smoothing=0.1)


def of_shards(model, tokens, target):
    weight = model.lm_head.weight  # plain logits do not carry their first class
    here = dict(group=weight.device_mesh.get_group(), num_classes=VOCAB,
                vocab_start=weight.device_mesh.get_local_rank() * -(-VOCAB // dist.get_world_size()))
    return sparse_ce.cross_entropy(model(tokens).logits, target, label_smoothing=0.1, **here)


def of_head(model, tokens, target):
    return sparse_ce.linear_cross_entropy(model.model(tokens).last_hidden_state, model.lm_head.weight, target,
                                          label_smoothing=0.1)


ALL_PARALLEL_STYLES.register("colwise_placed", ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
WAYS = {"gathered": ({}, of_logits), "placed": ({"lm_head": "colwise_placed"}, of_logits),
        "shards": ({"lm_head": "colwise"}, of_shards), "head": ({}, of_head)}


def train(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    draw = torch.Generator().manual_seed(1)
    tokens, ids = (torch.randint(VOCAB, size, generator=draw) for size in ((4, 8), (4, 8, 3)))
    target = SparseTarget.from_topk(ids, torch.rand(4, 8, 3, generator=draw), num_classes=VOCAB)
    for _ in range(STEPS):
        out = loss(model, tokens, target)
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out)
    found = {"losses": torch.stack(losses), **dict(model.named_parameters())}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in found.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if rank == 0:
        LlamaForCausalLM(CONFIG).double().save_pretrained(folder / "model")
    dist.barrier()
    exact = train(LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64), of_logits)
    found = {"one process": {"first": float(exact["losses"][0]), "last": float(exact["losses"][-1])}}
    for way, (plan, loss) in WAYS.items():
        config = DistributedConfig(tp_size=2, tp_plan=plan or "auto")
        model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, distributed_config=config)
        with torch.no_grad():
            logits = model(torch.zeros(1, 2, dtype=torch.int64)).logits
        ours = train(model, loss)
        found[way] = {name: float((ours[name] - t).abs().max()) for name, t in exact.items()}
        found[way]["logits"] = f"{type(logits).__name__} {list(logits.shape)}"
        found[way]["weight"] = str(model.lm_head.weight.placements)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
