"""A step of reinforcement learning through `policygrad serve` and the Tinker SDK, and the same step in this process; in turns.

    python scripts/measure_serve.py [--model tiny] [--prompts 64] [--samples 8] [--max-tokens 32] [--steps 5] [--results FILE]

A step samples completions of questions of the embedded task, takes the group's mean from a reward that costs nothing, learns with
importance_sampling, and saves the weights for the next step's sampling. In this process it is the server's own code without HTTP
and the SDK (`serve.models`, `serve.sampling`). Wall time; the server and the client are two processes, and on two cores neither
hides the other's work if both are busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from policygrad.learners.config import LearnerConfig
from policygrad.samplers.base import SamplingParams
from policygrad.serve.adapters import AdapterSpec
from policygrad.serve.losses import Datum
from policygrad.serve.models import AdamParams, ClientModel, load_network
from policygrad.serve.sampling import LocalAnswers, SampleQuery
from policygrad.tasks import load_task
from policygrad.training.learner_setup import limit_torch_threads
from stress_serve import Server, report_result


class InProcess:
    """The step without a server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.count = options, 0
        self.network = load_network(options.model, options.model, LearnerConfig(), adaptable=True)
        self.model = ClientModel.with_adapter(self.network, AdapterSpec(32, seed=0))
        self.answers = LocalAnswers(self.network)
        task, encode = load_task("embedded", seed=0), self.network.tokenizer.hf.encode
        self.prompts = [encode(str(task.train_example(i).prompt)) for i in range(options.prompts)]

    def step(self) -> int:
        """Take a step; return the number of tokens that were sampled."""
        options, tokens = self.options, 0
        self.count += 1
        params = SamplingParams()
        queries = [
            SampleQuery(torch.tensor(p), options.samples, params, options.max_tokens, (self.count, i))
            for i, p in enumerate(self.prompts)
        ]
        data = []
        for query, answer in zip(queries, self.answers.answer([(q, self.model.adapter) for q in queries]), strict=True):
            prompt = query.prompt.tolist()
            for sample, advantage in zip(
                answer.samples, advantages([s.tokens.tolist() for s in answer.samples]), strict=True
            ):
                tokens += len(sample.tokens)
                ids = torch.cat([query.prompt, sample.tokens])
                head = len(prompt) - 1
                zeros = torch.zeros(head)
                logprobs, psi = torch.cat([zeros, sample.logprobs]), torch.full((len(sample.tokens),), advantage)
                data.append(
                    Datum(
                        ids[:-1],
                        {"target_tokens": ids[1:], "logprobs": logprobs, "advantages": torch.cat([zeros, psi])},
                    )
                )
        self.model.run(data, "importance_sampling", {}, backward=True)
        self.model.step(AdamParams(1e-5))
        return tokens


class Served:
    """The step through a server."""

    def __init__(self, options: argparse.Namespace, url: str, prompts: list[list[int]]) -> None:
        import tinker

        self.options, self.types, self.prompts = options, tinker.types, prompts
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        self.training = service.create_lora_training_client(options.model, rank=32, seed=0).result()

    def step(self) -> int:
        types, options, tokens = self.types, self.options, 0
        sampling = self.training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=options.max_tokens)
        futures = [sampling.sample(types.ModelInput.from_ints(p), options.samples, params) for p in self.prompts]
        data = []
        for prompt, future in zip(self.prompts, futures, strict=True):
            sequences = future.result().sequences
            for sequence, advantage in zip(sequences, advantages([s.tokens for s in sequences]), strict=True):
                tokens += len(sequence.tokens)
                ids, head = prompt + sequence.tokens, len(prompt) - 1
                inputs = {
                    "target_tokens": ids[1:],
                    "logprobs": [0.0] * head + (sequence.logprobs or []),
                    "advantages": [0.0] * head + [advantage] * len(sequence.tokens),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        passed = self.training.forward_backward(data, "importance_sampling")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-5))
        passed.result()
        stepped.result()
        return tokens


def advantages(completions: list[list[int]]) -> list[float]:
    """Return each completion's reward, the share of its even tokens, minus the group's mean."""
    rewards = [sum(t % 2 == 0 for t in c) / len(c) for c in completions]
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, its own and the system's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    for name, value in (("prompts", 64), ("samples", 8), ("max-tokens", 32), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "served", ("--model", options.model), threads=None)
        try:
            local = InProcess(options)
            served = Served(options, server.url, local.prompts)
            assert server.process is not None
            pids = {"server": (server.process.pid, os.getpid()), "process": (os.getpid(),)}
            seconds: dict[str, list[float]] = {"server": [], "process": []}
            cpu: dict[str, list[float]] = {"server": [], "process": []}
            tokens: dict[str, list[int]] = {"server": [], "process": []}
            with limit_torch_threads(local.network.model):
                for step in range(options.steps + 1):
                    for name, one in (("server", served), ("process", local)):
                        started, used = time.perf_counter(), sum(map(read_cpu_seconds, pids[name]))
                        count = one.step()
                        if step:  # the first prepares caches
                            seconds[name].append(time.perf_counter() - started)
                            cpu[name].append(sum(map(read_cpu_seconds, pids[name])) - used)
                            tokens[name].append(count)
        finally:
            server.stop()
    result = {
        "prompts": options.prompts,
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        **{f"{name}_seconds": round(statistics.median(x), 3) for name, x in seconds.items()},
        **{f"{name}_cpu_seconds": round(statistics.median(x), 3) for name, x in cpu.items()},
        **{f"{name}_tokens": round(statistics.mean(x)) for name, x in tokens.items()},
    }
    result["overhead"] = round(result["server_seconds"] / result["process_seconds"] - 1, 3)
    report_result(f"step of {Path(options.model).name}", result, options.results)


if __name__ == "__main__":
    main()
