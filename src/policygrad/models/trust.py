"""What of a model's folder is believed: configuration, tokenizer and safetensors. Code and pickles are programs."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from policygrad.contents import parse_json
from policygrad.errors import ModelError
from policygrad.models.hub import files
from policygrad.planning.shapes import check_sizes

FLAG = "--trust-remote-code"
ADAPTER, SAFE_ADAPTER = "adapter_model.bin", "adapter_model.safetensors"
_PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def reading(trust: bool) -> dict[str, Any]:
    """How `from_pretrained` and `from_config` are called: never a question on the terminal. trust: run the folder's own code."""
    return {"trust_remote_code": trust}


def weights(trust: bool) -> dict[str, Any]:
    """`reading`, for what also has weights: those of safetensors only."""
    return {**reading(trust), "use_safetensors": True}


def refuse_pickles(path: str, what: str) -> None:
    """Raises ModelError where a folder has its weights as pickles only, or an adapter on the hub has. A whole model on the hub is
    transformers' to find, which is asked for safetensors; of an adapter it would take what there is."""
    folder = Path(path)
    there = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else files(path)
    if ADAPTER in there and SAFE_ADAPTER not in there:  # whatever stands beside it
        raise ModelError(f"{_pickled(what, ADAPTER)}. {_adapter_as_safe(path)}")
    safe = not folder.is_dir() or any(name.endswith(".safetensors") for name in there)
    found = [] if safe else sorted(name for name in there for kind in _PICKLES if fnmatchcase(name, kind))
    if found:
        raise ModelError(f"{_pickled(what, found[0])}. {_as_safe(path)}")


def _pickled(what: str, file: str) -> str:
    return f"{what} has its weights in {file}, a pickle, which can run any program when it is read"


def _as_safe(path: str) -> str:
    return (
        'If you trust whoever made it, write it as safetensors beside it: python -c "from transformers import '
        f'AutoModelForCausalLM as M; M.from_pretrained({path!r}, use_safetensors=False).save_pretrained({path!r})"'
    )


def _adapter_as_safe(path: str) -> str:
    """torch reads the tensors of such a file alone, and refuses whatever else is in it."""
    folder = path if Path(path).is_dir() else path.rpartition("/")[2]
    here = "" if folder == path else f"fetch it, `hf download {path} --local-dir {folder}`, and "
    old, new = (str(Path(folder) / name) for name in (ADAPTER, SAFE_ADAPTER))
    command = f"import torch; from safetensors.torch import save_file as f; f(torch.load({old!r}, weights_only=True), {new!r})"
    end = "" if folder == path else f", and give {folder}"
    return f'Have its tensors written as safetensors, which runs nothing: {here}python -c "{command}"{end}'


def checked_config(path: str, what: str) -> dict[str, Any]:
    """Read config.json; {} where there is none that transformers could read either, which says why.

    Raises:
        ModelError: a size that no model has, of which building one layer after the other would take hours, or all memory.
    """
    from transformers.utils.hub import cached_file

    try:  # on the hub too
        config = parse_json(Path(str(cached_file(path, "config.json"))).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    try:
        for part in (config, config.get("text_config")):
            check_sizes(part if isinstance(part, dict) else {})
    except ValueError as error:
        raise ModelError(f"{what} has a config.json in which {error}; put the model's own back") from error
    return config


def cannot_load(what: str, error: Exception, needs: str, path: str = "") -> ModelError:
    """What transformers says, as a refusal with a way out. path: the folder, whose files may tell more."""
    text = str(error)
    if "trust_remote_code" in text:
        return ModelError(
            f"{what} brings code of its own along, which is not run unless you say so: read it, then give {FLAG} (from Python "
            "trust_remote_code=True), or take a model whose architecture transformers has"
        )
    lines = [line.strip().rstrip(" .") for line in text.strip().splitlines()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = _malformed(path) or (f"{first[:-1]} …" if first.endswith(":") else first) or repr(error)
    return ModelError(f"cannot load {what}, whose folder needs {needs}: {said}")


def _malformed(path: str) -> str:
    """Which of a folder's configuration files is no JSON object, in words; "" where all are, or it is no folder."""
    for file in sorted(Path(path).glob("*config.json")) if path else ():
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return f"{file.name} holds no JSON object; put the model's own back"
        except (ValueError, RecursionError, OSError) as error:
            return f"{file.name} is no JSON ({error}); put the model's own back"
    return ""
