"""Uploaded losses: equal to the function that was traced, and refused where they would do anything but compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import _get_qualified_name

from policygrad.errors import ConfigError
from policygrad.serve import custom_loss
from policygrad.serve.custom_loss import CustomLoss, build_custom_loss

Function = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
Node = dict[str, Any]


def encode(value: Any) -> Any:
    """Encode an argument of a node of torch.fx as the API's clients do."""
    match value:
        case torch.fx.Node():
            return {"ref": value.name}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case tuple():
            return {"tuple": [encode(x) for x in value]}
        case list():
            return [encode(x) for x in value]
        case dict():
            return {"dict": {key: encode(x) for key, x in value.items()}}
        case slice():
            return {"slice": [encode(x) for x in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.device() | torch.memory_format():
            return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"ellipsis": True} if value is ... else value


def trace(function: Function) -> list[Node]:
    """Return the graph of a loss, once through JSON."""
    nodes = []
    for node in torch.fx.symbolic_trace(function).graph.nodes:
        target = _get_qualified_name(node.target) if node.op == "call_function" else node.target
        kwargs = {key: encode(x) for key, x in node.kwargs.items()}
        target = target.replace("_operator.", "operator.")
        nodes.append(
            {"op": node.op, "name": node.name, "target": target, "args": list(map(encode, node.args)), "kwargs": kwargs}
        )
    return json.loads(json.dumps(nodes))


# Losses that users write.


def reinforce(logprobs: Tensor, advantages: Tensor) -> Any:
    return -(logprobs * advantages).sum(), {}


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    ratio, count = torch.exp(logprobs - old), mask.sum().clamp(min=1)
    value = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    clipped = ((ratio < 0.8) | (ratio > 1.2)).to(logprobs.dtype)
    metrics = {"custom/clipped:mean": (clipped * mask).sum() / count, "custom/kl:sum": ((old - logprobs) * mask).sum()}
    return -(value * mask).sum() / count, metrics


def dpo(logprobs: Tensor, old: Tensor, mask: Tensor) -> Any:
    change = ((logprobs - old) * mask.unsqueeze(-1)).sum(0)
    margin = change[0] - change[1]
    return -F.logsigmoid(0.1 * margin), {"custom/correct:mean": margin > 0}


def kl_penalty(logprobs: Tensor, old: Tensor, scale: Tensor) -> Any:
    change = old - logprobs
    kl = change.exp() - change - 1
    return (kl * scale - logprobs).mean(), {"custom/kl:mean": kl.mean(), "custom/tokens:sum": logprobs.shape[0]}


def entropy(logprobs: Tensor) -> Any:
    log_p = F.log_softmax(logprobs, dim=-1)
    return (log_p.exp() * log_p).sum(dim=-1).mean() + torch.logsumexp(logprobs, -1).pow(2).mean(), {}


def masked_mean(logprobs: Tensor, mask: Tensor) -> Any:
    chosen = logprobs[mask > 0]
    return -chosen.mean() - logprobs.masked_fill(mask == 0, 0.0).sum() / mask.sum(), {"custom/n:sum": (mask > 0).sum()}


def indexing(logprobs: Tensor, places: Tensor, last: Tensor) -> Any:
    steps = logprobs[1:] - logprobs[:-1]
    return -(
        logprobs[places].sum() + logprobs[last] + logprobs[:last].sum() + steps.square().sum() + logprobs[..., -1]
    ), {}


def where(logprobs: Tensor, advantages: Tensor) -> Any:
    low = torch.where(advantages > 0, logprobs, torch.full_like(logprobs, -math.inf))
    return -torch.where(low > -2.0, low, 0.0).sum() - torch.maximum(logprobs, torch.zeros_like(logprobs) - 1).sum(), {}


def discounted(logprobs: Tensor, advantages: Tensor) -> Any:
    length = logprobs.shape[0]
    returns = advantages.flip(0).cumsum(0).flip(0)
    weights = 0.9 ** torch.arange(length, device=logprobs.device)
    return -(weights * logprobs * (returns - returns.mean()) / (returns.std() + 1e-6)).sum() / math.log(length), {}


def pairs(logprobs: Tensor, advantages: Tensor) -> Any:
    better = (advantages[:, None] > advantages[None, :]).float()
    return (F.softplus(logprobs[None, :] - logprobs[:, None]) * better).sum() / better.sum().clamp(min=1), {}


def per_group(logprobs: Tensor, group: Tensor) -> Any:
    members = F.one_hot(group, 3).to(logprobs.dtype)
    mean = torch.einsum("t,tg->g", logprobs, members) / members.sum(0)
    total = torch.zeros_like(logprobs).index_add(0, group, logprobs)
    return total.max() + torch.stack([mean[0], mean[1]]).norm() + torch.cat([mean, total]).var(), {}


def ordered(logprobs: Tensor) -> Any:
    worst = torch.topk(-logprobs, 3).values
    bound = torch.quantile(logprobs.detach(), 0.3)
    return worst.sum() + logprobs.sort(descending=True)[0][:2].prod() + logprobs.max(dim=0).values + F.relu(
        logprobs - bound
    ).sum(), {}


def classes(logprobs: Tensor, group: Tensor) -> Any:
    value = F.cross_entropy(logprobs, group.clamp(max=1)) + F.huber_loss(logprobs[:, 0], group.to(logprobs.dtype))
    return value + F.kl_div(logprobs, logprobs.detach().expand(-1, 2).roll(1), log_target=True, reduction="sum"), {}


LOSSES: dict[Function, dict[str, int]] = {
    reinforce: {"advantages": 1},
    ppo: {"old": 1, "advantages": 1, "mask": 1},
    dpo: {"old": 2, "mask": 1},
    kl_penalty: {"old": 1, "scale": 0},
    entropy: {},
    masked_mean: {"mask": 1},
    indexing: {"places": 1, "last": 0},
    where: {"advantages": 1},
    discounted: {"advantages": 1},
    pairs: {"advantages": 1},
    per_group: {"group": 1},
    ordered: {},
    classes: {"group": 1},
}
ON_PAIRS = {dpo, entropy, classes}


def arguments(function: Function, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Return (log-probabilities [7] or [7, 2], other inputs)."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "mask": torch.tensor([0, 0, 1, 1, 0, 1, 1], dtype=dtype),
        "places": torch.tensor([2, 3, 5]),
        "last": torch.tensor(4),
        "group": torch.tensor([0, 0, 1, 1, 2, 2, 2]),
        "scale": torch.tensor(0.1, dtype=dtype),
    }
    shape = (7, 2) if function in ON_PAIRS else (7,)
    logprobs = -torch.rand(shape, generator=generator, dtype=dtype) * 4
    values["old"] = logprobs + 0.5 * torch.randn(shape, generator=generator, dtype=dtype)
    values["advantages"] = torch.randn(7, generator=generator, dtype=dtype)
    return logprobs.requires_grad_(), [values[name] for name in LOSSES[function]]


def build(function: Function) -> CustomLoss:
    inputs = [("logprobs", 2 if function in ON_PAIRS else 1), *LOSSES[function].items()]
    return build_custom_loss(function.__name__, inputs, trace(function))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", LOSSES)
def test_values_metrics_and_gradients_are_those_of_the_function(function: Function, dtype: torch.dtype) -> None:
    check_same(build(function), function, dtype)


def check_same(loss: CustomLoss, function: Function, dtype: torch.dtype) -> None:
    results = []
    for run in (loss, function):
        logprobs, inputs = arguments(function, dtype)
        value, metrics = run(logprobs, *inputs)
        (2 * value).backward()
        assert logprobs.grad is not None
        numbers = {key: float(x.detach()) if isinstance(x, Tensor) else float(x) for key, x in metrics.items()}
        results.append((value.detach(), numbers, logprobs.grad))
    assert loss.input_names == tuple(LOSSES[function])
    torch.testing.assert_close(
        *results, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-12 if dtype == torch.float64 else 1e-6
    )


def test_of_several_data_the_gradients_add_up_and_only_logprobs_have_one() -> None:
    loss, (logprobs, inputs) = build(ppo), arguments(ppo)
    total = loss(logprobs, *inputs)[0] + 2 * loss(logprobs[:5], *(x[:5].requires_grad_() for x in inputs))[0]
    total.backward()
    got, logprobs.grad = logprobs.grad, None
    (ppo(logprobs, *inputs)[0] + 2 * ppo(logprobs[:5], *(x[:5] for x in inputs))[0]).backward()
    torch.testing.assert_close(got, logprobs.grad)
    assert all(x.grad is None for x in inputs)


def test_without_gradient_the_value_is_the_same() -> None:
    loss, (logprobs, inputs) = build(ppo), arguments(ppo)
    value, metrics = loss(logprobs, *inputs)
    assert value.requires_grad
    assert not any(x.requires_grad for x in metrics.values())
    with torch.no_grad():
        assert loss(logprobs, *inputs)[0] == value
    assert loss(logprobs.detach(), *inputs)[0] == value


def test_the_sdk_sends_what_this_server_reads() -> None:
    sdk = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
    for function, ranks in LOSSES.items():
        handle = sdk.trace_loss(function, {"logprobs": 2 if function in ON_PAIRS else 1, **ranks}, "session")
        graph = sdk.encode_graph(handle)
        nodes = json.loads(json.dumps([node.model_dump() for node in graph.nodes]))
        loss = build_custom_loss(handle.name, [(x.name, x.rank) for x in handle.inputs], nodes, graph.format)
        check_same(loss, function, torch.float64)


# Graphs by hand: (logprobs, x) → (some result, {}).


def node(target: str, *args: Any, name: str = "result", op: str = "call_function", **kwargs: Any) -> Node:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, name: str = "result", **kwargs: Any) -> Node:
    return node(target, LOGPROBS, *args, name=name, op="call_method", **kwargs)


