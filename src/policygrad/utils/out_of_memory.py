"""What counts as running out of memory, and work that is repeated in smaller pieces when it happens.

One budget limits one kind of work: the tokens of a learner's pass, or the completions that a sampler decodes at a time.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from policygrad.errors import OutOfMemoryError, PolicygradError
from policygrad.utils.memory import refusing_what_is_not_free

T = TypeVar("T")
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"  # torch on the CPU
    r"|\bout of memory\b"  # CUDA, NCCL and Metal, where torch has no class of its own for it
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|OUT_OF_(DEVICE|HOST|RESOURCES)"  # Level Zero and OpenCL, of Intel's GPUs
    r"|std::bad_alloc",
    re.IGNORECASE,
)
_WANTED = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of a device or of this machine, or was raised because of one that does."""
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, OutOfMemoryError | torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(current, PolicygradError):
            return False
        if isinstance(current, RuntimeError) and _MESSAGES.search(str(current)):
            return True
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def describe_missing_memory(error: BaseException) -> str:
    """Return what was asked for, or else the error's first line, as text for a message."""
    text = str(error).strip()
    if match := _WANTED.search(text):
        number, unit = match.group(1), match.group(2)
        if unit.lower() == "bytes":  # as torch says it on a CPU
            size = int(number)
            number, unit = (f"{size / 2**30:.2f}", "GiB") if size >= 2**30 else (f"{size / 2**20:.2f}", "MiB")
        return f"{number} {unit} more were wanted"
    return text.splitlines()[0][:120] if text else type(error).__name__


def release_memory() -> None:
    """Give back what dropped tensors held: to the device, whose allocator keeps it, and from cycles of references."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def keep_gradients(*parameters: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that puts gradients back to what they are now, which is mostly none: then it drops what was added."""
    tensors = (p for named in parameters for p in named.values())
    gradients = [(p, None if p.grad is None else p.grad.detach().clone()) for p in tensors]

    def put_back() -> None:
        for p, gradient in gradients:
            p.grad = None if gradient is None else gradient.clone()

    return put_back


@dataclass(frozen=True)
class Halving:
    """Memory ran out, and the work goes on in smaller pieces."""

    before: int  # tokens or rows of the piece that did not fit
    limit: int  # of the pieces from now on
    message: str


class MemoryBudget:
    """How many tokens or rows are computed at a time: as many as configured, until memory runs out; then half as many, for good.

    `run` encloses work that begins anew after that, so it must be without effect until it is complete, or undone.
    """

    def __init__(self, flag: str, noun: str, device: torch.device | str | None = None, *, retries: bool = True) -> None:
        """
        Args:
            flag: The option that sets it, such as --learner.micro-tokens.
            noun: What it counts.
            device: Where the work is done. On a CPU what is not free is refused, before the kernel kills the process.
            retries: Begin work anew; False = only choose a lower `limit`, for the next time, and raise the error.
        """
        self.flag, self.noun, self.retries = flag, noun, retries
        self.is_on_cpu = device is not None and torch.device(device).type == "cpu"
        self.limit: int | None = None
        """Set once memory has run out, or by who knows that it would; None = what is configured."""
        self.on_halved: Callable[[Halving], None] = lambda halving: warnings.warn(halving.message, stacklevel=2)
        self.end: OutOfMemoryError | None = None
        """Without `retries`: what ended the work."""
        self._allowed = 0  # what `cap` returned last
        self._largest = 0  # size of the largest piece of this attempt
        self._piece: tuple[int, Callable[[], int]] | None = None
        """Size of the piece that is being computed, and what counts the parts that it can be cut into."""

    def cap(self, configured: int) -> int:
        """Return how many may be computed at a time."""
        self._allowed = configured if self.limit is None else min(configured, self.limit)
        return self._allowed

    def begin(self, size: int, parts: int) -> None:
        """Say which piece of work comes next: how large it is, and how many parts it has."""
        self._begin(size, lambda: parts)

    def _begin(self, size: int, parts: Callable[[], int]) -> None:
        self._piece, self._largest = (size, parts), max(size, self._largest)

    def watch(self, pieces: Iterable[T], size: Callable[[T], int], parts: Callable[[T], int]) -> Iterator[T]:
        """Iterate over pieces of work, and `begin` each."""
        for piece in pieces:
            self._begin(size(piece), partial(parts, piece))
            yield piece

    def run(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Return `work()`. If memory runs out `undo` what it has done, and begin anew with a lower `limit`.

        Raises:
            OutOfMemoryError: A single part does not fit, which cannot be cut.
        """
        while True:
            self._piece, self._largest = None, 0
            try:
                with self._refusing():
                    return work()
            except Exception as error:
                if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                    raise
                if not self.retries:
                    halved = self.halve()
                    self.end = self._make_end(describe_missing_memory(error), self.limit if halved else None)
                    raise
                shortage = describe_missing_memory(error)
            piece, halved = self._piece, self.halve()
            undo()  # out of the block: the error's frames keep the work's tensors
            release_memory()
            if piece is None or not halved:
                raise self._make_end(shortage)
            assert self.limit is not None
            message = f"out of memory at {piece[0]:,} {self.noun} at a time ({shortage}): going on with at most {self.limit:,}"
            message += f"; {self.flag} {self.limit} would have avoided it" if self.flag else ""
            self.on_halved(Halving(piece[0], self.limit, message))

    def halve(self) -> bool:
        """Lower the limit until the largest piece of the attempt would be cut; return False if it has one part, which is not cut.

        Where larger pieces fitted before the last one, it is their memory that was missing, or somebody else's.
        """
        if self._piece is None:
            return False
        size, parts = self._piece
        if size == self._largest and parts() <= 1:
            return False
        limit = self.cap(self._allowed) // 2
        while limit >= self._largest:  # no piece used what was allowed
            limit //= 2
        if limit < 1:
            return False
        self.limit = limit
        return True

    def _make_end(self, shortage: str, limit: int | None = None) -> OutOfMemoryError:
        """Return the error that ends the work; `limit`: what the next attempt should begin with."""
        size = None if self._piece is None else self._piece[0]
        what = "" if size is None else f" at {size:,} {self.noun} at a time"
        what += ", which cannot be fewer" if size is not None and limit is None else ""
        return OutOfMemoryError(f"out of memory{what} ({shortage})", flag=self.flag, size=size, limit=limit)

    def _refusing(self) -> AbstractContextManager[None]:
        return refusing_what_is_not_free() if self.is_on_cpu else nullcontext()


@runtime_checkable
class HasMemoryBudget(Protocol):
    """A learner or a sampler of this process, which goes on with less at a time when memory runs out."""

    @property
    def memory(self) -> MemoryBudget: ...


@runtime_checkable
class ReportsShortage(Protocol):
    """A learner in several processes that may have to end this one."""

    on_shortage: Callable[[OutOfMemoryError], None]
    """Called with what another process ran out of memory in, where this one ends without an error."""
