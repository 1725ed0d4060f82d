"""The notebooks run in a kernel from top to bottom, at a small size; a run in one is a single picture that is redrawn in place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
jupyter = pytest.importorskip("jupyter_client.manager")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALL = {"STEPS": 2, "PROMPTS": 2, "PROBLEMS": 2}


def read(path: Path) -> Any:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book


def parameters(book: Any) -> list[Any]:
    return [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_its_links_lead_somewhere(path: Path) -> None:
    book = read(path)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    (sizes,) = parameters(book)
    assert set(re.findall(r"^([A-Z]+) = ", sizes.source, re.MULTILINE)) == set(SMALL)
    text = "".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / target).exists(), target


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cells, behind the first of which the sizes are set to small ones."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = read(path)
    (sizes,) = parameters(book)
    smaller = nbformat.v4.new_code_cell("\n".join(f"{name} = {size}" for name, size in SMALL.items()))
    book.cells.insert(book.cells.index(sizes) + 1, smaller)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained = [cell for cell in book.cells if cell.cell_type == "code" and "pg.train(" in cell.source]
    assert len(trained) >= 2
    for cell in trained:
        pictures = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
        assert len(pictures) == 1, cell.source
        assert "<svg" in pictures[0]
        assert "done · step" in pictures[0] or "stop_after" in cell.source
    assert list((tmp_path / "runs").glob("*/model/model.safetensors"))


ENDLESS = """
import policygrad as pg

run = pg.Run(algorithm=pg.DR_GRPO, steps=10**6, prompts_per_step=2, evaluation=pg.EvaluationConfig(problems=0), output="run")
print(pg.train(run).interrupted)
"""


@pytest.mark.full
def test_the_stop_button_ends_a_run_resumably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is interrupted while it trains, as the button of Jupyter does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kernel, client = jupyter.start_new_kernel(cwd=str(tmp_path))
    asked, printed, picture, over = False, "", "", False
    try:
        request = client.execute(ENDLESS)
        while not over:
            message = client.get_iopub_msg(timeout=300)
            kind, content = message["msg_type"], message["content"]
            printed += content["text"] if kind == "stream" else ""
            picture = content.get("data", {}).get("text/html", picture)
            if not asked and "tok/s" in picture:  # of a step
                asked = True
                kernel.interrupt_kernel()
            over = content.get("execution_state") == "idle" and message["parent_header"]["msg_id"] == request
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert printed.endswith("True\n"), printed
    assert "stopped · step" in picture
    assert "policygrad train --resume run" in picture
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
