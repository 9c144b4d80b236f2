"""Write docs/families.md from the families' records: python tools/families_page.py"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rlspec.models.config import EAGLE3
from megatron_rlspec.models.families import FAMILIES, Family
from megatron_rlspec.rollout.sglang.scheduler.versions import EAGLE3_TARGETS

PAGE = Path(__file__).parent.parent / "docs/families.md"
HEAD = """\
# Model families, and what was shown for each

`python tools/families_page.py` writes this page from the records in `megatron_rlspec/models/families.py`, and a test
compares them. A "yes" is about the architecture, shown on a CPU with small models ([what ran on a GPU](gpu.md)).
"""
DRAFTERS = """\
The drafter: "its own" is in the family's checkpoints, and `rlspec convert --add-mtp` makes a fresh one. "MiMo's" is a
fresh one, with which SGLang runs the model as MiMo. The drafter of a Llama is MiMo's without biases of q, k and v.
Engines have those biases, so the checkpoint holds them as 0, and the trainer does not have them.

Each command that refuses a model names the column, and the architectures with "yes" in it.
"""
FOOT = """\
Limits of the table:

- Rotary embeddings are plain, scaled as Llama 3.1's, or YaRN's, as Qwen2.5 and Qwen3 have it for long contexts
  (`rope_scaling` of type yarn, with `max_position_embeddings` as long as the context: neither trainer nor engine goes
  beyond it). `models/config.py` refuses what else changes a model's function.
- DeepSeek-V3's latent attention is compared with Transformers' layer at depths 1 to 3 of the drafter. No engine runs it
  on a CPU, so no RL run with it took place. DeepSeek publishes FP8, which is refused.
- `tests/models/published.py` has the config.json of 16 published models that are accepted.
  Qwen3-0.6B and -1.7B, which store their tied head, are read. A tokenizer.json is read as it is, whatever class
  tokenizer_config.json names; SGLang's routes of text follow Transformers 5, for which DeepSeek-R1-Distill-Llama
  needs `"tokenizer_class": "PreTrainedTokenizerFast"` there. Moonlight's tokenizer is Python code, which
  `model.trust_remote_code = true` runs. Experts of a layer in one tensor, as Transformers 5 can save them, are
  read; SGLang does not read them, and `rlspec convert` to Megatron and back writes each by its name.
- Qwen3-Next and Qwen3.5 are not converted. megatron-core 0.16.1 has no delta net for packed sequences; 0.19.2 has one,
  which needs CUDA.
- An EAGLE-3 drafter (`LlamaForCausalLMEagle3`) has a directory of its own, which is not converted
  ([drafter](drafter.md#eagle-3)).
- Inside slime, Megatron and slime load the policy. Families are trained there that are not in this table
  ([slime](slime.md)).
- Engines of families that are not "pushed" take pushes, too. They are checked by what their loaders were given
  ([weights](weights.md)).
"""


@dataclass(frozen=True)
class Fact:
    """A column: whether it is true of a family, what that means, and the files whose tests show it."""

    holds: Callable[[str, Family], bool]
    meaning: str
    tests: str


FACTS = {
    "converted": Fact(
        lambda name, record: True,
        "Hugging Face tensors to Megatron's and back, bit for bit, under either naming of Megatron",
        "`tests/models/test_families.py`",
    ),
    "trained": Fact(
        lambda name, record: True,
        "the trainer's policy computes Transformers' log-probabilities after two steps, under exported names",
        "`tests/train/test_model_parity.py`, `test_experts.py`, `test_latent.py`",
    ),
    "pushed": Fact(
        lambda name, record: record.pushed,
        "SGLang's target and drafter classes, built from a small config.json at tensor parallel sizes 1, 2 and 4, hold "
        "every byte of a push",
        "`tests/rollout/test_pushed_families.py`",
    ),
    "served": Fact(
        lambda name, record: record.served,
        "a real SGLang engine on a CPU computes Transformers' log-probabilities before and after a push, and drafts "
        "where SGLang has a drafter class of the family",
        "`tests/rollout/test_served_families.py`",
    ),
    "embedded": Fact(
        lambda name, record: record.embedded,
        "the embedded engine computes Transformers' log-probabilities, for small models",
        "`tests/rollout_embedded/test_embedded_families.py`",
    ),
    "EAGLE-3": Fact(
        lambda name, record: name in EAGLE3_TARGETS,
        "SGLang's target class gives an EAGLE-3 drafter its hidden states; built at tensor parallel sizes 1, 2 and 4, "
        "both hold every byte of a push. All three ran in a real engine on a CPU",
        "`tests/rollout/test_eagle3.py`",
    ),
}


def page() -> str:
    """Return the whole page."""
    meanings = ["| column | yes means | tests |", "|---|---|---|"]
    meanings += [f"| {name} | {fact.meaning} | {fact.tests} |" for name, fact in FACTS.items()]
    families = [f"| architecture | drafter | {' | '.join(FACTS)} |", "|---|---|" + "---|" * len(FACTS)]
    for name, record in FAMILIES.items():
        if name == EAGLE3:
            continue
        marks = ["yes" if fact.holds(name, record) else "" for fact in FACTS.values()]
        families.append(f"| {name} | {drafter(name, record)} | {' | '.join(marks)} |")
    tables = ["\n".join(lines) + "\n" for lines in (meanings, families)]
    return "\n".join((HEAD, tables[0], DRAFTERS, tables[1], FOOT))


def drafter(name: str, record: Family) -> str:
    """Say which drafter models of this family have."""
    if not record.added_drafter:
        return ""
    return "its own" if record.added_drafter == name else f"{record.added_drafter.removesuffix('ForCausalLM')}'s"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
