"""How a server of vLLM takes an adapter by name, and drops those before it: `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`.

Source: vllm-project/vllm 0.32, vllm/entrypoints/serve/lora (both routes, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 only) and
vllm/entrypoints/openai/models/serving.py (what they check and answer; `/v1/models` lists adapters with their folder, as `root`). A
completion is asked of the adapter as `model`, and its answer names it there again. What is unloaded may stay in the engine's memory
until another is loaded in its place (vllm-project/vllm, issue 54839): with --max-loras 1 that is the next one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from policygrad.errors import EngineError
from policygrad.samplers.adapter_names import not_taken
from policygrad.samplers.http import AwayError, Http
from policygrad.weight_sync.folder import Publication

_ASKS = 10.0
"""Seconds for a question that needs no computation."""
_REFUSED = "500 {"
"""How an answer begins that is a refusal with its reason: vLLM gives what its engine raises that status."""
_HINTS = (
    ('"Not Found"', "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"),
    ("not enabled", "Start it with --enable-lora"),
    ("max_lora_rank", "Start it with a --max-lora-rank that is not below the adapter's"),
    ("target modules", "Adapt layers that it knows, --learner.lora targets=…"),
    ("No adapter found", "Let it see the folder under the same path, --sampler.folder"),
)
"""(what is in its answer, the way out)."""


async def take(http: Http, url: str, publication: Publication, patience: float, *, again: bool) -> None:
    """Returns when the server answers to the publication's name, and to none of the same folder's before it. patience: seconds for
    loading. again: load it also where the server has it.

    Raises:
        AwayError: it does not answer, or not now.
        EngineError: it takes no adapters, or not this one; which option is missing.
    """
    names = await _loaded(http, url, publication.path.parent)
    has = publication.name in names and not again
    for name in names:
        if not (has and name == publication.name):
            await drop(http, url, name)
    if has:
        return
    body = {"lora_name": publication.name, "lora_path": str(publication.path)}
    try:
        await http.post(f"{url}/v1/load_lora_adapter", body, patience)
    except EngineError as error:
        raise not_taken(url, error, _HINTS, "vllm") from error
    except AwayError as error:
        if not str(error).startswith(_REFUSED):
            raise
        raise not_taken(url, error, _HINTS, "vllm") from error


async def drop(http: Http, url: str, name: str) -> None:
    """Has the server forget an adapter. One that it has dropped already, for want of room, it does not find."""
    with suppress(AwayError, EngineError):
        await http.post(f"{url}/v1/unload_lora_adapter", {"lora_name": name}, _ASKS)


async def _loaded(http: Http, url: str, folder: Path) -> list[str]:
    """Names of the adapters that it has from this folder: another run's are let be."""
    listed = await http.get(f"{url}/v1/models", _ASKS)
    try:
        cards = [card for card in listed["data"] if card.get("parent")]
        return [str(card["id"]) for card in cards if Path(str(card.get("root"))).parent == folder]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{url}/v1/models lists no models: is it a server of vLLM?") from error
