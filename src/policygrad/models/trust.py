"""What of a model's folder is believed: configuration, tokenizer and safetensors. Code and pickles are programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from policygrad.errors import ModelError

FLAG = "--trust-remote-code"
ADAPTER = "adapter_model.bin"
_PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def reading(trust: bool) -> dict[str, Any]:
    """How `from_pretrained` and `from_config` are called: never a question on the terminal. trust: run the folder's own code."""
    return {"trust_remote_code": trust}


def weights(trust: bool) -> dict[str, Any]:
    """`reading`, for what also has weights: those of safetensors only."""
    return {**reading(trust), "use_safetensors": True}


def refuse_pickles(path: str, what: str) -> None:
    """Raises ModelError where a folder has its weights as pickles only; what is not a folder here is transformers' to find."""
    folder = Path(path)
    if not folder.is_dir():
        return
    safe = any(folder.glob("*.safetensors"))
    found = [] if safe else sorted({file.name for kind in _PICKLES for file in folder.glob(kind)})
    if (folder / ADAPTER).is_file() and not (folder / ADAPTER).with_suffix(".safetensors").is_file():
        found = [ADAPTER]  # whatever stands beside it
    if found:
        pickled = f"{what} has its weights in {found[0]}, a pickle, which can run any program when it is read"
        raise ModelError(f"{pickled}. {_as_safe(path)}")


def _as_safe(path: str) -> str:
    return (
        'If you trust whoever made it, write it as safetensors beside it: python -c "from transformers import '
        f'AutoModelForCausalLM as M; M.from_pretrained({path!r}, use_safetensors=False).save_pretrained({path!r})"'
    )


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
