"""Trains with policy gradients (GRPO) on top-p samples, and replays the kept tokens.

    python examples/train_policy.py           # a minute or two on one CPU core
    python examples/train_policy.py --quick   # seconds: fewer steps

The task is sorting: the text consists of numbers, then the same numbers in ascending order. A short supervised warm-up
gives a model that sorts badly. Reinforcement learning then sees only the fraction of each sample that is correct.

Top-p sampling draws from a set of likely tokens, the kept tokens, and normalizes the probabilities among them. If
training normalizes over the whole vocabulary instead, the importance ratio differs from 1 even before the first update.
The sampler therefore returns the kept tokens, as vLLM and SGLang do, and training normalizes among them too.
"""

import argparse
import time
from typing import List, NamedTuple, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, help="batches of samples")
parser.add_argument("--warm-up", type=int, default=80, help="supervised steps")
parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
parser.add_argument("--group", type=int, default=8, help="samples per prompt")
parser.add_argument("--updates", type=int, default=2, help="optimizer steps on the same samples")
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--temperature", type=float, default=0.9)
parser.add_argument("--top-p", type=float, default=0.9)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--entropy-bonus", type=float, default=1e-2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--quick", action="store_true", help="few steps, for tests")
parser.add_argument("--device", help="by default a GPU if there is one")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from small_lm import SmallLM
from sparse_ce import SparseTarget

VOCAB = 64
SORTED = VOCAB  # the token between the numbers and the sorted numbers
NUMBERS = 4
PROMPT = NUMBERS + 1  # tokens, with SORTED


class Rollout(NamedTuple):
    """Stores sampled tokens as rows: the first tokens of all samples, then the second tokens, and so on."""

    tokens: Tensor  # (samples, PROMPT + NUMBERS) int64
    actions: Tensor  # (rows,) int64, the sampled tokens
    kept: SparseTarget  # (rows,), jagged: the set of tokens that each action was drawn from
    log_probs: Tensor  # (rows,), the sampler's log-probabilities, among the kept tokens


def prompts(count: int) -> Tensor:
    """Returns random prompts, (count, PROMPT)."""
    return torch.cat([torch.randint(VOCAB, (count, NUMBERS)), torch.full((count, 1), SORTED)], 1)


def rewards(tokens: Tensor) -> Tensor:
    """Returns the fraction of each answer that is correct: (samples, PROMPT + NUMBERS) -> (samples,)."""
    return (tokens[:, PROMPT:] == tokens[:, :NUMBERS].sort(1).values).float().mean(1)


