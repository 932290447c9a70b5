"""Pipeline files: TOML read into typed, documented models.

A pipeline file holds one table per stage, and may name another file as its ``base`` (``read``). Unknown keys, wrong
types and impossible combinations are one clear line each. Nothing here imports torch or vllm, so that ``tseeds
validate`` starts at once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from tseeds.errors import UserError
from tseeds.grading.options import Conventions as ScoreConfig
from tseeds.grading.options import Task

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

PrefixWeight = Literal["clip", "mask", "decoupled", "truncate", "shape", "shape_policy", "band", "topr", "on_policy"]


class Section(BaseModel):
    """A table of a pipeline file: immutable, unknown keys refused, the line under each field is its documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_guessing(cls, value: Any, info: ValidationInfo) -> Any:
        """true is no number, "12" is no number, and yes is no boolean."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if kind in (int, float) and isinstance(value, bool | str):
            raise ValueError(f"{value!r} is no number")
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value


class RunConfig(Section):
    """How long to train, and the one number that all randomness comes from."""

    seed: int = 0
    """Run seed: every sampling seed is a hash of it with iteration, stage, problem and slot."""
    iterations: NonNegative = 100
    """Iterations to train; raising it continues a finished run, unless a falling seed.schedule ends with the run (set
    seed.schedule_end)."""


class ArchitectureConfig(Section):
    """The numbers of a policy's config.json that decide its size."""

    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the gated MLP."""
    num_hidden_layers: Positive
    """Layers."""
    num_attention_heads: Positive
    """Query heads."""
    num_key_value_heads: Positive
    """Key and value heads."""
    head_dim: NonNegative = 0
    """Width of a head; 0 is hidden_size / num_attention_heads."""
    vocab_size: Positive
    """Rows of the embedding."""
    tie_word_embeddings: bool = False
    """Embedding and output head are one matrix."""
    attention_bias: bool = False
    """Query, key and value projections have biases (Qwen2.5)."""
    qk_norm: bool = False
    """Queries and keys are normalised per head (Qwen3)."""


class PolicyConfig(Section):
    """The policy that training starts from."""

    path: str
    """Hugging Face model directory: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision of engine and trainer; master weights are always float32."""
    trust_remote_code: bool = False
    """Run Python code that ships inside the model directory. Leave off unless you wrote that code."""
    architecture: ArchitectureConfig | None = None
    """The policy's size, for tseeds validate --estimate where the policy itself is not on this machine; not used otherwise."""


class BenchmarkConfig(Section):
    """One evaluation data set."""

    name: str
    """Name in tables and files."""
    path: str
    """As problems.path."""
    columns: dict[Literal["id", "problem", "gold", "source", "difficulty"], str] = {}
    """As problems.columns."""
    task: Task | None = None
    """As problems.task, which is the default."""
    limit: NonNegative = 0
    """Use only the first N good rows; 0 uses all."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
            raise ValueError("it names a directory: up to 80 letters, digits, dots, dashes, underscores")
        return name


Finding = Literal["keep", "quarantine", "fail"]


class FindingsConfig(Section):
    """What becomes of rows in which ingest finds something: keep, quarantine (counted and listed), or fail the stage."""

    unusable: Literal["quarantine", "fail"] = "quarantine"
    """Rows that cannot be read, or have no problem text or no gold."""
    unparsable_gold: Finding = "quarantine"
    """The task's grader cannot read the gold: no answer could ever be right."""
    conflicting_gold: Finding = "quarantine"
    """One problem with different golds; quarantine takes all of its rows, for nobody knows which gold is right."""
    duplicate: Finding = "quarantine"
    """The same problem and gold again; the first row stays."""
    damaged_text: Finding = "quarantine"
    """Control characters of broken LaTeX escapes, such as a form feed before "rac"."""
    partial_gold: Finding = "keep"
    """The gold seems to hold one of several answers (a guess from the wording or from the solution's boxes)."""
    contaminated: Finding = "quarantine"
    """Equal or close to a row of evaluate.benchmarks or problems.benchmarks."""
    special_token: Finding = "quarantine"
    """The text contains one of the tokenizer's special tokens, which would end or forge a turn."""
    overlong: Literal["quarantine", "fail"] = "quarantine"
    """The prompt has more than max_prompt_tokens tokens."""


