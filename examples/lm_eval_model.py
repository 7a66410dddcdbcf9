"""Evaluates a causal language model with lm-evaluation-harness from its hidden states: no (tokens, vocabulary) logits.

    python examples/lm_eval_model.py --model sparse-hf --model_args pretrained=FOLDER_OR_NAME --tasks wikitext,hellaswag

The arguments are those of ``lm_eval`` (see ``lm_eval --help``); the model ``sparse-hf`` takes the arguments of
lm_eval's ``hf``. In Python, call
``lm_eval.simple_evaluate(model=SparseHFLM(pretrained=model, tokenizer=tokenizer), tasks=[...])``.

``hf`` stores the logits and the log-probabilities of all tokens, context included. ``sparse-hf`` computes logits of the
continuations only, in chunks. Log-probabilities of 16-bit models are float32, as with ``softmax_dtype=float32``.
"""

import argparse
from typing import Any, List, Optional, Sequence, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
if __name__ == "__main__":
    parser.parse_known_args()  # answers --help before the slow imports

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM, eval_logger
from lm_eval.models.utils import Collator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from sparse_ce import LogProbs
from sparse_ce.integrations.transformers import logits_of

Request = Tuple[Any, List[int], List[int]]  # texts, and the tokens of the context and of the continuation
Score = Tuple[float, bool]  # log-likelihood, and whether each token is the most likely one


@register_model("sparse-hf")
class SparseHFLM(HFLM):
    """Replaces the log-likelihoods of decoders. Generation, encoder-decoders and all arguments are those of ``HFLM``,
    without ``softmax_dtype``."""

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = False,
                              override_bs: Optional[int] = None) -> List[Score]:
        if self.backend != "causal":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        # Continuations that differ only in their last token share an input.
        order = Collator(requests, lambda request: (-len(request[1] + request[2]), request[1] + request[2]),
                         lambda request: request[1] + request[2][:-1], "contexts" if self.logits_cache else None)
        self.batch_sizes, scores = {}, []  # "auto" measures batch sizes for these requests
        size, schedule = override_bs or self.batch_size, None
        if size == "auto":
            size, schedule = 0, self._batch_scheduler
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or self.rank != 0) as progress:
            for batch in order.get_batched(size, schedule):
                shared = [(row, texts, ids) for row, request in enumerate(batch)
                          for texts, ids, _ in order.get_cache(*request, torch.empty(1, 1, 1))]
                found = self._scores([self._input(context, continuation) for _, context, continuation in batch],
                                     [(row, ids) for row, _, ids in shared])
                for (_, texts, _), score in zip(shared, found):
                    if texts is not None:  # windows of loglikelihood_rolling have none
                        self.cache_hook.add_partial("loglikelihood", texts, score)
                scores += found
                progress.update(len(found))
        return order.get_original(scores)

    def _input(self, context: List[int], continuation: List[int]) -> List[int]:
        """Returns the model's input, whose last positions predict the continuation."""
        if not (context and 0 < len(continuation) <= self.max_length):
            raise ValueError(f"a request must have a context and 1 to {self.max_length} (max_length) tokens to score, "
                             f"got {len(context)} and {len(continuation)}")
        tokens = (context + continuation)[:-1]
        if len(tokens) > self.max_length:
            eval_logger.warning(f"truncated {len(tokens)} tokens from the left, to {self.max_length} (max_length)")
        return tokens[-self.max_length:]

    def _scores(self, inputs: List[List[int]], continuations: List[Tuple[int, List[int]]]) -> List[Score]:
        """Computes the score of each continuation, a pair of its row in ``inputs`` and its tokens."""
        tokens = pad_sequence([torch.tensor(one) for one in inputs], batch_first=True).to(self.device)
        rows = torch.tensor([row for row, one in continuations for _ in one])
        # Counted from the end, because PEFT may prepend virtual tokens.
        positions = torch.cat([torch.arange(-len(one), 0) + len(inputs[row]) - tokens.shape[1]
                               for row, one in continuations])
        ids = torch.tensor([token for _, one in continuations for token in one])
        out = self._log_probs(tokens, (rows, positions), ids.to(self.device))
        lengths = [len(one) for _, one in continuations]
        return [(float(log_probs.sum()), bool(greedy.all())) for log_probs, greedy in zip(
            out.log_probs.cpu().split(lengths), (out.argmax.cpu() == ids).split(lengths))]

    def _log_probs(self, tokens: Tensor, index: Tuple[Any, ...], ids: Tensor) -> LogProbs:
        """Computes the log-probabilities of ``ids`` at positions ``index`` of ``tokens`` (B, S)."""
        with torch.no_grad(), torch.autocast(self.device.type, self.mixed_precision_dtype,
                                             enabled=self.mixed_precision_dtype is not None):
            return logits_of(self.model, {"input_ids": tokens}).of_rows(index).log_probs(ids, return_argmax=True)

    def _model_call(self, inps: Tensor, attn_mask: Optional[Tensor] = None, labels: Optional[Tensor] = None) -> Tensor:
        """Computes log-probabilities (B, S) in place of logits: ``HFLM`` searches the largest batch with this call."""
        if labels is not None:
            return super()._model_call(inps, attn_mask, labels)
        return self._log_probs(inps, (slice(None), slice(-inps.shape[1], None)), inps).log_probs


if __name__ == "__main__":
    cli_evaluate()
