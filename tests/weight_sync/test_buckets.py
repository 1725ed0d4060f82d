"""A policy's weights in buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from policygrad.weight_sync.base import iter_buckets


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 40))
def test_buckets_contain_all_weights_in_order_within_the_limit(lengths: list[int], most: int) -> None:
    tensors = {f"w{i}": torch.zeros(length) for i, length in enumerate(lengths)}  # 4 bytes a number
    generations = list(iter_buckets(tensors, most))
    assert [name for bucket in generations for name in bucket.names] == list(tensors)
    assert [bucket.is_last for bucket in generations] == [False] * (len(generations) - 1) + [True]
    for bucket in generations:
        assert all(tensors[name] is tensor for name, tensor in zip(bucket.names, bucket.tensors, strict=True))
        assert sum(tensor.nbytes for tensor in bucket.tensors) <= most or len(bucket.names) == 1


def test_buckets_are_as_full_as_possible() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1))}
    assert [list(bucket.names) for bucket in iter_buckets(tensors, 16)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_bucket_names_dtypes_and_shapes() -> None:
    [bucket] = iter_buckets({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float64)})
    assert (bucket.dtypes, bucket.shapes) == (["bfloat16", "float64"], [[2, 3], []])
