"""Proof that an engine holds the policy it was told to: log-probs of fixed sequences against the trainer's side."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tseeds.artifacts.policy import probe_sequences, read_probe
from tseeds.engines import policies
from tseeds.errors import StageFailed, UserError, first_line

logger = logging.getLogger(__name__)

TOLERANCE = {"float32": (1e-3, 5e-3), "bfloat16": (0.15, 1.0), "float16": (0.05, 0.3)}
"""Largest allowed (mean, maximum) of |engine - trainer| log-prob in nats (docs/engines.md has what was measured)."""


_MEND = 'Run again; if it repeats, use engine.backend = "transformers" and report it'


@dataclass(frozen=True)
class Probe:
    """Trainer-side log-probs: ids [n][length]; logprobs [n][length - 1] of token t given tokens < t; compute dtype."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    dtype: str


def of_policy(policy: Path, vocab_size: int, dtype: str, *, trust_remote_code: bool = False) -> Probe:
    """The probe stored beside the weights, or one computed now with transformers on the CPU.

    Raises:
        UserError: probe.json is damaged, or transformers cannot load the model.
    """
    return stored(policy) or compute(policy, vocab_size, dtype, trust_remote_code=trust_remote_code)


def stored(policy: Path) -> Probe | None:
    """The probe beside the weights, or None where there is none.

    Raises:
        UserError: probe.json is damaged.
    """
    try:
        found = read_probe(policy)
        if found is None:
            return None
        probe = Probe(ids=found["ids"], logprobs=found["logprobs"], dtype=found["dtype"])
        lengths = [len(i) == len(p) + 1 for i, p in zip(probe.ids, probe.logprobs, strict=True)]
        if probe.dtype not in TOLERANCE or not lengths or not all(lengths):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{policy / 'probe.json'}: damaged probe; delete the file and it is computed anew") from None
    return probe


def compute(policy: Path, vocab_size: int, dtype: str, *, trust_remote_code: bool = False) -> Probe:
    """Log-probs of ``probe_sequences`` by transformers on the CPU, in ``dtype`` with a float32 softmax."""
    ids = probe_sequences(vocab_size)
    model = open_model(policy, dtype, trust_remote_code=trust_remote_code)
    return Probe(ids=ids, logprobs=score(model, ids), dtype=dtype)


def open_model(policy: Path, dtype: str, *, device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """The policy as a transformers model, every tensor of it read from the files.

    Raises:
        UserError: transformers cannot load it, or would have invented a tensor that the files lack.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not (policy / "config.json").is_file():
        return _open_adapter(policy, dtype, device=device, trust_remote_code=trust_remote_code)
    try:
        with without_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(policy),
                dtype=getattr(torch, dtype),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise UserError(f"{policy}: transformers cannot load this policy: {first_line(error)}") from None
    model, info = loaded
    lacking = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if lacking:
        raise UserError(f"{policy}: its files lack or misshape the tensor {lacking[0]}; copy the model again")
    return model.to(device).eval()


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the progress bars of transformers off the terminal."""
    from transformers.utils import logging as noise

    bars = noise.is_progress_bar_enabled()
    noise.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            noise.enable_progress_bar()


def refill(model: Any, policy: Path) -> bool:
    """Read the policy's tensors into ``model`` in place; False, with nothing read, where names or shapes do not match.

    For a small model this is ten times cheaper than opening it again. Tied weights need no tensor of their own. The caller
    proves the result with ``check``.
    """
    import torch
    from safetensors.torch import load_file

    found = {k: v for file in sorted(policy.glob("*.safetensors")) for k, v in load_file(file).items()}
    own = model.state_dict()
    tied = {k for k, v in own.items() if any(v.data_ptr() == own[name].data_ptr() for name in found if name in own)}
    if any(name not in own or own[name].shape != v.shape for name, v in found.items()) or set(own) - set(found) - tied:
        return False
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(value)
    return True


def _open_adapter(policy: Path, dtype: str, *, device: str, trust_remote_code: bool) -> Any:
    """Base and LoRA adapter as one model, merged in ``dtype``."""
    described = policies.describe(policy)
    assert described.base is not None
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(f"{policy}: a LoRA adapter needs peft: install tseeds[lora]") from None
    model = open_model(described.base.path, dtype, device=device, trust_remote_code=trust_remote_code)
    return PeftModel.from_pretrained(model, str(policy)).merge_and_unload().eval()


def score(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs at temperature 1 of every token but the first of each sequence (all of one length), float32 softmax."""
    import torch

    tokens = torch.tensor(sequences, device=model.device)
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].tolist()


def check(policy: Path, probe: Probe, found: list[list[float]], dtype: str, previous: Probe | None = None) -> float:
    """Compare the engine's log-probs ``found`` with the probe's; returns the mean absolute difference in nats.

    previous: the probe of the policy held before. A small update changes log-probs by less than the tolerance of
    bfloat16, so an engine three times nearer to the previous policy than to the new one counts as never swapped.

    Raises:
        StageFailed: beyond the tolerance of the coarser of both dtypes, not a number, or still the previous policy.
    """
    pairs = [(a, b) for want, got in zip(probe.logprobs, found, strict=True) for a, b in zip(want, got, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    mean, worst = sum(gaps) / len(gaps), max(gaps)
    limits = max(TOLERANCE[dtype], TOLERANCE[probe.dtype])
    if not (mean <= limits[0] and worst <= limits[1]):
        raise StageFailed(
            f"{policy}: after the swap the engine's log-probs differ from the trainer's by {mean:.2g} on average and "
            f"{worst:.2g} at most (allowed in {dtype}: {limits[0]:g} and {limits[1]:g}); the engine does not hold this "
            f"policy, and nothing was sampled. {_MEND}"
        )
    if previous is not None and previous.ids == probe.ids:
        old = [a for row in previous.logprobs for a in row]
        before = [abs(a - b) for a, (_, b) in zip(old, pairs, strict=True)]
        if 3 * sum(before) < sum(gaps):
            raise StageFailed(
                f"{policy}: after the swap the engine still holds the previous policy (its log-probs differ by "
                f"{sum(before) / len(before):.2g} from that one's and by {mean:.2g} from the new one's); nothing was "
                f"sampled. {_MEND}"
            )
    return mean
