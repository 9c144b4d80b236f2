"""The arithmetic example: its calculations are true and lead to the answer, in GSM8K's format."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [json.loads(line) for line in (EXAMPLE / "sample.jsonl").open()]


def test_calculations_are_true_and_lead_to_the_answer(rows):
    for row in rows:
        count = int(re.match(r"\w+ has (\d+)", row["question"])[1])
        for left, operator, right, result in re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", row["answer"]):
            assert int(left) == count
            count = {"+": count + int(right), "-": count - int(right), "*": count * int(right)}.get(
                operator, count / int(right)
            )
            assert count == int(result) and right in row["question"]
        assert row["answer"].endswith(f"\n#### {int(count)}")


def test_the_sample_is_what_the_generator_writes(rows):
    make = runpy.run_path(str(EXAMPLE / "make_arithmetic.py"))
    rng = make["random"].Random(1)
    assert [make["problem"](rng) for _ in rows] == rows
