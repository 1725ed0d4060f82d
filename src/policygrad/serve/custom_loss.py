"""Losses that a client uploads: graphs of torch operations as plain data, rebuilt from a fixed list of operations.

A client traces its function with torch.fx and sends the nodes. Nothing of a graph is executed by name: every target is looked up in
`_OPERATIONS`, whose operations are deterministic, write to no tensor, and allocate no more than `_Limits` allows.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from policygrad.errors import ConfigError

FORMAT = 1
MAX_INPUTS, MAX_NODES, MAX_METRICS = 16, 2000, 256
MAX_DEPTH, MAX_ITEMS, MAX_ARGUMENTS = 8, 1024, 20_000
"""Nested lists in an argument, entries in each, and values in all arguments of a graph."""
MAX_DIMENSIONS = 16
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(?:sum|mean)")
_ON_CLIENT = "forward_backward_custom with the function itself runs it on the client"


@dataclass(frozen=True, eq=False)
class CustomLoss:
    """A client's loss of one datum: (log-probabilities, its inputs) → (scalar, metrics).

    It runs on the CPU, wherever its arguments are: its tensors are small, and an index out of range, an error here, would end the
    process on a GPU. Its numbers have the types that the arguments and the client's own casts give them. The gradient is computed
    with the loss: an error in it is the client's too, and the memory of one datum is free before the next.
    """

    name: str
    input_names: tuple[str, ...]
    """`loss_fn_inputs` that it takes, in order, after `logprobs`."""
    ranks: tuple[int, ...]
    """Number of dimensions of `logprobs` and of each input."""
    _placeholders: tuple[str, ...]
    _nodes: tuple[_Node, ...]
    _loss: _Ref
    _metrics: Mapping[str, _Ref]

    def __call__(self, logprobs: Tensor, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss [], metrics without gradient []), on the device of `logprobs`. The loss can be differentiated once.

        Args:
            logprobs: [T] or [T, K].
            inputs: As in `input_names`; they get no gradient.

        Raises:
            ConfigError: Other inputs than declared; an operation that fails or needs too much memory; a loss that is not a scalar,
                or does not depend on `logprobs`.
        """
        names, given = ("logprobs", *self.input_names), (logprobs, *inputs)
        if len(given) != len(names):
            raise ConfigError(f"custom loss {self.name!r} takes {', '.join(names)}, not {len(given)} tensors")
        for name, rank, tensor in zip(names, self.ranks, given, strict=True):
            if tensor.ndim != rank:
                raise ConfigError(
                    f"custom loss {self.name!r}: {name} has shape {list(tensor.shape)}, and was declared with rank {rank}: send it "
                    "in that shape, or create the loss with another rank"
                )
        differentiable = torch.is_grad_enabled() and logprobs.requires_grad
        values: dict[str, Any] = {name: x.detach().cpu() for name, x in zip(self._placeholders, given, strict=True)}
        values[self._placeholders[0]].requires_grad_(differentiable)
        limits = _Limits.of(given)
        for node in self._nodes:
            with _client_errors(f"custom loss {self.name!r}: {node.operation.label} (node {node.name!r})"):
                values[node.name] = _evaluate(node, values, limits)
        loss = self._check_loss(values[self._loss.name])
        metrics = {
            key: self._as_metric(key, values[ref.name]).to(logprobs.device) for key, ref in self._metrics.items()
        }
        if not differentiable:
            return loss.to(logprobs.device), metrics
        if not loss.requires_grad:
            raise ConfigError(
                f"custom loss {self.name!r} has no gradient with respect to logprobs: they are only read through detach() or "
                "operations without a derivative, such as comparisons; use them directly in the loss"
            )
        with _client_errors(f"custom loss {self.name!r}: its gradient"):
            (gradient,) = torch.autograd.grad(loss, values[self._placeholders[0]])
        value = loss.detach().to(logprobs.device)
        return _WithGradient.apply(logprobs, value, gradient.to(logprobs.device)), metrics  # type: ignore[no-untyped-call]

    def _check_loss(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise ConfigError(
                f"custom loss {self.name!r} returned a loss that is {_describe(loss)}, not a floating-point scalar: end it with "
                ".sum() or .mean()"
            )
        return loss

    def _as_metric(self, key: str, value: Any) -> Tensor:
        if isinstance(value, (int, float)):
            return torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"custom loss {self.name!r}: {key!r} is {_describe(value)}, not one number: use .sum() or .mean()"
            )
        return value.detach().reshape(())


