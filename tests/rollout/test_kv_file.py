"""A sample's keys and values as a file: what is read is what was written, or one sentence."""

import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.rollout.sglang.server import kv_file


@dataclass
class MHATokenToKVPool:
    """The buffers of SGLang's pool of this name."""

    layer_num: int
    seed: int
    head_num: int = 2
    head_dim: int = 4
    v_head_dim: int = 3
    slots: int = 32
    kv_cache_layout: str = "nhd"
    store_dtype: torch.dtype = torch.bfloat16
    k_buffer: list = field(init=False)
    v_buffer: list = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        sizes = [(self.slots, self.head_num, size) for size in (self.head_dim, self.v_head_dim)]
        self.k_buffer, self.v_buffer = (
            [torch.randn(size).to(self.store_dtype) for _ in range(self.layer_num)] for size in sizes
        )


SOURCE = [MHATokenToKVPool(3, seed=0), MHATokenToKVPool(1, seed=1)]
LAYOUT = kv_file.layout_of(SOURCE, rank=1, pairs=True)
HEADER = kv_file.Header("a", list(range(8)), 2, 7, "3", LAYOUT)
SLOTS = torch.tensor([9, 3, 30, 4, 11])  # of columns 2 to 7


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("kv") / "rlspec-kv-a")
    assert kv_file.write(path, HEADER, SOURCE, SLOTS) == LAYOUT.column_bytes() * 5 == 2 * 4 * 2 * 7 * 5
    assert os.listdir(os.path.dirname(path)) == ["rlspec-kv-a"]
    return path


def test_columns_arrive_in_other_slots(written):
    header, columns = kv_file.read(written, LAYOUT)
    assert header == HEADER
    target = [MHATokenToKVPool(3, seed=2), MHATokenToKVPool(1, seed=3)]
    before = [[buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)] for pool in target]
    here = torch.tensor([1, 20, 2])  # column 2 and 3 are there already
    kv_file.scatter(columns, target, here)
    others = [slot for slot in range(32) if slot not in here.tolist()]
    for mine, theirs, old in zip(target, SOURCE, before, strict=True):
        for i, (to, sent) in enumerate(
            zip((*mine.k_buffer, *mine.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True)
        ):
            assert torch.equal(to[here], sent[SLOTS[2:]])
            assert torch.equal(to[others], old[i][others])


def refused(path, layout=LAYOUT):
    with pytest.raises(ValueError) as error:
        kv_file.read(str(path), layout)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_a_damaged_file_is_refused(written, place, change, cut):
    whole = bytearray(open(written, "rb").read())
    place %= len(whole)
    if cut:
        del whole[place:]
    else:
        whole[place] ^= change
    damaged = f"{written}-damaged"
    with open(damaged, "wb") as file:
        file.write(whole)
    refused(damaged)


def test_other_files_are_refused(written, tmp_path):
    assert "No such file" in refused(tmp_path / "none")
    assert "no regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"rl")
    assert "not the columns of a sample" in refused(tmp_path / "short")


def test_columns_of_another_engine_are_refused(written):
    for pools, rank, pairs in ((SOURCE, 0, True), (SOURCE, 1, False), (SOURCE[:1], 1, True)):
        assert "columns of another kind" in refused(written, kv_file.layout_of(pools, rank, pairs))
    with pytest.raises(ValueError, match="only plain keys and values move"):
        kv_file.layout_of([MHATokenToKVPool(1, seed=0, kv_cache_layout="hnd")], 0, True)


@pytest.mark.parametrize(
    "change", [{"first": 8}, {"first": -1}, {"last": 8}, {"tokens": [1]}, {"tokens": list(range(9))}], ids=str
)
def test_a_header_that_does_not_fit_its_columns_is_refused(tmp_path, change):
    fields = {name: getattr(HEADER, name) for name in HEADER.__struct_fields__} | change
    kv_file.write(str(tmp_path / "x"), kv_file.Header(**fields), SOURCE, SLOTS)
    refused(tmp_path / "x")


def test_a_full_device_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(*names: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        kv_file.write(str(tmp_path / "x"), HEADER, SOURCE, SLOTS)
    assert not os.listdir(tmp_path)
