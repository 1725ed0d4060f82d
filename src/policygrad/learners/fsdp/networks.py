"""The networks that train, where processes share the work: each takes its share of the micro-batches, all take equally many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch, Forward
from policygrad.core.metrics import Metrics, merge
from policygrad.learners.fsdp.ranks import Ranks
from policygrad.learners.local.actor_critic import ActorCritic
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.packing import Pack, pack


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedNetworks(ActorCritic):
    """The policy and its reference, each spread over the processes. All have the same batch, and know what the others do."""

    ranks: Ranks

    def packs(self, batch: Batch, rows: Tensor | None = None, whole: bool = False) -> Iterator[Pack]:
        """This process's share of the micro-batches. Where others have one more, a pass that adds nothing stands for it: what is
        gathered and summed must be so in all processes."""
        every = list(super().packs(batch, rows, whole))
        mine = every[self.ranks.rank :: self.ranks.size]
        yield from mine
        for _ in range(-(-len(every) // self.ranks.size) - len(mine)):
            self._idle()

    def _idle(self) -> None:
        with self.differentiating():
            logp = self.policy(_nothing().to(self.device))
            if logp.requires_grad:
                torch.autograd.backward(logp.sum() * 0)

    @torch.no_grad()
    def look(self, batch: Batch, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Forward:
        """As `ActorCritic.look`, from all shares."""
        looking = replace(self, policy=evaluator)  # whose passes the idle ones stand for
        found = ActorCritic.look(looking, batch, evaluator, needs)
        shares = {f.name: x for f in fields(found) if (x := getattr(found, f.name)) is not None}
        return Forward(**{name: self.ranks.summed(x) for name, x in shares.items()})

    def everywhere(self, metrics: Metrics) -> Metrics:
        """Of all shares, each metric by its own reduction, in the order of the processes."""
        plain = {n: type(m)(*(float(getattr(m, f.name)) for f in fields(m))) for n, m in metrics.items()}
        return merge(*self.ranks.gathered(plain))


def _nothing() -> Pack:
    """The smallest micro-batch: one token after another."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(mask=token == 0, group=one, reward=torch.zeros(1), tokens=token, prompts=(one,))
    return next(pack(batch, one, 1))
