"""Attention along branches is attention within each text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from policygrad.learners.local import tree_attention
from policygrad.learners.local.tree_attention import AttentionTree


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Texts in order, none a beginning of the one before it."""
    some = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=8))
    return sorted(set(some))


@pytest.mark.parametrize("limits", [(2**24, 2**15), (2**24, 1), (20, 1)], ids=["one call", "many", "no masks"])
def test_tree_attention_equals_separate_texts(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]) -> None:
    monkeypatch.setattr(tree_attention, "_MAX_SCORES", limits[0])
    monkeypatch.setattr(tree_attention, "_SMALL_CALL", limits[1])

    @settings(max_examples=60)
    @given(forests())
    def check(texts: list[tuple[int, ...]]) -> None:
        nodes: dict[tuple[int, ...], int] = {}
        for text in texts:
            for i in range(len(text)):
                nodes.setdefault(text[: i + 1], len(nodes))
        lengths = np.array([len(text) for text in texts])
        paths = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
        shared, seen = np.zeros(len(texts), dtype=np.int64), set[tuple[int, ...]]()
        for row, text in enumerate(texts):
            own = [nodes[text[: i + 1]] for i in range(len(text))]
            paths[row] = own + [own[-1]] * (paths.shape[1] - len(own))
            shared[row] = sum(text[: i + 1] in seen for i in range(len(text)))
            seen |= {text[: i + 1] for i in range(len(text))}
        q, k, v = torch.randn(3, 1, 2, len(nodes), 4, dtype=torch.float64, requires_grad=True)
        result, _ = tree_attention.tree_attention(
            nn.Module(), q, k, v, None, tree=AttentionTree(paths, lengths, shared)
        )
        assert result.shape == (1, len(nodes), 2, 4)
        expected = torch.zeros_like(result)
        for text in texts:
            path = [nodes[text[: i + 1]] for i in range(len(text))]
            alone = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, path], k[:, :, path], v[:, :, path], is_causal=True
            )
            expected[:, path] = alone.transpose(1, 2)
        assert torch.allclose(result, expected, atol=1e-12)
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        got = torch.autograd.grad((weight * result).sum(), (q, k, v))
        for a, b in zip(got, torch.autograd.grad((weight * expected).sum(), (q, k, v)), strict=True):
            assert torch.allclose(a, b, atol=1e-12)

    check()


def test_equal_shapes_are_one_call_and_a_long_text_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = np.stack([np.r_[0:4, 4 + 2 * i : 6 + 2 * i] for i in range(3)])
    lengths, shared = np.full(3, 6), np.array([0, 4, 4])
    result = AttentionTree(paths, lengths, shared).blocks
    assert [(tuple(b.queries.shape), b.mask is None) for b in result] == [((1, 6), True), ((2, 2), False)]
    monkeypatch.setattr(
        tree_attention, "_MAX_SCORES", 11
    )  # a mask of 2 × 6 is too large: its queries begin at the beginning
    assert all(b.mask is None for b in AttentionTree(paths, lengths, shared).blocks)