class ProblemsConfig(Section):
    """Where problems come from and how they become prompt token ids."""

    path: str | list[str]
    """JSONL, Parquet or CSV file, a directory or pattern of such parts, an hf:// file, or reasoning-gym:NAME?size=500."""
    columns: dict[Literal["id", "problem", "gold", "source", "difficulty"], str] = {}
    """Column mapping for data whose columns are not found by name, such as {problem = "question"}; dots enter structs."""
    task: Task = "math"
    """What a correct answer is: math, gsm8k, countdown, or python:FILE.py:FUNCTION for your own verifier."""
    prompt: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template; plain: the template below as it stands."""
    template: str = "{problem}"
    """Text of the user turn (chat) or of the whole prompt (plain); {problem} is replaced."""
    system: str | None = None
    """System turn of a chat prompt."""
    prefill: str = ""
    """Text that opens the assistant turn, such as "<think>\\n"."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are quarantined with a reason."""
    limit: NonNegative = 0
    """Use only the first N good rows; 0 uses all."""
    findings: FindingsConfig = FindingsConfig()
    """What becomes of suspicious rows, one policy per kind of finding."""
    benchmarks: list[BenchmarkConfig] = []
    """Data sets that training must not contain, beside evaluate.benchmarks."""
    contamination_ngram: Positive = 8
    """Words of one n-gram in the search for training rows that are close to benchmark rows."""
    contamination_overlap: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Close means that this share of the shorter text's n-grams is in the other text."""

    @model_validator(mode="after")
    def _prompt(self) -> ProblemsConfig:
        if self.prompt == "plain" and self.system is not None:
            raise ValueError('system needs prompt = "chat"; put its text into template')
        if "{problem}" not in self.template:
            raise ValueError("template must contain {problem}")
        return self


class CurriculumConfig(Section):
    """Which problems are trained on and how often, by the base policy's own pass rate, measured once before training."""

    samples: NonNegative = 0
    """Responses per problem that measure the base policy's pass rate; 0 measures nothing and every epoch takes every problem
    once."""
    lo: Fraction = 0.0
    """Problems with a pass rate below this are left out."""
    hi: Fraction = 1.0
    """Problems with a pass rate above this are left out."""
    weight: Literal["equal", "variance", "hard"] = "equal"
    """How often a problem comes relative to others: equal; variance, the expected p(1 - p) given what was measured; hard,
    the expected 1 - p. Both under a uniform prior of p, so that no measured pass rate gives 0."""

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        if self.lo > self.hi:
            raise ValueError(f"lo {self.lo} is above hi {self.hi}")
        if not self.samples and (self.lo, self.hi, self.weight) != (0.0, 1.0, "equal"):
            raise ValueError("lo, hi and weight need measured pass rates: set curriculum.samples, such as 8")
        return self


class SnapshotConfig(Section):
    """Which past policies are kept as a pool of seed writers."""

    every: Positive = 10
    """A snapshot is taken at step 0 and then every this many iterations."""
    keep_last: NonNegative = 0
    """Keep this many newest snapshots (beside step 0); 0 keeps all."""
    keep_every: NonNegative = 0
    """Additionally keep every snapshot whose step is a multiple of this; 0 adds none."""
    disk_budget_gb: Annotated[float, Field(ge=0)] = 0.0
    """Oldest snapshots go first when snapshots need more than this; 0 sets no budget."""
    keep_states: Positive = 2
    """Weights and trainer state of this many newest iterations are kept to resume or fork from."""
    keep_states_every: NonNegative = 0
    """Additionally keep them at every iteration that is a multiple of this; 0 adds none."""