def build_custom_loss(
    name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Mapping[str, Any]], format: int = FORMAT
) -> CustomLoss:
    """Check an uploaded graph and return the loss.

    Args:
        name: The function's, for messages.
        inputs: (name, rank) of each input, `logprobs` first.
        nodes: In execution order, each with `op`, `name`, `target`, `args` and `kwargs`, encoded as the SDK does.
        format: Version of that encoding.

    Raises:
        ConfigError: A malformed graph, or one with an operation that is not allowed.
    """
    if not isinstance(name, str) or len(name) > 256:
        raise ConfigError(f"a custom loss is named by up to 256 characters, not {_show(name)}")
    if format != FORMAT or isinstance(format, bool):
        raise ConfigError(
            f"custom loss {name!r} has format {_show(format)}, and this server reads format {FORMAT}: install a tinker "
            f"that sends it, or {_ON_CLIENT}"
        )
    try:
        names, ranks = _check_inputs(inputs)
        return CustomLoss(name, names[1:], ranks, *_read_graph(names, nodes))
    except ConfigError as error:
        raise ConfigError(f"custom loss {name!r}: {error}") from None


@contextmanager
def _client_errors(what: str) -> Iterator[None]:
    """Raise ConfigError for any exception: torch's, in an operation that the client chose, are the client's."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{what} failed: {' '.join(str(error).split())[:300]}") from error


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to `logprobs` is known."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None


# Reading a graph.


@dataclass(frozen=True)
class _Ref:
    """The value of another node, as an argument."""

    name: str


@dataclass(frozen=True)
class _Node:
    name: str
    operation: _Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _check_inputs(inputs: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise ConfigError(f"it takes {len(inputs)} inputs: a loss takes logprobs and at most {MAX_INPUTS - 1} others")
    names, ranks = tuple(name for name, _ in inputs), tuple(rank for _, rank in inputs)
    for name, rank in inputs:
        if not isinstance(name, str) or not _INPUT.fullmatch(name):
            raise ConfigError(f"input {_show(name)} must be a lowercase name of letters, digits and underscores")
        if type(rank) is not int or not 0 <= rank <= 2:
            raise ConfigError(f"input {name!r} has rank {_show(rank)}: it is 0, 1 ([T]) or 2 ([T, K])")
    if names[0] != "logprobs" or ranks[0] == 0:
        raise ConfigError(f"its first input is {names[0]!r} with rank {ranks[0]}, not logprobs with rank 1 or 2")
    if len(set(names)) < len(names):
        raise ConfigError(f"its inputs {', '.join(names)} repeat a name: name each of them once")
    return names, ranks


def _read_graph(
    inputs: Sequence[str], nodes: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, ...], tuple[_Node, ...], _Ref, Mapping[str, _Ref]]:
    """Return (names of the placeholders, nodes between them and the output, loss, metrics)."""
    if not len(inputs) < len(nodes) <= MAX_NODES:
        raise ConfigError(
            f"its graph has {len(nodes)} nodes: it needs one for each of {', '.join(inputs)} and an output, and at most "
            f"{MAX_NODES} in all. Write loops over positions as tensor operations, or {_ON_CLIENT}"
        )
    earlier = dict[str, bool]()  # whether it depends on logprobs
    between, arguments = list[_Node](), 0
    for place, given in enumerate(nodes[:-1]):
        op, name, target, args, kwargs = _check_node(given)
        if name in earlier:
            raise ConfigError(f"two nodes are named {name!r}: every node needs its own name")
        expected = inputs[place] if place < len(inputs) else None
        if (op == "placeholder") != (expected is not None) or (expected and (target != expected or args or kwargs)):
            raise ConfigError(
                f"node {place} is {op} {target!r}: the graph begins with one placeholder for each input, "
                f"{', '.join(inputs)}, in this order and without defaults, and has no others"
            )
        if expected:
            earlier[name] = place == 0
            continue
        try:
            node = _read_node(op, name, target, args, kwargs, earlier)
        except ConfigError as error:
            raise ConfigError(f"node {name!r}: {error}") from None
        leaves = list(_leaves((node.args, node.kwargs)))
        earlier[name] = any(earlier[x.name] for x in leaves if isinstance(x, _Ref))
        between.append(node)
        arguments += len(leaves)
    if arguments > MAX_ARGUMENTS:
        raise ConfigError(
            f"its nodes have {arguments} arguments, and the limit is {MAX_ARGUMENTS}: use tensors for lists"
        )
    op, _, _, args, kwargs = _check_node(nodes[-1])
    if op != "output":
        raise ConfigError(f"its last node is {op}, not output: the function must return (loss, metrics)")
    return tuple(earlier)[: len(inputs)], tuple(between), *_read_output(args, kwargs, earlier)


def _check_node(given: Mapping[str, Any]) -> tuple[str, str, str, list[Any], dict[str, Any]]:
    """Return (op, name, target, args, kwargs) of a node, of the right types."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"a node is {_show(given)}, not an object with op, name, target, args and kwargs")
    op, name, target = given.get("op"), given.get("name"), given.get("target")
    args, kwargs = given.get("args", []), given.get("kwargs", {})
    texts = (op, name, target, *(kwargs if isinstance(kwargs, dict) else [None]))
    if not isinstance(args, list) or not all(isinstance(x, str) and len(x) <= 256 for x in texts):
        raise ConfigError(
            f"node {_show(name)} is malformed: op, name, target and the keys of kwargs are strings of up to 256 characters, args "
            "is a list and kwargs an object. Send it as the SDK encodes it"
        )
    return str(op), str(name), str(target), args, kwargs


