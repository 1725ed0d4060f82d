"""Attention along branches is attention within each text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from policygrad.learners.local import tree_attention
from policygrad.learners.local.tree_attention import AttentionTree
from policygrad.models.replica import PlainAttention


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Texts in order, none a beginning of the one before it."""
    some = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=8))
    return sorted(set(some))


def laid_out(texts: list[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], int], AttentionTree]:
    """Return the node of every prefix, and the tree."""
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
    return nodes, AttentionTree(paths, lengths, shared)


def attend_alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one text [1, H, L, D], written out."""
    depth = torch.arange(q.shape[2])
    hidden = depth[:, None] < depth
    if window is not None:
        hidden |= depth[:, None] - depth >= window
    scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    total = scores.exp().sum(-1, keepdim=True) + sinks[:, None, None].exp()
    return scores.exp() / total @ v


@pytest.mark.parametrize("limits", [(2**24, 2**15), (2**24, 1), (20, 1)], ids=["one call", "many", "no masks"])
def test_tree_attention_equals_separate_texts(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]) -> None:
    monkeypatch.setattr(tree_attention, "_MAX_SCORES", limits[0])
    monkeypatch.setattr(tree_attention, "_SMALL_CALL", limits[1])
    monkeypatch.setattr(tree_attention, "_LEAST_PART", 2)

    @settings(max_examples=40)
    @given(forests(), st.sampled_from([None, 1, 2, 3, 20]), st.booleans())
    def check(texts: list[tuple[int, ...]], window: int | None, has_sinks: bool) -> None:
        nodes, tree = laid_out(texts)
        q, k, v = torch.randn(3, 1, 2, len(nodes), 4, dtype=torch.float64, requires_grad=True)
        sinks = torch.randn(2, dtype=torch.float64, requires_grad=True) if has_sinks else None
        options = {"sliding_window": window, "s_aux": sinks}
        result, _ = tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree, **options)
        assert result.shape == (1, len(nodes), 2, 4)
        expected = torch.zeros_like(result)
        for text in texts:
            path = [nodes[text[: i + 1]] for i in range(len(text))]
            alone = attend_alone(q[:, :, path], k[:, :, path], v[:, :, path], window, sinks)
            expected[:, path] = alone.transpose(1, 2)
        assert torch.allclose(result, expected, atol=1e-12)
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        got = torch.autograd.grad((weight * result).sum(), inputs)
        for a, b in zip(got, torch.autograd.grad((weight * expected).sum(), inputs), strict=True):
            assert torch.allclose(a, b, atol=1e-12)

    check()


@pytest.mark.parametrize("limits", [(2**24, 2**15, 128), (20, 1, 2)], ids=["one call", "many"])
def test_some_of_the_nodes_attend_as_they_do_among_all(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int, int]
) -> None:
    for name, limit in zip(("_PART_SCORES", "_SMALL_CALL", "_LEAST_PART"), limits, strict=True):
        monkeypatch.setattr(tree_attention, name, limit)

    @settings(max_examples=60)
    @given(forests(), st.sampled_from([None, 1, 2, 3, 20]), st.booleans(), st.data())
    def check(texts: list[tuple[int, ...]], window: int | None, has_sinks: bool, data: st.DataObject) -> None:
        nodes, tree = laid_out(texts)
        own = np.array(sorted(data.draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1))))
        q, k, v = torch.randn(3, 1, 2, len(nodes), 4, dtype=torch.float64, requires_grad=True)
        sinks = torch.randn(2, dtype=torch.float64, requires_grad=True) if has_sinks else None
        options: dict[str, Any] = {"sliding_window": window, "s_aux": sinks}
        some = replace(tree, queries=own)
        result, _ = tree_attention.tree_attention(nn.Module(), q[:, :, own], k, v, None, tree=some, **options)
        every, _ = tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree, **options)
        assert torch.allclose(result, every[:, own], atol=1e-12)
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        got = torch.autograd.grad((weight * result).sum(), inputs)
        for a, b in zip(got, torch.autograd.grad((weight * every[:, own]).sum(), inputs), strict=True):
            assert torch.allclose(a, b, atol=1e-12)

    check()


def test_few_keys_outside_of_a_window_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "_LEAST_PART", 16)
    tree = AttentionTree(np.arange(100)[None], np.array([100]), np.array([0]))
    blocks, _ = tree.blocks(8)
    read = sum(b.queries.numel() * b.keys.shape[1] for b in blocks)
    assert read <= 100 * (16 + 8) * 1.25  # 100² without windows
    assert tree.blocks(100) is tree.blocks()  # a window beyond all texts is none


def test_equal_shapes_are_one_call_and_a_long_text_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = np.stack([np.r_[0:4, 4 + 2 * i : 6 + 2 * i] for i in range(3)])
    lengths, shared = np.full(3, 6), np.array([0, 4, 4])
    result = AttentionTree(paths, lengths, shared).blocks()[0]
    assert [(tuple(b.queries.shape), b.mask is None) for b in result] == [((1, 6), True), ((2, 2), False)]
    monkeypatch.setattr(
        tree_attention, "_MAX_SCORES", 11
    )  # a mask of 2 × 6 is too large: its queries begin at the beginning
    assert all(b.mask is None for b in AttentionTree(paths, lengths, shared).blocks()[0])


@given(forests(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 1, 2, 3, 6]), st.data())
def test_flex_attention_sees_the_same_tokens(
    texts: list[tuple[int, ...]], block: int, window: int | None, data: st.DataObject
) -> None:
    """Node by node, and by blocks: none that has a visible token is left out, and none called full has a hidden one; likewise where
    some nodes attend alone."""
    nodes, tree = laid_out(texts)
    own = sorted(data.draw(st.none() | st.sets(st.integers(0, len(nodes) - 1), min_size=1)) or range(len(nodes)))
    tree = tree if len(own) == len(nodes) else replace(tree, queries=np.array(own))
    count, expected = len(nodes), torch.eye(len(nodes), dtype=torch.bool)
    for prefix, node in nodes.items():
        for i in range(1, len(prefix)):
            expected[node, nodes[prefix[:i]]] = window is None or len(prefix) - i < window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "FLEX_BLOCK", block)
        mask = tree.flex_mask(window)
    expected = expected[own]
    visible = mask.mask_mod(
        torch.tensor(0), torch.tensor(0), torch.arange(len(own))[:, None], torch.arange(count)[None]
    )
    assert torch.equal(visible, expected)
    blocks, columns = -(-len(own) // block), -(-count // block)
    padded = torch.zeros(blocks * block, columns * block, dtype=torch.bool)
    padded[: len(own), :count] = expected
    grid = padded.view(blocks, block, columns, block)
    seen = {
        "kv": torch.zeros(blocks, columns, dtype=torch.bool),
        "full_kv": torch.zeros(blocks, columns, dtype=torch.bool),
    }
    for name, table in seen.items():
        numbers, indices = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
        for row in range(blocks):
            table[row, indices[row, : numbers[row]].long()] = True
    assert not (seen["kv"] & seen["full_kv"]).any()
    needed, read = grid.any(3).any(1), seen["kv"] | seen["full_kv"]
    assert not (needed & ~read).any()
    assert window is not None or tree.queries is not None or torch.equal(read, needed)
    assert not (seen["full_kv"] & ~grid.all(3).all(1)).any()


def test_flex_attention_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own implementation on the CPU, which has no backward pass; with keys shared between heads."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(tree_attention, "is_flex_possible", lambda query: True)
    monkeypatch.setattr(tree_attention, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setattr(tree_attention, "FLEX_SCORES", 0)
    texts = sorted((0, 1, 2, *map(int, f"{i:07b}"), *[3] * (i % 5)) for i in range(0, 100, 7))
    nodes, tree = laid_out(texts)
    q, k, v = (torch.randn(1, heads, len(nodes), 16) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups = 2
    for window in (None, 5):
        options: dict[str, Any] = {"tree": tree, "scaling": 0.3, "sliding_window": window}
        expected, _ = tree_attention.tree_attention(module, q, k, v, None, use_flex=False, **options)
        result, _ = tree_attention.tree_attention(module, q, k, v, None, **options)
        assert torch.allclose(result, expected, atol=1e-5)
        own = np.flatnonzero(np.arange(len(nodes)) % 7 < 3)
        options["tree"] = replace(tree, queries=own)
        result, _ = tree_attention.tree_attention(module, q[:, :, own], k, v, None, **options)
        assert torch.allclose(result, expected[:, own], atol=1e-5)


def test_where_flex_attention_cannot_be_compiled_another_is_used_and_the_reason_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no working Triton\nin many lines")

    monkeypatch.setattr(tree_attention, "_is_flex_broken", False)
    monkeypatch.setattr(tree_attention, "_has_flex_worked", False)
    monkeypatch.setattr(tree_attention, "is_flex_possible", lambda query: True)
    monkeypatch.setattr(tree_attention, "compiled_flex_attention", lambda: fail)
    nodes, tree = laid_out([(0, 1, 2), (0, 1, 3)])
    q, k, v = torch.randn(3, 1, 2, len(nodes), 4)
    expected, _ = tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree)
    monkeypatch.setattr(tree_attention, "FLEX_SCORES", 0)
    with pytest.warns(UserWarning, match=r"RuntimeError: no working Triton\).*--learner.attention sdpa"):
        result, _ = tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree)
    assert torch.equal(result, expected)
    tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree)  # told once
    monkeypatch.setattr(tree_attention, "_is_flex_broken", False)
    tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree, use_flex=False)  # not tried
    monkeypatch.setattr(tree_attention, "_has_flex_worked", True)
    with pytest.raises(RuntimeError, match="Triton"):  # a fault of a later call is no lack of a compiler
        tree_attention.tree_attention(nn.Module(), q, k, v, None, tree=tree)


def test_flex_attention_is_not_used_where_its_derivative_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `PlainAttention`, for products with the Fisher matrix; in this thread only."""
    query = torch.randn(1, 2, 3, 4)
    monkeypatch.setattr(tree_attention, "FLEX_DEVICES", ("cpu",))
    assert tree_attention.is_flex_possible(query)
    with PlainAttention():
        assert not tree_attention.is_flex_possible(query)
        with PlainAttention():
            pass
        assert not tree_attention.is_flex_possible(query)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(tree_attention.is_flex_possible, query).result()
    assert tree_attention.is_flex_possible(query)
    assert not tree_attention.is_flex_possible(query.double())
