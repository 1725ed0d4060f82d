"""Compile the blocks of a model for the learner's passes (`torch.compile`): fewer kernels and fewer saved activations.

A block's attention stays as it is: it has kernels of its own, and its shapes change with every micro-batch. What surrounds it is
compiled once for all lengths and, since all blocks have the same code, once for all blocks.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from policygrad.errors import ConfigError
from policygrad.learners.local.forward import get_backbone
from policygrad.learners.local.tree_attention import exclude_attention_from_compilation
from policygrad.models.traits import has_experts

COMPILERS = ("g++", "clang++", "c++", "cl")
T = TypeVar("T")


class CompiledBlocks:
    """The blocks of a model, compiled. They are used inside `run` only: a sampler of the same model decodes as before."""

    def __init__(self, model: nn.Module, recompute: bool = False) -> None:
        """
        Args:
            recompute: Activations are recomputed: then the parts of each block are compiled one by one, as the block itself
                contains the call that recomputes it.

        Raises:
            ConfigError: No C++ compiler, or a model whose blocks are not in a list called `layers`.
        """
        if not any(map(shutil.which, COMPILERS)):
            raise ConfigError(
                f"learner.compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is on the PATH: install one (on "
                "Debian: apt install g++), or leave learner.compile out; `policygrad doctor` looks for one"
            )
        blocks = getattr(get_backbone(model), "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise ConfigError(
                f"learner.compile compiles the blocks of a model, and {type(model).__name__} has no list of `layers`: leave it out"
            )
        exclude_attention_from_compilation(model)
        keep_compiled_code()
        self.modules: list[Any] = [part for block in blocks for part in (block.children() if recompute else [block])]
        self.model_name, self.is_broken = type(model).__name__, False
        self.calls = [torch.compile(module._call_impl, dynamic=True) for module in self.modules]

    def run(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Return `work()` with the compiled blocks; once they cannot be compiled, with the blocks as they are.

        The compiler may fail in the middle of the work, as a backward pass is compiled when it is first needed. Then the work
        starts anew, since what compiled blocks have saved is not what others recompute.

        Args:
            undo: Takes back what unfinished work has left, such as gradients.
        """
        if not self.is_broken:
            try:
                with self._active():
                    return work()
            except Exception as error:  # by where it was raised: compilers raise all kinds
                if not is_compiler_error(error):
                    raise
                self.is_broken = True
                cause = getattr(error, "inner_exception", error)
                reason = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or ['no message'])[0]}"
            warnings.warn(
                f"learner.compile: the blocks of {self.model_name} cannot be compiled here ({reason}): "
                "they run as they are. Leave learner.compile out to silence this.",
                stacklevel=2,
            )
            undo()
        return work()

    @staticmethod
    def count_graphs() -> int:
        """Return how many graphs this process has compiled."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Call the compiled modules instead of the originals."""
        for module, call in zip(self.modules, self.calls, strict=True):
            module._compiled_call_impl = call
        try:
            yield
        finally:
            for module in self.modules:
                module._compiled_call_impl = None


def keep_compiled_code() -> None:
    """Let torch keep what it compiles in the user's cache: a later process then compiles in seconds, also after a restart.

    Nothing changes where TORCHINDUCTOR_CACHE_DIR is set; where the folder cannot be written, torch uses a temporary one.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, RuntimeError):  # no home folder
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "policygrad" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def can_compile(model: Any) -> bool:
    """Return whether a model's blocks can be compiled: they are in a list, call attention by its name, and have no experts."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    has_blocks = isinstance(getattr(get_backbone(model), "layers", None), nn.ModuleList)
    name = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return has_blocks and name in interface() and not has_experts(model)


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile raised it, rather than the model that runs compiled."""
    kinds = (getattr(torch._dynamo.exc, "TorchDynamoException", ()),)
    return isinstance(error, kinds) or type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))
