"""A sample's keys and values as a file: what is read is what was written, or one sentence."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from host_reads import HostReads
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.extensions.migration.sglang import kv_file
from megatron_rlspec.extensions.migration.sglang.folder import Folder
from megatron_rlspec.rollout.sglang.cpu import stand_ins


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


HEADS = 4  # of the model; a pool of SOURCE holds two of them
SOURCE = [MHATokenToKVPool(3, seed=0), MHATokenToKVPool(1, seed=1)]
LAYOUT = kv_file.layout_of(SOURCE, [HEADS, HEADS], rank=1, ranks=2, pairs=True)
HEADER = kv_file.Header("a", list(range(8)), 2, 7, "3", LAYOUT)
SLOTS = torch.tensor([9, 3, 30, 4, 11])  # of columns 2 to 7
WHOLE = [MHATokenToKVPool(3, seed=0, head_num=HEADS), MHATokenToKVPool(1, seed=1, head_num=HEADS)]


def of_rank(rank: int, ranks: int, pools: list[MHATokenToKVPool] = WHOLE) -> list[MHATokenToKVPool]:
    """Cut the heads of one rank out of pools that hold all of them."""
    found = []
    for pool in pools:
        first, count, _ = kv_file.held_by(rank, ranks, HEADS)
        part = MHATokenToKVPool(pool.layer_num, pool.seed, head_num=count)
        for name in ("k_buffer", "v_buffer"):
            setattr(part, name, [buffer[:, first : first + count].clone() for buffer in getattr(pool, name)])
        found.append(part)
    return found


def folder_of(path: str) -> Folder:
    folder = Path(path).parent
    return Folder(folder.name, folder.parent)


def columns_at(path: str, layout: kv_file.KVLayout) -> tuple[kv_file.Header, torch.Tensor]:
    with folder_of(path) as folder:
        return kv_file.read(folder, Path(path).name, layout)


def written_by(path: str, ranks: int, **change) -> str:
    """Write the files of all ranks."""
    for rank in range(ranks):
        pools = of_rank(rank, ranks)
        layout = kv_file.layout_of(pools, [HEADS, HEADS], rank, ranks, pairs=True)
        header = kv_file.Header(**{name: getattr(HEADER, name) for name in HEADER.__struct_fields__} | change)
        with folder_of(path) as folder:
            size = kv_file.write(
                folder, f"{Path(path).name}.{rank}", msgspec.structs.replace(header, layout=layout), pools, SLOTS
            )
        assert size == layout.column_bytes() * 5
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("kv") / "rlspec-kv-a")
    written_by(path, 2)
    assert sorted(os.listdir(os.path.dirname(path))) == ["rlspec-kv-a.0", "rlspec-kv-a.1"]
    return path


@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_reads_its_heads_into_other_slots(tmp_path, source, ranks):
    """Heads are cut and joined where the sizes differ; of 8 ranks, two hold the same head."""
    path = written_by(str(tmp_path / "x"), source)
    here = torch.tensor([1, 20, 2])  # column 2 and 3 are there already
    others = [slot for slot in range(32) if slot not in here.tolist()]
    for rank in range(ranks):
        target = of_rank(rank, ranks, [MHATokenToKVPool(n, seed=2, head_num=HEADS) for n in (3, 1)])
        before = [[buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)] for pool in target]
        header, columns = columns_at(path, kv_file.layout_of(target, [HEADS, HEADS], rank, ranks, True))
        assert header.place == HEADER.place and header.id == "a"
        kv_file.scatter(columns, target, here)
        for mine, theirs, old in zip(target, of_rank(rank, ranks), before, strict=True):
            for i, (to, sent) in enumerate(
                zip((*mine.k_buffer, *mine.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True)
            ):
                assert torch.equal(to[here], sent[SLOTS[2:]])
                assert torch.equal(to[others], old[i][others])


@pytest.mark.slow  # imports SGLang
@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages_of_sglang_s_own_pools_travel(tmp_path, page, monkeypatch):
    """FlashAttention 3 and FlashInfer read these pools at several page sizes. Other layouts are refused."""
    stand_ins.install()
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool as Pool

    def pools(seed):
        torch.manual_seed(seed)
        found = [Pool(128, page, torch.bfloat16, 2, 8, layers, "cpu", False) for layers in (3, 1)]
        for pool in found:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.copy_(torch.randn(buffer.shape))
        return found

    def columns(pool, slots):
        return [
            torch.stack([part(layer)[slots] for part in (pool.get_key_buffer, pool.get_value_buffer)])
            for layer in range(pool.layer_num)
        ]

    source, target = pools(0), pools(1)
    layout = kv_file.layout_of(source, [2, 2], 0, 1, True)
    pages = torch.arange(128 + page).view(-1, page)
    there, here = (torch.cat([pages[i] for i in which]) for which in ((1, -1), (-2, 0)))
    header = kv_file.Header("a", list(range(len(there) + 1)), 0, len(there), "3", layout)
    with folder_of(str(tmp_path / "x")) as folder:
        kv_file.write(folder, "x.0", header, source, there)
        _, found = kv_file.read(folder, "x", layout)
    kv_file.scatter(found, target, here)
    for mine, theirs in zip(target, source, strict=True):
        assert all(map(torch.equal, columns(mine, here), columns(theirs, there)))
    if page > 1:
        with envs.SGLANG_USE_HND_KVCACHE.override(True), pytest.raises(ValueError, match="only plain keys and values"):
            kv_file.layout_of(pools(2), [2, 2], 0, 1, True)


def test_a_gpu_s_cache_crosses_to_the_host_once_a_head(tmp_path):
    with HostReads() as reads:
        source, target = of_rank(1, 2), of_rank(1, 2, [MHATokenToKVPool(n, seed=2, head_num=HEADS) for n in (3, 1)])
        for pool in (*source, *target):
            reads.put(pool.k_buffer, pool.v_buffer)
        slots, here = SLOTS.to("cuda"), torch.tensor([1, 20, 2]).to("cuda")
        reads.found.clear()
        with folder_of(str(tmp_path / "x")) as folder:
            kv_file.write(folder, "x.1", HEADER, source, slots)
        assert sorted(reads.found.values()) == [1, 4], reads.found  # all fingerprints together; four heads
        reads.found.clear()
        written_by(str(tmp_path / "x"), 1)
        reads.found.clear()
        with folder_of(str(tmp_path / "x")) as folder:
            _, columns = kv_file.read(folder, "x", LAYOUT)
        kv_file.scatter(columns, target, here)
        assert list(reads.found.values()) == [2 * 2 * (3 + 1)]  # keys and values of each layer of a head
    for mine, theirs in zip(target, source, strict=True):
        assert torch.equal(mine.k_buffer[0][[1, 20, 2]], theirs.k_buffer[0][SLOTS[2:]])


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 key and value heads do not divide among 3 tensor-parallel ranks"):
        kv_file.layout_of(SOURCE, [HEADS, HEADS], 0, 3, True)
    with pytest.raises(ValueError, match="this rank holds 2 key and value heads of 4, expected 4"):
        kv_file.layout_of(SOURCE, [HEADS, HEADS], 0, 1, True)


def test_files_of_two_moments_are_refused(tmp_path):
    path = written_by(str(tmp_path / "x"), 2)
    late = written_by(str(tmp_path / "y"), 2, version="4")
    os.rename(f"{late}.1", f"{path}.1")
    assert "rlspec" not in refused(path) and "another sample or moment than those of rank 0" in refused(path)
    columns_at(path, kv_file.layout_of(SOURCE, [HEADS, HEADS], 0, 2, True))  # needs rank 0's heads only
    shutil.copy(f"{path}.0", f"{path}.1")
    assert "heads [(0, 2, 4), (0, 2, 4)], which rank 1 lacks" in refused(path)
    os.unlink(f"{path}.1")
    assert "x.1: No such file" in refused(path)


def refused(path, layout=LAYOUT):
    with pytest.raises(ValueError) as error:
        columns_at(path, layout)
    assert "\n" not in str(error.value) and Path(path).name in str(error.value)
    return str(error.value)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans(), st.sampled_from([0, 1]))
def test_a_damaged_file_is_refused(written, place, change, cut, rank):
    """Rank 1's reader uses the header of rank 0's file, and all of rank 1's."""
    for other in (0, 1):
        shutil.copy(f"{written}.{other}", f"{written}-damaged.{other}")
    damaged = f"{written}-damaged.{rank}"
    whole = bytearray(open(damaged, "rb").read())
    place %= len(whole) if rank else 12 + int.from_bytes(whole[:8], "little")
    if cut:
        del whole[place:]
    else:
        whole[place] ^= change
    with open(damaged, "wb") as file:
        file.write(whole)
    refused(f"{written}-damaged")


