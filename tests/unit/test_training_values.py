"""Tokens of groups without signal count in the ratio statistics with the ratio they have, not with 0."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from training_toys import make_policy, make_rows

from tseeds.config import UpdateConfig
from tseeds.training.trainer import Trainer


def test_ratio_of_rows_without_advantage_is_that_of_pi_old(tmp_path: Path) -> None:
    rows = make_rows()
    rows.reward[:4] = [1.0] * 4  # the first group teaches nothing
    config = UpdateConfig(minibatches=1, save_tokens=True)
    trainer = Trainer(config, make_policy(tmp_path), dtype="float32", run_seed=0)
    result = trainer.step(rows, iteration=1)
    tokens = result.tokens.to_pandas()
    idle = tokens[tokens.row_id.str.startswith("r0.")]
    assert (idle[idle.region == "continuation"].ratio == 1).all()
    seeds = idle[idle.region == "seed"]
    expected = torch.exp(torch.tensor((seeds.logprob_old - seeds.logprob_behaviour).to_numpy()))
    assert torch.allclose(torch.tensor(seeds.ratio.to_numpy()), expected, rtol=1e-5)
    # one minibatch: the continuation is exactly on-policy everywhere
    assert math.isclose(result.summary["ratio_mean_continuation"], 1.0, abs_tol=1e-9)
