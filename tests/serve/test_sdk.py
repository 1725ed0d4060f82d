"""The Tinker SDK itself against the server: training, sampling, saving, errors, retries, restarts, several users."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from serve.running import Running, running
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from policygrad.models.loading import load_model, resolve_model
from policygrad.serve import training as training_requests
from policygrad.training.export import export_merged

tinker = pytest.importorskip("tinker", reason="the extra `serve`")
types = tinker.types

IDS = [5, 17, 40, 33, 8, 61, 22, 9]
KEY = "tml-local"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve") / "served") as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as found:
        yield found


def example(ids: list[int] = IDS, weight: float = 1.0) -> Any:
    inputs = {"target_tokens": ids[1:], "weights": [weight] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def logprobs(training: Any, ids: list[int] = IDS) -> torch.Tensor:
    found: torch.Tensor = (
        training.forward([example(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    )
    return found


def step(training: Any, rate: float = 1e-2, count: int = 1) -> None:
    for _ in range(count):
        passed, stepped = (
            training.forward_backward([example()], "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=rate)),
        )
        passed.result()
        stepped.result()


def test_a_model_learns_and_is_adamw(client: Any, server: Running) -> None:
    """Three steps equal torch's own AdamW on the same adapter's parameters."""
    training = client.create_lora_training_client("tiny", rank=4, seed=5).result()
    lane = server.service.training.lanes[training.model_id]
    assert lane.model is not None
    assert lane.model.adapter is not None
    pairs = {
        name: tuple(p.detach().clone().requires_grad_() for p in pair)
        for name, pair in lane.model.adapter.pairs.items()
    }
    before = logprobs(training)
    params = {
        "learning_rate": 1e-2,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-3,
        "weight_decay": 0.1,
        "grad_clip_norm": 0.5,
    }
    optimizer = torch.optim.AdamW(
        [p for pair in pairs.values() for p in pair], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1
    )
    base = load_model("tiny")
    for name, (a, b) in pairs.items():
        base.get_submodule(name).register_forward_hook(
            lambda module, args, out, a=a, b=b: out + (args[0] @ a.T @ b.T) * 8.0
        )
    for _ in range(3):
        training.forward_backward([example()], "cross_entropy").result()
        norm = training.optim_step(types.AdamParams(**params)).result().metrics["grad_norm:mean"]
        logp = base(input_ids=torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
        (-logp.gather(1, torch.tensor(IDS[1:])[:, None]).sum()).backward()
        own = torch.nn.utils.clip_grad_norm_([p for pair in pairs.values() for p in pair], 0.5)
        assert norm == pytest.approx(float(own), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for name, pair in lane.model.adapter.pairs.items():
        for mine, theirs in zip(pair, pairs[name], strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
    assert float(logprobs(training).sum()) > float(before.sum())


def test_sampled_log_probabilities_are_those_of_forward(client: Any) -> None:
    training = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    step(training, count=2)
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(IDS[:4])
    result = sampling.sample(
        prompt, 6, types.SamplingParams(max_tokens=5, seed=3), include_prompt_logprobs=True
    ).result()
    for sequence in result.sequences:
        found = logprobs(training, IDS[:4] + sequence.tokens)
        assert torch.allclose(found[3:], torch.tensor(sequence.logprobs), atol=1e-4)
        assert torch.allclose(found[:3], torch.tensor(result.prompt_logprobs[1:]), atol=1e-4)
    again = sampling.sample(prompt, 6, types.SamplingParams(max_tokens=5, seed=3)).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in result.sequences]
    assert len({tuple(s.tokens) for s in result.sequences}) > 1
    assert len({s.sequence_id for s in result.sequences}) == 6


def test_prompts_are_scored(client: Any, server: Running) -> None:
    """Log-probabilities, the top ones, chosen ones and draws at every position, against the model itself."""
    sampling = client.create_sampling_client(base_model="tiny").result()
    with torch.no_grad():
        table = load_model("tiny")(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
    targets = torch.full((len(IDS) - 1, 2), -1)
    targets[2, 1], targets[6, 0] = 30, 31
    result = sampling.sample(
        types.ModelInput.from_ints(IDS),
        1,
        types.SamplingParams(max_tokens=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(targets, pad_value=-1),
        prompt_alt_tokens_k=2,
    ).result()
    assert result.prompt_logprobs[0] is None
    expected = table[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    assert torch.allclose(torch.tensor(result.prompt_logprobs[1:]), expected, atol=1e-4)
    top = table[:-1].topk(3)
    assert result.topk_prompt_logprobs[0] is None
    assert [[i for i, _ in row] for row in result.topk_prompt_logprobs[1:]] == top.indices.tolist()
    scored = result.target_prompt_logprobs.to_torch()
    assert float(scored[2, 1]) == pytest.approx(float(table[2, 30]), abs=1e-4)
    assert float(scored[6, 0]) == pytest.approx(float(table[6, 31]), abs=1e-4)
    assert int((scored != 0).sum()) == 2
    drawn = result.prompt_alt_tokens.tokens.to_torch()
    assert torch.allclose(result.prompt_alt_tokens.logprobs.to_torch(), table[:-1].gather(1, drawn).float(), atol=1e-4)
    assert len(result.sequences[0].topk_logprobs) == len(result.sequences[0].tokens)
    last = sampling.sample(
        types.ModelInput.from_ints(IDS),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result()
    assert last.prompt_logprobs[:-2] == [None] * (len(IDS) - 2)
    assert last.prompt_logprobs[-1] == pytest.approx(float(expected[-1]), abs=1e-4)


def test_where_completions_stop(client: Any) -> None:
    """At the tokenizer's end tokens, at chosen ones, at a text of several tokens, or nowhere."""
    sampling = client.create_sampling_client(base_model="tiny").result()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    prompt = types.ModelInput.from_ints(tokenizer.encode("7 + 5 ="))

    def sample(**params: Any) -> list[Any]:
        found = sampling.sample(prompt, 8, types.SamplingParams(max_tokens=12, seed=1, **params)).result()
        return list(found.sequences)

    free = sample(stop=[])
    assert all(len(s.tokens) == 12 and s.stop_reason == "length" for s in free)
    usual = sample()
    assert any(s.stop_reason == "stop" and s.tokens[-1] == tokenizer.eos_token_id for s in usual)
    token = free[0].tokens[2]
    for chosen, before in zip(sample(stop=[token]), free, strict=True):
        end = before.tokens.index(token) + 1 if token in before.tokens else 12
        assert chosen.tokens == before.tokens[:end]
    text = tokenizer.decode(free[0].tokens[1:4])
    for chosen, before in zip(sample(stop=[text]), free, strict=True):
        assert chosen.tokens == before.tokens[: len(chosen.tokens)]
        assert chosen.stop_reason == ("stop" if text in tokenizer.decode(before.tokens) else "length")
        assert text not in tokenizer.decode(chosen.tokens[:-1])
    assert len({tuple(s.tokens) for s in sample(temperature=0.0)}) == 1


