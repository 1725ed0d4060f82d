"""An engine: one server in this process, which loads the published folder and samples with it."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

import policygrad as pg
from policygrad.samplers.engines.base import EngineCompletion
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer


class CorridorEngine(pg.EngineSampler):
    """The server at the end of the corridor."""

    name, launch_hint = "the corridor's engine", "It runs in this process"
    served: pg.LocalSampler

    def weight_writer(self) -> WeightWriter:
        return make_safetensors_writer(self.model, self.tokenizer.hf)

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        model = AutoModelForCausalLM.from_pretrained(publication.path)
        self.served = pg.LocalSampler.from_tokenizer(model.eval(), self.tokenizer)

    async def complete(self, url: str, request: pg.Request, seed: int) -> EngineCompletion:
        asked = pg.Request(request.prompt_ids, (seed,), request.sampling, request.max_tokens)
        [result] = await self.served.generate([asked])
        return EngineCompletion(result.tokens.tolist(), result.logp.tolist())
