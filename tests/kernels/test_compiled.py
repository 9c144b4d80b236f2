"""The sampling kernels compile for an H100 and a B200, by the assembler that Triton brings, and spill no registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed; the kernels were not compiled")
pytestmark = pytest.mark.slow
KERNELS = ("scan", "merge", "add_up", "choose")
FLOATS = (
    "logits temperatures sharpnesses top_ps min_ps part_z part_floor_z part_peak row_z row_floor_z row_peak logprobs"
)
DOUBLES = "part_score part_total row_score row_total"
LONGS = "seeds positions words masses wholes tokens"
INTEGERS = "top_ks part_column part_floor_column row_column row_floor_column counts numbers unsettled"
POINTERS = {
    name: pointer
    for names, pointer in ((FLOATS, "*fp32"), (DOUBLES, "*fp64"), (LONGS, "*i64"), (INTEGERS, "*i32"))
    for name in names.split()
}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_no_register_is_spilled(capability: int, logits: str, name: str, tmp_path: Path) -> None:
    """For 1,024 rows of 151,680 words in one part each, and for few rows in 16 parts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_rlspec.kernels import keyed_draw, sampling

    kernel = getattr(keyed_draw, name)
    warps = sampling.WARPS_OF_CHOICE if name == "choose" else 4
    for parts in (1, 16):
        constants = {"BLOCK": sampling.BLOCK, "STAIRS": sampling.STAIRS, "PARTS": parts, "MAPPED": False, "WHOLE": True}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        pointers = POINTERS | {"logits": logits}
        kinds = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        aligned = [["tt.divisibility", 16]]  # as pointers, strides and the vocabulary are
        attributes = {
            (i,): aligned for i, name in enumerate(kernel.arg_names) if name in pointers or name in ("stride", "width")
        }
        source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=attributes)
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        path = tmp_path / f"{name}.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        print(f"{name}, sm_{capability}, {logits}, {parts} parts: {used}")
        assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= 48 << 10
