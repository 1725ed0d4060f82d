"""Programs judged by their tests, behind a wall (policygrad.sandbox)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError, DataError
from policygrad.rewards.code_rows import exam_of, name_of, whole_program
from policygrad.rewards.memory import size
from policygrad.rewards.options import from_options, number, yes
from policygrad.sandbox import Dialogue, Limits, converse, examine, standing

_SPARE = 120.0  # seconds that a call may take beyond its program's: three interpreters have to start
_LONGEST = 200_000  # characters of a program


@dataclass(frozen=True)
class Code:
    """1.0 if the completion's program passes all tests of its row, else 0.0; None where the row has none.

    Tests are `test` and `entry_point` (HumanEval), `test_list` (MBPP), `tests` (statements, or pairs of `input` and `output`),
    `inputs` and `outputs`, `input_output` (APPS), or `public_test_cases` and `private_test_cases` (LiveCodeBench). The program is
    the completion's last fenced block.
    """

    seconds: float = 8.0
    """All tests of one program together, by the clock."""
    memory: str = "1GiB"
    """Address space of the program's process."""
    share: bool = False
    """The share of the tests that it passes, in place of all or nothing."""
    wall: str = "auto"
    """bubblewrap, landlock, or the first of them that stands."""

    def __post_init__(self) -> None:
        self._limits()

    @property
    def reward_options(self) -> dict[str, Any]:
        return {"batched": False, "budget": self.seconds + _SPARE, "process_reward": False}

    def reward_prepare(self) -> None:
        """Find a wall that stands; raises ConfigError where there is none."""
        standing(self.wall)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float | None]:
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(completions)))
        return [self.score(prompt, text, row) for prompt, text, row in zip(prompts, completions, rows, strict=True)]

    def score(self, prompt: Any, completion: str, row: dict[str, Any]) -> float | None:
        """One completion's reward. Raises DataError, with the row's name, for tests of no known form or without hope."""
        try:
            tests = exam_of(prompt, row)
        except DataError as error:
            raise DataError(f"{name_of(prompt, row)}: {error}") from None
        if tests is None:
            return None
        program = whole_program(prompt, completion, tests)
        if not program.strip() or len(program) > _LONGEST:
            return 0.0
        judge = converse if isinstance(tests, Dialogue) else examine
        verdict = judge(program, tests, self._limits(), self.wall, to_end=self.share)  # type: ignore[arg-type]  # each has its kind
        if verdict.unfit:
            raise DataError(f"{name_of(prompt, row)}: no program can pass its tests: {verdict.unfit}")
        passed = sum(verdict.points) / len(verdict.points)
        return passed if self.share else float(passed == 1.0)

    @classmethod
    def of(cls, options: str) -> "Code":
        """`seconds=20,memory=2GiB,share=yes`. Raises ConfigError."""
        return from_options(cls, "code", options, {"seconds": number, "share": yes})

    def _limits(self) -> Limits:
        memory = size(self.memory, "reward 'code': memory")
        if memory is None:
            raise ConfigError("reward 'code': a program's memory has to be limited, such as memory=1GiB")
        return Limits(seconds=self.seconds, memory=memory)


code = Code()
