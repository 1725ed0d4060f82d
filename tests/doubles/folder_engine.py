"""An engine in this process: it loads published weights, as servers do, and samples with them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import ClassVar

from transformers import AutoModelForCausalLM

from policygrad.samplers.base import Request
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer


class FolderEngine(EngineSampler):
    """One server, which loads the folder."""

    name, launch_hint = "a folder's engine", "There is no other way to start it"
    served: LocalSampler

    def weight_writer(self) -> WeightWriter:
        return make_safetensors_writer(self.model, self.tokenizer.hf)

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(publication.path)
        self.served = LocalSampler.from_tokenizer(loaded.eval(), self.tokenizer)

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        asked = Request(request.prompt_ids, (seed,), request.sampling, request.max_tokens)
        [result] = await self.served.generate([asked])
        return EngineCompletion(result.tokens.tolist(), result.logp.tolist())


class SilentEngine(FolderEngine):
    """Accepts its third weights, those after the second step, and never answers; the process is asked to stop meanwhile."""

    loads: ClassVar[int] = 0

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        SilentEngine.loads += 1
        if SilentEngine.loads == 3:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        await super().load_weights(url, publication)