class SeedConfig(Section):
    """Prefixes written by past policies."""

    share: Fraction = 0.5
    """Share of every group that is seeded; 0 is plain on-policy training."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the share falls from its start to 0 at schedule_end."""
    schedule_end: NonNegative = 0
    """Iteration at which a falling share reaches 0; 0 means run.iterations."""
    position: Literal["prefix", "suffix", "whole"] = "prefix"
    """What the snapshot writes: the beginning (the method), the end, or everything (naive replay)."""
    sampler: Literal["uniform", "recent", "fixed_lag", "oldest", "spread", "current"] = "uniform"
    """Which snapshot writes: uniform over history, recent (exp(-lag/tau)), a fixed lag, step 0, equally spaced, or
    the current policy itself (a control)."""
    snapshots_per_iteration: Positive = 1
    """How many snapshots are drawn in an iteration; each costs one weight swap of the engine."""
    tau: Annotated[float, Field(gt=0)] = 20.0
    """Time constant of the recent sampler, in iterations."""
    lag: Positive = 10
    """Lag of the fixed_lag sampler, in iterations: the newest snapshot at least this old."""
    cut: Literal["uniform", "tokens", "line", "entropy_peak", "target"] = "uniform"
    """Where the chain is cut: a uniform fraction of it, a uniform number of tokens, the last newline before the uniform
    fraction, the entropy peak of the middle half, or a fraction steered by the problem's own pass rate."""
    lo: Annotated[float, Field(ge=0)] = 0.2
    """Lower end of the cut: a fraction of the chain, or tokens for cut = "tokens"."""
    hi: Annotated[float, Field(gt=0)] = 0.8
    """Upper end of the cut: a fraction of the chain, or tokens for cut = "tokens"."""
    source: Literal["live", "replay"] = "live"
    """live: the snapshot generates now; replay: cut a stored unseeded trajectory of an earlier iteration."""
    success: Literal["any", "correct", "wrong"] = "any"
    """Keep seeds of any chain, or only of chains that were graded correct or wrong."""
    candidates: Positive = 1
    """Chains sampled per seed from which success picks the first that fits (live source)."""
    continuations: Positive = 1
    """Trajectories that continue one seed; the seeded rows of a group are rounded down to a multiple of it. 1 (distinct
    seeds) keeps the seed's gradient from cancelling."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of the seed; log-probs are recorded at it."""

    @model_validator(mode="after")
    def _check(self) -> SeedConfig:
        if self.lo > self.hi:
            raise ValueError(f"lo {self.lo} is above hi {self.hi}")
        if self.cut == "tokens":
            if self.lo != int(self.lo) or self.hi != int(self.hi):
                raise ValueError(f'cut = "tokens" counts tokens: lo {self.lo} and hi {self.hi} must be whole numbers')
        elif self.hi > 1:
            raise ValueError(f'hi {self.hi} is above 1: cut = "{self.cut}" takes fractions of the chain')
        if self.success != "any" and self.position == "suffix":
            raise ValueError("success filters chains of a snapshot; position suffix has none before the rollout")
        if self.source == "replay" and self.position == "suffix":
            raise ValueError("source replay has no suffix: stored trajectories cannot finish a new beginning")
        if self.cut != "uniform" and self.position == "suffix":
            raise ValueError(
                f'cut "{self.cut}" looks at a chain of the snapshot; position suffix has none before the rollout: '
                'use cut = "uniform"'
            )
        if self.source == "replay" and self.temperature != 1.0:
            raise ValueError(
                "temperature is of live seeds: stored trajectories keep the rollout.temperature that they were sampled at"
            )
        return self


class RolloutConfig(Section):
    """On-policy completion of seeded and unseeded rows."""

    problems_per_iteration: Positive = 128
    """Groups in one iteration."""
    group_size: Positive = 8
    """Trajectories of one problem in one iteration (G)."""
    max_response_tokens: Positive = 1024
    """Budget of seed and continuation together."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; all log-probs are of this tempered distribution."""
    top_p: float = 1.0
    """Must stay 1: truncated sampling renormalises log-probs and breaks the importance ratio."""
    top_k: int = 0
    """Must stay 0, for the same reason."""

    @model_validator(mode="after")
    def _untruncated(self) -> RolloutConfig:
        if self.top_p != 1.0:
            raise ValueError(f"top_p {self.top_p} renormalises log-probs and breaks the importance ratio; use 1")
        if self.top_k != 0:
            raise ValueError(f"top_k {self.top_k} renormalises log-probs and breaks the importance ratio; use 0")
        return self


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters is alpha / rank."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Names of the linear layers that get an adapter."""


