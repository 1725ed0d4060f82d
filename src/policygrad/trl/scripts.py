"""What TRL's scripts import beside the trainers: arguments of scripts and of models, and the parser that reads them."""

# No `from __future__ import annotations`: transformers' argument parser reads the types themselves.
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from policygrad.models.adapters import make_peft_config
from policygrad.utils.devices import pick_device


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ScriptArguments:
    """The data set of a script."""

    dataset_name: str | None = _option(None, "Folder, file format or hub id, as load_dataset takes it.")
    dataset_config: str | None = _option(None, "Configuration of the data set.")
    dataset_train_split: str = _option("train", "Split to train on.")
    dataset_test_split: str = _option("test", "Split to evaluate on.")
    dataset_streaming: bool = _option(False, "Read the data set as a stream.")
    ignore_bias_buffers: bool = _option(False, "Without effect.")


@dataclass
class ModelConfig:
    """The model of a script: its name, precision, adapters and quantisation."""

    model_name_or_path: str | None = _option(None, "Folder or hub id of the model.")
    model_revision: str = _option("main", "Branch, tag or commit on the hub.")
    dtype: str | None = _option("float32", "auto, bfloat16, float16 or float32.")
    attn_implementation: str | None = _option(None, "Attention of transformers.")
    use_peft: bool = _option(False, "Train adapters.")
    lora_r: int = _option(16, "Rank of the adapters.")
    lora_alpha: int = _option(32, "Their scale, alpha.")
    lora_dropout: float = _option(0.05, "Without effect: there is no dropout here.")
    lora_target_modules: list[str] | None = _option(None, "Modules that get adapters.")
    lora_target_parameters: list[str] | None = _option(None, "Parameters that get adapters.")
    lora_modules_to_save: list[str] | None = _option(None, "Modules that are trained whole.")
    lora_task_type: str = _option("CAUSAL_LM", "Task type of PEFT.")
    use_rslora: bool = _option(False, "Scale by alpha/sqrt(r).")
    use_dora: bool = _option(False, "Decompose weights (DoRA).")
    load_in_8bit: bool = _option(False, "Load the weights in 8 bits.")
    load_in_4bit: bool = _option(False, "Load the weights in 4 bits.")
    bnb_4bit_quant_type: str = _option("nf4", "nf4 or fp4.")
    use_bnb_nested_quant: bool = _option(False, "Quantise the scales too.")
    bnb_4bit_quant_storage: str | None = _option(None, "Type in which 4-bit weights are stored.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set: choose one")
        targets = self.lora_target_modules
        if targets is not None and len(targets) == 1:
            self.lora_target_modules = targets[0]  # type: ignore[assignment]  # a name such as all-linear


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return the adapters that the arguments describe; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    options: dict[str, Any] = {}
    if model_args.lora_target_parameters is not None:
        options["target_parameters"] = model_args.lora_target_parameters
    return make_peft_config(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
        **options,
    )


def get_quantization_config(model_args: ModelConfig) -> Any:
    """Return how the weights are quantised as they are loaded; None if they are not."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return where a quantised model is loaded: the first GPU, or nowhere in particular."""
    return {"": 0} if pick_device("auto").startswith("cuda") else None


class TrlParser(HfArgumentParser):
    """Reads dataclasses from the command line, and from a YAML file that `--config` names. The command line wins."""

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        kinds = dataclass_types or []
        kinds = [*kinds] if isinstance(kinds, Iterable) else [kinds]
        for kind in kinds:
            if "config" in kind.__dataclass_fields__:
                raise ValueError(f"{kind.__name__} has a field 'config', which names the YAML file: rename the field")
        super().__init__(dataclass_types=kinds, **options)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return an instance of each dataclass, and what was left over if that is asked for.

        Raises:
            ValueError: The file is no mapping, or has names that no dataclass has.
        """
        given, left = [*(sys.argv[1:] if args is None else args)], list[str]()
        if "--config" in given:
            at = given.index("--config")
            if at + 1 == len(given):
                raise ValueError("--config needs the name of a YAML file after it")
            left = self._read_config(Path(given[at + 1]))
            del given[at : at + 2]
        parsed = self.parse_args_into_dataclasses(args=given, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *values, unread = parsed
            return (*values, left, unread) if separate_remaining_strings else (*values, left + unread)
        if left and fail_with_unknown_args:
            raise ValueError(f"the configuration file has names that no argument has: {' '.join(left[::2])}")
        return parsed

    def _read_config(self, file: Path) -> list[str]:
        """Make a file's values the defaults; return what no argument has, as arguments."""
        import yaml

        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold a mapping of names to values, not {type(values).__name__}")
        variables = values.pop("env", {}) or {}
        if not isinstance(variables, dict):
            raise ValueError(f"{file}: env must be a mapping of environment variables, not {type(variables).__name__}")
        os.environ.update({str(name): str(value) for name, value in variables.items()})
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values.pop(action.dest), False
        return [text for name, value in values.items() for text in (f"--{name}", str(value))]
