"""`rlspec convert --check` compares logits with Transformers' for every family whose record says so."""

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

FAST = ("MiMoForCausalLM",)


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
