"""What fits into memory, as a run finds it out and its folder keeps it; and what to say where the least that it needs does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from policygrad.errors import MemoryStopError, OutOfMemoryError, RunError
from policygrad.learners.base import CutsLongTexts
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.optimizers import ADAMW
from policygrad.planning.model_sizes import GRADIENT_BYTES, MASTER_BYTES
from policygrad.rewards.workers.limits import format_size, get_resident_bytes
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.memory import measure_free_memory, read_meminfo
from policygrad.utils.out_of_memory import Halving, HasMemoryBudget, describe_missing_memory

MEMORY_FILE = "memory.json"
"""In the run's folder: by option the limit that memory has set."""
COUNTED_TOKENS = 1024  # of the text that is counted
MICRO_TOKENS, DECODE_ROWS = "learner.micro_tokens", "sampling.decode_rows"


@dataclass(frozen=True)
class Limit:
    """What fitted. It holds as long as the run has the same option and device: with another one it starts from the option."""

    configured: int
    limit: int
    device: str


class MemoryLimits:
    """The limits of a run's folder."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        """Read those that an earlier process of the run has found. Raises RunError for a damaged file."""
        self._file, self._device = folder / MEMORY_FILE, describe_device(torch.device(device))
        self._limits = dict[str, Limit]()
        if self._file.exists():
            try:
                stored = json.loads(self._file.read_text(encoding="utf-8"))
                self._limits = {option: Limit(**values) for option, values in stored.items()}
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{self._file} cannot be read ({error}): delete it, and the run finds out again"
                ) from error

    def find(self, option: str, configured: int) -> int | None:
        """Return the limit of an option; None while memory has set none."""
        stored = self._limits.get(option)
        is_same = stored is not None and (stored.configured, stored.device) == (configured, self._device)
        return stored.limit if stored is not None and is_same else None

    def keep(self, option: str, configured: int, limit: int) -> None:
        """Write a limit into the folder."""
        self._limits[option] = Limit(configured, limit, self._device)
        write_atomically(self._file, json.dumps({name: asdict(x) for name, x in self._limits.items()}, indent=1) + "\n")

    def apply(self, config: LearnerConfig) -> LearnerConfig:
        """Return the options with which the learner begins."""
        limit = self.find(MICRO_TOKENS, config.micro_tokens)
        return config if limit is None else replace(config, micro_tokens=limit)

    def follow(self, owner: object, option: str, configured: int, note: Callable[[str], None]) -> None:
        """Begin with what fitted, and from now on keep and note what does; nothing for an owner without a budget."""
        if not isinstance(owner, HasMemoryBudget):
            return

        def on_halved(halving: Halving) -> None:
            note(halving.message)
            self.keep(option, configured, halving.limit)

        owner.memory.on_halved = on_halved
        owner.memory.limit = self.find(option, configured)


def describe_device(device: torch.device) -> str:
    """Return a device with its memory, as text that is another for another kind of device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {format_size(properties.total_memory)}"
    total = read_meminfo().get("MemTotal", 0) if device.type == "cpu" else 0
    return f"{device.type}, {format_size(total)}" if total else device.type


# What to say at the end.