def ref(name: str) -> Node:
    return {"ref": name}


LOGPROBS, X, RESULT = ref("logprobs"), ref("x"), ref("result")
PLACEHOLDERS = [node("logprobs", name="logprobs", op="placeholder"), node("x", name="x", op="placeholder")]


def output(loss: Any = RESULT, metrics: Any = None, form: str | None = "tuple") -> Node:
    pair = [loss, {"dict": {} if metrics is None else metrics}]
    return node("output", {form: pair} if form else pair, name="output", op="output")


def by_hand(
    *nodes: Any, end: Any = None, inputs: Sequence[Any] = (("logprobs", 1), ("x", 1)), **options: Any
) -> CustomLoss:
    return build_custom_loss("hand", inputs, [*PLACEHOLDERS, *nodes, end or output()], **options)


def call(*nodes: Node, end: Node | None = None, size: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    return by_hand(*nodes, end=end)(torch.linspace(-2, -1, size).requires_grad_(), torch.arange(size))


def test_a_graph_by_hand_with_every_kind_of_argument() -> None:
    nodes = [
        node("operator.getitem", LOGPROBS, {"tuple": [{"ellipsis": True}, {"slice": [None, None, 2]}]}, name="even"),
        node("torch.clamp", ref("even"), name="bounded", min={"float": "-inf"}, max={"float": "inf"}),
        node(
            "torch.zeros_like",
            X,
            name="zeros",
            dtype={"dtype": "float64"},
            device={"device": "cuda:1"},
            layout={"layout": "strided"},
        ),
        node("torch.cat", [ref("bounded"), ref("zeros")], name="joined"),
        node(
            "to",
            ref("joined"),
            "cuda",
            {"dtype": "float64"},
            name="moved",
            op="call_method",
            memory_format={"memory_format": "preserve_format"},
        ),
        node("builtins.getattr", ref("moved"), "shape", name="shape"),
        node("operator.getitem", ref("shape"), 0, name="length"),
        node("math.sqrt", ref("length"), name="root"),
        method("sum", {"tuple": [0]}, name="total"),
        node("torch.functional.norm", ref("moved"), name="norm", p="fro", out=None),
        node("torch._C._special.special_entr", ref("norm"), name="entropy"),
        node("operator.truediv", ref("total"), ref("root")),
    ]
    metrics = {"custom/a/b_c.d-1:sum": ref("root"), "custom/norm:mean": ref("norm")}
    for form in ("tuple", None):
        value, got = call(*nodes, end=output(RESULT, metrics, form))
        assert float(value.detach()) == pytest.approx(-6 / math.sqrt(6))
        assert {key: float(x) for key, x in got.items()} == pytest.approx(
            {"custom/a/b_c.d-1:sum": math.sqrt(6), "custom/norm:mean": math.sqrt(4 + 16 / 9)}
        )


SUM = method("sum")
COLUMN, THREE = method("unsqueeze", 1, name="column"), node("torch.ones", 3, name="three")
FUNCTIONS = """
    torch.rand_like torch.randn torch.nn.functional.dropout torch.bernoulli torch.empty_like torch.load torch.save torch.compile
    torch.from_file torch.autograd.grad torch.set_num_threads torch.ops.aten.add torch.hub.load torch.linalg.norm torch.as_strided
    torch.exp_ operator.iadd operator.setitem operator.attrgetter operator.methodcaller operator.call math.factorial math.comb
    builtins.eval builtins.exec builtins.open builtins.__import__ eval open os.system posix.system subprocess.run pickle.loads
    importlib.import_module numpy.load torch torch. .exp torch.nn.functional torch._C._nn.softplus.__call__ _operator.add
    torch.serialization.load torch.functional.exp.__self__ Tensor.exp getattr.x torch.tensor_split torch.repeat_interleave_
"""
METHODS = """
    item numpy tolist backward exp_ add_ copy_ zero_ requires_grad_ masked_fill_ detach_ set_ resize_ as_strided data_ptr
    untyped_storage register_hook retain_grad cuda __class__ __getattribute__ __reduce_ex__ __setitem__ __dict__ apply_ map_
    new_empty new share_memory_ bernoulli multinomial tensor_split
"""


@pytest.mark.parametrize("target", FUNCTIONS.split())
def test_functions_that_are_not_allowed_are_named(target: str) -> None:
    with pytest.raises(ConfigError) as error:
        by_hand(node(target, LOGPROBS))
    public = target.replace("torch._C._nn", "torch.nn.functional").replace("torch.functional", "torch")
    assert f"node 'result': {public} is not allowed: " in str(error.value)


@pytest.mark.parametrize("target", METHODS.split())
def test_methods_that_are_not_allowed_are_named(target: str) -> None:
    with pytest.raises(ConfigError, match=f"Tensor.{target} is not allowed: "):
        by_hand(method(target))


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("exp_", "in place: use exp,"),
        ("item", "keep every value, metrics too, a tensor"),
        ("backward", "return it"),
        ("bernoulli", "sample on the client"),
        ("new_empty", "use zeros_like"),
        ("unknown", "forward_backward_custom"),
    ],
)
def test_a_refusal_says_what_to_do(target: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        by_hand(method(target))


@pytest.mark.parametrize(
    "attribute",
    ["__class__", "__globals__", "__dict__", "data", "grad", "grad_fn", "_base", "exp", "shape.x", 1, None, ["shape"]],
)
def test_attributes_that_are_not_allowed_are_named(attribute: Any) -> None:
    for target in ("getattr", "builtins.getattr"):
        with pytest.raises(ConfigError, match=r"getattr of .*is not allowed") as error:
            by_hand(node(target, LOGPROBS, attribute))
        assert str(attribute) in str(error.value)


NESTED: Any = 1
for _ in range(900):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("torch.exp", ref("later")), node("torch.exp", LOGPROBS, name="later")], "'later'.* no earlier node"),
        ([node("torch.exp", RESULT)], "'result'.* no earlier node"),
        ([node("torch.exp", ref("output"))], "no earlier node"),
        ([SUM, SUM], "two nodes are named 'result'"),
        ([method("sum", name="x")], "two nodes are named 'x'"),
        ([node("linear", LOGPROBS, op="call_module")], "module 'linear'"),
        ([node("_tensor_constant0", op="get_attr")], "tensor '_tensor_constant0': make it an input"),
        ([node("y", op="placeholder")], "one placeholder for each input, logprobs, x"),
        ([node("exp", LOGPROBS, op="call")], "op is 'call'"),
        ([output(), SUM], "op is 'output'"),
        ([node("torch.exp", {"tuple": NESTED})], "nested more than 8"),
        ([node("torch.exp", *[1] * 2000)], "2000 entries"),
        ([node("torch.stack", [LOGPROBS] * 1000, name=f"n{i}") for i in range(30)] + [SUM], "30001 arguments"),
        ([node("torch.exp", 2**63)], "integer beyond 64 bits"),
        ([node("torch.exp", 10**5000)], "integer beyond 64 bits"),
        ([node("torch.exp", {"dtype": "complex64"})], "complex64"),
        ([node("torch.exp", {"device": "meta"})], "meta"),
        ([node("torch.exp", {"float": "1e999"})], "1e999"),
        ([node("torch.exp", {"dict": {}})], "dict"),
        ([node("torch.exp", {"slice": [1, 2]})], "slice"),
        ([node("torch.exp", {"ref": ["x"]})], "ref"),
        ([node("torch.exp", {"ref": "x", "tuple": []})], "one key"),
        ([node("torch.exp", b"x")], "one key"),
        ([node("torch.exp", "/etc/passwd")], "/etc/passwd"),
        ([method("div", X, rounding_mode="trunc")], "'trunc'"),
        ([method("type", "torch.FloatTensor")], "torch.FloatTensor"),
        ([node("torch.exp", LOGPROBS, out=X)], "torch.exp may not have the option out"),
        ([node("torch.functional.norm", LOGPROBS, 2, 0, False, X)], "torch.norm may not have the option out"),
        ([node("torch.functional.tensordot", LOGPROBS, X, 1, X)], "torch.tensordot may not have the option out"),
        ([node("torch.nn.functional.relu", LOGPROBS, inplace=True)], "relu may not have the option inplace"),
        ([node("torch.nn.functional.elu", LOGPROBS, 1.0, True)], "elu may not have the option inplace"),
        ([node("torch.nn.functional.relu", LOGPROBS, X)], "relu may not have the option inplace"),
        ([node("torch.zeros", 3, requires_grad=True)], "torch.zeros may not have the option requires_grad"),
        ([node("sum", 1, op="call_method")], "needs the tensor whose method it is"),
        ([node("sum", op="call_method")], "needs the tensor whose method it is"),
        ([{**SUM, "target": 3}], "malformed"),
        ([{**SUM, "target": ["torch.exp"]}], "malformed"),
        ([{**SUM, "name": None}], "malformed"),
        ([{**SUM, "op": {}}], "malformed"),
        ([{**SUM, "args": "x"}], "malformed"),
        ([{**SUM, "args": {"0": 1}}], "malformed"),
        ([{**SUM, "kwargs": [1]}], "malformed"),
        ([{**SUM, "kwargs": None}], "malformed"),
        ([{**SUM, "target": "e" * 1000}], "malformed"),
        ([{}], "malformed"),
        (["sum"], "not an object"),
        ([method("sum", name=f"n{i}") for i in range(2000)], "at most 2000"),
    ],
)  # fmt: skip
def test_malformed_graphs_are_refused(nodes: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        by_hand(*nodes)
    assert str(error.value).startswith("custom loss 'hand': ")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (output(metrics={"kl": RESULT}), "metric 'kl' must be named"),
        (output(metrics={"custom/kl": RESULT}), "must be named"),
        (output(metrics={"custom/KL:sum": RESULT}), "must be named"),
        (output(metrics={"custom/kl:max": RESULT}), "must be named"),
        (output(metrics={"custom/kl:sum\n": RESULT}), "must be named"),
        (output(metrics={"custom/:sum": RESULT}), "must be named"),
        (output(metrics={"custom/kl:sum": 1.0}), "is 1.0, not a tensor"),
        (output(metrics={"custom/kl:sum": ref("y")}), "no earlier node"),
        (output(metrics={f"custom/{i}:sum": RESULT for i in range(300)}), "at most 256"),
        (output(metrics=[]), "not a dictionary"),
        (output(loss=1.0), "returns 1.0 as its loss"),
        (output(loss=X), "does not depend on logprobs"),
        (node("output", RESULT, name="output", op="output"), "not a pair"),
        (node("output", {"tuple": [RESULT]}, name="output", op="output"), "not a pair"),
        (node("output", {"tuple": [RESULT, RESULT]}, name="output", op="output"), "not a dictionary"),
        (node("output", name="output", op="output"), "not a pair"),
        (method("mean", name="mean"), "last node is call_method"),
    ],
)
def test_malformed_outputs_are_refused(end: Node, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_hand(SUM, end=end)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "0 inputs"),
        ([("logprobs", 1), *((f"x{i}", 1) for i in range(16))], "17 inputs"),
        ([("x", 1), ("logprobs", 1)], "not logprobs"),
        ([("logprobs", 0), ("x", 1)], "not logprobs with rank 1 or 2"),
        ([("logprobs", 3), ("x", 1)], "rank 3"),
        ([("logprobs", 1), ("x", True)], "rank True"),
        ([("logprobs", 1), ("X", 1)], "'X' must be a lowercase name"),
        ([("logprobs", 1), ("x" * 65, 1)], "must be a lowercase name"),
        ([("logprobs", 1), ("logprobs", 1)], "repeat a name"),
        ([("logprobs", 1), ("y", 1)], "one placeholder for each input, logprobs, y"),
        ([("logprobs", 1)], "one placeholder for each input, logprobs"),
        ([("logprobs", 1), ("x", 1), ("y", 1)], "one placeholder for each input"),
    ],
)
def test_malformed_inputs_are_refused(inputs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_hand(SUM, inputs=inputs)


def test_other_formats_and_missing_placeholders_are_refused() -> None:
    for format in (2, 0, True, None, "1"):
        with pytest.raises(ConfigError, match="reads format 1"):
            by_hand(SUM, format=format)
    with pytest.raises(ConfigError, match="one placeholder for each input"):
        build_custom_loss("hand", [("logprobs", 1), ("x", 1)], [*reversed(PLACEHOLDERS), SUM, output()])
    with pytest.raises(ConfigError, match="it needs one for each"):
        build_custom_loss("hand", [("logprobs", 1), ("x", 1)], PLACEHOLDERS)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([method("repeat", 10**12)], "Tensor.repeat .*limit is"),
        ([method("repeat", 2**40, 2**40)], "Tensor.repeat .*overflow"),
        ([method("expand", 10**12, 4000)], "Tensor.expand .*limit is"),
        ([method("expand", -5, 0)], "Tensor.expand "),
        ([method("new_zeros", 10**12)], "Tensor.new_zeros .*limit is"),
        ([node("torch.zeros", 10**12), method("sum", name="s")], "torch.zeros .*limit is"),
        ([node("torch.arange", 10**12)], "torch.arange .*limit is"),
        ([node("torch.full", [10**6, 10**6], 1.0, device={"device": "cpu"})], "torch.full .*limit is"),
        ([node("torch.nn.functional.pad", LOGPROBS, [10**12, 0])], "pad .*limit is"),
        ([node("torch._C._nn.one_hot", X, 10**12)], "one_hot .*limit is"),
        ([node("torch._C._nn.one_hot", X)], "one_hot .*num_classes"),
        ([COLUMN, node("operator.mul", LOGPROBS, ref("column"))], "operator.mul .*limit is"),
        ([COLUMN, node("torch.nn.functional.mse_loss", LOGPROBS, ref("column"))], "mse_loss .*limit is"),
        ([COLUMN, THREE, node("torch.addcmul", LOGPROBS, ref("column"), ref("three"))], "torch.addcmul .*limit is"),
        ([COLUMN, node("torch.cosine_similarity", LOGPROBS, ref("column"))], "torch.cosine_similarity .*limit is"),
        ([node("torch.functional.einsum", "i,j->ij", LOGPROBS, LOGPROBS)], "torch.einsum .*limit is"),
        ([node("torch.outer", LOGPROBS, LOGPROBS)], "torch.outer .*limit is"),
        ([method("unfold", 0, 3000, 1)], "Tensor.unfold .*limit is"),
        ([node("torch.stack", [LOGPROBS] * 1000)], "torch.stack .*limit is"),
        ([method("diag_embed")], "limit is"),
        ([node("operator.pow", 10, 10**9)], "operator.pow .*64 bits"),
        ([node("operator.lshift", 1, 10**9)], "operator.lshift .*64 bits"),
        ([node("operator.pow", 10, 64)], "64 bits"),
        ([node("math.floor", 1e300)], "64 bits"),
        ([node("operator.mul", [1], 10**9)], "operator.mul .*use tensors and numbers"),
        ([method("numel", name="n"), node("operator.mul", {"tuple": [1]}, ref("n"))], "use tensors and numbers"),
        ([node("operator.getitem", X, 5, name="n"), node("operator.mul", {"tuple": [1]}, ref("n"))], "use tensors and numbers"),
        ([node("operator.mod", "ij", 1)], "use tensors and numbers"),
        ([node("math.exp", LOGPROBS)], "math.exp .*use the function of torch"),
        ([node("operator.getitem", LOGPROBS, {"tuple": [None] * 20})], "20 parts"),
        ([method("reshape", [1] * 20 + [-1])], "dimensions"),
        ([node("operator.getitem", 1, 0)], "of type int"),
        ([node("getattr", X, "values")], "only results such as"),
        ([method("size", name="n"), node("getattr", ref("n"), "shape")], "only tensors have it"),
        ([method("type")], "Tensor.type .*of type str"),
        ([node("operator.pow", -8.0, 0.5)], "of type complex"),
        ([method("view", {"dtype": "int32"})], "Tensor.view"),
        ([node("operator.getitem", LOGPROBS, ref("x")), method("gather", 0, 3)], "gather"),
        ([node("operator.add", X, 4000, name="far"), node("operator.getitem", LOGPROBS, ref("far"))], "out of (range|bounds)"),
    ],
)  # fmt: skip
def test_calls_that_need_too_much_or_fail_are_refused_before_they_run(nodes: list[Node], message: str) -> None:
    unique = [{**x, "name": f"r{i}"} if x["name"] == "result" else x for i, x in enumerate(nodes)]
    with pytest.raises(ConfigError, match=message):
        call(*unique, SUM, size=4000)


