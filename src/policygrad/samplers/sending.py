"""A sampler whose servers may be sent weights over NCCL, instead of reading them from a folder: --sampler.transfer nccl."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from policygrad.errors import EngineError
from policygrad.models.adapters import adapters_of
from policygrad.samplers.config import NCCL
from policygrad.samplers.engine import EngineSampler
from policygrad.weight_sync.safetensors_folder import tied_head

if TYPE_CHECKING:
    from policygrad.samplers.transfer import Transfer
    from policygrad.weight_sync.nccl import Opens


class SendingSampler(EngineSampler):
    """An engine says how: `transfers`, and whether it takes an output head that is tied to the embeddings by its own name too."""

    head_too: ClassVar[bool] = False
    opens: ClassVar[Opens | None] = None
    """How a group is formed; None = over NCCL."""
    transfer: Transfer | None = None
    """None = by a folder."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `EngineSampler`.

        Raises:
            EngineError: a model that cannot be sent, or no GPU for it.
        """
        super().__init__(*args, **options)
        if self.config.transfer != NCCL:
            return
        if adapters_of(self.model):
            raise EngineError("adapters are published by a folder: --sampler.transfer folder")
        from policygrad.weight_sync.nccl import own_address  # torch.distributed takes a while to import

        self.transfer = self.versions = self.transfers()(
            self.versions.root,
            self.model,
            self.config.patience,
            type(self).opens or self.over_nccl(),
            own_address,
            tied_head(self.model) if self.head_too else None,
        )

    @abstractmethod
    def transfers(self) -> Callable[..., Transfer]:
        """The class that has the engine's words."""

    @abstractmethod
    def over_nccl(self) -> Opens:
        """How the engine's groups are formed over NCCL. Raises EngineError where they cannot be."""

    async def close(self) -> None:
        """As ever, and servers forget their groups."""
        if self._servers is not None:
            await self._servers.close()
        if self.transfer is not None:
            await self.transfer.close(self.http)
        await super().close()
