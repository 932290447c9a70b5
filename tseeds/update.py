"""Stage update: the mixed-loss policy update on one iteration's rollouts and scores.

Reads the policy of step i - 1 with its trainer state, rollouts, scores; writes policy/ (a model directory; with update.lora
an adapter), state/ (optimizer moments, fp32 master weights where the policy is bf16, step and token counts), rows.parquet,
steps.parquet and, when asked for, tokens.parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tseeds.artifacts.policy import ADAPTER_CONFIG
from tseeds.artifacts.rundir import digest_of, recorded_digest
from tseeds.artifacts.store import Identity, Manifest, check_space, read_rows, require, verified, writing
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.errors import UserError

if TYPE_CHECKING:
    from tseeds.training.compare import Comparison

STAGE = "update"
VERSION = 1
_NEUTRAL = {"processes", "threads", "kl_sampler"}  # the snapshot that kl_sampler takes is an input


@dataclass(frozen=True)
class Inputs:
    """policy: model directory; state: trainer state beside it (None at step 0); reference: model directory of the KL term."""

    policy: Path
    state: Path | None
    rollouts: Path
    scores: Path
    iteration: int
    reference: Path | None = None


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the weights: loss and optimizer values, and digests of policy, trainer state, rollouts and scores."""
    values: dict[str, Any] = {
        "run.seed": config.run.seed,
        "iteration": inputs.iteration,
        "policy.dtype": config.policy.dtype,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        **{f"update.{k}": v for k, v in config.update.model_dump(mode="json").items() if k not in _NEUTRAL},
    }
    if config.update.lora is not None:
        values["update.lora.policy"] = "adapter"  # earlier versions wrote the merged model
    digests = {
        "policy": recorded_digest(inputs.policy),
        "rollouts": require(inputs.rollouts, "rollouts").digest,
        "scores": require(inputs.scores, "scores").digest,
    }
    if inputs.state is not None:
        digests["state"] = require(inputs.state.parent, "trainer state").digest
    if inputs.reference is not None:
        digests["reference"] = recorded_digest(inputs.reference)
    return Identity(STAGE, VERSION, values, digests)


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Train on the iteration's rows and commit the new policy at ``out``.

    Raises:
        UserError: an input is missing or damaged. StageFailed: the disk is full.
    """
    from tseeds.training import distributed
    from tseeds.training.trainer import Rows, Trainer

    ident = identity(config, inputs)
    rollouts = read_rows(inputs.rollouts, "rollouts", ["response_ids"])
    scores = read_rows(inputs.scores, "scores", ["reward"])
    rows = Rows.from_tables(rollouts, scores)
    check_space(out, _bytes(config, inputs.policy), f"policy and optimizer state of iteration {inputs.iteration}")
    context.progress.begin(STAGE, len(rows))
    if context.engine_running and config.engine.sleep_during_update:
        context.engine().sleep()
    options: dict[str, Any] = {
        "dtype": config.policy.dtype,
        "run_seed": config.run.seed,
        "max_response_tokens": config.rollout.max_response_tokens,
        "state": inputs.state,
        "trust_remote_code": config.policy.trust_remote_code,
    }
    several = config.update.processes > 1
    made_with = (config.update, config.policy, config.run.seed, config.rollout.max_response_tokens)
    if context.trainer is None or context.trainer[0] != (made_with, ident.inputs["policy"], ident.inputs.get("state")):
        if digest_of(inputs.policy) != ident.inputs["policy"]:
            raise UserError(
                f"{inputs.policy}: damaged, it differs from the digest recorded when it was written; restore it"
            )
        if inputs.state is not None:
            verified(require(inputs.state.parent, "trainer state"), under=f"{inputs.state.name}/")
        context.trainer = None  # frees the old one before the new one is built
        trainer = None if several else Trainer(config.update, inputs.policy, **options)
    else:
        trainer = context.trainer[1]
    if inputs.reference is not None and digest_of(inputs.reference) != ident.inputs["reference"]:
        raise UserError(
            f"{inputs.reference}: damaged, it differs from the digest recorded when it was written; restore it"
        )
    context.trainer = None  # a step that fails half-way leaves no trainer that could be reused
    with writing(out, ident) as writer:
        policy, state = writer.path("policy"), writer.path("state")
        if trainer is None:
            result = distributed.update(
                config.update,
                inputs.policy,
                rows,
                out_policy=policy,
                out_state=state,
                iteration=inputs.iteration,
                reference=inputs.reference,
                ray_address=config.engine.ray_address,
                **options,
            )
        else:
            result = trainer.step(rows, iteration=inputs.iteration, reference=inputs.reference)
            trainer.save(policy, state)
        context.progress.advance(len(rows), int(result.summary.get("tokens", 0)))
        writer.table("rows.parquet", result.rows)
        writer.table("steps.parquet", result.steps)
        if result.tokens is not None:
            writer.table("tokens.parquet", result.tokens)
        writer.facts.update(
            policy=digest_of(writer.path("policy")),
            step=inputs.iteration,
            summary={k: known(v) for k, v in result.summary.items()},
        )
    assert writer.manifest is not None
    if trainer is not None:
        context.trainer = ((made_with, writer.manifest.facts["policy"], writer.manifest.digest), trainer)
    context.progress.end()
    return writer.manifest


def _bytes(config: Pipeline, policy: Path) -> int:
    """About what an update writes: the weights and two moments of each, fp32 masters too where the files are not fp32."""
    size = sum(f.stat().st_size for f in policy.glob("*.safetensors"))
    if config.update.lora is not None:  # of an adapter, which the first update makes from a whole model
        return 4 * size if (policy / ADAPTER_CONFIG).is_file() else 0
    return (4 if config.policy.dtype == "float32" else 8) * size


def compare_gradients(
    config: Pipeline, inputs: Inputs, modes: Sequence[str] | None = None, *, at: Path | None = None
) -> Comparison:
    """What each ``prefix_weight`` in ``modes`` (None: all) would do to the committed rows of ``inputs``; trains nothing.

    at: a later policy to take the gradients at, with ``inputs.policy`` as pi_old; None: at ``inputs.policy`` itself.

    Raises:
        UserError: an input is missing or damaged, or a mode is unknown.
    """
    from tseeds.training.compare import compare_modes
    from tseeds.training.loss import PREFIX_MODES
    from tseeds.training.trainer import Rows

    rows = Rows.from_tables(
        read_rows(inputs.rollouts, "rollouts", ["response_ids"]), read_rows(inputs.scores, "scores", ["reward"])
    )
    return compare_modes(
        config.update, at or inputs.policy, rows, list(PREFIX_MODES) if modes is None else modes,
        dtype=config.policy.dtype, run_seed=config.run.seed, max_response_tokens=config.rollout.max_response_tokens,
        old=inputs.policy if at is not None else None, trust_remote_code=config.policy.trust_remote_code,
    )  # fmt: skip


def known(value: float) -> float | None:
    """JSON-ready: NaN (nothing to average) becomes null."""
    return None if value != value else value
