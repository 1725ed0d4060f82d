"""A device written in Python: its tensors are the CPU's in a wrapper, it has no float64, and refuses those of another device.

    python -m doubles.python_device FOLDER ALGORITHM...

trains on the CPU and on it, into FOLDER/ALGORITHM/DEVICE. In a process of its own, because a device cannot be unregistered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pydevice"
MIXED = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_")
"""What takes tensors of two devices; an index may be the CPU's everywhere."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        if raw.dtype == torch.float64:
            raise TypeError(f"{NAME} has no float64")
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=f"{NAME}:0"
        )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    # What torch does not send through `__torch_dispatch__`.

    def tolist(self) -> Any:
        return self.raw.tolist()

    def storage(self) -> Any:
        return self.raw.storage()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the CPU, and wrap what comes of it."""
    name, device = function._schema.name, kwargs.get("device")
    to_cpu = device is not None and torch.device(device).type == "cpu"
    others = [
        x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)
    ]
    if name not in MIXED and any(x.ndim for x in others):
        raise RuntimeError(f"{name}: tensors of {NAME} and of another device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    raw_args, raw_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    result = function(*raw_args, **raw_kwargs)
    if name == "aten::_local_scalar_dense" or to_cpu:
        return result
    if args and isinstance(args[0], torch.Tensor) and result is raw_args[0]:  # in place
        return args[0]
    return tree_map(wrap, result)


def unwrap(x: Any) -> Any:
    return x.raw if isinstance(x, DeviceTensor) else x


def wrap(x: Any) -> Any:
    return DeviceTensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor) else x


def register() -> tuple[torch.library.Library, ...]:
    """Make the device known. It is there as long as what is returned."""
    _setup_privateuseone_for_python_backend(NAME)
    library, made = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    # `arange` is made of an empty tensor that grows, which a wrapper cannot; `torch.tensor` goes around the fallback
    for name in ("arange", "arange.start", "arange.start_step", "_to_copy"):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet), overload or "default")
        made.impl(name, lambda *args, f=function, **kwargs: dispatch(f, args, kwargs), "PrivateUse1")
    library.fallback(lambda function, *args, **kwargs: dispatch(function, args, kwargs), "PrivateUse1")
    return library, made


REWARD = """
def letters(prompts, completions, **columns):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""
"""Where all rewards are equal, a gradient is nothing but rounding, of which Adam makes steps."""


def train(algorithm: str, device: str, folder: Path) -> None:
    import policygrad as pg

    (folder / "mine.py").write_text(REWARD)
    run = pg.Run(
        algorithm=pg.get_algorithm(algorithm),
        reward=(f"{folder / 'mine.py'}:letters",),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        sampling=pg.SamplingParams(max_tokens=12),
        evaluation=pg.EvaluationConfig(problems=0),
        rewards=pg.RewardConfig(num_workers=1),
        learner=pg.LearnerConfig(device=device),
        output=str(folder / algorithm / device),
    )
    pg.train(run, display=False)


def main() -> None:
    from policygrad.core import precision

    libraries = register()
    precision.DEVICES_WITHOUT_FLOAT64.add(NAME)
    folder, *algorithms = sys.argv[1:]
    for algorithm in algorithms:
        for device in ("cpu", NAME):
            train(algorithm, device, Path(folder))
    del libraries


if __name__ == "__main__":
    main()
