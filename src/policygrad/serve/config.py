"""Options of the training server."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.samplers.config import LOCAL, SamplerConfig
from policygrad.utils.filesystem import read_text_bounded
from policygrad.utils.http_limits import is_loopback


@dataclass(frozen=True)
class ServeConfig:
    """Options of `policygrad serve`."""

    model: tuple[str, ...] = ("tiny",)
    """Models to train: folders, hub ids or NAME=FOLDER, where NAME is what clients call it; tiny = the embedded one."""
    folder: Path = Path("served")
    """What clients have saved, and what a restart needs."""
    host: str = "127.0.0.1"
    """Address to listen at; with another than this machine's own, clients need --api-keys."""
    port: int = 8010
    """Port to listen at; 0 = a free one."""
    api_keys: Path | None = None
    """File of keys that clients may use, one a line, each tml-…; whoever has a key sees only what was made with it."""
    max_models: int = 8
    """Models, and weights to sample from, in memory; those idle longest are on the disk."""
    keep_samplers: int = 4
    """Weights saved for sampling without a name that are kept of each model."""
    replay_seconds: float = 30.0
    """Longest work in seconds that a restart may have to repeat."""
    reproducible: bool = False
    """Sample each request by itself: its bits then do not depend on the others. Slower."""
    decode_rows: int = 512
    """Completions decoded at a time."""
    trust_remote_code: bool = False
    """Let Python code in a model's folder or repository run."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model: name at least one model")
        names = [name for name, _ in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"--model: {', '.join(names)} names a model twice")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")
        for name in ("max_models", "keep_samplers", "decode_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.replay_seconds < math.inf:
            raise ConfigError(f"--replay-seconds must be at least 0 and finite, not {self.replay_seconds}")
        sizes = self.learner.world_size, self.learner.tensor_parallel, self.learner.context_parallel
        if max(sizes) > 1 or self.learner.lora:
            raise ConfigError(
                "--learner: the server learns in one process, and clients choose adapters themselves (create_model): leave "
                "world_size, tensor_parallel, context_parallel and lora out"
            )
        if self.learner.compile is not False:
            raise ConfigError(
                f"learner.compile={self.learner.compile} is for policygrad train, not serve: leave it out"
            )
        if self.sampler.engine != LOCAL and len(self.model) > 1:
            raise ConfigError(
                f"--sampler.engine {self.sampler.engine} samples from one model, and --model names {len(self.model)}: start a "
                "server for each"
            )
        if self.api_keys is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-keys FILE, so that not everyone can train and "
                "read what others have saved; or listen at 127.0.0.1"
            )

    @property
    def models(self) -> list[tuple[str, str]]:
        """Names and folders, or hub ids, of the models."""
        pairs = (text.partition("=") for text in self.model)
        return [(name, path if equals else name) for name, equals, path in pairs]

    def find_exposed(self) -> str:
        """Return a sentence about what other users of this machine can read; "" if they cannot."""
        exposed = []
        if self.folder.exists() and self.folder.stat().st_mode & 0o055:
            exposed.append(f"--folder {self.folder} (chmod 700 {self.folder})")
        if self.api_keys is not None and self.api_keys.exists() and self.api_keys.stat().st_mode & 0o044:
            exposed.append(f"--api-keys {self.api_keys} (chmod 600 {self.api_keys})")
        return f"other users of this machine can read {' and '.join(exposed)}" if exposed else ""

    def read_api_keys(self) -> frozenset[str]:
        """Read the keys. Raises ConfigError for a file that cannot be read, or has a key that the SDK refuses."""
        if self.api_keys is None:
            return frozenset()
        try:
            lines = read_text_bounded(self.api_keys).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-keys {self.api_keys} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        for key in keys:
            if not re.fullmatch(r"tml-[\w.-]{8,200}", key):
                raise ConfigError(
                    f"--api-keys {self.api_keys}: a key is tml- and at least 8 letters and digits, which the SDK demands, not "
                    f"{key[:8]}…"
                )
        if not keys:
            raise ConfigError(f"--api-keys {self.api_keys} has no keys")
        return frozenset(keys)
