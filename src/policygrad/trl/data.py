"""The prompts of a run of TRL's trainers: which rows of the data set a generation or an evaluation has, in TRL's order.

A generation has so many different prompts, each `num_generations` times in a row. An epoch goes through the data once, in a new
random order; what does not fill a generation at its end is left out. Source: TRL 1.16, `RepeatSampler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

Row = dict[str, Any]


def keep_rows(rows: list[Row]) -> list[Row]:
    """Return a batch as it is. A function of a module, so that workers can be started with it."""
    return rows


class RepeatedOrder(Sampler[int]):
    """The order of a data set's rows: chunks of `prompts` rows, each row `samples` times, and the chunk `repeats` times over.

    Args:
        shuffle: A new permutation at every pass, all from one seed.
    """

    def __init__(
        self, size: int, samples: int, prompts: int = 1, repeats: int = 1, *, shuffle: bool, seed: int
    ) -> None:
        self.size, self.samples, self.prompts, self.repeats, self.shuffle = size, samples, prompts, repeats, shuffle
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def num_used(self) -> int:
        """Rows of one pass; the rest does not fill a chunk."""
        return self.size // self.prompts * self.prompts

    def __len__(self) -> int:
        return self.num_used * self.samples * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=self.generator).tolist() if self.shuffle else range(self.size)
        for first in range(0, self.num_used, self.prompts):
            for _ in range(self.repeats):
                for index in order[first : first + self.prompts]:
                    yield from [index] * self.samples


class RepeatedStream(IterableDataset[Row]):
    """A data set that is read in one direction, with the same repetitions."""

    def __init__(self, rows: Iterable[Row], samples: int, prompts: int = 1, repeats: int = 1) -> None:
        self.rows, self.samples, self.prompts, self.repeats = rows, samples, prompts, repeats

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in another order, if the data set can."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Row]:
        chunk = list[Row]()
        for row in self.rows:
            chunk.append(row)
            if len(chunk) == self.prompts:
                for _ in range(self.repeats):
                    for each in chunk:
                        yield from (dict(each) for _ in range(self.samples))
                chunk = []


def is_stream(dataset: Any) -> bool:
    """Return True for a data set without random access."""
    return not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__")


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    samples: int,
    prompts: int = 1,
    repeats: int = 1,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
) -> DataLoader[Row]:
    """Return what yields lists of `batch_size` rows, in the order of `RepeatedOrder`. A stream is read by one process alone."""
    if is_stream(dataset):
        rows = dataset.shuffle(seed=seed) if shuffle and hasattr(dataset, "shuffle") else dataset
        stream = RepeatedStream(rows, samples, prompts, repeats)
        return DataLoader(stream, batch_size=batch_size, collate_fn=keep_rows)
    order = RepeatedOrder(len(dataset), samples, prompts, repeats, shuffle=shuffle, seed=seed)
    return DataLoader(dataset, batch_size=batch_size, sampler=order, collate_fn=keep_rows, num_workers=num_workers)


def is_conversation(prompt: Any) -> bool:
    """Return True for a prompt of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]


def add_images(prompt: Sequence[Any], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages with the pictures of a row in their places for them, or before the first text of the user.

    Source: TRL 1.16, `prepare_multimodal_messages`.
    """
    messages, left = [dict(message) for message in prompt], list(images)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message["content"] = parts = [dict(part) for part in content]
            for part in parts:
                if part.get("type") == "image" and part.get("image") is None and left:
                    part["image"] = left.pop(0)
    if left:
        first = next(message for message in messages if message["role"] == "user")
        content = first["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        first["content"] = [*({"type": "image", "image": image} for image in left), *text]
    return messages