def _read_node(
    op: str, name: str, target: str, args: list[Any], kwargs: dict[str, Any], earlier: Mapping[str, bool]
) -> _Node:
    is_attribute = op == "call_function" and target in ("getattr", "builtins.getattr")
    operation = _find_attribute(args, kwargs) if is_attribute else _find_operation(op, target)
    read = tuple(_decode_list(args[:1] if is_attribute else args, earlier))
    options = {key: _decode(x, earlier) for key, x in kwargs.items()}
    if op == "call_method" and not (read and isinstance(read[0], _Ref)):
        raise ConfigError(f"{operation.label} needs the tensor whose method it is as its first argument")
    for text in (x for x in _leaves((read, options)) if isinstance(x, str)):
        if text not in _OPTIONS.split() and not (operation.label == "torch.einsum" and _EINSUM.fullmatch(text)):
            raise ConfigError(
                f"{operation.label} has the argument {_show(text)}, which this server does not know; {_ON_CLIENT}"
            )
    _check_options(operation, read, options)
    return _Node(name, operation, read, options)


def _find_attribute(args: list[Any], kwargs: dict[str, Any]) -> _Operation:
    """Return the operation that reads the attribute that getattr(value, name) names."""
    attribute = args[1] if len(args) == 2 and not kwargs else None
    if not isinstance(attribute, str) or attribute not in _ATTRIBUTES:
        raise ConfigError(
            f"getattr of {_show(attribute)} is not allowed: a loss may read {', '.join(_ATTRIBUTES)} of a tensor or result, and "
            "use methods such as detach()"
        )
    return _ATTRIBUTES[attribute]


