"""What becomes of training and sampling requests, without HTTP: retries, failures, restarts, divided requests, turns."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types

from doubles.short_memory import short_of_memory
from policygrad.errors import ConfigError
from policygrad.serve import sample_queue, wire
from policygrad.serve import training as training_requests
from policygrad.serve.config import ServeConfig
from policygrad.serve.models import ClientModel
from policygrad.serve.service import Service
from policygrad.serve.store import LoggedRequest, SavedInfo, SavedPath, UnknownIdError

IDS = [5, 17, 40, 33, 8, 61, 22, 9]


class Bench:
    """A service whose requests are computed when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.service = Service(ServeConfig(folder=folder, replay_seconds=1000.0), self.notes.append)
        self.training, self.store = self.service.training, self.service.store

    def open_session(self, user: str = "local") -> str:
        request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
        return self.service.create_session(user, request)

    def create(self, number: int = 0, rank: int = 2, user: str = "local", session_id: str | None = None) -> Model:
        session_id = session_id or self.open_session(user)
        lora = types.LoraConfig(rank=rank, seed=1)
        request = types.CreateModelRequest(
            session_id=session_id, model_seq_id=number, base_model="tiny", lora_config=lora
        )
        self.service.create_model(user, request, "create_model", request.model_dump_json().encode())
        model = Model(self, f"{session_id}:train:{number}")
        self.training.compute_next(model.id)
        return model

    def stop_suddenly(self) -> None:
        """End as a killed server does: nothing more is written."""
        self.service.worker.shutdown()
        self.service.resources.close()


def make_datum(ids: list[int]) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": ids[1:], "dtype": "int64"},
        "weights": {"data": [1.0] * (len(ids) - 1), "dtype": "float32"},
    }
    return {"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": inputs}


class Model:
    """A client's model."""

    def __init__(self, bench: Bench, model_id: str) -> None:
        self.bench, self.id, self.count = bench, model_id, 0

    @property
    def model(self) -> ClientModel:
        found = self.bench.training.lanes[self.id].model
        assert found is not None
        return found

    def submit(self, kind: str, sequence: int | None = None, **values: Any) -> int:
        self.count = sequence if sequence is not None else self.count + 1
        body = json.dumps({"model_id": self.id, "seq_id": self.count, **values}).encode()
        self.bench.training.submit(self.id, LoggedRequest(self.count, kind, body, wire.JSON))
        return self.count

    def submit_pass(self, *, token: int = 9, forward: bool = False, count: int = 1, **given: Any) -> int:
        """`token`: the last target; one that the model does not have makes the request fail."""
        content = {"data": [make_datum([*IDS[:-1], token])] * count, "loss_fn": "cross_entropy", **given}
        kind = "forward" if forward else "forward_backward"
        return self.submit(kind, **{"forward_input" if forward else "forward_backward_input": content})

    def submit_step(self) -> int:
        return self.submit("optim_step", adam_params={"learning_rate": 1e-2})

    def compute(self) -> None:
        """Compute all that can be."""
        while self.bench.training.open_lane(self.id).is_ready:
            self.bench.training.compute_next(self.id)

    def error(self, sequence: int) -> str:
        answer = self.bench.training.find_result(self.id, sequence)
        assert answer is not None
        return wire.read_error(answer)

    def train(self) -> None:
        numbers = self.submit_pass(), self.submit_step()
        self.compute()
        assert not any(map(self.error, numbers))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in self.model.state()[0].items()}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Bench]]:
    """Start a server in a folder, again and again."""
    benches: list[Bench] = []

    def build() -> Bench:
        if benches:
            benches[-1].stop_suddenly()
        benches.append(Bench(tmp_path / "served"))
        return benches[-1]

    yield build
    benches[-1].stop_suddenly()


def without_memory(*args: Any, **options: Any) -> Any:
    """Stand in for a computation that does not fit."""
    raise torch.OutOfMemoryError("too little")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())