def explain_shortage(
    error: BaseException, model: nn.Module | None, learner: object, config: Any, resume_command: str
) -> MemoryStopError:
    """Return the error of a run that ends for want of memory: in what, what fills the memory, and what to change, by its effect.

    Args:
        model: The one that trains; None if it was still being loaded.
        config: The run's.
    """
    if isinstance(error, OutOfMemoryError):
        flag, size, limit, what = error.flag, error.size, error.limit, str(error)
    else:
        flag, size, limit, what = "", None, None, f"out of memory ({describe_missing_memory(error)})"
    if limit is not None:
        text = f"{what}. The run's folder keeps {flag} {limit}, with which this begins: {resume_command}"
        return MemoryStopError(text, flag=flag, size=size, limit=limit)
    lines = [f"{what}. The run can be resumed once something is changed: {resume_command} …"]
    if model is not None:
        use = MemoryUse.measure(model, learner, config)
        saved = None if flag != "--learner.micro-tokens" or size is None else use.estimate_saved(size)
        rows = {name: x for name, x in use.parts.items() if x}
        if saved is not None:
            rows[f"saved of {size:,} tokens for their backward pass (estimate)"] = saved
        width = max(map(len, rows))
        lines.append(f"What fills {use.device}:")
        lines += [f"  {name:<{width}}  {format_size(x):>9}" for name, x in rows.items()]
        lines.append("To change, the most effective first:")
        lines += [f"  {text}" for text in use.list_remedies(config, saved, is_sampling=flag == "--decode-rows")]
    return MemoryStopError("\n".join(lines), flag=flag, size=size)


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes that a run holds all the time."""

    model: nn.Module
    learner_config: LearnerConfig
    device: str
    """With its memory."""
    parts: Mapping[str, int]

    @classmethod
    def measure(cls, model: nn.Module, learner: object, config: Any) -> MemoryUse:
        """Count the weights of the model, and of what the learner has beside it. Of several processes each has its share."""
        settings: OptimizerConfig = config.optimizer
        moment_bytes = settings.row.count_moment_bytes(settings.momentum)
        parameters = list(model.parameters())
        optimizers = getattr(learner, "optimizers", None)
        if optimizers is None:  # several processes, or a learner of the user's
            trained = sum(p.numel() for p in parameters if p.requires_grad)
            copies = sum(p.numel() for p in parameters if p.requires_grad and p.element_size() < 4)
            others_bytes = 0
        else:
            masters = [(p, o.masters[n]) for o in optimizers for n, p in o.parameters.items()]
            trained, copies = sum(m.numel() for _, m in masters), sum(m.numel() for p, m in masters if p is not m)
            others_bytes = sum(p.nbytes for o in optimizers[1:] for p in o.parameters.values())
        share = max(1, config.learner.world_size)
        other = int(getattr(learner, "reference_parameters", 0)) * parameters[0].element_size()
        parts = {
            "weights": sum(p.nbytes for p in parameters) // share,
            "gradients": GRADIENT_BYTES * trained // share,
            "moments": int(moment_bytes * trained) // share,
            "float32 copies of the weights": MASTER_BYTES * copies // share,
            "other models": (other + others_bytes) // share,
        }
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        return cls(model, config.learner, _describe_capacity(device), parts)

    def estimate_saved(self, tokens: int) -> int | None:
        """Return the bytes that a text saves for its backward pass; None where that cannot be counted, or is recomputed instead."""
        from policygrad.learners.local.activation_memory import saved_activation_bytes

        if self.learner_config.gradient_checkpointing or tokens < 2:
            return None
        text = getattr(getattr(self.model, "config", None), "get_text_config", lambda: None)()
        dtype = next(self.model.parameters()).dtype
        try:
            return saved_activation_bytes(text, dtype, tokens, 1, tokens - 1, 1, self.learner_config.adapters)
        except Exception:  # an architecture may fail in any way on tensors without memory, and the table does without
            return None

    def estimate_longest(self, learner: object, tokens: int, budget: int | None = None) -> int | None:
        """Return about how many tokens of one text fit beside what the run holds, counted on texts of `tokens` and half as many.

        None where that cannot be counted, or where what is saved grows faster than the text.

        Args:
            budget: Tokens of a pass, beyond which texts are read in segments; None = texts are read whole.
        """
        from policygrad.planning.cost_model import HOLES

        free = _measure_free(next(self.model.parameters()).device)
        long, short = self.estimate_saved(tokens), self.estimate_saved(tokens // 2)
        if free is None or not long or not short or long > 2.2 * short:
            return None
        optimizers = getattr(learner, "optimizers", ())
        present = sum(o.moment_bytes for o in optimizers)
        free -= self.parts["gradients"] + max(0, self.parts["moments"] - present)
        if not self.device.startswith("cuda"):
            free /= 1 + HOLES["adapters" if self.learner_config.lora else "weights"]
        longest = free / (long / tokens)
        number, of = next(self.model.parameters()).element_size(), getattr(self.model, "config", None)
        further = None if budget is None else count_segment_bytes(of, number)
        if budget is not None and further is not None and longest > budget:
            longest = budget + (free - budget * long / tokens) / further
        return max(0, int(longest))

    def list_remedies(self, config: Any, saved: int | None, *, is_sampling: bool) -> Iterator[str]:
        """Iterate over options that the run does not have yet, the one that frees most first."""
        learner, parts = self.learner_config, self.parts
        passes = 0 if is_sampling else saved or 0
        state = parts["gradients"] + parts["moments"] + parts["float32 copies of the weights"]
        on_gpu, gpus = not self.device.startswith("cpu"), torch.cuda.device_count()
        sampling = getattr(config, "sampling", None)
        remedies = list[tuple[float, str]]()
        if not learner.gradient_checkpointing and not is_sampling:
            remedies.append(
                (0.9 * passes, "--learner.gradient-checkpointing: recompute activations in the backward pass")
            )
        if not (learner.lora or learner.trainable):
            remedies.append(
                (0.98 * state, "--learner.lora rank=16: train adapters, without gradients and moments of the weights")
            )
        if learner.adapters is not None and learner.adapters.bits is None and on_gpu:
            remedies.append((0.7 * parts["weights"], f"--learner.lora {learner.lora},bits=4: weights in four bits"))
        remedies += self._list_optimizer_remedies(config, on_gpu=on_gpu)
        if learner.dtype == "fp32" and on_gpu:
            remedies.append((passes / 2, "--learner.dtype bf16: half of what a pass saves"))
        if gpus > learner.world_size:
            share = (sum(parts.values()) + 0.0) * (1 - learner.world_size / gpus)
            remedies.append(
                (share, f"--learner.world-size {gpus}: shard weights, gradients and moments over this machine's GPUs")
            )
        if is_sampling and sampling is not None and on_gpu and not learner.offload and learner.world_size == 1:
            text = "--learner.offload: keep moments in this machine's memory while completions are sampled"
            remedies.append((parts["moments"] + parts["float32 copies of the weights"], text))
        if sampling is not None:
            text = f"--max-tokens below {sampling.max_tokens:,}: shorter completions"
            remedies.append((passes / 2 or 1, text))
        else:
            remedies.append((passes / 2 or 1, "rows with fewer tokens"))
        yield from (text for _, text in sorted(remedies, key=lambda remedy: -remedy[0]))

    def _list_optimizer_remedies(self, config: Any, *, on_gpu: bool) -> Iterator[tuple[float, str]]:
        """Iterate over what each option of the optimizer frees, and what it does; none for adapters, whose state is small."""
        learner, parts, optimizer = self.learner_config, self.parts, getattr(config, "optimizer", None)
        if learner.lora or optimizer is None or not parts["moments"]:
            return
        if optimizer.name == ADAMW and learner.tensor_parallel == 1:
            yield 0.75 * parts["moments"], "--optimizer.name adamw8bit: moments in 8 bits"
        if learner.world_size == 1 and parts["float32 copies of the weights"] and optimizer.masters == "fp32":
            copies = float(parts["float32 copies of the weights"])
            yield copies, "--optimizer.masters none: bf16 weights without float32 copies, rounded by chance"
        if on_gpu and not (learner.offload or optimizer.offload):
            state = float(parts["moments"] + parts["float32 copies of the weights"])
            yield state, "--optimizer.offload: keep moments in this machine's memory, also while learning"


def describe_longest_text(model: nn.Module, learner: object, config: Any) -> tuple[dict[str, str], str | None]:
    """Return about how long a text may be that is learned from, as a fact of the run, and a note if completions may be longer.

    Nothing where they are short: it is counted on the architecture, which takes seconds, where a completion of `max_tokens`
    may take a quarter of what is free.
    """
    tokens, free = config.sampling.max_tokens, _measure_free(next(model.parameters()).device)
    if config.learner.world_size > 1 or free is None or _guess_saved(model, tokens) < free / 4:
        return {}, None
    budget = None
    if isinstance(learner, CutsLongTexts) and learner.cuts_long_texts():
        device, parameters = next(model.parameters()).device, sum(p.numel() for p in model.parameters())
        budget = config.learner.resolve_micro_tokens(device, parameters)
    use = MemoryUse.measure(model, learner, config)
    longest = use.estimate_longest(learner, COUNTED_TOKENS, budget)
    if longest is None:
        return {}, None
    how = "" if budget is None or longest <= budget else f", read in segments of {budget:,}"
    facts = {"longest text": f"about {longest:,} tokens fit, prompt and completion{how}"}
    if tokens <= longest:
        return facts, None
    remedies = "; or ".join(use.list_remedies(config, use.estimate_saved(COUNTED_TOKENS), is_sampling=False))
    return (
        facts,
        f"completions may have {tokens:,} tokens, and about {longest:,} of a text fit, prompt included: {remedies}",
    )


def count_segment_bytes(config: Any, number: int) -> float | None:
    """Return the bytes that a token of a segment leaves to what follows it: keys and values with their gradients, which are in
    float32, and states with theirs (see `segment_bytes` of the cost model); None where the model's configuration does not tell.

    Args:
        number: Bytes of one in the compute precision.
    """
    text: Any = getattr(config, "get_text_config", lambda: None)()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if not heads or not hidden:
        return None
    width = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    widths = 2 * width
    if getattr(text, "kv_lora_rank", None) is not None:  # latent attention: they are kept as layers attend to them
        widths = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    numbers = int(text.num_hidden_layers) * int(heads) * int(widths)
    return float(numbers * (number + GRADIENT_BYTES) + hidden * (2 * number + GRADIENT_BYTES))


def _guess_saved(model: nn.Module, tokens: int) -> float:
    """Return roughly the bytes that a text saves for its backward pass, from the sizes of a transformer's layers.

    34 numbers per layer and channel: Korthikanti et al. 2022, arXiv:2205.05198, eq. 1, without the term of attention scores.
    """
    text = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
    return float(34 / 2 * tokens * layers * width * next(model.parameters()).element_size())


def _measure_free(device: torch.device) -> float | None:
    """Return the bytes that this process may still take on a device; None where it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    free = measure_free_memory() if device.type == "cpu" else float("inf")
    return free if free < float("inf") else None


def _describe_capacity(device: torch.device) -> str:
    """Return a device and the memory that this process may use of it."""
    if device.type == "cuda":
        return f"{device} ({format_size(torch.cuda.mem_get_info(device)[1])})"
    free = measure_free_memory() if device.type == "cpu" else float("inf")
    return f"{device} ({format_size(int(free) + get_resident_bytes())})" if free < float("inf") else str(device)
