"""Variables of a chat template, such as enable_thinking=false: given, recorded, taken over by an evaluation, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import write_rows
from doubles.models import changed_copy
from doubles.scripted_sampler import ScriptedSampler
from doubles.templates import tokenizer_with
from policygrad.commands.evaluate import parse_options
from policygrad.commands.served_model import ServedModel
from policygrad.errors import ConfigError, ModelError
from policygrad.models.chat.template_options import list_template_variables, parse_template_options
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ChatRequest
from policygrad.training.config.serialization import load_config
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.sft import SFTObjective

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}(brief) {% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "1+1="}]
OFF = ("enable_thinking=false",)


@pytest.fixture
def model(random_model: Path, tmp_path: Path) -> str:
    folder = changed_copy(random_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_values_are_json_or_text() -> None:
    given = ("a=false", "b=3", "c=low", "d=[1]", "e=", "f=False", "g=x=y")
    assert parse_template_options(given) == {"a": False, "b": 3, "c": "low", "d": [1], "e": "", "f": False, "g": "x=y"}
    for text, reason in [("a", "NAME=VALUE"), ("a b=1", "NAME=VALUE"), ("tools=[]", "'tools' is given to it")]:
        with pytest.raises(ConfigError, match=reason):
            parse_template_options([text])
    with pytest.raises(ConfigError, match="twice"):
        parse_template_options(["a=1", "a=2"])


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    own = tokenizer_with("qwen3", ("<|im_end|>",), "<|im_start|>")
    own.hf.chat_template = TEMPLATE
    prompt = own.encode(ASKED, 0).ids
    assert own.hf.decode(own.with_template_options(OFF).encode(ASKED, 0).ids) == own.hf.decode(prompt) + "(brief) "
    with pytest.raises(ModelError, match=r"does not read 'enable_thinkng'.*it reads .*enable_thinking"):
        own.with_template_options(["enable_thinkng=false"])
    assert "enable_thinking" in list_template_variables("{% generation %}{{ enable_thinking }}{% endgeneration %}")
    own.hf.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        own.with_template_options(OFF)


def test_a_run_records_them_and_its_evaluation_takes_them_over(model: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": ASKED, "answer": "2"}])
    folder = tmp_path / "run"
    run = pg.Run(
        model=model,
        task=data,
        reward=("exact_match",),
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=4),
        evaluation=pg.EvaluationConfig(problems=0),
        template_options=OFF,
        output=str(folder),
    )
    samplers = list[ScriptedSampler]()

    def script(network: Any, own: Tokenizer) -> ScriptedSampler:
        samplers.append(ScriptedSampler(own, lambda key, context: "2"))
        return samplers[-1]

    pg.train(run, sampler=script, display=False)
    asked = samplers[0].tokenizer.hf.decode(samplers[0].asked[0].prompt_ids)
    assert asked.endswith("assistant: (brief) ")
    assert load_config(folder / "run.toml", pg.Run()).template_options == OFF
    assert parse_options([str(folder)]).template_options == OFF
    assert parse_options([str(folder), "--benchmark", "gsm8k"]).template_options == OFF
    changed = parse_options([str(folder), "--tokenizer.template-options", "enable_thinking=true"])
    assert changed.template_options == ("enable_thinking=true",)


def test_fine_tuning_and_the_proxy_read_them(model: str, tmp_path: Path) -> None:
    row: dict[str, Any] = {"messages": [*ASKED, {"role": "assistant", "content": "(brief) 2"}]}
    data = write_rows(tmp_path / "rows.jsonl", [row])
    objective = SFTObjective(SFTConfig(data=data, model=model, template_options=OFF).resolve())
    own = objective.tokenizer
    assert own.hf.decode(objective.rows[0].prompt_ids).endswith("assistant: (brief) ")
    proxied = ServedModel(model, template_options=OFF)
    turn = proxied.tree.open_turn(ChatRequest(tuple(ASKED)))
    assert own.hf.decode(turn.context_ids).endswith("assistant: (brief) ")