def _check_options(operation: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if an option, given by name or by position, would do more than compute a result."""
    try:
        given = {**inspect.signature(operation.function).bind(*args, **kwargs).arguments, **kwargs}
    except (TypeError, ValueError):  # built-in functions have no signature, and take these by name only
        given = kwargs
    for option in ("out", "inplace", "requires_grad", "pin_memory"):
        if given.get(option) is not None and given[option] is not False:
            raise ConfigError(f"{operation.label} may not have the option {option}: leave it out, and use the result")


def _read_output(
    args: list[Any], kwargs: dict[str, Any], earlier: Mapping[str, bool]
) -> tuple[_Ref, Mapping[str, _Ref]]:
    """Return (loss, metrics)."""
    returned = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(returned, dict):
        returned = returned.get("tuple")
    if not isinstance(returned, list) or len(returned) != 2:
        raise ConfigError("its output is not a pair: the function must return (loss, metrics)")
    loss, given = _decode(returned[0], earlier), returned[1]
    metrics = given["dict"] if isinstance(given, dict) and list(given) == ["dict"] else None
    if not isinstance(loss, _Ref):
        raise ConfigError(f"it returns {_show(loss)} as its loss, not a tensor that it computes from logprobs")
    if not earlier[loss.name]:
        raise ConfigError("its loss does not depend on logprobs, so that it has no gradient: compute it from logprobs")
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise ConfigError(
            f"its metrics are not a dictionary of at most {MAX_METRICS} tensors: return (loss, {{}}) if it has none"
        )
    read = dict[str, _Ref]()
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC.fullmatch(key):
            raise ConfigError(
                f"metric {_show(key)} must be named custom/<name>:sum or custom/<name>:mean in lowercase, which says how "
                "it combines over the data"
            )
        ref = _decode(value, earlier)
        if not isinstance(ref, _Ref):
            raise ConfigError(f"metric {key!r} is {_show(ref)}, not a tensor that the function computes")
        read[key] = ref
    return loss, read


def _decode(value: Any, earlier: Mapping[str, bool], depth: int = 0) -> Any:
    """Return an argument with `_Ref` for nodes. Raises ConfigError for one that is malformed."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"an argument is nested more than {MAX_DEPTH} levels deep: flatten it")
    if isinstance(value, list):
        return _decode_list(value, earlier, depth + 1)
    if isinstance(value, dict) and len(value) == 1:
        kind, content = next(iter(value.items()))
        if kind == "ref" and isinstance(content, str) and content in earlier:
            return _Ref(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(_decode_list(content, earlier, depth + 1))
        if kind == "slice" and isinstance(content, list) and len(content) == 3:
            return slice(*_decode_list(content, earlier, depth + 1))
        if kind == "ellipsis" and content is True:
            return ...
        if kind in _CONSTANTS and isinstance(content, str) and content in _CONSTANTS[kind]:
            return _CONSTANTS[kind][content]
        if kind == "device" and isinstance(content, str) and _DEVICE.fullmatch(content):
            return torch.device("cpu")
        what = "which is no earlier node" if kind == "ref" else "which this server does not know"
        raise ConfigError(f"an argument is {_show(value)}, {what}: send it as the SDK encodes it, or {_ON_CLIENT}")
    if isinstance(value, str):
        return torch.device("cpu") if _DEVICE.fullmatch(value) else value
    if value is None or isinstance(value, float) or (isinstance(value, int) and _is_word(value)):
        return value
    what = "an integer beyond 64 bits" if isinstance(value, int) else _show(value)
    raise ConfigError(
        f"an argument is {what}: send numbers, texts, lists and what the SDK encodes as objects with one key"
    )


def _decode_list(values: list[Any], earlier: Mapping[str, bool], depth: int = 0) -> list[Any]:
    if len(values) > MAX_ITEMS:
        raise ConfigError(f"a list of arguments has {len(values)} entries, and the limit is {MAX_ITEMS}: use a tensor")
    return [_decode(x, earlier, depth) for x in values]


def _find_operation(op: str, target: str) -> _Operation:
    """Return the operation that a node calls, or raise ConfigError that says what to use instead."""
    if op == "call_module":
        raise ConfigError(f"it calls the module {_show(target)}: use functions, such as those of torch.nn.functional")
    if op == "get_attr":
        raise ConfigError(
            f"it captures the tensor {_show(target)}: make it an input, or use a Python number or full_like"
        )
    if op not in ("call_function", "call_method"):
        raise ConfigError(f"its op is {_show(op)}, which has no meaning there: send the nodes as the SDK encodes them")
    name = target
    if op == "call_method":
        name = f"Tensor.{target}"
    else:
        for private, public in _PUBLIC_NAMES.items():
            if name.startswith(private):
                name = public + name.removeprefix(private)
        name = _ALIASES.get(name, name)
    if name in _OPERATIONS and (op == "call_method") == name.startswith("Tensor."):
        return _OPERATIONS[name]
    last = name.rpartition(".")[2]
    reason = _REASONS.get(name) or _REASONS.get(last)
    if reason is None and last.endswith("_") and not last.endswith("__"):
        reason = f"it changes a tensor in place: use {last.rstrip('_')}, and its result"
    reason = reason or f"it is not one of this server's operations: write it with others, or {_ON_CLIENT}"
    raise ConfigError(f"{name} is not allowed: {reason}")


# Running a graph.

_GROWTH, _ALWAYS = 64, 2**20
"""Elements of one result: 64 for each element of the largest input, and 2²⁰, enough for all pairs of 1024 tokens."""
_TOTAL_GROWTH, _TOTAL_ALWAYS = 256, 2**25
"""Elements of all results, which the backward pass keeps: 2²⁵ are 128 MiB in float32."""
_OVERHEAD = 128
"""Elements that a tensor counts as at least: a list of many tiny tensors needs memory too."""

_PLAIN = (float, torch.dtype, torch.device)
"""Results that are no tensors or integers."""


@dataclass
class _Limits:
    """Bounds the memory of one call."""

    elements: int
    remaining: int

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> _Limits:
        largest = max(x.numel() for x in inputs)
        return cls(_GROWTH * largest + _ALWAYS, _TOTAL_GROWTH * largest + _TOTAL_ALWAYS)

    def check(self, elements: int) -> None:
        if elements > self.elements:
            raise ConfigError(
                f"its result would have {elements} elements, and the limit is {self.elements}, {_GROWTH} times the largest input "
                f"plus {_ALWAYS}: reduce before combining all pairs, or {_ON_CLIENT}"
            )

    def charge(self, result: Any) -> None:
        """Count a result, or raise ConfigError if it is too much, or nothing that a graph may pass on."""
        if isinstance(result, (tuple, list)):
            for x in result:
                self.charge(x)
            return
        if isinstance(result, Tensor):
            if result.ndim > MAX_DIMENSIONS:
                raise ConfigError(f"its result has {result.ndim} dimensions, and the limit is {MAX_DIMENSIONS}")
            if min(result.shape, default=0) < 0:  # expand(-5, 0)
                raise ConfigError(f"its result has shape {list(result.shape)}: sizes are at least 0")
            self.check(result.numel())
        elif not (isinstance(result, int) and _is_word(result)) and not isinstance(result, _PLAIN):
            raise ConfigError(f"its result is {_describe(result)}: a loss computes with tensors and numbers of 64 bits")
        self.remaining -= max(_OVERHEAD, result.numel() if isinstance(result, Tensor) else 0)
        if self.remaining < 0:
            raise ConfigError(
                f"the results up to here need too much memory: use fewer or smaller intermediate tensors, or {_ON_CLIENT}"
            )


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class _Operation:
    label: str
    function: Callable[..., Any]
    check: Callable[[_Call, _Limits], None]
    """Raises ConfigError for a call that would make a tensor that is too large."""


def _evaluate(node: _Node, values: Mapping[str, Any], limits: _Limits) -> Any:
    def resolve(leaf: Any) -> Any:
        return values[leaf.name] if isinstance(leaf, _Ref) else leaf

    call = _Call(node.operation.function, _map(resolve, node.args), _map(resolve, node.kwargs))
    node.operation.check(call, limits)
    result = call.run()
    limits.charge(result)
    return result


def _check_nothing(call: _Call, limits: _Limits) -> None:
    """For results that are no larger than their first argument, or no tensors."""


def _check_broadcast(call: _Call, limits: _Limits) -> None:
    """For results, and intermediate ones such as a loss before its mean, no larger than the arguments broadcast to each other."""
    shapes = list({x.shape for x in _leaves((call.args, call.kwargs)) if isinstance(x, Tensor)})
    if len(shapes) < 2:
        return
    for some in (shapes, *itertools.combinations(shapes[:MAX_INPUTS], 2)):
        try:
            shape = torch.broadcast_shapes(*some)  # type: ignore[no-untyped-call]
        except RuntimeError:  # these are not combined, or fail to be
            continue
        limits.check(math.prod(shape))


def _check_by_rehearsal(call: _Call, limits: _Limits) -> None:
    """For all else: make the call with tensors that have a shape and no data."""
    rehearsal = _Call(call.function, _map(_without_data, call.args), _map(_without_data, call.kwargs))
    try:
        with torch.no_grad(), _LimitResults(limits):
            rehearsal.run()
    except RuntimeError as error:
        if "meta" in str(error).lower():
            raise ConfigError(
                "the size of its result depends on the values of tensors: use numbers for sizes, such as one_hot's num_classes"
            ) from error
        raise


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


class _LimitResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Limits every tensor that torch makes, also within a function, as einsum's intermediate ones."""

    def __init__(self, limits: _Limits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits = limits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in _leaves(result):
            if isinstance(x, Tensor):
                self.limits.check(x.numel())
        return result


def _check_creation(call: _Call, limits: _Limits) -> None:
    """For tensors that are made from sizes, as torch.zeros(n)."""
    _check_by_rehearsal(_Call(call.function, call.args, {**call.kwargs, "device": torch.device("cpu")}), limits)


def _create(function: Callable[..., Any], *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
    """Make a tensor on the CPU, whatever torch's default device is."""
    return function(*args, device=device or torch.device("cpu"), **kwargs)


def _check_index(call: _Call, limits: _Limits) -> None:
    """For x[index]: only an index with tensors can make more elements than x has."""
    x, index = call.args
    if not isinstance(x, (Tensor, tuple, list)):
        raise ConfigError(
            f"what it indexes is {_describe(x)}: index tensors, shapes, and results such as those of sort"
        )
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > MAX_DIMENSIONS:
        raise ConfigError(f"its index has {len(parts)} parts, and the limit is {MAX_DIMENSIONS}")
    if not isinstance(x, Tensor) or not any(isinstance(part, list) or _has_shape(part) for part in parts):
        return
    plain = list[Any]()
    for part in parts:
        if _has_shape(part) and part.dtype == torch.bool:
            plain += part.nonzero(as_tuple=True)
        elif _has_shape(part) and part.dtype == torch.uint8:
            raise ConfigError(
                "its index is uint8, which is ambiguous: convert a mask with bool(), positions with long()"
            )
        else:
            plain.append(_map(_as_number, part))
    _check_by_rehearsal(_Call(call.function, (x, tuple(plain)), {}), limits)


def _has_shape(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim > 0


def _as_number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, Tensor) and leaf.ndim == 0 else leaf


def _calculate(function: Callable[..., Any], *args: Any) -> Any:
    """Apply an operator of Python to tensors or numbers: `*` of a list, for one, may need memory without bound."""
    if all(isinstance(x, (Tensor, int, float)) for x in args):
        is_power = function in (operator.pow, operator.lshift)
        if is_power and all(isinstance(x, int) for x in args) and args[1] > 64:
            raise ConfigError(f"{args[0]} and {args[1]} give an integer beyond 64 bits: use floating-point numbers")
        return function(*args)
    if function is operator.add and all(isinstance(x, tuple) and len(x) <= MAX_DIMENSIONS for x in args):
        return function(*args)  # shapes
    raise ConfigError(f"it cannot combine what is {' and '.join(map(_describe, args))}: use tensors and numbers")


def _calculate_numbers(function: Callable[..., Any], *args: Any) -> Any:
    """Apply a function of the math module."""
    if not all(isinstance(x, (int, float)) for x in args):
        raise ConfigError(
            f"its argument is {' and '.join(map(_describe, args))}: for tensors, use the function of torch"
        )
    return function(*args)


def _read_tensor_attribute(attribute: Callable[[Any], Any], value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise ConfigError(f"it is read of what is {_describe(value)}: only tensors have it here")
    return attribute(value)


def _read_result_attribute(attribute: Callable[[Any], Any], value: Any) -> Any:
    if not isinstance(value, tuple) or type(value).__module__ != "torch.return_types":
        raise ConfigError(
            f"it is read of what is {_describe(value)}: only results such as those of sort and max(dim) have it"
        )
    return attribute(value)


# Arguments and messages.


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in nested lists, tuples, dictionaries and slices."""
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _leaves(x)
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step))
    else:
        yield value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples, dictionaries and slices with every leaf replaced."""
    if isinstance(value, list):
        return [_map(function, x) for x in value]
    if isinstance(value, tuple):
        return tuple(_map(function, x) for x in value)
    if isinstance(value, dict):
        return {key: _map(function, x) for key, x in value.items()}
    if isinstance(value, slice):
        return slice(*(_map(function, x) for x in (value.start, value.stop, value.step)))
    return function(value)


def _is_word(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _show(value: object) -> str:
    """Return a client's value for a message, however long and nested it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    return short.repr(value)


# The operations.

_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul all amax amin any argmax argmin argsort asin asinh atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil chunk clamp clamp_max clamp_min clip clone copysign cos cosh
    count_nonzero cummax cummin cumprod cumsum deg2rad detach diagonal digamma div divide eq erf erfc erfinv exp exp2 expm1
    flatten flip float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt hypot isclose isfinite isinf
    isnan isneginf isposinf kthvalue le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_scatter masked_select max
    maximum mean median min minimum moveaxis movedim mul multiply nan_to_num nanmean nanmedian nansum narrow ne neg negative
    nonzero norm not_equal numel permute positive pow prod rad2deg reciprocal relu remainder reshape roll round rsqrt select sgn
    sigmoid sign sin sinh softmax sort split sqrt square squeeze std sub subtract sum swapaxes swapdims t tan tanh topk transpose
    tril triu true_divide trunc unbind unflatten unsqueeze var where xlogy
"""
"""Functions of torch and methods of tensors whose results are no larger than their arguments broadcast to each other."""
_TORCH = "full_like is_floating_point ones_like rsub std_mean trapezoid trapz var_mean zeros_like cosine_similarity"
_FUNCTIONAL = """
    binary_cross_entropy binary_cross_entropy_with_logits celu cross_entropy elu gaussian_nll_loss gelu hardsigmoid hardswish
    hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid margin_ranking_loss mish mse_loss
    nll_loss normalize poisson_nll_loss relu relu6 selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softplus
    softsign tanh tanhshrink threshold
"""
_SPECIAL = """
    digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr ndtri psi round sinc
    softmax xlog1py xlogy
"""
_METHODS = """
    bfloat16 bool contiguous cpu dim double float half index_add index_fill int is_floating_point long ndimension nelement
    reshape_as scatter scatter_add size to type type_as view_as
"""
"""Methods whose results are no larger than the tensor, whatever their other arguments."""
_REHEARSED = """
    bmm broadcast_to diag diag_embed dot gather index_select inner kron matmul mm mv nanquantile outer quantile repeat_interleave
    take_along_dim tile
"""
"""Functions of torch and methods of tensors whose results may be larger."""
_REHEARSED_TORCH = "broadcast_tensors cat cdist concat einsum hstack meshgrid stack tensordot vstack"
_REHEARSED_METHODS = "expand expand_as new_full new_ones new_tensor new_zeros repeat unfold"
_CREATIONS = "arange eye full linspace ones zeros"
_OPERATORS = """
    abs add and_ eq floordiv ge gt inv invert le lshift lt mod mul ne neg or_ pos pow rshift sub truediv xor
"""
_MATH = """
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod gamma hypot isfinite
    isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc
"""


def _list_operations() -> Iterator[_Operation]:
    for prefix, owner, names, check in (
        ("torch", torch, _POINTWISE + _TORCH, _check_broadcast),
        ("torch.nn.functional", torch.nn.functional, _FUNCTIONAL, _check_broadcast),
        ("torch.special", torch.special, _SPECIAL, _check_broadcast),
        ("torch.linalg", torch.linalg, "vector_norm", _check_broadcast),
        ("Tensor", Tensor, _POINTWISE, _check_broadcast),
        ("Tensor", Tensor, _METHODS, _check_nothing),
        ("torch", torch, _REHEARSED + _REHEARSED_TORCH, _check_by_rehearsal),
        ("torch.nn.functional", torch.nn.functional, "one_hot pad", _check_by_rehearsal),
        ("Tensor", Tensor, _REHEARSED + _REHEARSED_METHODS, _check_by_rehearsal),
        ("operator", operator, "matmul", _check_by_rehearsal),
        ("operator", operator, "getitem", _check_index),
    ):
        for name in names.split():
            yield _Operation(f"{prefix}.{name}", getattr(owner, name), check)
    yield _Operation("Tensor.view", Tensor.reshape, _check_nothing)  # view also reinterprets bits as another type
    for name in _CREATIONS.split():
        yield _Operation(f"torch.{name}", partial(_create, getattr(torch, name)), _check_creation)
    for name in _OPERATORS.split():
        yield _Operation(f"operator.{name}", partial(_calculate, getattr(operator, name)), _check_broadcast)
    for name in _MATH.split():
        yield _Operation(f"math.{name}", partial(_calculate_numbers, getattr(math, name)), _check_nothing)


_OPERATIONS: Mapping[str, _Operation] = {operation.label: operation for operation in _list_operations()}
_ATTRIBUTES: Mapping[str, _Operation] = {
    name: _Operation(f"getattr {name!r}", partial(read, operator.attrgetter(name)), _check_nothing)
    for read, names in (
        (_read_tensor_attribute, "shape ndim dtype device T mT"),
        (_read_result_attribute, "values indices"),
    )
    for name in names.split()
}

_PUBLIC_NAMES = {
    "torch._C._nn.": "torch.nn.functional.",
    "torch._C._special.special_": "torch.special.",
    "torch._C._linalg.linalg_": "torch.linalg.",
    "torch.functional.": "torch.",
}
"""torch.fx names a function by the module that defines it."""
_ALIASES = {
    "torch.nn.functional.log_sigmoid": "torch.nn.functional.logsigmoid",
    "torch.nn.functional._threshold": "torch.nn.functional.threshold",
}
_DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
    "dtype": {name: getattr(torch, name) for name in _DTYPES.split()},
    "layout": {"strided": torch.strided},
    "memory_format": {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format")},
}
_DEVICE = re.compile(r"(?:cpu|cuda|mps)(?::\d{1,3})?")
_EINSUM = re.compile(r"[A-Za-z,.> -]{1,64}")
_OPTIONS = """
    none mean sum batchmean floor ij xy fro constant reflect replicate circular tanh linear lower higher nearest midpoint
    use_mm_for_euclid_dist use_mm_for_euclid_dist_if_necessary donot_use_mm_for_euclid_dist
"""
"""Texts that are arguments. Not rounding_mode='trunc': -2⁶³ divided by -1 so is a signal that ends the process."""

_RANDOM = """
    alpha_dropout bernoulli dropout dropout1d feature_alpha_dropout gumbel_softmax multinomial normal poisson rand rand_like randint
    randint_like randn randn_like randperm rrelu
"""
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(_RANDOM.split(), "it is random: sample on the client, and make the numbers an input"),
    **dict.fromkeys(("item", "numpy", "tolist"), "its result is no tensor: keep every value, metrics too, a tensor"),
    **dict.fromkeys(("backward", "grad"), "the server computes the gradient of the loss: return it"),
    **dict.fromkeys(("empty", "empty_like", "new_empty"), "its numbers are whatever memory holds: use zeros_like"),
    **dict.fromkeys(("cuda", "mps"), "the server chooses the device: leave it out"),
    "setitem": "it writes to a tensor: use torch.where or masked_fill",
    "torch.linalg.norm": "use torch.linalg.vector_norm",
}