def test_saved_states_continue_exactly(client: Any) -> None:
    """With its optimizer a copy takes the same steps; without it, it starts from the weights alone."""
    training = client.create_lora_training_client("tiny", rank=4, seed=2).result()
    step(training, count=3)
    path = training.save_state("three").result().path
    whole = client.create_training_client_from_state_with_optimizer(path).result()
    weights = client.create_training_client_from_state(path).result()
    assert torch.equal(logprobs(whole), logprobs(training))
    assert torch.equal(logprobs(weights), logprobs(training))
    for one in (training, whole, weights):
        step(one)
    assert torch.equal(logprobs(whole), logprobs(training))
    assert not torch.equal(logprobs(weights), logprobs(training))
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("three").result()
    assert training.save_state("three", overwrite=True).result().path == path
    with pytest.warns(FutureWarning):
        whole.load_state_with_optimizer(path).result()
    assert torch.equal(logprobs(whole), logprobs(training))


def test_identical_sessions_have_identical_bits(tmp_path: Path) -> None:
    """Two sessions of a server with --reproducible that do the same at the same time."""
    with running(tmp_path / "served", reproducible=True) as server:
        clients = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for _ in range(2)]
        trainings = [c.create_lora_training_client("tiny", rank=4, seed=9).result() for c in clients]
        found = []
        for _ in range(2):
            samplings = [t.save_weights_and_get_sampling_client().result() for t in trainings]
            prompt = types.ModelInput.from_ints(IDS[:3])
            futures = [[s.sample(prompt, 2, types.SamplingParams(max_tokens=4)) for _ in range(4)] for s in samplings]
            answers = [[f.result() for f in row] for row in futures]
            found.append([[(s.tokens, s.logprobs) for a in row for s in a.sequences] for row in answers])
            waiting = [t.forward_backward([example()], "cross_entropy") for t in trainings]
            waiting += [t.optim_step(types.AdamParams(learning_rate=1e-2)) for t in trainings]
            for future in waiting:
                future.result()
        assert all(first == second for first, second in found)
        assert torch.equal(logprobs(trainings[0]), logprobs(trainings[1]))


