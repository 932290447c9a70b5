"""What every engine offers: load a policy, sample token ids with their log-probs, verified after each swap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample.

    ids: prompt and seed token ids, as they are (no token is added). max_tokens: budget of new tokens (>= 1).
    seed: this request's own random seed (63 bits); the result depends on nothing but policy, ids and these values.
    entropies: also return the entropy of each sampled token's distribution.
    part: where neighbours in a batch change the last bits of a log-prob, requests of different parts are never neighbours,
    so that a part that is made again after an interruption is made alike.
    """

    ids: Sequence[int]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    entropies: bool = False
    part: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """New tokens of one request, the closing end-of-sequence token included.

    ids [T]; logprobs [T] of the tempered distribution that was sampled from; finish_reason "stop" (an end-of-sequence
    token was sampled) or "length"; entropies [T] in nats, or None when not asked for.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    entropies: list[float] | None = None


class Engine(Protocol):
    """Samples from one policy at a time."""

    def load(self, policy: Path) -> str:
        """Make ``policy`` (a Hugging Face model directory) the one that is sampled from, and return its digest.

        Loading the policy that is already held costs nothing. After a swap the engine's log-probs of the policy's probe
        sequences are compared with the trainer-side ones.

        Raises:
            UserError: the directory is not a usable policy (missing shard, other vocabulary, ...).
            StageFailed: the engine's log-probs differ from the trainer-side ones, or the engine died.
        """
        ...

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, completion) as completions finish, all requests in flight at once."""
        ...

    def sleep(self) -> None:
        """Free device memory until the next load or sample (no-op where the device is not shared)."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
