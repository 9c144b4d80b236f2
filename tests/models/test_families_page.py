"""docs/families.md says what the records say, and the records say what the tests run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from test_convert import run
from test_model_parity import CASES
from test_pushed_families import checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from train_ranks import HF_CONFIG
from weight_oracles import one_rank

from megatron_rlspec.models.families import FAMILIES, names_where
from megatron_rlspec.models.hf_files import write_hf

ROOT = Path(__file__).parent.parent.parent
PAGE = runpy.run_path(str(ROOT / "tools/families_page.py"))
# Each fact, and the tests that show it for an architecture which their ids name.
SHOWN_BY = {
    "converted": (
        "models/test_families.py::test_round_trip_is_exact",
        "models/test_families.py::test_an_external_drafters_round_trip_is_exact",
    ),
    "trained": (
        "train/test_model_parity.py::test_policy_equals_transformers",
        "train/test_experts.py::test_policy_and_drafter_equal_transformers",
        "train/test_latent.py::test_policy_and_drafter_equal_transformers",
    ),
    "pushed": ("rollout/test_pushed_families.py::test_every_pushed_byte_is_in_the_right_place",),
    "served": ("rollout/test_served_families.py::test_a_push_changes_what_the_engine_computes",),
    "embedded": ("rollout_embedded/test_embedded_families.py::test_log_probs_are_those_of_transformers",),
    "EAGLE-3": ("rollout/test_eagle3.py::test_every_pushed_byte_is_in_the_right_place",),
    "checked": ("models/test_families_page.py::test_convert_checks_the_logits",),
}


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The ids of the tests' cases, those of the slow suite included, as pytest itself collects them."""
    tests = [f"tests/{test}" for tests in SHOWN_BY.values() for test in tests]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return [line.removeprefix("tests/") for line in found.stdout.splitlines() if "::" in line]


@pytest.mark.slow
@pytest.mark.parametrize("fact", SHOWN_BY)
def test_a_record_says_what_the_tests_run(collected, fact):
    ids = [case for case in collected if case.partition("[")[0] in SHOWN_BY[fact]]
    shown = {word for case in ids for word in re.findall(r"\w+", case.partition("[")[2])} & FAMILIES.keys()
    assert shown == {name for name, record in FAMILIES.items() if PAGE["FACTS"][fact].holds(name, record)}


def test_every_fact_has_a_test():
    files = {fact: {test.partition("::")[0].rpartition("/")[2] for test in tests} for fact, tests in SHOWN_BY.items()}
    assert files == {name: set(re.findall(r"test_\w+\.py", fact.tests)) for name, fact in PAGE["FACTS"].items()}


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/families.md").read_text() == PAGE["page"](), "run python tools/families_page.py"


FAST = ("MiMoForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in names_where(lambda record: record.transformers)
    ],
)
def test_convert_checks_the_logits(tmp_path, architecture):
    drafters = int(bool(FAMILIES[architecture].sglang_drafter))
    config = HF_CONFIG | {"architectures": [architecture], "num_nextn_predict_layers": drafters} | CASES[architecture]
    config |= {"torch_dtype": "float32"}
    write_hf(tmp_path / "hf", config, checkpoint(config, tmp_path / "names"))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "hf/tokenizer.json"))
    code, report = one_rank(run, str(tmp_path / "hf"), str(tmp_path / "megatron"), "--quiet", "--check")
    assert code == 0, report
    assert "Transformers" in report
