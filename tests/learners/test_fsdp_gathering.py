"""What each process has in memory while engines are published to: its share, and one parameter at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.ranked import BATCH, learned, make_spec, model, started
from doubles.vision_models import make_family
from policygrad.learners.fsdp.controller import FsdpController
from policygrad.learners.fsdp.learner import FsdpLearner
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.chat.messages import EncodedText
from policygrad.models.tokenizer import load_tokenizer
from policygrad.models.vision import read_texts
from policygrad.samplers.engines.probe import make_pictured_prompts
from policygrad.weight_sync.base import LazyStateDict, StaleWeightsError

ALGORITHM = pg.DR_GRPO.with_max_tokens(6)


@pytest.fixture
def ranks() -> Iterator[WorkerGroup]:
    """Two."""
    gc.collect()
    gc.freeze()  # what other tests have left is not looked through for each parameter
    try:
        with started(2) as result:
            yield result
    finally:
        gc.unfreeze()


def counted(x: object) -> bool:
    """Other tests of this process may have left sparse ones, which have no memory of that kind."""
    return isinstance(x, Tensor) and x.layout == torch.strided and x.is_floating_point()


def held(learner: FsdpLearner) -> list[int]:
    """In every process, bytes of floating-point tensors that somebody has, each memory once."""
    gc.collect()
    result = {}
    for x in gc.get_objects():
        if counted(x):
            local = getattr(x, "_local_tensor", x)
            if local.device.type == "cpu" and local.untyped_storage().nbytes():
                result[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return learner.workers.all_gather(sum(result.values()))


def test_a_process_holds_at_most_its_shard_and_one_parameter(
    ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted while each matrix is there: what both have at most is less than the model, of which rank 0 has the structure."""
    sizes = {"n_embd": 60, "n_inner": 120}
    full, local = (model(torch.float32, **sizes) for _ in range(2))
    total, largest = (f(p.nbytes for p in full.parameters()) for f in (sum, max))
    alone = LocalLearner(local, make_spec(ALGORITHM))
    before = held_here() - total  # beside the model that is spread now
    ranked = FsdpController(ranks, full, make_spec(ALGORITHM), stream_weights=True)
    assert all(p.is_meta for p in full.parameters())
    tensors, most = ranked.publish().tensors, [0, 0]
    assert isinstance(tensors, LazyStateDict)
    assert [*tensors] == [name for name, _ in local.named_parameters()]
    for name in tensors:
        tensor = tensors[name]
        assert torch.equal(tensor, local.get_parameter(name))
        if tensor.dim() > 1:  # to count takes a while
            now = ranked.run_on_all(held)
            most = [max(most[0], now[0] - before), max(most[1], now[1])]
        del tensor
    share = 0.6 * total  # rows are not to be halved everywhere, and buffers are small
    assert share + largest < 0.9 * total
    assert 0.4 * total < most[0] < share + largest
    assert 0.4 * total < most[1] < share + largest
    _follows_the_weights(alone, ranked)


def _follows_the_weights(alone: LocalLearner, ranked: FsdpController) -> None:
    """Logits too; and what was published before is gone."""
    old, ids = ranked.publish(), torch.tensor([[3, 4, 5], [5, 6, 0]])
    for learner in (alone, ranked):
        learned(learner, ALGORITHM, replace(BATCH, reward=BATCH.reward.float()))
    new = ranked.publish()
    assert (old.version, new.version) == (0, 1)
    for name, tensor in new.tensors.items():
        assert torch.allclose(tensor, alone.model.get_parameter(name), atol=1e-6)
    with torch.no_grad():
        expected = alone.model(input_ids=ids).logits  # type: ignore[operator]
    assert new.logits is not None
    assert old.logits is not None
    assert torch.allclose(new.logits(ids), expected, atol=1e-5)
    for asked in (lambda: old.tensors["transformer.wte.weight"], lambda: old.logits(ids)):  # type: ignore[misc]
        with pytest.raises(StaleWeightsError, match="the weights of version 0 are gone"):
            asked()
    assert ranked.publish().version == 1  # and all go on


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("idefics3", marks=pytest.mark.full)])
def test_logits_of_texts_with_pictures_are_those_of_one_process(ranks: WorkerGroup, name: str) -> None:
    """Which the probe of an engine reads; two pictures, one, and none."""
    whole, processor = make_family(name)
    tokenizer = load_tokenizer(processor, whole)
    texts = [*make_pictured_prompts(tokenizer, 512), EncodedText(torch.arange(2, 30))]
    ids = nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    media = [text.media for text in texts]
    ranked = FsdpController(ranks, make_family(name)[0], make_spec(ALGORITHM), stream_weights=True)
    logits = ranked.publish().logits
    assert logits is not None
    with torch.no_grad():
        assert torch.allclose(logits(ids, media), read_texts(whole, ids, media), atol=1e-4)
        assert torch.allclose(logits(ids[2:]), read_texts(whole, ids[2:], ()), atol=1e-4)


def held_here() -> int:
    gc.collect()
    result = {}
    for x in gc.get_objects():
        if counted(x) and x.device.type == "cpu":
            result[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(result.values())