def test_other_files_are_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "none")
    (tmp_path / "folder.0").mkdir()
    assert "no regular file" in refused(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe.0")
    assert "no regular file" in refused(tmp_path / "pipe")
    (tmp_path / "short.0").write_bytes(b"rl")
    assert "not the columns of a sample" in refused(tmp_path / "short")
    written_by(str(tmp_path / "there"), 2)
    (tmp_path / "link.0").symlink_to(tmp_path / "there.0")
    assert "symbolic links" in refused(tmp_path / "link")


def test_a_folder_that_others_can_enter_is_not_used(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    Folder("own", tmp_path).__exit__()
    for name in ("open", "link", "none"):
        with pytest.raises(OSError):
            Folder(name, tmp_path)


def test_a_folder_removes_its_own_files_only(tmp_path):
    outside = tmp_path / "a.0"
    for file in (outside, *((tmp_path / "own" / name) for name in ("a.0", "a.1", "ab.0"))):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch()
    with Folder("own", tmp_path) as folder:
        folder.remove("../a")
        folder.remove("a.")
        assert folder.names() == ["ab.0"] and outside.exists()
        folder.remove(ends=".0")
        assert not folder.names()


def test_columns_of_another_engine_are_refused(written):
    for pools, heads, pairs in ((SOURCE, 4, False), (SOURCE[:1], 4, True), (SOURCE, 2, True)):
        other = kv_file.layout_of(pools, [heads] * len(pools), 0, heads // 2, pairs)
        assert "columns of another kind: bfloat16, 3 layers of 4 heads of (4, 3)" in refused(written, other)
    with pytest.raises(ValueError, match="only plain keys and values move"):
        kv_file.layout_of([MHATokenToKVPool(1, seed=0, kv_cache_layout="hnd")], [2], 0, 1, True)


@pytest.mark.parametrize(
    "change", [{"first": 8}, {"first": -1}, {"last": 8}, {"tokens": [1]}, {"tokens": list(range(9))}], ids=str
)
def test_a_header_that_does_not_fit_its_columns_is_refused(tmp_path, change):
    refused(written_by(str(tmp_path / "x"), 2, **change))


def test_a_full_device_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(*names: str, **folders: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"), folder_of(str(tmp_path / "x")) as folder:
        kv_file.write(folder, "x", HEADER, SOURCE, SLOTS)
    assert not os.listdir(tmp_path)