def test_whole_weights_train(client: Any) -> None:
    """rank=0: sampled, saved as a model that transformers loads, and continued."""
    training = client.create_lora_training_client("tiny", rank=0).result()
    assert training.get_info().is_lora is False
    before = logprobs(training)
    step(training, rate=1e-3, count=2)
    after = logprobs(training)
    assert float(after.sum()) > float(before.sum())
    sampling = training.save_weights_and_get_sampling_client().result()
    scored = sampling.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    assert torch.allclose(torch.tensor(scored[1:]), after, atol=1e-4)
    copy = client.create_training_client_from_state_with_optimizer(training.save_state("s").result().path).result()
    assert torch.equal(logprobs(copy), after)


@pytest.mark.parametrize("rank", [4, 0])
def test_exported_weights_load_elsewhere(client: Any, tmp_path: Path, rank: int) -> None:
    """In PEFT or transformers, with the same log-probabilities."""
    training = client.create_lora_training_client("tiny", rank=rank, seed=3).result()
    step(training, rate=1e-3, count=2)
    path = training.save_weights_external("out").result().path
    for name, url in training_files(client, path).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(httpx.get(url).content)
    if rank:
        peft = pytest.importorskip("peft")
        base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, tmp_path)
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        table = model(input_ids=torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
    assert torch.allclose(table.gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1), logprobs(training), atol=1e-4)


def test_an_adapter_merges_into_what_was_sampled_from(client: Any, tmp_path: Path) -> None:
    """On all layers, as the SDK asks by default, and on a base whose head is tied to its embedding."""
    pytest.importorskip("peft")
    training = client.create_lora_training_client("tiny", rank=8, seed=3).result()
    step(training, rate=1e-2, count=3)
    for name, url in training_files(client, training.save_weights_external("merge").result().path).items():
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / name).write_bytes(httpx.get(url).content)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert "lm_head" in config["target_modules"]
    assert config["base_model_name_or_path"] == str(Path(resolve_model("tiny")).resolve())
    merged = load_model(str(export_merged(str(tmp_path / "adapter"), str(tmp_path / "merged"))))
    with torch.no_grad():
        table = merged(input_ids=torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
    found = table.gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    assert torch.allclose(found, logprobs(training), atol=1e-4)
    assert not torch.allclose(found, logprobs(client.create_lora_training_client("tiny", rank=1).result()), atol=0.1)


@pytest.mark.parametrize("rank", [2, 0])
def test_weights_that_other_programs_would_read_as_others_are_not_exported(
    client: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    write_adapter, save_pretrained = training_requests.write_adapter, LlamaForCausalLM.save_pretrained

    def write_doubled(folder: Path, adapter: Any, *args: Any) -> None:
        write_adapter(folder, adapter, *args)
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 64}), encoding="utf-8")

    def save_shorter(model: Any, folder: Path) -> None:
        save_pretrained(model, folder, state_dict={n: x for n, x in model.state_dict().items() if "layers.0" not in n})

    training = client.create_lora_training_client("tiny", rank=rank).result()
    monkeypatch.setattr(training_requests, "write_adapter", write_doubled)
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_shorter)
    match = "other values .* tensors" if rank else "lacks 9 tensors"
    with pytest.raises(tinker.RequestFailedError, match=rf"another model than was trained: it .*{match}.*save_state"):
        training.save_weights_external("wrong").result()
    monkeypatch.undo()
    assert training.save_weights_external("wrong").result().path


