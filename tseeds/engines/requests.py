"""What all engines ask of a request before they take any."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tseeds.engines.base import Request
from tseeds.errors import UserError


def check(requests: Sequence[Request], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse requests that no engine can answer, before any of them runs.

    Raises:
        UserError: naming the request by its position.
    """
    for index, request in enumerate(requests):
        where, length = f"request {index} of {len(requests)}", len(request.ids)
        if length == 0:
            raise UserError(f"{where}: no token ids; a prompt needs at least one token")
        if length > max_model_len - 1:
            raise UserError(
                f"{where}: {length} prompt tokens where the engine takes {max_model_len - 1} "
                f"(max_model_len {max_model_len} less one to sample): lower problems.max_prompt_tokens"
            )
        if request.max_tokens < 1:
            raise UserError(f"{where}: max_tokens {request.max_tokens}; it must be at least 1")
        if min(request.ids) < 0 or max(request.ids) >= vocab_size:
            bad = next(i for i in request.ids if not 0 <= i < vocab_size)
            raise UserError(
                f"{where}: token id {bad} is outside the policy's vocabulary of {vocab_size}: "
                "the problems were tokenised for another model"
            )


def entropy(logprobs: Sequence[float]) -> float:
    """Entropy in nats of a distribution known by its top log-probs; the remaining mass counts as one more token.

    A lower bound of the true entropy: the rest adds at most rest * log(its number of tokens).

    >>> round(entropy([math.log(0.5), math.log(0.25)]), 4)
    1.0397
    """
    known = [p for p in logprobs if p > -math.inf]
    rest = 1.0 - sum(math.exp(p) for p in known)
    lump = -rest * math.log(rest) if rest > 1e-9 else 0.0
    return lump - sum(math.exp(p) * p for p in known)
