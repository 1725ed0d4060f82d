"""A complete engine of your own: completions by POST /complete, weights by POST /load. docs/engines.md explains it."""

from __future__ import annotations

from policygrad.errors import EngineError
from policygrad.samplers.base import Request
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer


class MyEngine(EngineSampler):
    """Samples from servers of `my-server`."""

    name = "my engine"
    launch_hint = "Start it with: my-server MODEL --port 8000"

    def weight_writer(self) -> WeightWriter:
        return make_safetensors_writer(self.model, self.tokenizer.hf)

    async def load_weights(self, url: str, version: WeightVersion) -> None:
        await self.http.post(f"{url}/load", {"folder": str(version.path)}, self.config.recovery_timeout)

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        if request.sampling.is_truncated:
            raise EngineError("my engine samples from the full distribution. Leave top_k at 0 and top_p at 1.")
        body = {
            "prompt_ids": request.prompt_ids.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "seed": seed,
        }
        reply = await self.http.post(f"{url}/complete", body)
        return EngineCompletion(reply["token_ids"], reply["logprobs"])
