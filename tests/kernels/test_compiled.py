"""The kernels compile for an H100 and a B200, by the assembler that Triton brings, and spill no registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed; the kernels were not compiled")
pytestmark = pytest.mark.slow
FLOATS = (
    "logits temperatures sharpnesses part_peak label_scores factors peaks totals seconds on_logprob on_entropy "
    "entropies scales overlaps"
)
DOUBLES = "part_score part_total lses teacher_lses"
LONGS = "seeds positions words part_column teacher_rows keys labels places"
INTEGERS = "columns bests beaten"
POINTERS = {
    name: pointer
    for names, pointer in ((FLOATS, "*fp32"), (DOUBLES, "*fp64"), (LONGS, "*i64"), (INTEGERS, "*i32"))
    for name in names.split()
}


# Of the losses: what is asked of the first pass, and of the second one.
PASSES = [
    ("statistics", {"KIND": kind, "MAPPED": mapped, "FACTORS": factors, "SLOTS": 4})
    for kind in ("none", "entropy", "forward_kl")
    for mapped, factors in ((False, 0), (False, 3), (True, 3))
]
PASSES += [("gradient", {"KIND": "label", "MAPPED": False})]
PASSES += [("gradient", {"KIND": "forward_kl", "MAPPED": mapped}) for mapped in (False, True)]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
@pytest.mark.parametrize("mapped", [False, True])
def test_drawing_spills_no_register(capability: int, logits: str, mapped: bool, tmp_path: Path) -> None:
    from megatron_rlspec.kernels import sampling

    constants = {"BLOCK": sampling.BLOCK, "MAPPED": mapped}
    used = compiled(sampling.scan, {"logits": logits}, constants, capability, sampling.LAUNCH, tmp_path)
    print(f"sm_{capability}, {logits}, words: {mapped}: {used}")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
def test_losses_spill_no_register(capability: int, logits: str, tmp_path: Path) -> None:
    from megatron_rlspec.kernels import loss_passes, losses

    for name, constants in PASSES:
        pointers = {"logits": logits, "teacher": logits, "masses": "*fp32", "words": "*i32"}
        constants = constants | {"BLOCK": losses.BLOCK}
        used = compiled(getattr(loss_passes, name), pointers, constants, capability, {"num_warps": 4}, tmp_path)
        print(f"{name} {constants}, sm_{capability}, {logits}: {used}")


def compiled(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    options: dict[str, int],
    folder: Path,
) -> dict[str, int]:
    """Compile and return registers and bytes of memory. Fails if a register is spilled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = POINTERS | {"temperature": "fp32"} | pointers
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [["tt.divisibility", 16]]  # as pointers, strides, the vocabulary and parts of it are
    sizes = ("stride", "teacher_stride", "width", "columns_of_part")
    attributes = {}
    for i, name in enumerate(kernel.arg_names):
        if kinds[name].startswith("*") or name in sizes:
            attributes[(i,)] = aligned
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=attributes)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    assert f".target sm_{capability}" in made.asm["ptx"]
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= 48 << 10, (constants, used)
    return used
