"""Weights read into a model that is open already are the weights of the policy, tied or not; another shape is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tseeds.engines import probe


def policy(path: Path, seed: int, *, tied: bool, width: int = 16) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_refilled_model_scores_as_one_opened_anew(tmp_path: Path, tied: bool) -> None:
    first, second = policy(tmp_path / "a", 1, tied=tied), policy(tmp_path / "b", 2, tied=tied)
    model = probe.open_model(first, "float32")
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    before, wanted = probe.score(model, ids), probe.score(probe.open_model(second, "float32"), ids)
    assert before != wanted
    assert probe.refill(model, second)
    assert probe.score(model, ids) == wanted


def test_another_shape_or_tying_is_refused_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = probe.open_model(policy(tmp_path / "a", 1, tied=False), "float32")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert not probe.refill(model, policy(tmp_path / "wide", 2, tied=False, width=32))
    assert not probe.refill(model, policy(tmp_path / "tied", 2, tied=True))  # no output head among its tensors
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