def rest(client: Any) -> Any:
    return tinker.RestClient(base_url=client._base_url, api_key=KEY)


def training_files(client: Any, path: str) -> dict[str, str]:
    urls: dict[str, str] = rest(client).get_external_weights_urls(path).result().urls
    return urls


def test_saved_weights_are_listed_and_deleted(client: Any) -> None:
    training = client.create_lora_training_client("tiny", rank=2, user_metadata={"a": "b"}).result()
    step(training)
    state = training.save_state("one", ttl_seconds=3600, user_metadata={"loss": "low"}).result().path
    training.save_weights_for_sampler("two").result()
    training.save_weights_and_get_sampling_client().result()  # without a name: not listed
    api = rest(client)
    listed = api.list_checkpoints(training.model_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/one", "sampler_weights/two"]
    assert listed[0].user_metadata == {"loss": "low"}
    assert listed[0].expires_at is not None
    assert listed[0].size_bytes > 0
    run = api.get_training_run(training.model_id).result()
    assert run.last_checkpoint.tinker_path == state
    assert run.user_metadata == {"a": "b"}
    assert training.model_id in [r.training_run_id for r in api.list_training_runs(limit=100).result().training_runs]
    assert api.get_weights_info_by_tinker_path(state).result().lora_rank == 2
    api.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert api.list_checkpoints(training.model_id).result().checkpoints[0].expires_at is None
    api.delete_checkpoint_from_tinker_path(state).result()
    assert len(api.list_checkpoints(training.model_id).result().checkpoints) == 1
    with pytest.raises(tinker.RequestFailedError, match="there are no saved weights"):
        client.create_training_client_from_state(state).result()


def test_failed_requests_say_why_and_take_no_step(client: Any) -> None:
    training = client.create_lora_training_client("tiny", rank=2).result()
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 99999], "weights": [1.0, 1.0]},
    )
    passed = training.forward_backward([example()], "cross_entropy")
    failed = training.forward_backward([wrong], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1.0))
    passed.result()
    with pytest.raises(tinker.RequestFailedError, match="token id 99999"):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        stepped.result()
    before = logprobs(training)
    step(training)
    assert not torch.equal(before, logprobs(training))
    with pytest.raises(tinker.BadRequestError, match="there is no model 'gpt'"):
        client.create_lora_training_client("gpt").result()
    with pytest.raises(tinker.RequestFailedError, match="is not public"):
        training.forward_backward([example()], "stable_reinforce").result()
    sampling = client.create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.RequestFailedError, match="together more than"):
        sampling.sample(types.ModelInput.from_ints(IDS), 1, types.SamplingParams(max_tokens=10**6)).result()
    with pytest.raises(tinker.BadRequestError, match="optimizer"):
        client.create_lora_training_client("tiny", optimizer=types.DimuonOptimizerConfig()).result()