def test_a_request_that_arrives_again_while_it_is_computed_counts_once(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    model = bench.create()
    step = training_requests.COMPUTE["optim_step"]

    def arrive_again(training: Any, lane: Any, request: LoggedRequest) -> Any:
        training.submit(model.id, request)
        model.submit("optim_step", sequence=4, adam_params={})  # 3 has not arrived
        return step(training, lane, request)

    monkeypatch.setitem(training_requests.COMPUTE, "optim_step", arrive_again)  # type: ignore[arg-type]
    model.submit_pass()
    model.submit_step()
    model.compute()
    bench.training.compute_next(model.id)  # a turn with nothing to do
    assert model.model.optimizer.num_updates == 1
    assert bench.training.lanes[model.id].waiting == {4}


def test_no_step_is_taken_with_a_part_of_its_gradient(make: Callable[[], Bench]) -> None:
    """Of three passes the first fails: the step is refused, and the next one is that of the passes after it alone."""
    bench = make()
    model, other = bench.create(), bench.create()
    failed, _, refused = model.submit_pass(token=99999), model.submit_pass(), model.submit_step()
    model.compute()
    assert "99999" in model.error(failed)
    assert "no step was taken" in model.error(refused)
    model.train()
    other.train()
    assert same(model.weights(), other.weights())


def test_a_forward_that_fails_leaves_the_gradient_alone(make: Callable[[], Bench]) -> None:
    bench = make()
    model, other = bench.create(), bench.create()
    _, failed, stepped = model.submit_pass(), model.submit_pass(token=99999, forward=True), model.submit_step()
    model.compute()
    assert "99999" in model.error(failed)
    assert not model.error(stepped)
    other.train()
    assert same(model.weights(), other.weights())


def test_a_pass_that_runs_out_of_memory_is_repeated_in_smaller_pieces_and_keeps_the_gradient_before_it(
    make: Callable[[], Bench],
) -> None:
    """Two passes make one gradient; each of the second one's runs out of memory in turn."""
    bench = make()
    data = [make_datum([*IDS[k:], *IDS[:k]]) for k in range(4)]
    models, failing = [bench.create() for _ in range(4)], [(), (1,), (2,), (1, 4)]
    for model, at in zip(models, failing, strict=True):
        model.submit_pass()
        model.compute()
        number = model.submit_pass(data=data)
        with warnings.catch_warnings(action="ignore"), short_of_memory(*at):
            model.compute()
        assert not model.error(number)
        model.submit_step()
        model.compute()
        model.model.network.memory.limit = None
    first, *others = (model.weights() for model in models)
    for other in others:
        assert all(torch.allclose(other[name], x, rtol=1e-4, atol=1e-6) for name, x in first.items())


def test_a_text_that_does_not_fit_is_refused_and_the_server_goes_on(make: Callable[[], Bench]) -> None:
    model = make().create()
    failed, refused = model.submit_pass(), model.submit_step()
    with warnings.catch_warnings(action="ignore"), short_of_memory(always_from=1):
        model.compute()
    assert "out of memory at" in model.error(failed)
    assert "send shorter data" in model.error(failed)
    assert "no step was taken" in model.error(refused)
    model.train()


def test_what_was_refused_before_a_restart_is_refused_again(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass had no memory, and after the restart it would have: its client was told of a failure, and has sent it again."""
    model = make().create()
    run = ClientModel.run

    monkeypatch.setattr(ClientModel, "run", without_memory)
    failed, refused = model.submit_pass(), model.submit_step()
    model.compute()
    monkeypatch.setattr(ClientModel, "run", run)
    assert "out of memory" in model.error(failed)
    assert "no step was taken" in model.error(refused)
    model.train()
    before = model.weights()
    model.bench = make()
    model.compute()
    assert model.model.optimizer.num_updates == 1
    assert same(model.weights(), before)


def test_a_step_that_ends_halfway_is_undone(make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    model, other = bench.create(), bench.create()
    model.train()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.optimizer, "sync_to_model", without_memory)
        model.submit_pass()
        failed = model.submit_step()
        model.compute()
    assert "out of memory" in model.error(failed)
    model.train()
    other.train()
    other.train()
    assert same(model.weights(), other.weights())


def test_a_model_that_cannot_be_computed_again_says_so(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().create()
    saved = model.submit("save_weights", path="first")
    model.train()
    assert not model.error(saved)

    model.bench = make()
    with monkeypatch.context() as patch:
        patch.setattr(ClientModel, "run", without_memory)
        model.compute()
    failed = model.submit_pass()
    model.compute()
    assert "could not be computed again" in model.error(failed)
    model.submit("load_weights", path=f"tinker://{model.id}/weights/first", optimizer=True)
    model.compute()
    model.train()
    assert model.model.optimizer.num_updates == 1


def test_a_model_is_not_lost_between_its_answer_and_its_state(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> None:
            raise OSError("no space left")

        patch.setattr(bench.store, "save_state", fail)
        model = bench.create()
    assert not model.error(0)
    assert any("no space left" in note for note in bench.notes)
    model.train()
    before = model.weights()
    model.bench = make()
    model.compute()
    assert same(model.weights(), before)


def test_a_full_disk_loses_no_answer(make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    model = bench.create()
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> None:
            raise OSError("no space left")

        patch.setattr(bench.store, "write_result", fail)
        number = model.submit_pass()
        model.compute()
    assert not model.error(number)
    model.submit_step()
    model.compute()
    assert model.model.optimizer.num_updates == 1


def test_a_request_that_kills_the_server_again_and_again_is_refused(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().create()
    number = model.submit_pass()

    def die(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClientModel, "run", die)
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                model.compute()
            model.bench = make()
    model.compute()
    assert "ended 4 times while it computed this request" in model.error(number)
    model.submit_step()  # refused
    model.compute()
    model.train()


# Divided requests.


def test_a_divided_request_is_computed_as_one(make: Callable[[], Bench]) -> None:
    bench = make()
    model, other = bench.create(), bench.create()
    first, second = (model.submit_pass(count=n, loss_fn_config={"datums": 3}) for n in (1, 2))
    model.compute()
    other.submit_pass(count=3)
    other.compute()
    assert not model.error(first)
    assert not model.error(second)
    for one in (model, other):
        one.submit_step()
        one.compute()
    assert same(model.weights(), other.weights())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_fn_config": {"datums": "three"}}, "datums must be"),
        ({"loss_fn_config": {"datums": 1}, "count": 2}, "datums must be"),
        ({"loss_fn_config": {"datums": 4}}, "differ"),
        ({"loss_fn_config": {"datums": 3}, "forward": True}, "differ"),
        ({"loss_fn_config": {"datums": 3}, "loss_fn": "ppo"}, "differ"),
        ({"loss_fn_config": {"datums": 3}, "token": 99999, "count": 2}, "99999"),
    ],
)
def test_a_divided_request_that_is_wrong_fails_in_all_its_parts(
    make: Callable[[], Bench], given: dict[str, Any], message: str
) -> None:
    bench = make()
    model, other = bench.create(), bench.create()
    is_later = message != "datums must be"
    parts = [model.submit_pass(loss_fn_config={"datums": 3})] if is_later else []
    parts.append(model.submit_pass(**given))
    model.compute()
    assert all(message in model.error(part) for part in parts)
    model.submit_step()  # refused
    model.compute()
    model.train()
    other.train()
    assert same(model.weights(), other.weights())


def test_nothing_else_is_computed_between_the_parts(make: Callable[[], Bench]) -> None:
    model = make().create()
    part, step = model.submit_pass(loss_fn_config={"datums": 3}), model.submit_step()
    model.compute()
    assert "only 1 data of a divided request have arrived" in model.error(step)
    assert "only 1 data" in model.error(part)
    assert model.model.pending == 0


# Saved weights.


def test_weights_saved_again_under_a_name_are_the_ones_that_are_sampled(make: Callable[[], Bench]) -> None:
    bench = make()
    model = bench.create()
    path = SavedPath(model.id, "sampler_weights", "a")

    def load() -> torch.Tensor:
        _, adapter = bench.service.queue._load_weights("tiny", str(path))
        assert isinstance(adapter, torch.nn.Module)
        return torch.cat([p.detach().flatten() for p in adapter.parameters()])

    model.submit("save_weights_for_sampler", path="a")
    model.compute()
    before = load()
    model.train()
    bench.store.delete(path)
    with pytest.raises(UnknownIdError):
        load()
    model.submit("save_weights_for_sampler", path="a")
    model.compute()
    after = load()
    assert not torch.equal(before, after)
    assert model.model.adapter is not None
    assert torch.equal(after, torch.cat([p.detach().flatten() for p in model.model.adapter.parameters()]))


def test_a_replacement_that_was_interrupted_leaves_the_weights_before_it(make: Callable[[], Bench]) -> None:
    bench = make()
    model = bench.create()
    model.submit("save_weights", path="a")
    model.compute()
    folder = bench.store.find_saved(SavedPath(model.id, "weights", "a"))
    folder.rename(folder.with_name("a.old"))
    bench = make()
    assert bench.store.find_saved(SavedPath(model.id, "weights", "a")) == folder
    with pytest.raises(ConfigError, match="is no name"):
        bench.store.check_name(SavedPath(model.id, "weights", "b.old"), 9)


def test_a_model_that_could_not_be_created_is_not_listed(make: Callable[[], Bench]) -> None:
    bench = make()
    session = bench.open_session()
    request = types.LoadWeightsRequest(
        session_id=session, model_seq_id=0, path=f"tinker://{session}:train:9/weights/x", optimizer=True
    )
    bench.service.create_model("local", request, "load_weights", request.model_dump_json().encode())
    bench.training.compute_next(f"{session}:train:0")
    assert bench.store.models(session) == []
    assert bench.create(1, session_id=session).id in bench.store.models(session)
    with pytest.raises(UnknownIdError, match="there is no model"):
        bench.training.submit(f"{session}:train:7", LoggedRequest(1, "optim_step", b"{}", wire.JSON))


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), 10**18, "soon", [1]])
def test_times_that_are_none_are_refused(seconds: object) -> None:
    with pytest.raises(ConfigError, match="ttl_seconds"):
        training_requests.compute_expiry(seconds)


def test_expired_weights_leave_the_disk_and_their_name(make: Callable[[], Bench]) -> None:
    bench = make()
    model = bench.create()
    path = SavedPath(model.id, "weights", "a")
    folder = bench.store.make_temporary(path)
    bench.store.install(path, folder, SavedInfo(created=1.0, request=1, expires=2.0))
    assert not bench.store.check_name(path, 5)
    bench.store.install(path, bench.store.make_temporary(path), SavedInfo(created=1.0, request=1, expires=2.0))
    make()
    assert not (bench.store.model(model.id) / "weights" / "a").exists()


# Sampling.


def ask(bench: Bench, session: str, number: int, **values: Any) -> str:
    sampler = bench.service.create_sampling_session(
        "local", types.CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, base_model="tiny")
    )
    params = types.SamplingParams(max_tokens=values.pop("max_tokens", 2), stop=values.pop("stop", None))
    request = types.SampleRequest(
        sampling_session_id=sampler,
        seq_id=number,
        num_samples=values.pop("num_samples", 1),
        prompt=types.ModelInput.from_ints(IDS),
        sampling_params=params,
        **values,
    )
    return bench.service.sample("local", request, wire.parse_sample(request), 0)


@pytest.mark.parametrize(
    "values",
    [
        {"num_samples": 0},
        {"num_samples": 10**9},
        {"topk_sample_logprobs": -1},
        {"prompt_alt_tokens_k": -1},
        {"prompt_alt_tokens_k": 10**6},
        {"topk_prompt_logprobs": -1},
        {"max_tokens": 0},
        {"stop": [2**63]},
    ],
)
def test_sampling_requests_out_of_bounds_are_refused(make: Callable[[], Bench], values: dict[str, Any]) -> None:
    bench = make()
    with pytest.raises(ConfigError, match="must be from"):
        ask(bench, bench.open_session(), 1, **values)


def test_one_request_that_fails_does_not_fail_the_others(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    queue, session = bench.service.queue, bench.open_session()
    ids = [ask(bench, session, i + 1, topk_sample_logprobs=i) for i in range(3)]
    answer = queue.samplers["tiny"].answer

    def fail(queries: Any) -> Any:
        if any(query.top_sample_logprobs == 1 for query, _ in queries):
            raise ValueError("a bug")
        return answer(queries)

    monkeypatch.setattr(queue.samplers["tiny"], "answer", fail)
    queue.answer_some()
    errors = []
    for request_id in ids:
        found = queue.find_answer(request_id)
        assert found is not None
        errors.append(wire.read_error(found))
    assert [bool(error) for error in errors] == [False, True, False]
    assert "a bug of the server" in errors[1]


def test_answers_are_kept_up_to_a_size(make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    monkeypatch.setattr(sample_queue, "MAX_ANSWER_BYTES", 100)
    session = bench.open_session()
    ids = [ask(bench, session, i + 1) for i in range(8)]
    bench.service.queue.answer_some()
    assert bench.service.queue.find_answer(ids[-1]) is not None
    with pytest.raises(sample_queue.LostRequestError):
        bench.service.queue.find_answer(ids[0])


def test_too_many_requests_are_asked_to_come_again(make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    monkeypatch.setattr(sample_queue, "MAX_WAITING", 2)
    session = bench.open_session()
    for i in range(2):
        ask(bench, session, i + 1)
    with pytest.raises(sample_queue.BusyError, match=r"2 sampling requests \(0 bytes\) wait"):
        ask(bench, session, 3)


def test_turns_are_among_users_and_not_among_their_models(make: Callable[[], Bench]) -> None:
    """Ten models of one user and one of another: the other's comes second. Without keys, likewise among sessions."""
    bench = make()
    for users in (("a", "b"), ("local", "local")):
        sessions = [bench.open_session(user) for user in users]
        many = [bench.create(i, user=users[0], session_id=sessions[0]) for i in range(4)]
        one = bench.create(0, user=users[1], session_id=sessions[1])
        bench.service.turns.clear()
        for model in (*many, one):
            model.submit_pass()
        turns = [bench.service._next_turn() for _ in range(5)]
        assert turns == [many[0].id, one.id, *(m.id for m in many[1:])]
        for model in (*many, one):
            model.compute()
        bench.service.turns.clear()
