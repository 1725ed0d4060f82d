"""How a server of SGLang takes an adapter by name, and drops those before it: `/load_lora_adapter`, `/unload_lora_adapter`.

Source: sgl-project/sglang 0.5, python/sglang/srt/managers/{io_struct,tokenizer_control_mixin}.py (both answer `success`,
`error_message` and `loaded_adapters`, with status 400 where it is no success; an adapter is taken out once nobody draws with it)
and docs/advanced_features/lora.ipynb. A completion is asked of the adapter as `lora_path`, and its answer does not name it. Checked
against answers of that form, not against a running server.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from policygrad.errors import EngineError
from policygrad.samplers.adapter_names import not_taken
from policygrad.samplers.http import AwayError, Http
from policygrad.weight_sync.folder import Publication

_ASKS = 10.0
"""Seconds for a question that needs no computation."""
_HINTS = (
    ("answers 404", "Take a server that loads adapters while it runs, SGLang 0.5 or later"),
    ("not enabled", "Start it with --enable-lora"),
    ("incompatible", "Start it with --max-lora-rank and --lora-target-modules for this adapter"),
    ("No such file", "Let it see the folder under the same path, --sampler.folder"),
)
"""(what is in its answer, the way out)."""


async def take(http: Http, url: str, publication: Publication, patience: float, before: str) -> None:
    """Returns when the server answers to the publication's name, and to none of the same folder's before it. patience: seconds for
    loading. before: the name that it was given last, "" = none that is known.

    Raises:
        AwayError: it does not answer, or not now.
        EngineError: it takes no adapters, or not this one; which option is missing.
    """
    for name in {before, publication.name} - {""}:  # it may have the one of now, and be made ready again
        await drop(http, url, name)
    body = {"lora_name": publication.name, "lora_path": str(publication.path)}
    try:
        told = await http.post(f"{url}/load_lora_adapter", body, patience)
    except EngineError as error:
        raise not_taken(url, error, _HINTS, "sglang") from error
    if not (isinstance(told, dict) and told.get("success")):
        raise not_taken(url, told, _HINTS, "sglang")
    for name in _others(told, publication):
        await drop(http, url, name)


async def drop(http: Http, url: str, name: str) -> None:
    """Has the server forget an adapter, if it has it."""
    with suppress(AwayError, EngineError):
        await http.post(f"{url}/unload_lora_adapter", {"lora_name": name}, _ASKS)


def _others(told: dict[str, Any], publication: Publication) -> list[str]:
    """Adapters that it has from the publication's folder, of a run that was killed say: another run's are let be."""
    found = told.get("loaded_adapters") or {}
    paths = {name: ref.get("lora_path") if isinstance(ref, dict) else ref for name, ref in found.items()}
    mine = publication.path.parent
    return [name for name, path in paths.items() if name != publication.name and Path(str(path)).parent == mine]
