"""The chunked head in both precisions, against full logits in float64."""

from __future__ import annotations

import pytest
import torch

from tseeds.training import logprobs


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_head_in_chunks_equals_full_logits(monkeypatch, dtype, tolerance, biased, chunk):
    vocabulary, nodes, pairs, width = 13, 6, 11, 8
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk * vocabulary)
    g = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(kind).requires_grad_()

    hidden, weight, bias = leaf(nodes, width), leaf(vocabulary, width), leaf(vocabulary) if biased else None
    other = (torch.randn(nodes, 4, generator=g).to(kind), torch.randn(vocabulary, 4, generator=g).to(kind), None)
    node, target = torch.randint(0, nodes, (pairs,), generator=g), torch.randint(0, vocabulary, (pairs,), generator=g)
    scale, mix = torch.rand(pairs, generator=g) + 0.5, torch.randn(3, pairs, generator=g)
    out = logprobs._Head.apply(hidden, weight, bias, node, target, scale, other)
    (mix * torch.stack(out)).sum().backward()

    wide = [x.detach().double().requires_grad_() if x is not None else None for x in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(wide[0][node], wide[1], wide[2]) * scale[:, None]
    reference = ((other[0][node].double() @ other[1].double().t()) * scale[:, None]).log_softmax(-1)
    logp = logits.log_softmax(-1)
    expected = torch.stack(
        [
            logp.gather(1, target[:, None])[:, 0],
            -(logp.exp() * logp).sum(-1),
            (reference.exp() * (reference - logp)).sum(-1),
        ]
    )
    (mix * expected).sum().backward()
    assert torch.stack(out).detach().double() == pytest.approx(expected.detach(), abs=10 * tolerance)
    for mine, theirs in zip((hidden, weight, bias), wide, strict=True):
        if mine is not None:
            assert mine.grad.dtype == kind
            assert float((mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < tolerance


def test_impossible_tokens_leave_entropy_and_gradient_finite():
    """Vocabulary rows that a model masks with a bias of -inf."""
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    bias = torch.tensor([0.0, 0, 0, 0, -torch.inf])
    lp, entropy, _ = logprobs._Head.apply(hidden, weight, bias, torch.arange(3), torch.tensor([0, 1, 2]), None, None)
    (lp + entropy).sum().backward()
    four = torch.nn.functional.linear(hidden, weight[:4]).log_softmax(-1)
    assert entropy.detach() == pytest.approx(-(four.exp() * four).sum(-1).detach(), abs=1e-6)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()
