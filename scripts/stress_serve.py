"""Kill the training server again and again under a client that goes on, and compare with a server that nobody disturbed.

    python scripts/stress_serve.py [--kills 200] [--seed 0] [--folder DIR] [--results FILE]

The client is the Tinker SDK: two forward_backward and an optim_step a step, a checkpoint every third step, all submitted before
the first answer; every thirtieth step it goes on with a new model, loaded from the last checkpoint. The server is killed with
SIGKILL at random moments and started again at the same address with the same folder. At the end every checkpoint whose saving was
answered must be there and loadable, the number of updates must be the number of steps, and the weights and AdamW's moments must be
those of the undisturbed server, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from policygrad.checkpoint.format import load_latest
from policygrad.serve.store import SavedPath, Store

READY_SECONDS = 120.0
LONGEST_LIFE = 5.0
"""Seconds from a server's first answer to its end."""


class Server:
    """A server process, which can be killed and started again."""

    def __init__(self, folder: Path, options: Sequence[str] = (), threads: int | None = 1) -> None:
        """
        Args:
            threads: For the mathematics; None = the server's own choice.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.folder, self.options, self.threads = folder, options, threads
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder.with_suffix(".log")
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "policygrad", "serve", "--plain", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--folder", str(self.folder), *self.options],
                stdout=log,
                stderr=log,
                env={**os.environ, **({} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)})},
            )
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5):
                    return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"the server did not answer: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stop it as Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def train(url: str, should_go_on: Callable[[], bool], steps: int) -> dict[str, object]:
    """Train with the SDK until `should_go_on()` is false, for at least `steps` steps; return what was answered."""
    import tinker
    from tinker import types

    generator = torch.Generator().manual_seed(0)

    def make_data() -> list[types.Datum]:
        data = []
        for _ in range(4):
            ids = torch.randint(3, 400, (12,), generator=generator).tolist()
            mask = [0.0] * 4 + [1.0] * 7
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": [-2.0 * m for m in mask],
                "advantages": [float(torch.randn((), generator=generator)) * m for m in mask],
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        return data

    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    saved, step = list[str](), 0
    while step < steps or should_go_on():
        step += 1
        waiting = [client.forward_backward(make_data(), "importance_sampling") for _ in range(2)]
        waiting.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
        save = client.save_state(f"step-{step:05d}") if step % 3 == 0 else None
        for future in waiting:
            future.result()
        if save is not None:
            saved.append(save.result().path)
        if step % 30 == 0:  # go on with a new model that is loaded from it
            client = service.create_training_client_from_state_with_optimizer(saved[-1]).result()
    final = client.save_state("final").result().path
    return {"saved": saved, "final": final, "steps": step}


def compare(
    disturbed: Path, quiet: Path, result: dict[str, object], undisturbed: dict[str, object]
) -> dict[str, object]:
    """Compare what two servers have saved. Raises AssertionError for a loss or a difference."""
    stores = Store(disturbed), Store(quiet)
    for path in result["saved"]:  # type: ignore[attr-defined]
        assert load_latest(stores[0].find_saved(SavedPath.parse(path)) / "state", warn=print) is not None, (
            f"{path} is lost"
        )
    finals = []
    for store, found in zip(stores, (result, undisturbed), strict=True):
        checkpoint = load_latest(store.find_saved(SavedPath.parse(str(found["final"]))) / "state", warn=print)
        assert checkpoint is not None
        assert checkpoint.state["optimizer"]["taken"] == found["steps"], (
            f"{checkpoint.state['optimizer']} after {found['steps']}"
        )
        finals.append(checkpoint.tensors)
    assert finals[0].keys() == finals[1].keys()
    different = [name for name in finals[0] if not torch.equal(finals[0][name], finals[1][name])]
    assert not different, f"{len(different)} of {len(finals[0])} tensors differ, for example {different[:1]}"
    return {"checkpoints": len(result["saved"]), "updates": result["steps"], "tensors": len(finals[0])}  # type: ignore[arg-type]


def stress(kills: int, seed: int, folder: Path) -> dict[str, object]:
    """Kill a server so many times, and return what was compared."""
    rng = random.Random(seed)
    server = Server(folder / "disturbed", ("--replay-seconds", "1"))
    done, results = 0, list[dict[str, object]]()
    client = threading.Thread(target=lambda: results.append(train(server.url, lambda: done < kills, 3)), daemon=True)
    client.start()
    while done < kills and client.is_alive():
        time.sleep(rng.uniform(0, LONGEST_LIFE))
        server.kill()
        server.start()
        done += 1
        if done % 10 == 0:
            print(f"{done} kills", file=sys.stderr, flush=True)
    done = kills
    client.join(600)
    server.stop()
    if not results:
        raise RuntimeError(f"the client failed, see above; the server's log is {server.log}")
    quiet = Server(folder / "quiet")
    undisturbed = train(quiet.url, lambda: False, int(str(results[0]["steps"])))
    quiet.stop()
    return {"kills": kills, **compare(server.folder, quiet.folder, results[0], undisturbed)}


def report_result(name: str, result: dict[str, object], file: Path | None) -> None:
    """Print a result, and put it under its name into a file of results."""
    print(json.dumps(result))
    if file is not None:
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps({**results, name: result}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="policygrad-serve-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    result = {**stress(options.kills, options.seed, folder), "seconds": round(time.time() - started)}
    report_result("kills", result, options.results)
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
