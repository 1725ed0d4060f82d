"""Attention to a kept beginning and along a tree is attention to the whole text, with its gradients, in all cases and dtypes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from policygrad.learners.local import prefix_attention
from policygrad.learners.local.prefix_attention import KeyBuffers, attend_after
from policygrad.learners.local.tree_attention import AttentionTree

PREFIX, HEADS, SHARED, WIDTH = 11, 6, 3, 8
TREES = {
    "a text": AttentionTree(np.arange(7)[None], np.array([7]), np.array([0])),
    # three texts after a common token, two of which share one more
    "a tree": AttentionTree(
        np.array([[0, 1, 2, 3, 4], [0, 1, 5, 5, 5], [0, 6, 7, 8, 8]]), np.array([5, 3, 4]), np.array([0, 2, 1])
    ),
    "texts": AttentionTree(np.array([[0, 1, 2], [3, 4, 4]]), np.array([3, 2]), np.array([0, 0])),
}


def attend_to_everything(
    q: Tensor, k: Tensor, v: Tensor, tree: AttentionTree, window: int | None, sinks: Tensor | None
) -> Tensor:
    """By definition, node by node: softmax over what precedes a node in its text, the beginning first."""
    out = torch.empty_like(q)
    ancestors = dict[int, list[int]]()
    for path, length in zip(tree.paths, tree.lengths, strict=True):
        for depth in range(length):
            ancestors[int(path[depth])] = path[: depth + 1].tolist()
    for node, path in ancestors.items():
        places = ([*range(PREFIX), *(PREFIX + x for x in path)])[-(window or 10**6) :]
        for head in range(HEADS):
            shared = head // (HEADS // SHARED)
            scores = k[0, shared, places] @ q[0, head, node] * WIDTH**-0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None]])
            out[0, head, node] = scores.softmax(0)[: len(places)] @ v[0, shared, places]
    return out


@pytest.mark.parametrize("has_kernel", [True, False])
def test_it_is_attention_to_the_whole_text(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "_MAX_SCORES", 60)  # several chunks
    if not has_kernel:
        monkeypatch.setattr(prefix_attention, "_has_kernel", lambda q, v: False)
    for name, window, has_sinks in itertools.product(TREES, (None, 1, 2, 4, 9, 15), (False, True)):
        g, tree = torch.Generator().manual_seed(0), TREES[name]
        nodes = int(tree.paths.max()) + 1

        def draw(*shape: int, g: torch.Generator = g) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        q, sinks = draw(1, HEADS, nodes, WIDTH).requires_grad_(), draw(HEADS).requires_grad_()
        k, v = (draw(1, SHARED, PREFIX + nodes, WIDTH).requires_grad_() for _ in range(2))
        expected = attend_to_everything(q, k, v, tree, window, sinks if has_sinks else None)
        weight = draw(*expected.shape)
        inputs = (q, k, v, sinks) if has_sinks else (q, k, v)
        exact = torch.autograd.grad((weight * expected).sum(), inputs)
        kept = KeyBuffers.allocate(k, v, PREFIX + 5, learns=True)
        kept.store(k[:, :, :PREFIX], v[:, :, :PREFIX], 0)
        own_k, own_v = (x[:, :, PREFIX:].detach().requires_grad_() for x in (k, v))
        inputs = (q, own_k, own_v, sinks) if has_sinks else (q, own_k, own_v)
        options = {"scale": WIDTH**-0.5, "window": window, "sinks": sinks if has_sinks else None}
        out = attend_after(q, own_k, own_v, kept, PREFIX, tree, **options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        gq, gk, gv, *gs = torch.autograd.grad((weight * out).sum(), inputs)
        pk, pv = kept.pop_gradients(0, PREFIX)
        found = (gq, torch.cat([pk, gk], 2), torch.cat([pv, gv], 2), *gs)
        for result, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(result, truth, rtol=1e-11, atol=1e-12)
        assert kept.key_gradients is not None
        assert not kept.key_gradients.any()
