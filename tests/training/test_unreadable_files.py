"""Files that have no end, or that somebody else would have to write first: refused, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.files import read_examples
from policygrad.errors import ConfigError, DataError
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import load_config
from policygrad.utils.filesystem import MAX_CONFIG_BYTES

Command = Callable[..., tuple[int, str, str]]
endless = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@endless
def test_an_endless_configuration_is_refused(run_command: Command) -> None:
    code, _, err = run_command("train", "--config", "/dev/zero", "--dry-run")
    assert code == 2
    assert "cannot read the configuration /dev/zero: it is larger than 1 MiB" in " ".join(err.split())


def test_a_configuration_of_the_largest_size_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"steps = 3\r\n#".ljust(MAX_CONFIG_BYTES, b" "))
    assert load_config(file, UncheckedRun()).steps == 3
    file.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_config(file, UncheckedRun())


@pipes
def test_a_pipe_as_configuration_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="a pipe without a writer"):
        load_config(tmp_path / "config.toml", UncheckedRun())
    reader, writer = os.pipe()  # as a shell's <(…)
    with os.fdopen(reader):
        os.write(writer, b"steps = 3\n")
        os.close(writer)
        assert load_config(f"/dev/fd/{reader}", UncheckedRun()).steps == 3


@pipes
@endless
def test_data_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    (tmp_path / "packed.jsonl.gz").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "endless.jsonl", "packed.jsonl.gz"):
        with pytest.raises(DataError, match=f"{name} is not a regular file"):
            read_examples(str(tmp_path / name))