def test_a_custom_loss_runs_on_the_client(client: Any) -> None:
    """As a function of the data, and as an uploaded one, which the SDK keeps: the gradient is the built-in loss's."""
    inputs = {"target_tokens": IDS[1:], "logprobs": [-3.0] * 7, "advantages": [0.5 * (i - 3) for i in range(7)]}
    data = [types.Datum(model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)]
    renamed = {{"logprobs": "logprobs_old"}.get(name, name): value for name, value in data[0].loss_fn_inputs.items()}
    data_for_handle = [types.Datum(model_input=data[0].model_input, loss_fn_inputs=renamed)]

    def importance_sampling(logprobs: Any, logprobs_old: Any, advantages: Any) -> Any:
        loss = -(torch.exp(logprobs - logprobs_old) * advantages).sum()
        return loss, {"custom/size:sum": advantages.abs().sum()}

    def of_data(data: Any, found: Any) -> Any:
        fields = [[d.loss_fn_inputs[name].to_torch() for name in ("logprobs", "advantages")] for d in data]
        return sum(importance_sampling(p, *f)[0] for p, f in zip(found, fields, strict=True)), {}

    handle = client.create_custom_loss(
        importance_sampling, {"logprobs": 1, "logprobs_old": 1, "advantages": 1}
    ).result()
    assert handle.loss_id is None  # nothing was uploaded
    norms, losses = [], []
    for run in (
        lambda t: t.forward_backward(data, "importance_sampling"),
        lambda t: t.forward_backward_custom(data, of_data),
        lambda t: t.forward_backward_custom(data_for_handle, handle),
    ):
        training = client.create_lora_training_client("tiny", rank=4, seed=4).result()
        losses.append(run(training).result().metrics["loss:sum"])
        norms.append(training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_a_number_that_is_none_names_its_datum(client: Any) -> None:
    training = client.create_lora_training_client("tiny", rank=2).result()
    for bad, words in ((float("nan"), r"datum 1: .*'weights'\] is nan at \[2\]"), (float("-inf"), "is -inf at")):
        wrong = example()
        wrong.loss_fn_inputs["weights"] = types.TensorData(data=[1.0, 1.0, bad, *[1.0] * 4], dtype="float32")
        with pytest.raises(tinker.RequestFailedError, match=words):
            training.forward_backward([example(), wrong], "cross_entropy").result()
    far = {"target_tokens": IDS[1:], "logprobs": [-30.0] * 7, "advantages": [3e38] * 7}  # which π/q multiplies
    near = {**far, "advantages": [1.0] * 7}
    data = [types.Datum(model_input=example().model_input, loss_fn_inputs=x) for x in (near, far)]
    with pytest.raises(tinker.RequestFailedError, match="the loss of datum 1 is not a finite number"):
        training.forward_backward(data, "importance_sampling").result()
    with pytest.raises(tinker.RequestFailedError, match=r"no step was taken, because .* datum 1"):
        training.optim_step(types.AdamParams()).result()
    step(training)


def test_an_algorithm_by_name(client: Any) -> None:
    """DAPO from rewards: the groups are the prompts, and the coefficients do not depend on how a client divides the request."""
    data = []
    for i in range(8):
        ids = [5, 6 + i // 4, 7, 20 + i, 30 + i]
        inputs = {
            "target_tokens": ids[1:],
            "mask": [0.0, 0.0, 1.0, 1.0],
            "reward": [float(i % 4 == 0)],
            "logprobs": [0.0, 0.0, -7.0, -7.0],
        }
        tensors = {
            k: types.TensorData(data=v, dtype="int64" if k == "target_tokens" else "float32", shape=[len(v)])
            for k, v in inputs.items()
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors))
    norms = []
    for parts in ([data], [data[:3], data[3:]]):
        training = client.create_lora_training_client("tiny", rank=4, seed=4).result()
        config = {"datums": 8.0} if len(parts) > 1 else None
        futures = [training.forward_backward(part, "dapo", config) for part in parts]
        outputs = [o for f in futures for o in f.result().loss_fn_outputs]
        assert len(outputs) == 8
        norms.append(training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"])
    assert norms[0] > 0
    assert norms[0] == norms[1]


def test_async_calls(server: Running) -> None:
    """Many at once in an event loop, out of order."""

    async def run() -> list[int]:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = await client.create_lora_training_client("tiny", rank=2)
        futures = [training.forward_backward([example()], "cross_entropy"), training.optim_step(types.AdamParams())]
        sampling = await training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=3)
        answers = await asyncio.gather(
            *(sampling.sample(types.ModelInput.from_ints(IDS[: 2 + i % 3]), 2, params) for i in range(12))
        )
        for future in futures:
            await future
        return [len(a.sequences) for a in answers]

    assert asyncio.run(run()) == [2] * 12


class FailsOnce:
    """Answers each kind of request with an error the first time, before or after it has been carried out."""

    def __init__(self, app: Any) -> None:
        self.app, self.failed = app, set[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in self.failed or not path.startswith("/api/v1/"):
            await self.app(scope, receive, send)
            return
        self.failed.add(path)

        async def swallow(message: Any) -> None:
            """The answer is lost."""

        if "retrieve" not in path:
            await self.app(scope, receive, swallow)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})


