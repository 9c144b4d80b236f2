"""Write docs/families.md from the families' records: python tools/families_page.py"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from megatron_rlspec.weights.families import FAMILIES, Family
from megatron_rlspec.weights.model_config import SCHEMAS

PAGE = Path(__file__).parent.parent / "docs/families.md"
HEAD = """\
# Model families, and what was shown for each

`python tools/families_page.py` writes this page from the records in `megatron_rlspec/weights/families.py`.
`tests/weights/test_families_page.py` compares it with them, and the records with the cases of the tests that are named here. Nothing
of it has run on a GPU ([what is open there](gpu.md)).

| column | yes means | test |
|---|---|---|
| converted | Hugging Face tensors to Megatron's and back, bit for bit, under either naming of Megatron; the target's names are those that Transformers writes | `tests/weights/test_families.py` |
| trained | the trainer's policy computes Transformers' log-probabilities after two steps; its export loads into Transformers | `tests/train/test_model_parity.py`, `test_experts.py` |
| pushed | SGLang's target and drafter classes, built from a small config.json at tensor parallel sizes 1, 2 and 4, hold every byte of a push | `tests/rollout/test_pushed_families.py` |
| served | a real SGLang engine on a CPU computes Transformers' log-probabilities before and after a push, and drafts | `tests/rollout/test_served_families.py` |
| checked | `rlspec convert --check` compares a converted checkpoint's logits with Transformers' | `tests/weights/test_families_page.py` |

The drafter: "its own" is in the family's checkpoints, and `rlspec convert --add-mtp` makes a fresh one. "MiMo's" is a fresh one by
which SGLang runs the model as MiMo.

"""
FACTS: dict[str, Callable[[str, Family], bool]] = {
    "converted": lambda name, record: True,
    "trained": lambda name, record: name in SCHEMAS,
    "pushed": lambda name, record: record.pushed,
    "served": lambda name, record: record.served,
    "checked": lambda name, record: bool(record.transformers),
}
FOOT = """
Limits of the table:

- Of Llama only unscaled rotary embeddings are trained. `weights/model_config.py` refuses what else changes a model's function.
- Qwen3-MoE and DeepSeek-V3 are not trained. The logits of DeepSeek-V3's policy and drafter were compared with Transformers' in
  megatron-core's own classes.
- Qwen3-Next and Qwen3.5 (text) are names and bytes, besides the delta net's and the gated attention's projections, which were compared
  with Transformers' modules. megatron-core 0.16.1 has no delta net for packed sequences.
- `LlamaForCausalLMEagle3` is the external drafter of EAGLE-3, under the names that ModelOpt gives it. It has no target.
- Inside slime, Megatron and slime load the policy, so families are trained there that are not in the column "trained"
  ([slime](slime.md)).
- Engines of families that are not pushed take pushes, too. They are checked by what their loaders were given ([weights](weights.md)).
"""


def page() -> str:
    """Return the whole page."""
    lines = [f"| architecture | drafter | {' | '.join(FACTS)} |", "|---|---|" + "---|" * len(FACTS)]
    for name, record in FAMILIES.items():
        marks = ["yes" if fact(name, record) else "" for fact in FACTS.values()]
        lines.append(f"| {name} | {drafter(name, record)} | {' | '.join(marks)} |")
    return HEAD + "\n".join(lines) + "\n" + FOOT


def drafter(name: str, record: Family) -> str:
    """Say which drafter models of this family have."""
    if not record.added_drafter:
        return ""
    return "its own" if record.added_drafter == name else f"{record.added_drafter.removesuffix('ForCausalLM')}'s"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