class UpdateConfig(Section):
    """The mixed-loss policy update (docs/loss.md)."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Constant AdamW learning rate; 1e-5 where adapters are trained and none is given."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW moment decays."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW decoupled weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient-norm limit."""
    minibatches: Positive = 2
    """Optimizer steps per epoch over an iteration's rows; split by problem, never within a group."""
    epochs: Positive = 1
    """Passes over an iteration's rows."""
    tokens_per_microbatch: Positive = 16384
    """Token budget of one forward/backward; changes memory and speed, never the gradient."""
    prefix_weight: PrefixWeight = "clip"
    """Loss on seed tokens: one of the modes of docs/loss.md."""
    prefix_coef: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the seed tokens' loss."""
    prefix_top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep only this share of seed tokens, those of highest entropy (0.2 in Prefix-RFT, arXiv 2507.01679)."""
    prefix_cap: Annotated[float, Field(gt=0)] = 2.0
    """Cap C of the importance weight in modes decoupled and truncate."""
    shape_gamma: Annotated[float, Field(gt=0)] = 0.1
    """gamma of modes shape and shape_policy."""
    continuation_correction: Literal["none", "geometric", "min_ratio", "reject"] = "none"
    """Weight of the continuation for its seed being off-policy (docs/loss.md)."""
    reject_lo: Annotated[float, Field(ge=0)] = 0.5
    """reject: drop trajectories whose geometric-mean seed ratio is below this."""
    reject_hi: Annotated[float, Field(gt=0)] = 2.0
    """reject: drop trajectories whose geometric-mean seed ratio is above this."""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip range."""
    eps_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip range."""
    dual_clip: Annotated[float, Field(ge=0)] = 3.0
    """Bound c of the loss for A < 0 and large ratios, on seed and continuation; 0 switches it off."""
    mismatch_cap: Annotated[float, Field(gt=0)] = 2.0
    """Cap of the engine/trainer mismatch weight on continuation tokens."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses become one number (docs/loss.md)."""
    advantage: Literal["group", "group_std", "leave_one_out", "split", "per_seed"] = "group"
    """Baseline of the advantage."""
    drop_degenerate: bool = False
    """Leave zero-variance groups out of the denominators too."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL term; 0 computes none."""
    kl_reference: Literal["base", "snapshot"] = "base"
    """base: k3 estimate to the step-0 policy; snapshot: exact forward KL over the vocabulary to one snapshot per iteration (the
    trust-region control)."""
    kl_sampler: Literal["uniform", "recent", "fixed_lag", "oldest", "spread"] = "uniform"
    """Which snapshot kl_reference = "snapshot" takes: as seed.sampler, with seed.tau and seed.lag."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Trajectories that hit the budget: keep as graded, mask out of the loss, or a soft length penalty on the reward."""
    overlong_buffer: NonNegative = 0
    """penalty: the reward falls linearly to -1 over the last this many tokens of the budget (DAPO, arXiv 2503.14476)."""
    token_filter: Literal["none", "clip_cov", "kl_cov"] = "none"
    """Treatment of the tokens of highest advantage-log-prob covariance (arXiv 2505.22617)."""
    token_filter_share: Annotated[float, Field(gt=0, le=1)] = 0.002
    """Share of tokens that token_filter acts on."""
    token_filter_coef: Annotated[float, Field(ge=0)] = 1.0
    """KL coefficient of kl_cov."""
    ratio: Literal["token", "sequence", "m2po", "unclipped"] = "token"
    """Continuation ratio: per token, GSPO's sequence ratio (2507.18071), M2PO's second-moment mask (2510.01161), or per
    token without any clip, so that the seed alone is clipped (a control)."""
    m2po_threshold: Annotated[float, Field(gt=0)] = 0.04
    """M2PO: bound of the batch's second moment of log-ratios."""
    probe_every: NonNegative = 0
    """Every this many iterations measure the true gradient lost to clipping on a probe batch; 0 never."""
    save_tokens: bool = False
    """Write tokens.parquet: one row per token with ratio, weight and clip flags."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights; every policy but step 0 is then an adapter in peft's format."""
    processes: Positive = 1
    """Trainer processes (FSDP2); more than one is started through torchrun."""
    threads: NonNegative = 0
    """CPU threads of the trainer; 0 chooses by model size."""

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lora") is not None and "learning_rate" not in values:
            return {**values, "learning_rate": 1e-5}
        return values


