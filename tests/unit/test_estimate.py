"""Estimates: exact where shapes decide, by hand on a tiny architecture, and for the recipes that we ship."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tseeds import config as configuration
from tseeds import estimate as estimating
from tseeds.errors import UserError

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tseeds/data/toy"
TINY = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 10,
}  # fmt: skip


def pipeline(**sections: dict) -> configuration.Pipeline:
    base = {"policy": {"path": "not-here", "dtype": "float32", "architecture": TINY}, "problems": {"path": "x"}}
    return configuration.parse({**base, **sections})


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [("qwen2.5-math-1.5b", 1_543_714_304), ("qwen3-1.7b", 1_720_574_976), ("qwen2.5-math-7b-8gpu", 7_615_616_512)],
)
def test_recipes_have_the_published_numbers_of_parameters_and_fit_their_gpus(recipe: str, parameters: int) -> None:
    config = configuration.load(ROOT / f"pipelines/recipes/{recipe}.toml")
    found = estimating.estimate(config, estimating.read_model(config), device="gpu")
    assert found.parameters == found.trained == parameters
    assert found.trainer_peak < 80e9
    assert found.engine_peak <= config.engine.gpu_memory_utilization * 80e9
    assert {b.name for b in config.evaluate.benchmarks} >= {"math500", "amc23", "minerva", "olympiadbench"}


def test_numbers_that_a_hand_can_check() -> None:
    """Tiny: embedding and head 80 each; a layer 64 + 32 + 32 + 64 attention, 3 x 128 MLP, 16 norms; last norm 8."""
    config = pipeline()
    model = estimating.read_model(config)
    assert model.parameters == 2 * 80 + 2 * (192 + 384 + 16) + 8 == 1352
    found = estimating.estimate(config, model, device="cpu", cores=1)
    parts = {part.name: part.value for part in [*found.trainer, *found.engine, *found.disk]}
    assert parts["fp32 master weights"] == 4 * 1352
    assert parts["Adam moments"] == 8 * 1352
    assert parts["compute copy"] == 0  # fp32 computes on the masters
    tokens = 2048 * 256  # 256 sequences of 1024 + 1024 tokens; 2 (K, V) x 2 layers x 1 head x 4 wide x 4 bytes each
    assert parts["KV cache"] == tokens * 2 * 2 * 1 * 4 * 4
    # 100 iterations: snapshots 0, 10, ..., 100; states of the last two, one of which is also a snapshot
    assert parts["snapshots"] == 11 * parts["one policy"]
    assert parts["newest policies"] == parts["one policy"]
    assert parts["trainer states"] == 2 * parts["one trainer state"]
    assert found.disk_peak - found.disk_end == parts["one policy"] + parts["one trainer state"]


def test_time_follows_from_tokens_and_given_rates() -> None:
    """128 x 8 rows of 512 tokens, half of them seeded at a mean cut of one half: 262,144 seed tokens, 393,216 others."""
    config = pipeline(update={"minibatches": 2})
    found = estimating.estimate(
        config, estimating.read_model(config), device="cpu", sampling_rate=1000, update_rate=2000, cores=1
    )
    seconds = {part.name: part.value for part in found.time}
    assert seconds["seeds"] == pytest.approx(262.144)
    assert seconds["rollout"] == pytest.approx(393.216)
    assert seconds["update"] == pytest.approx((128 * 8 * 512 + 128 * 200) / 2000)
    off = estimating.estimate(
        pipeline(seed={"share": 0.0}), estimating.read_model(config), device="cpu", sampling_rate=1000, cores=1
    )
    assert {part.name: part.value for part in off.time}["seeds"] == 0


def test_choices_move_what_they_should() -> None:
    model = estimating.read_model(pipeline())

    def parts(**sections: dict) -> dict[str, float]:
        return {
            p.name: p.value for p in estimating.estimate(pipeline(**sections), model, device="cpu", cores=1).trainer
        }

    plain, narrow = parts(), parts(policy={"path": "x", "dtype": "bfloat16", "architecture": TINY})
    assert narrow["compute copy"] == 2 * 1352
    assert narrow["activations"] < plain["activations"]
    halved = parts(update={"tokens_per_microbatch": 8192})
    assert halved["activations"] == pytest.approx(plain["activations"] / 2)
    lora = parts(update={"lora": {"rank": 2}})
    # A and B of rank 2: q 8+8, k 8+4, v 8+4, o 8+8, gate, up, down 8+16 each, in 2 layers
    assert lora["fp32 master weights"] == 4 * 2 * 2 * (16 + 12 + 12 + 16 + 3 * 24)
    assert "reference policy" in parts(update={"kl_coef": 0.1})


def test_safetensors_sizes_are_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}.{k}": rng.normal(size=shape).astype(kind)
        for k, (name, shape, kind) in enumerate(
            [("b", (3, 5), "float32"), ("a", (7,), "float16"), ("c", (2, 2), "int64"), ("ä", (1000,), "float32")]
        )
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors = estimating.read_tensors(tmp_path / "x.safetensors")
    assert {n: s for n, (_, s) in tensors.items()} == {n: a.shape for n, a in arrays.items()}
    assert estimating.file_bytes(tensors) == (tmp_path / "x.safetensors").stat().st_size
    save_file(arrays, tmp_path / "y.safetensors")
    assert estimating.file_bytes(tensors, metadata={}) == (tmp_path / "y.safetensors").stat().st_size
    for name, size in (("model.safetensors", (TOY / "model.safetensors").stat().st_size),):
        assert estimating.file_bytes(estimating.read_tensors(TOY / name)) == size


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    missing = configuration.parse({"policy": {"path": "gone"}, "problems": {"path": "x"}})
    with pytest.raises(UserError, match=r"policy\.path gone: not on this machine; give its numbers"):
        estimating.read_model(missing)
    (tmp_path / "model.safetensors").write_bytes(b"\x05\x00")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        estimating.read_tensors(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 8, "n_layer": 2}))
    with pytest.raises(UserError, match="not a Llama-like architecture"):
        estimating.read_model(configuration.parse({"policy": {"path": str(tmp_path)}, "problems": {"path": "x"}}))


def test_the_command_prints_it_without_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['tseeds', 'validate', 'pipelines/toy.toml', '--estimate', '--device', 'cpu', '--json', "
        "'--set', 'policy.path=tseeds/data/toy']\n"
        "try:\n    runpy.run_module('tseeds_cli.main', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["parameters"] == 355_872
    assert {p["name"] for p in record["disk"]} >= {"one policy", "one trainer state", "snapshots"}