def advantages(reward: Tensor, group: int) -> Tensor:
    """Normalizes each reward by the rewards of the same prompt, (samples,) -> (samples,)."""
    groups = reward.view(-1, group)
    spread = groups.std(1, keepdim=True) + 1e-4  # equal rewards give an advantage of 0 instead of NaN
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def warm_up(model: SmallLM, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        prompt = prompts(64)
        tokens = torch.cat([prompt, prompt[:, :NUMBERS].sort(1).values], 1)
        labels = torch.full_like(tokens, -100)
        labels[:, PROMPT - 1:-1] = tokens[:, PROMPT:]
        optimizer.zero_grad()
        model(tokens, SparseTarget.from_index(labels)).backward()
        optimizer.step()


@torch.no_grad()
def sample(model: SmallLM, tokens: Tensor, temperature: float, top_p: float) -> Rollout:
    """Extends each prompt by an answer. Keys and values are not cached, as answers are short."""
    actions: List[Tensor] = []
    log_probs: List[Tensor] = []
    kept_ids: List[Tensor] = []
    kept_sizes: List[Tensor] = []
    for _ in range(NUMBERS):
        logits, ids = (model.head(model.hidden(tokens)[:, -1]) / temperature).sort(descending=True)
        probs = logits.softmax(-1)
        keep = probs.cumsum(-1) - probs < top_p  # includes the token at which the sum reaches top_p
        among_kept = logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
        drawn = among_kept.exp().multinomial(1)
        token = ids.gather(1, drawn)
        tokens = torch.cat([tokens, token], 1)
        actions.append(token.squeeze(1))
        log_probs.append(among_kept.gather(1, drawn).squeeze(1))
        kept_ids.append(ids[keep])
        kept_sizes.append(keep.sum(1))
    offsets = F.pad(torch.cat(kept_sizes).cumsum(0), (1, 0))
    kept = SparseTarget.from_jagged(torch.cat(kept_ids), None, offsets)
    return Rollout(tokens, torch.cat(actions), kept, torch.cat(log_probs))


def evaluate(model: SmallLM, rollout: Rollout, temperature: float) -> Tuple[Tensor, Tensor, Tensor]:
    """Computes log-probabilities of the actions among the kept tokens and among all tokens, and the entropy, (rows,)
    each."""
    hidden = model.hidden(rollout.tokens)[:, PROMPT - 1:-1]  # the positions that predict the actions
    hidden = hidden.transpose(0, 1).flatten(0, 1)  # in the order of the rows
    kept = rollout.kept
    out = sparse_ce.linear_selected_log_probs(hidden, model.head.weight, kept, linear_bias=model.head.bias,
                                              logit_scale=1 / temperature, return_entropy=True)
    among_kept = sparse_ce.segment_log_softmax(out.log_probs, offsets=kept.offsets)
    action = kept.indices == rollout.actions.repeat_interleave(kept.offsets.diff())  # one entry of each row
    return among_kept[action], out.log_probs[action], out.entropy


def measure(model: SmallLM, prompt: Tensor, args: argparse.Namespace) -> Tuple[float, float, float]:
    """Returns the mean reward, the entropy in nats, and the number of kept tokens per row."""
    rollout = sample(model, prompt, args.temperature, args.top_p)
    with torch.no_grad():
        entropy = evaluate(model, rollout, args.temperature)[2]
    return (rewards(rollout.tokens).mean().item(), entropy.mean().item(),
            rollout.kept.indices.numel() / rollout.actions.numel())


def train(model: SmallLM, steps: int, args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0)
    started, tokens = time.perf_counter(), 0
    for step in range(1, steps + 1):
        rollout = sample(model, prompts(args.prompts).repeat_interleave(args.group, 0), args.temperature, args.top_p)
        reward = rewards(rollout.tokens)
        advantage = advantages(reward, args.group).repeat(NUMBERS)  # (rows,): one value for all tokens of a sample
        for update in range(args.updates):
            log_probs, among_all, entropy = evaluate(model, rollout, args.temperature)
            ratio = (log_probs - rollout.log_probs).exp()
            if step == 1 and update == 0:
                biased = (among_all - rollout.log_probs).exp()
                print(f"importance ratio before the first update: max |ratio - 1| = {(ratio - 1).abs().max():.1e}")
                print(f"with all tokens instead of the kept ones: max |ratio - 1| = {(biased - 1).abs().max():.1e}")
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - args.entropy_bonus * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        tokens += rollout.actions.numel()
        if step % 10 == 0 or step == 1:
            print(f"step {step} reward {reward.mean():.3f} entropy {entropy.mean():.2f} "
                  f"tokens/s {tokens / (time.perf_counter() - started):,.0f}", flush=True)


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    steps = args.steps if args.steps is not None else 60 if args.quick else 300

    torch.set_default_device(args.device)
    torch.manual_seed(args.seed)
    started = time.perf_counter()
    model = SmallLM(VOCAB + 1, PROMPT + NUMBERS)
    warm_up(model, args.warm_up)
    print(f"warm-up: {args.warm_up} steps, {time.perf_counter() - started:.1f} s", flush=True)

    held_out = prompts(512)
    before = measure(model, held_out, args)
    train(model, steps, args)
    after = measure(model, held_out, args)
    print(f"\n{'held-out prompts':<18}{'before':>8}{'after':>8}")
    for name, *values in zip(("mean reward", "entropy, nats", "kept tokens"), before, after):
        print(f"{name:<18}{values[0]:>8.3f}{values[1]:>8.3f}")
    print(f"{time.perf_counter() - started:.0f} s in total")


if __name__ == "__main__":
    main()