def test_an_index_that_broadcasts_is_measured() -> None:
    pair = [method("expand", 2, 4000, name="rows"), method("expand", 300, 4000, name="many")]
    index = [
        method("reshape", -1, name="flat"),
        node("operator.gt", ref("flat"), 0, name="mask"),
        method("long", name="ids"),
    ]
    index += [node("clamp", ref("ids"), 0, 1, name="bits", op="call_method"), node("operator.lt", 1, 2, name="yes")]
    for part in ({"tuple": [ref("bits")]}, {"tuple": [True, ref("bits")]}, {"tuple": [ref("yes"), ref("bits")]}):
        with pytest.raises(ConfigError, match=r"operator\.getitem .*limit is"):
            call(*pair, *index, node("operator.getitem", ref("rows"), part, name="huge"), SUM, size=4000)


def test_the_results_together_are_bounded() -> None:
    views = [method("expand", 60, 100_000, name=f"n{i}") for i in range(10)]
    with pytest.raises(ConfigError, match=r"Tensor\.expand \(node 'n9'\) failed: .*too much memory"):
        call(*views, SUM, size=100_000)
    assert call(*views[:9], SUM, size=100_000)[0].isfinite()
    limits = custom_loss._Limits(elements=1000, remaining=1000)
    with pytest.raises(ConfigError, match="too much memory"):
        limits.charge(torch.zeros(8).unbind())  # many tiny tensors are not tiny


