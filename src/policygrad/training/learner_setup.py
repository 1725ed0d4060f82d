"""The learner of a run, with the models that it compares the policy with; and the teachers that are behind servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from policygrad.core.auxiliary import is_server
from policygrad.errors import ConfigError
from policygrad.learners.base import Learner, LearnerSpec
from policygrad.learners.fsdp.torchrun import check_not_torchrun
from policygrad.models.tokenizer import Tokenizer
from policygrad.planning.model_sizes import SMALL_MODEL_PARAMETERS
from policygrad.samplers.config import LOCAL
from policygrad.tasks.base import Task
from policygrad.training.config.paths import resolve_config_paths
from policygrad.training.config.run import Run
from policygrad.training.placement import LOCAL_PLACEMENT, LearnerFactory, Placement
from policygrad.training.policy_setup import PROBE_EXAMPLES, call_factory, load_policy_tokenizer
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.progress import ProgressCallback

if TYPE_CHECKING:
    from policygrad.rollout.teachers import ServedTeachers
    from policygrad.samplers.engines.teachers import TeacherServer


def make_local_learner(model: nn.Module, run: Run, placement: Placement = LOCAL_PLACEMENT) -> Learner:
    """Make the learner of a run, in this process and `learner.world_size` − 1 others.

    Raises:
        ModelError: The reference cannot be read, or has another tokenizer than the policy.
        ConfigError: This is one of several torchrun processes that would each learn alone.
    """
    check_not_torchrun(run.learner.world_size)
    lora, settings = run.learner.adapters, run.algorithm.reference
    loaded = dict[int, nn.Module]()
    for i, name in enumerate(settings.models.values() if settings is not None else ()):
        if not is_server(name):
            from policygrad.models.replica import load_reference

            if settings is not None and settings.tokenizer is not None:
                from policygrad.rollout.aligned_teachers import load_reference_tokenizer

                tokenizer = load_reference_tokenizer(settings.tokenizer, run.sampling)
            else:
                tokenizer = load_policy_tokenizer(run.model, run.tokenizer, model, run.trust_remote_code)
            loaded[i] = load_reference(
                name,
                tokenizer,
                dtype=run.learner.dtype,
                device=str(next(model.parameters()).device),
                trust_remote_code=run.trust_remote_code,
            )
    reference: nn.Module | None = None
    options: dict[str, Any] = {}
    if settings is not None and settings.teachers:
        options = {"teachers": loaded} if loaded else {}
    elif loaded:
        reference = loaded[0]
        from policygrad.models.adapters import add_adapters
        from policygrad.models.traits import adapter_configs

        if lora is not None and run.algorithm.reward_model is not None and not adapter_configs(reference):
            reference = add_adapters(reference, lora, seed=run.seed)  # the implicit reward model starts as a copy
            reference.requires_grad_(False)
    make: Callable[..., Learner]
    if run.learner.world_size == 1:
        from policygrad.learners.local.learner import LocalLearner

        make = LocalLearner
    else:  # torch.distributed takes a while to import
        from policygrad.learners.fsdp.controller import start_fsdp_learner

        make = partial(
            start_fsdp_learner,
            replicate_policy=run.sampler.engine == LOCAL and not run.max_staleness and placement.sampler is None,
            stream_weights=run.publishes_sharded,
            folder=Path(run.output) if run.output else None,
            launcher=placement.learner_processes,
        )
    spec = LearnerSpec(run.algorithm, run.lr, run.steps, run.sampling.temperature, run.learner, run.optimizer)
    return make(model, spec, reference=reference, **options)


def make_learner(factory: LearnerFactory | Learner, model: nn.Module, run: Run) -> Learner:
    """Return the learner that `factory` makes of the model. Raises ConfigError if it is none."""
    learner = call_factory(factory, Learner, model, resolve_config_paths(run))
    if not isinstance(learner, Learner):
        raise ConfigError(
            f"learner is {learner!r}: pass a function of (model, run) that returns what policygrad.Learner describes "
            "(evaluate, update, publish, version, state, restore), such as pg.make_local_learner"
        )
    return learner


def connect_teachers(
    stack: ExitStack, run: Run, task: Task, tokenizer: Tokenizer, run_async: AsyncRunner, phase: ProgressCallback
) -> ServedTeachers | None:
    """Connect to the teachers that are behind servers, and check them and the column that chooses between several.

    Args:
        stack: Closes the connections.
        phase: Called while a server is waited for.

    Returns:
        None if no teacher is behind a server.

    Raises:
        EngineError: A server does not answer, or fails a check.
        DataError: An example does not name its teacher.
    """
    reference = run.algorithm.reference
    if reference is None or not reference.models or "logp_ref" not in run.algorithm.needs:
        return None
    from policygrad.rollout.teachers import ServedTeachers, find_teacher
    from policygrad.samplers.engines.teachers import TeacherServer

    if reference.teachers:
        for example in task.rows or [task.train_example(index) for index in range(PROBE_EXAMPLES)]:
            find_teacher(example, list(reference.models), example.source or "an example")
    owner = "the policy"
    if reference.tokenizer is not None:
        from policygrad.rollout.aligned_teachers import load_reference_tokenizer

        tokenizer, owner = load_reference_tokenizer(reference.tokenizer, run.sampling), reference.tokenizer
    top_k = max((term.divergence.top_k for term in run.algorithm.terms if "kl_ref" in term.forward_needs), default=0)
    servers = {
        i: TeacherServer(address, tokenizer, run.teacher_server, phase, top_k=top_k, tokenizer_of=owner)
        for i, address in enumerate(reference.models.values())
        if is_server(address)
    }
    if not servers:
        return None
    max_tokens = run.sampling.max_tokens
    lengths = [len(tokenizer.encode(e.prompt, max_tokens, e.source, e.tools).ids) for e in task.rows]
    for server in servers.values():
        stack.callback(partial(_run_closing, run_async, server))
        run_async(server.connect(max(lengths, default=0) + max_tokens))
    return ServedTeachers(servers, run_async, top_k)


def _run_closing(run_async: AsyncRunner, server: TeacherServer) -> None:
    run_async(server.close())


@contextmanager
def limit_torch_threads(model: nn.Module) -> Iterator[None]:
    """Compute with one thread for a small model on the CPU, unless OMP_NUM_THREADS is set; restore the number afterwards.

    On two cores the default run trains in 21 seconds with one thread and in 30 with two, which get in each other's way and in
    that of the reward workers.
    """
    before = torch.get_num_threads()
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    is_small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS
    if on_cpu and is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