class EvaluateConfig(Section):
    """Evaluation without seeds."""

    every: NonNegative = 0
    """Evaluate every this many iterations, and before the first and after the last; 0 never."""
    samples: Positive = 16
    """Samples per problem (n of pass@k)."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    """Sampling temperature; 0 is greedy and takes one sample per problem."""
    greedy: bool = False
    """Also decode every problem once greedily, beside the samples."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Nucleus sampling."""
    max_response_tokens: NonNegative = 0
    """Token budget; 0 takes the rollout's."""
    benchmarks: list[BenchmarkConfig] = []
    """Data sets to evaluate on."""

    @model_validator(mode="after")
    def _distinct(self) -> EvaluateConfig:
        names = [b.name for b in self.benchmarks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two benchmarks are called {name}; give them different names")
        return self


class EngineConfig(Section):
    """What samples tokens."""

    backend: Literal["vllm", "transformers"] = "vllm"
    """vllm, or transformers as reference and where no vLLM exists."""
    workers: Positive = 1
    """Engines; more than one run as Ray actors."""
    ray_address: str | None = None
    """Join this Ray cluster instead of starting a local one."""
    tensor_parallel: Positive = 1
    """GPUs of one engine."""
    threads: NonNegative = 0
    """CPU threads of one engine; 0 chooses by model size (one thread for small models: barriers cost 20x on busy
    machines)."""
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1.0
    """KV cache of an engine on CPU, in GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of GPU memory of an engine on GPU."""
    sleep_during_update: bool = True
    """On a GPU that engine and trainer share: free the engine's memory during the update."""
    part_rows: Positive = 256
    """Rows of one committed part file: the most that an interruption can cost."""
    stall_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A vLLM engine that finishes no token for this long is reported dead."""


class LogConfig(Section):
    """Where metrics go beside metrics.jsonl."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Optional loggers."""
    project: str = "tseeds"
    """Project name for loggers that have one."""


class Pipeline(Section):
    """A whole pipeline file."""

    run: RunConfig = RunConfig()
    policy: PolicyConfig
    problems: ProblemsConfig
    curriculum: CurriculumConfig = CurriculumConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    seed: SeedConfig = SeedConfig()
    rollout: RolloutConfig = RolloutConfig()
    score: ScoreConfig = ScoreConfig()
    update: UpdateConfig = UpdateConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Pipeline:
        budget = self.rollout.max_response_tokens
        if self.seed.share > 0:
            if self.seed.cut == "tokens" and self.seed.hi + 1 > budget and self.seed.position != "whole":
                raise ValueError(
                    f"seed.hi {self.seed.hi:g} leaves no token for the continuation: "
                    f"it must be below rollout.max_response_tokens {budget}"
                )
            if round(self.seed.share * self.rollout.group_size) < self.seed.continuations:
                several = f"{self.seed.continuations} continuations of one seed"
                raise ValueError(
                    f"seed.share {self.seed.share} of rollout.group_size {self.rollout.group_size} rounds to no "
                    f"{'seeded trajectory' if self.seed.continuations == 1 else several}: raise one of them, or set "
                    "seed.share = 0"
                )
            if (
                self.seed.sampler == "fixed_lag"
                and self.seed.lag < self.snapshot.every
                and self.snapshot.keep_last == 1
            ):
                raise ValueError("seed.lag needs older snapshots than snapshot.keep_last = 1 keeps")
        if self.update.minibatches > self.rollout.problems_per_iteration:
            raise ValueError(
                f"update.minibatches {self.update.minibatches} is above rollout.problems_per_iteration "
                f"{self.rollout.problems_per_iteration}: a minibatch holds whole groups"
            )
        if self.update.advantage == "per_seed" and self.seed.share > 0 and self.seed.continuations < 2:
            raise ValueError(
                'update.advantage = "per_seed" compares continuations of one seed: set seed.continuations >= 2'
            )
        if not self.update.reject_lo <= 1 <= self.update.reject_hi:
            raise ValueError(
                "update.reject_lo <= 1 <= update.reject_hi is needed: a ratio of 1 is a seed as on-policy as can be"
            )
        if self.update.overlong == "penalty" and not 0 < self.update.overlong_buffer <= budget:
            raise ValueError(
                "update.overlong = penalty needs 0 < update.overlong_buffer <= rollout.max_response_tokens"
            )
        return self


def _line(where: str, error: Any) -> str:
    """One line for one pydantic error, naming the key and the mend."""
    key = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        near = _near(error["loc"])
        return f"{where}: unknown key {key}{f'; did you mean {near}?' if near else ''}"
    if error["type"] == "missing":
        return f"{where}: {key} is required"
    if key:
        return (
            f"{where}: {key} = {error['input']!r}: {message}"
            if error["type"] != "value_error"
            else (f"{where}: {key}: {message}")
        )
    return f"{where}: {message}"


def _near(loc: tuple[Any, ...]) -> str | None:
    import difflib

    model: Any = Pipeline
    for part in loc[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return None
        model = next((a for a in (field.annotation, *get_args(field.annotation)) if hasattr(a, "model_fields")), None)
    match = difflib.get_close_matches(str(loc[-1]), list(getattr(model, "model_fields", {})), n=1)
    return ".".join([*map(str, loc[:-1]), match[0]]) if match else None


def parse(data: dict[str, Any], where: str = "pipeline") -> Pipeline:
    """A typed pipeline from nested dictionaries.

    Raises:
        UserError: one line per mistake, joined by newlines.
    """
    try:
        pipeline = Pipeline.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(_line(where, e) for e in error.errors())) from None
    for text in _texts(pipeline.model_dump()):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: {text!a} is not UTF-8 text, no file could keep it") from None
    return pipeline


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested dictionaries and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def set_value(data: dict[str, Any], assignment: str) -> None:
    """Apply one ``--set section.key=value`` to nested dictionaries in place; the value is read as TOML, else as text."""
    key, sep, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not sep or len(parts) < 2 or not all(parts):
        raise UserError(f"--set {assignment}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise UserError(f"--set {assignment}: {part} is a value, not a table")
    data[parts[-1]] = value


def read(path: Path | str) -> dict[str, Any]:
    """The tables of a pipeline file over those of its ``base``, if it names one.

    ``base = "other.toml"`` (relative to the file that names it) takes every value that the file itself does not set; a
    list is replaced whole. A base may have a base of its own.

    Raises:
        UserError: a file is missing, is not TOML, or is its own base.
    """
    return _read(Path(path), ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    named = f"{path}" if not above else f"{above[-1]}: base {path}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{named}: no such pipeline file") from None
    except IsADirectoryError:
        raise UserError(f"{named}: is a directory; name a pipeline file (.toml)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{named}: not valid TOML: {error}") from None
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise UserError(f'{path}: base = {base!r}: name one pipeline file, such as base = "toy.toml"')
    if path.resolve() in [p.resolve() for p in above]:
        raise UserError(f"{path}: base leads back to the file itself")
    return _over(_read(path.parent / base, (*above, path)), data)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, table by table."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def load(path: Path | str, sets: list[str] | tuple[str, ...] = ()) -> Pipeline:
    """Read and check a pipeline file and what it is based on (``read``), with ``--set`` assignments applied.

    Raises:
        UserError: the file is missing, is not TOML, or holds a mistake.
    """
    path = Path(path)
    data = read(path)
    for assignment in sets:
        set_value(data, assignment)
    return parse(data, str(path))


def flatten(config: BaseModel) -> dict[str, Any]:
    """All values as {"section.key": value}, JSON-ready, lists kept whole."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value and prefix.count(".") < 1:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", config.model_dump(mode="json"))
    return flat


def dumps(config: Pipeline) -> str:
    """The resolved pipeline as TOML with every default, each value under its one-line documentation."""
    import tomli_w

    lines: list[str] = []
    for name in Pipeline.model_fields:
        section = getattr(config, name)
        doc = " ".join((type(section).__doc__ or "").split())
        lines += [f"# {doc}", f"[{name}]"]
        for key, info in type(section).model_fields.items():
            value = section.model_dump(mode="json")[key]
            choices = ", ".join(map(str, _choices(info.annotation)))
            note = " ".join((info.description or "").split()) + (f" One of: {choices}." if choices else "")
            if value is None:
                lines += [f"# {note}", f"# {key} is not set"]
                continue
            lines += [f"# {note}", tomli_w.dumps({key: value}).rstrip() if not _nested(value) else _inline(key, value)]
        lines.append("")
    return "\n".join(lines)


def _choices(annotation: Any) -> Sequence[Any]:
    """The values that a field, or each entry of its list, may have where its type names them all."""
    if get_origin(annotation) is list:
        (annotation,) = get_args(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))


def _inline(key: str, value: Any) -> str:
    """Nested values as one inline TOML line, so that a section stays one table."""
    import json

    def show(item: Any) -> str:
        if isinstance(item, dict):
            return (
                "{ " + ", ".join(f"{k} = {show(v)}" for k, v in item.items() if v is not None) + " }" if item else "{}"
            )
        if isinstance(item, list):
            return "[" + ", ".join(map(show, item)) + "]"
        return json.dumps(item, ensure_ascii=False)

    return f"{key} = {show(value)}"