def test_lost_answers_are_asked_for_again_and_nothing_counts_twice(tmp_path: Path) -> None:
    with running(tmp_path / "served", wrap=FailsOnce) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = client.create_lora_training_client("tiny", rank=4, seed=6).result()
        step(training, count=3)
        sampling = training.save_weights_and_get_sampling_client().result()
        assert (
            len(
                sampling.sample(types.ModelInput.from_ints(IDS), 2, types.SamplingParams(max_tokens=2))
                .result()
                .sequences
            )
            == 2
        )
        lane = server.service.training.lanes[training.model_id]
        assert lane.model is not None
        assert lane.model.optimizer.num_updates == 3
        found = logprobs(training)
    with running(tmp_path / "other") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = client.create_lora_training_client("tiny", rank=4, seed=6).result()
        step(training, count=3)
        assert torch.equal(logprobs(training), found)


def test_a_server_restarted_in_the_middle(tmp_path: Path) -> None:
    """The client goes on as if nothing had happened: training, a sampling client, and the requests of before."""
    with running(tmp_path / "served") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = client.create_lora_training_client("tiny", rank=4, seed=6).result()
        step(training, count=2)
        sampling = training.save_weights_and_get_sampling_client().result()
        before, port = logprobs(training), server.port
    with running(tmp_path / "served", port=port) as server:
        assert torch.equal(logprobs(training), before)
        step(training)
        scored = sampling.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
        assert torch.allclose(torch.tensor(scored[1:]), before, atol=1e-4)
        lane = server.service.training.lanes[training.model_id]
        assert lane.model is not None
        assert lane.model.optimizer.num_updates == 3


def test_idle_models_leave_the_memory(tmp_path: Path) -> None:
    """With --max-models 2, four models train in turns; each has all of its updates."""
    with running(tmp_path / "served", max_models=2) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        trainings = [client.create_lora_training_client("tiny", rank=2, seed=i).result() for i in range(4)]
        for _ in range(2):
            for training in trainings:
                step(training)
        lanes = [server.service.training.lanes[t.model_id] for t in trainings]
        assert sum(lane.model is not None for lane in lanes) == 2
        found = [logprobs(t) for t in trainings]
        alone = client.create_lora_training_client("tiny", rank=2, seed=0).result()
        step(alone, count=2)
        assert torch.equal(logprobs(alone), found[0])
        assert len({tuple(np.round(x.numpy(), 4)) for x in found}) == 4


def test_users_see_what_is_theirs(tmp_path: Path) -> None:
    """Another key, no key and a wrong one reach nothing; nor does an id that leaves the folder."""
    keys = tmp_path / "keys"
    keys.write_text("# two users\ntml-alice-0001\ntml-bob-000001\n")
    with running(tmp_path / "served", api_keys=keys) as server:
        alice = tinker.ServiceClient(base_url=server.url, api_key="tml-alice-0001")
        training = alice.create_lora_training_client("tiny", rank=2).result()
        path = training.save_state("mine").result().path
        weights = training.save_weights_for_sampler("mine").result().path
        bob = tinker.ServiceClient(base_url=server.url, api_key="tml-bob-000001")
        with pytest.raises(tinker.RequestFailedError, match="there is no session"):
            bob.create_training_client_from_state(path).result()
        with pytest.raises(tinker.NotFoundError):
            bob.create_sampling_client(model_path=weights).result()
        assert tinker.RestClient(base_url=server.url, api_key="tml-bob-000001").list_sessions().result().sessions == [
            bob.holder.get_session_id()
        ]
        with pytest.raises(tinker.AuthenticationError, match="unknown"):
            tinker.ServiceClient(base_url=server.url, api_key="tml-mallory-1").create_lora_training_client(
                "tiny"
            ).result()
        with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-bob-000001"}) as http:
            session = training.model_id.partition(":")[0]
            for wrong in (
                training.model_id,
                "../x:train:0",
                f"{session}:train:../..",
                f"{session}:train:99",
                "x",
                f"{session}:sample:0",
            ):
                assert (
                    http.post("/optim_step", json={"model_id": wrong, "seq_id": 1, "adam_params": {}}).status_code
                    == 404
                )
                assert http.post("/get_info", json={"model_id": wrong}).status_code == 404
            for wrong in (
                "tinker://../weights/x",
                f"tinker://{training.model_id}/weights/..%2f..",
                "/etc/passwd",
                path,
            ):
                assert http.post("/weights_info", json={"tinker_path": wrong}).status_code == 404
            assert http.get(f"/training_runs/{training.model_id}/checkpoints").status_code == 404
            assert http.delete(f"/training_runs/{training.model_id}/checkpoints/weights/mine").status_code == 404
            for path in ("retrieve_future", "cancel_future"):
                assert http.post(f"/{path}", json={"request_id": f"{training.model_id}:1"}).status_code == 404
            assert training.model_id not in http.get(server.url).text
        assert httpx.get(server.url).status_code == 401
        with pytest.raises(tinker.RequestFailedError, match="is no name"):
            training.save_state("../../escape").result()
        assert not list(tmp_path.rglob("*escape*"))


