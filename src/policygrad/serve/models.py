"""What the server computes with: networks that several models share, and the models that clients train on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.base import State
from policygrad.core.batch import Batch, Forward
from policygrad.errors import ConfigError, NumericsError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.forward import Evaluator, backward_mode, build_evaluator, choose_kernels
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import (
    MICRO_TOKENS_FLAG,
    Pack,
    TokenSequences,
    micro_batch_tokens,
    pack_texts,
)
from policygrad.models.loading import at_least_float32, context_length, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.serve.adapters import Adapter, AdapterSpec, AdapterSwitch, make_adaptable
from policygrad.serve.losses import Datum, EquationLoss, LossConfig, prepare_loss, target_rows
from policygrad.utils.devices import pick_device
from policygrad.utils.out_of_memory import MemoryBudget, keep_gradients


@dataclass(frozen=True, eq=False)
class ServedNetwork:
    """A model in memory: frozen, with a switch between adapters, or with weights of its own that train."""

    name: str
    """As clients call it."""
    path: str
    """A folder or a hub id."""
    model: nn.Module
    tokenizer: Tokenizer
    evaluator: Evaluator
    config: LearnerConfig
    switch: AdapterSwitch | None = None
    """None: no adapters."""
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(MICRO_TOKENS_FLAG, "tokens"))
    """What limits the tokens of a pass once memory has run out."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of losses: the model's, at least float32."""
        return at_least_float32(next(self.model.parameters()).new_empty(0)).dtype

    @property
    def vocabulary(self) -> int:
        """Number of token ids that it reads."""
        return self.evaluator.network.vocabulary

    @property
    def context_length(self) -> int | None:
        return context_length(self.model)

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Enclose passes of one adapter, or of the network alone."""
        if self.switch is None or adapter is None:
            yield
            return
        with self.switch.using((None, adapter)):
            yield

    def check_ids(self, ids: Tensor, what: str) -> None:
        """Raise ConfigError for ids that the model does not have."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ConfigError(
                f"{what} has the token id {wrong}, and {self.name!r} has ids from 0 to {self.vocabulary - 1}"
            )

    def read_datum(self, datum: Datum) -> Datum:
        """Return a datum with the tokens and media of its pictures. Raises ConfigError as `ModelInputParts.read`."""
        if datum.parts is None:
            return datum
        text = datum.parts.read(self.tokenizer, self.name)
        return Datum(text.ids, datum.inputs, text.media)

    def check_text(self, ids: Tensor, what: str) -> None:
        """Raise ConfigError for a text that the model cannot read."""
        self.check_ids(ids, what)
        if self.context_length is not None and len(ids) > self.context_length:
            raise ConfigError(
                f"{what} has {len(ids)} tokens, and {self.name!r} reads {self.context_length}: shorten it"
            )