def test_no_operation_writes_to_its_inputs() -> None:
    logprobs, inputs = arguments(ppo)
    before = [x.clone() for x in (logprobs, *inputs)]
    build(ppo)(logprobs, *inputs)
    assert all(x._version == 0 and torch.equal(x, old) for x, old in zip((logprobs, *inputs), before, strict=True))
    assert not [
        name for name in custom_loss._OPERATIONS if name.endswith("_") and name not in ("operator.and_", "operator.or_")
    ]


def test_a_loss_is_a_scalar_with_a_gradient() -> None:
    with pytest.raises(ConfigError, match=r"a tensor of shape \[4\], not a floating-point scalar"):
        call(method("exp"))
    with pytest.raises(ConfigError, match="not a floating-point scalar"):
        call(method("argmax"))
    with pytest.raises(ConfigError, match="of type int, not a floating-point scalar"):
        call(method("numel"))
    with pytest.raises(ConfigError, match="no gradient with respect to logprobs"):
        call(method("detach", name="constant"), node("torch.sum", ref("constant")))
    with pytest.raises(ConfigError, match=r"its gradient failed: .*floor_divide"):
        call(node("operator.floordiv", LOGPROBS, 2, name="half"), node("torch.sum", ref("half")))
    with pytest.raises(ConfigError, match=r"'custom/p:mean' is a tensor of shape \[4\], not one number"):
        call(method("exp", name="p"), SUM, end=output(RESULT, {"custom/p:mean": ref("p")}))


def test_the_arguments_of_a_call_are_those_declared() -> None:
    loss = by_hand(SUM)
    with pytest.raises(ConfigError, match="takes logprobs, x, not 1 tensors"):
        loss(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"x has shape \[3, 2\], and was declared with rank 1"):
        loss(torch.zeros(3), torch.zeros(3, 2))


def test_a_failure_names_the_loss_the_operation_and_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"custom loss 'hand': torch.matmul \(node 'result'\) failed: .*size"):
        by_hand(node("torch.matmul", LOGPROBS, X))(torch.zeros(3), torch.zeros(4))