def test_malformed_requests_are_refused(server: Running) -> None:
    with httpx.Client(base_url=f"{server.url}/api/v1") as http:
        for path, body in (
            ("create_session", "{"),
            ("create_session", '{"tags": 3}'),
            ("optim_step", "[]"),
            ("optim_step", '{"model_id": "x", "seq_id": -1}'),
            ("asample", '{"prompt": {"chunks": []}}'),
            ("retrieve_future", "{}"),
        ):
            answer = http.post(f"/{path}", content=body)
            assert answer.status_code == 400, (path, answer.text)
            assert answer.json()["detail"]
        assert (
            http.post(
                "/forward_backward", content=b"\xff\xff", headers={"content-type": "application/x-protobuf"}
            ).status_code
            == 400
        )
        assert http.post("/copy_weights", content="{}").status_code == 400
        assert http.post("/retrieve_future", json={"request_id": "local:x:0"}).status_code == 410
        assert "docs/serve.md" in http.get("/nothing").json()["detail"]


def test_the_page_shows_what_is_trained(client: Any, server: Running) -> None:
    training = client.create_lora_training_client("tiny", rank=2).result()
    page = httpx.get(server.url).text
    assert training.model_id in page
    assert "an adapter of rank 2" in page


def test_a_bug_is_reported_and_does_not_end_the_server(
    client: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = client.create_lora_training_client("tiny", rank=2).result()

    def broken(*args: Any) -> None:
        raise KeyError("unexpected")

    notes: list[str] = []
    monkeypatch.setattr(server.service.training, "note", notes.append)
    monkeypatch.setitem(training_requests.COMPUTE, "optim_step", broken)
    with pytest.raises(tinker.RequestFailedError, match="KeyError"):
        training.optim_step(types.AdamParams()).result()
    monkeypatch.undo()
    assert "KeyError" in notes[0]
    step(training)


def test_protobuf_and_json_are_read_alike(server: Running) -> None:
    """Older clients send JSON."""
    with httpx.Client(base_url=f"{server.url}/api/v1") as http:
        session = http.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"}).json()[
            "session_id"
        ]
        made = http.post(
            "/create_model",
            json={
                "session_id": session,
                "model_seq_id": 0,
                "base_model": "tiny",
                "lora_config": {"rank": 2, "seed": 1},
            },
        )
        model = http.post("/retrieve_future", json=made.json()).json()["model_id"]
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": IDS[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": IDS[1:], "dtype": "int64", "shape": [7]},
                "weights": {"data": [1.0] * 7, "dtype": "float32"},
            },
        }
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        future = http.post(
            "/forward_backward", json={"model_id": model, "seq_id": 1, "forward_backward_input": given}
        ).json()
        answer = http.post("/retrieve_future", json=future)
        assert answer.headers["content-type"] == "application/x-protobuf"
        wrong = json.dumps({"model_id": model, "seq_id": 2, "forward_backward_input": {"data": [{}]}})
        failed = http.post("/retrieve_future", json=http.post("/forward_backward", content=wrong).json()).json()
        assert "malformed" in failed["error"]