def load_network(
    name: str, path: str, config: LearnerConfig, *, adaptable: bool, trust_remote_code: bool = False
) -> ServedNetwork:
    """Load a model, frozen and ready for adapters, or with weights that train."""
    config = config.resolve()
    model = load_model(path, dtype=config.dtype, device=pick_device(config.device), trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(path, model, trust_remote_code=trust_remote_code)
    switch = make_adaptable(model) if adaptable else None
    evaluator = choose_kernels(build_evaluator(model, 1.0), config)
    memory = MemoryBudget(MICRO_TOKENS_FLAG, "tokens", next(model.parameters()).device)
    return ServedNetwork(name, path, model, tokenizer, evaluator, config, switch, memory)


@dataclass(frozen=True)
class AdamParams:
    """Settings of one optimizer step, with the API's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Maximum norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        if not (0 <= self.learning_rate < float("inf")):
            raise ConfigError(f"learning_rate must be at least 0 and finite, not {self.learning_rate}")


@dataclass(frozen=True)
class PassResult:
    """The result of a forward or forward_backward request."""

    logprobs: list[Tensor]
    """[T] or [T, K] nats for each datum: log π of its targets."""
    metrics: dict[str, float]


@dataclass(eq=False)
class ClientModel:
    """One client's weights, gradient and optimizer."""

    network: ServedNetwork
    adapter: Adapter | None
    """None: the network's own weights train."""
    optimizer: Optimizer = field(init=False)
    pending: int = 0
    """Requests whose gradients the next optimizer step will use."""
    loss_states: dict[str, State] = field(default_factory=dict)
    """States of algorithms that have one, by name."""

    def __post_init__(self) -> None:
        trained = self.network.model if self.adapter is None else self.adapter
        self.optimizer = Optimizer(trained, OptimizerConfig(betas=(0.9, 0.95), eps=1e-12, clip=0.0), 1e-4, 1)

    @classmethod
    def with_adapter(cls, network: ServedNetwork, spec: AdapterSpec) -> ClientModel:
        """Return a model with a new adapter, whose output is the network's."""
        assert network.switch is not None
        return cls(network, Adapter(network.switch.choose_layers(spec), spec))

    def run(
        self,
        data: Sequence[Datum],
        loss_name: str,
        config: LossConfig,
        *,
        backward: bool,
    ) -> PassResult:
        """Compute log-probabilities and the loss, and with `backward` add its gradient to what is pending.

        Raises:
            OutOfMemoryError: A single text does not fit; what is pending stays.
            ConfigError: See `prepare_loss`; a token that the model does not have; a picture that it cannot read.
        """
        network = self.network
        data = [network.read_datum(datum) for datum in data]
        for i, datum in enumerate(data):
            network.check_text(datum.tokens, f"datum {i}")
            network.check_ids(datum.targets, f"datum {i}: target_tokens")
        loss = prepare_loss(loss_name, config, data, dtype=network.dtype, states=self.loss_states)
        passes = _Passes(network, data, loss.keep_together)
        with network.using(self.adapter):
            if loss.selection_needs is not None:
                loss = loss.select_tokens(passes.score(loss.selection_needs))
            undo = keep_gradients(self.optimizer.parameters, self.optimizer.masters)
            metrics = network.memory.run(partial(passes.accumulate, loss, self.optimizer if backward else None), undo)
        if backward:
            self.pending += 1
            if loss.state:
                self.loss_states[loss_name] = loss.state
        return PassResult(passes.logprobs(), metrics)

    def step(self, params: AdamParams) -> dict[str, float]:
        """Take one step of AdamW with the pending gradient, and clear it.

        Raises:
            NumericsError: The gradient is not finite; the weights are unchanged, and the gradient is cleared.
        """
        optimizer = self.optimizer
        optimizer.config = OptimizerConfig(
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            clip=params.grad_clip_norm,
        )
        optimizer.lr = params.learning_rate
        for group in (group for rule in optimizer.rules for group in rule.param_groups):
            group |= {"betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay}
        self.pending = 0
        norm, _ = optimizer.step()
        return {"grad_norm:mean": 0.0 if norm is None else norm, "updates:sum": float(optimizer.num_updates)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON values): weights, moments and what algorithms remember."""
        tensors, values = self.optimizer.state()
        return tensors, {"optimizer": values, "loss_states": self.loss_states}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Load a state: the weights, and with `optimizer` the moments and what algorithms remember, which else start anew."""
        if optimizer:
            self.optimizer.restore(tensors, values["optimizer"])
            self.loss_states = dict(values["loss_states"])
        else:
            weights = {name: x for name, x in tensors.items() if name.startswith("weights/")}
            self.optimizer.restore(weights, {"taken": 0, "moments": 0})
            self.loss_states = {}
        self.clear_gradient()

    def clear_gradient(self) -> None:
        """Drop what is pending."""
        self.optimizer.clear_gradients()
        self.pending = 0


class _Passes:
    """The forward and backward passes of one request, in micro-batches in which common prefixes are computed once."""

    def __init__(self, network: ServedNetwork, data: Sequence[Datum], keep_together: Tensor | None) -> None:
        self.network, self.data = network, data
        self.texts, targets, self.owner = target_rows(data)
        pad = torch.nn.utils.rnn.pad_sequence
        pictures = [data[i].media for i in self.owner.tolist()]
        self.media = pictures if any(pictures) else []
        self.targets = pad(targets, batch_first=True)
        self.mask = pad([torch.ones_like(t, dtype=torch.bool) for t in targets], batch_first=True)
        self.group = self.owner if keep_together is None else keep_together
        self.keep = keep_together is not None
        self.logp = torch.zeros(self.mask.shape, dtype=network.dtype)

    def _packs(self) -> Iterator[Pack]:
        batch = Batch(mask=self.mask, group=self.group, reward=torch.zeros(len(self.mask)), tokens=self.targets)
        memory = self.network.memory
        budget = memory.cap(micro_batch_tokens(self.network.config, self.network.model))
        texts = TokenSequences.of_texts(self.texts, self.media)
        packs = pack_texts(batch, texts, budget, groups=self.group if self.keep else None)
        for pack in memory.watch(packs, lambda pack: pack.num_nodes, self._count_parts):
            yield pack.to(self.network.device)

    def _count_parts(self, pack: Pack) -> int:
        """Return into how many micro-batches a pack could be cut."""
        return len(torch.unique(self.group[pack.rows])) if self.keep else pack.completions

    @torch.no_grad()
    def score(self, needs: frozenset[str]) -> Forward:
        """Return log π and the statistics `needs` of all rows."""
        outputs: dict[str, Tensor] = {}

        def work() -> None:
            for pack in self._packs():
                for name, x in self.network.evaluator.forward(pack, needs).tensors().items():
                    outputs.setdefault(name, torch.zeros(self.mask.shape, dtype=x.dtype))[pack.rows.cpu()] = x.cpu()

        self.network.memory.run(work)
        return Forward(**outputs)

    def accumulate(self, loss: EquationLoss, optimizer: Optimizer | None) -> dict[str, float]:
        """Compute all micro-batches, and add their gradients with an optimizer."""
        metrics: dict[str, float] = {}
        network = self.network
        with torch.set_grad_enabled(optimizer is not None):
            for pack in self._packs():
                rows = pack.rows.cpu()
                with backward_mode(network.model, network.config.gradient_checkpointing):
                    out = network.evaluator.forward(pack, loss.forward_needs, expected=self._expected(loss, rows))
                    if optimizer is not None:
                        torch.autograd.backward(loss(out, rows))
                        optimizer.accumulate_master_grads()
                detached = Forward(**{name: x.detach() for name, x in out.tensors().items()})
                self.logp[rows] = detached.logp.to("cpu", self.logp.dtype)
                for name, value in loss.value(detached, rows).items():
                    metrics[name] = metrics.get(name, 0.0) + value
                if not math.isfinite(metrics["loss:sum"]) and self._is_finite(rows):
                    raise ConfigError(self._explain_loss(loss, detached, rows))
        if not self._is_finite(torch.arange(len(self.mask))):
            raise NumericsError(
                "the model's log-probabilities are not finite: lower the learning rate, or load a checkpoint"
            )
        return metrics

    def _is_finite(self, rows: Tensor) -> bool:
        """Return whether log π of these rows' targets is."""
        return bool(torch.isfinite(self.logp[rows][self.mask[rows]]).all())

    def _explain_loss(self, loss: EquationLoss, out: Forward, rows: Tensor) -> str:
        """Return which datum's loss is not finite although log π is, where one datum's is not."""
        owner, wrong = self.owner[rows].tolist(), list[int]()
        for k in range(len(rows)):
            one = Forward(**{name: x[k : k + 1] for name, x in out.tensors().items()})
            if not math.isfinite(loss.value(one, rows[k : k + 1])["loss:sum"]):
                wrong.append(owner[k])
        which = f"datum {wrong[0]}" if wrong else f"data {min(owner)} to {max(owner)} together"
        return (
            f"the loss of {which} is not a finite number, although the model's log-probabilities are: its loss_fn_inputs are too "
            "large, or its logprobs those of another text"
        )

    def _expected(self, loss: EquationLoss, rows: Tensor) -> Tensor | None:
        """Return the gradient [b, T] that log π will receive if it is known before the pass: without a ratio or terms."""
        if not torch.is_grad_enabled():
            return None
        if loss.batch.logp_old is not None or loss.algorithm.terms or loss.forward_needs:
            return None
        zero = torch.zeros(len(rows), self.mask.shape[1], dtype=self.network.dtype, device=self.network.device)
        zero.requires_grad_()
        return torch.autograd.grad(loss(Forward(zero), rows), zero)[0]

    def logprobs(self) -> list[Tensor]:
        """Return log π of each datum's targets, in their shape."""
        logprobs = list[Tensor]()
        for i, datum in enumerate(self.data):
            columns = self.logp[self.owner == i, : len(datum.tokens)]
            logprobs.append(columns[0] if datum.targets.ndim == 1 else columns.T.contiguous())
        return logprobs
