"""An engine in this process: it loads what is published, as servers do, and draws with that."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from policygrad.samplers.base import Request
from policygrad.samplers.engines.base import Drawn, EngineSampler
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.weight_sync.folder import Publication, Write, safetensors_writer


class FolderEngine(EngineSampler):
    """One server, whose weights are those of the folder."""

    name, way_out = "a folder's engine", "There is no other way to start it"
    served: LocalSampler

    def writer(self) -> Write:
        return safetensors_writer(self.model, self.tokenizer.hf)

    async def load(self, url: str, publication: Publication) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(publication.path)
        self.served = LocalSampler.of(loaded.eval(), self.tokenizer)

    async def draw(self, url: str, request: Request, seed: int) -> Drawn:
        asked = Request(request.tokens, (seed,), request.sampling, request.max_tokens)
        [found] = await self.served.generate([asked])
        return Drawn(found.tokens.tolist(), found.logp.tolist())
