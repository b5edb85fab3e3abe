"""TensorFlow's checkpoint files: files built by hand are read, ours are complete, damaged files are refused."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import UserError
from bertsmith.formats import sorted_table
from bertsmith.formats.tensor_bundle import NUMBERS, data_file, index_file, read_index, read_tensor, write_bundle

for library in ("google_crc32c", "cramjam"):
    pytest.importorskip(library, reason="of the extra tf1")
ARRAYS = {
    "bert/a": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
    "bert/ab": np.array([1.5, -2.0], np.float64),
    "bert/b": np.array([[0.5], [65504]], np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "flags": np.array([True, False]),
    "global_step": np.array(1 << 40, np.int64),
    "ids": np.array([-1, 7], np.int32),
}


# A second writer, after the format's description, so that the same mistake in our reader and writer is found.


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return mask(crc ^ 0xFFFFFFFF)


def mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def number(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + number(n // 128)


def closed(content: bytes, kind: int = 0) -> bytes:
    return content + bytes([kind]) + struct.pack("<I", crc32c(content + bytes([kind])))


def block(*rows: tuple[int, bytes, bytes], restarts: tuple[int, ...] = (0,)) -> bytes:
    """A block of rows (length of the shared prefix, rest of the key, value)."""
    body = b"".join(number(s) + number(len(key)) + number(len(value)) + key + value for s, key, value in rows)
    return body + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(*blocks: tuple[bytes, bytes], kind: int = 0) -> bytes:
    """A file of data blocks, each with a separator key, which is not before the block's last key."""
    data, places = b"", []
    for key, content in blocks:
        places.append((0, key, number(len(data)) + number(len(content))))
        data += closed(content, kind)
    meta, index = block(), block(*places)
    handles = number(len(data)) + number(len(meta)) + number(len(data) + len(meta) + 5) + number(len(index))
    return data + closed(meta) + closed(index) + handles.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def varint_field(field: int, n: int) -> bytes:
    return bytes([field << 3]) + number(n)


def bytes_field(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + number(len(data)) + data


def entry(
    dtype: int, shape: tuple[int, ...], data: bytes, offset: int = 0, shard: int = 0, extra: bytes = b""
) -> bytes:
    dims = b"".join(bytes_field(2, varint_field(1, n)) for n in shape)
    place = varint_field(3, shard) + varint_field(4, offset) + varint_field(5, len(data))
    return varint_field(1, dtype) + bytes_field(2, dims) + place + b"\x35" + struct.pack("<I", crc32c(data)) + extra


HEADER = varint_field(1, 1) + bytes_field(3, varint_field(1, 1))


def write(folder: Path, rows: list[tuple[bytes, bytes]], *shards: bytes) -> Path:
    """Write a checkpoint of one block."""
    prefix = folder / "hand.ckpt"
    index_file(prefix).write_bytes(table((rows[-1][0], block(*[(0, key, value) for key, value in rows]))))
    for i, data in enumerate(shards):
        data_file(prefix, i, len(shards)).write_bytes(data)
    return prefix


def read(prefix: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(name, entry) for name, entry in read_index(prefix).items() if entry.dtype in NUMBERS}


@pytest.fixture
def written(tmp_path) -> Path:
    write_bundle(tmp_path / "model.ckpt", ARRAYS.items())
    return tmp_path / "model.ckpt"


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_the_checksum_is_masked_crc32c():
    assert sorted_table.checksum(b"123456789") == crc32c(b"123456789") == mask(0xE3069283)


def test_blocks_and_shortened_keys_written_by_hand(tmp_path):
    one, two, three = (np.full(n, n, "<f4").tobytes() for n in (1, 2, 3))
    rows = [
        (0, b"", HEADER),
        (0, b"bert/a", entry(1, (1,), one)),
        (6, b"b", entry(1, (2,), two, 4)),  # bert/ab
    ]
    second = [(0, b"bert/b", entry(1, (3, 1), three, 12)), (5, b"c", entry(1, (1,), one))]
    start = 3 + len(rows[0][2])
    first = block(*rows, restarts=(0, start))
    index_file(tmp_path / "hand").write_bytes(table((b"bert/ab", first), (b"x", block(*second))))
    data_file(tmp_path / "hand").write_bytes(one + two + three)
    found = read(tmp_path / "hand")
    assert {name: array.tolist() for name, array in found.items()} == {
        "bert/a": [1],
        "bert/ab": [2, 2],
        "bert/b": [[3], [3], [3]],
        "bert/c": [1],
    }


def test_a_snappy_block_written_by_hand(tmp_path):
    data = np.arange(4, dtype="<f4").tobytes()
    plain = block((0, b"", HEADER), (0, b"aaaaaaaaaaaaaaaa", entry(1, (4,), data)))
    cut = plain.index(b"aaaa")
    literal = lambda part: bytes([60 << 2, len(part) - 1]) + part  # noqa: E731
    copy = bytes([14 << 2 | 2]) + struct.pack("<H", 1)  # 15 bytes from one byte back
    packed = number(len(plain)) + literal(plain[: cut + 1]) + copy + literal(plain[cut + 16 :])
    index_file(tmp_path / "hand").write_bytes(table((b"b", packed), kind=1))
    data_file(tmp_path / "hand").write_bytes(data)
    assert read(tmp_path / "hand")["a" * 16].tolist() == [0, 1, 2, 3]
    for damaged, reason in (
        (packed[:-1], "snappy"),
        (b"", "snappy"),
        (b"\xff" * 12, "snappy"),
        (number(1 << 31) + packed[2:], "claims a size that snappy cannot reach"),
    ):
        index_file(tmp_path / "hand").write_bytes(table((b"b", damaged), kind=1))
        with pytest.raises(UserError, match=rf"hand\.index is damaged: .*{reason}"):
            read_index(tmp_path / "hand")


def test_bfloat16_is_read_as_float32_and_strings_are_refused(tmp_path):
    data = np.array([1.5, -2.0, 3.0], "<f4").view("<u2")[1::2].tobytes()
    rows = [(b"", HEADER), (b"half", entry(14, (3,), data)), (b"words", entry(7, (1,), data))]
    prefix = write(tmp_path, rows, data)
    assert {name: array.tolist() for name, array in read(prefix).items()} == {"half": [1.5, -2.0, 3.0]}
    assert read_index(prefix)["words"].dtype == "strings"
    with pytest.raises(UserError, match="words is of strings"):
        read_tensor("words", read_index(prefix)["words"])


def test_several_data_files(tmp_path):
    one, two = np.full(2, 1, "<i4").tobytes(), np.full(2, 2, "<i4").tobytes()
    header = varint_field(1, 2) + bytes_field(3, varint_field(1, 1))
    rows = [(b"", header), (b"a", entry(3, (2,), one)), (b"b", entry(3, (2,), two, 0, 1))]
    prefix = write(tmp_path, rows, one, two)
    assert {name: array.tolist() for name, array in read(prefix).items()} == {"a": [1, 1], "b": [2, 2]}
    data_file(prefix, 1, 2).unlink()
    with pytest.raises(UserError, match="data-00001-of-00002, which is missing"):
        read_index(prefix)


def partitioned(*extents: tuple[int, int], cut: int = 0) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """A variable of shape (5, 2) in parts of its rows, as TensorFlow keys them."""
    whole = np.arange(10, dtype="<f4").reshape(5, 2)
    slices = [bytes_field(1, varint_field(1, s) + varint_field(2, n)) + bytes_field(1, b"") for s, n in extents]
    rows, data = [], b""
    for start, length in extents:
        part = whole[start : start + length].tobytes()
        key = b"\0emb\0\1" + b"\1\2" + bytes([0x80 + start, 0x80 + length]) + b"\x80\x7f"
        rows.append((key, entry(1, (length, 2), part, len(data))))
        data += part
    total = entry(1, (5, 2), b"", extra=b"".join(bytes_field(7, s) for s in reversed(slices)))
    return [(b"", HEADER), *rows[cut:], (b"emb", total)], data


def test_the_parts_of_a_partitioned_variable_are_joined(tmp_path):
    rows, data = partitioned((0, 2), (2, 2), (4, 1))
    assert read(write(tmp_path, rows, data))["emb"].tolist() == np.arange(10).reshape(5, 2).tolist()


@pytest.mark.parametrize(("extents", "cut"), [([(0, 2), (2, 2)], 0), ([(0, 2), (1, 2)], 0), ([(0, 2), (2, 3)], 1)])
def test_a_partitioned_variable_with_a_missing_part_is_refused(tmp_path, extents, cut):
    rows, data = partitioned(*extents, cut=cut)
    with pytest.raises(UserError, match="lacks parts of the partitioned variable emb"):
        read_index(write(tmp_path, rows, data))


def test_a_written_checkpoint_is_read_back(written):
    same(read(written), ARRAYS)
    assert sorted(p.name for p in written.parent.iterdir()) == ["model.ckpt.data-00000-of-00001", "model.ckpt.index"]


@pytest.mark.parametrize("size", [1, 1000, 256 << 10])
def test_many_names_take_many_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sorted_table, "BLOCK_SIZE", size)
    arrays = {f"scope_{i % 7}/layer_{i}/" + "x" * (i % 50): np.full(i % 3, i, np.int32) for i in range(500)}
    write_bundle(tmp_path / "m", arrays.items())  # in no order
    same(read(tmp_path / "m"), arrays)


def test_arrays_of_any_memory_layout_are_written(tmp_path):
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    write_bundle(tmp_path / "m", {"big-endian": array, "transposed": array.T, "cut": array[:, ::2]}.items())
    found = read(tmp_path / "m")
    assert found["big-endian"].tolist() == array.tolist()
    assert found["transposed"].tolist() == array.T.tolist()
    assert found["cut"].tolist() == [[0, 2], [3, 5]]


def test_only_the_requested_tensor_is_read(written):
    data = bytearray(data_file(written).read_bytes())
    data[read_index(written)["ids"].offset] ^= 1
    data_file(written).write_bytes(data)
    entries = read_index(written)
    assert len(read_tensor("flags", entries["flags"]))
    with pytest.raises(UserError, match="ids do not match their checksum"):
        read_tensor("ids", entries["ids"])


def test_nothing_is_overwritten_and_a_failed_write_leaves_no_files(tmp_path, written):
    before = index_file(written).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        write_bundle(written, {"a": np.zeros(1)}.items())
    assert index_file(written).read_bytes() == before

    def failing():
        yield "a", np.zeros(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_bundle(tmp_path / "new" / "model.ckpt", failing())
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("bits", [0xFF, 1, 0x80])
def test_every_flipped_byte_of_the_index_is_refused(written, bits):
    good = index_file(written).read_bytes()
    for place in range(len(good)):
        index_file(written).write_bytes(good[:place] + bytes([good[place] ^ bits]) + good[place + 1 :])
        with pytest.raises(UserError, match=r"model\.ckpt\.index "):
            read_index(written)


def test_every_flipped_byte_of_the_data_is_refused(written):
    good = data_file(written).read_bytes()
    for place in range(len(good)):
        data_file(written).write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(UserError, match="do not match their checksum"):
            read(written)


@pytest.mark.parametrize("file", [index_file, data_file])
def test_every_truncated_file_is_refused(written, file):
    good = file(written).read_bytes()
    for length in range(len(good)):
        file(written).write_bytes(good[:length])
        with pytest.raises(UserError, match="truncated" if file is data_file else r"\.index "):
            read(written)


def test_the_data_of_another_checkpoint_is_refused(tmp_path, written):
    write_bundle(tmp_path / "other", {name: array + array.dtype.type(1) for name, array in ARRAYS.items()}.items())
    data_file(tmp_path / "other").replace(data_file(written))
    with pytest.raises(UserError, match="bert/a do not match their checksum"):
        read(written)


def test_data_that_shrinks_after_the_index_was_read_is_refused(written):
    index = read_index(written)
    data_file(written).write_bytes(data_file(written).read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated: ids is incomplete"):
        read_tensor("ids", index["ids"])


def test_random_content_with_valid_checksums_never_crashes(tmp_path):
    draw = np.random.default_rng(0)
    rows, data = partitioned((0, 2), (2, 3))
    rows = sorted([*rows, (b"a", entry(3, (5, 2), data)), (b"b", entry(14, (20,), data))])
    content = block(*[(0, key, value) for key, value in rows])
    prefix, refused = tmp_path / "hand", 0
    data_file(prefix).write_bytes(data)
    for _ in range(1000):
        damaged = bytearray(content)
        for place in draw.integers(0, len(content), draw.integers(1, 4)):
            damaged[place] = draw.integers(0, 256)
        index_file(prefix).write_bytes(table((b"z", bytes(damaged))))
        try:
            read(prefix)
        except UserError as error:
            refused += str(prefix) in str(error)
    assert refused > 500


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(b"a", entry(1, (1,), b"\0" * 4))], "has no header"),
        ([(b"", varint_field(1, 1) + varint_field(2, 1))], "big-endian"),
        ([(b"", varint_field(1, 1) + bytes_field(3, varint_field(2, 2)))], "a reader of version 2"),
        ([(b"", b"")], "claims 0 data files"),
        ([(b"", HEADER), (b"a", entry(1, (2,), b"\0" * 4))], "4 bytes are not a tensor of float32"),
        ([(b"", HEADER), (b"a", entry(1, (1,), b"\0" * 4, 0, 1))], "impossible offset"),
        ([(b"", HEADER), (b"a", entry(1, (1,) * 70, b"\0" * 4))], "impossible offset or shape"),
        ([(b"", HEADER), (b"a", entry(1, (0, 1 << 62, 1 << 62), b""))], "0 bytes are not a tensor of float32"),
        ([(b"", HEADER), (b"a", entry(1, (1,), b"\0" * 4, 1))], "needs 5 bytes of .*, which is truncated to 4 bytes"),
        ([(b"", HEADER), (b"b", entry(1, (1,), b"\0" * 4)), (b"a", entry(1, (1,), b"\0" * 4))], "not sorted"),
    ],
)
def test_impossible_entries_are_refused_with_the_reason(tmp_path, rows, reason):
    with pytest.raises(UserError, match=reason):
        read_index(write(tmp_path, rows, b"\0" * 4))


@pytest.mark.parametrize(
    ("rows", "restarts", "reason"),
    [
        ([(0, b"", HEADER), (0, b"ab", b""), (1, b"c", b"")], (0, 9, 14), "a name in a block does not fit"),
        ([(0, b"", HEADER), (3, b"ab", b"")], (0,), "a name in a block does not fit"),
        ([(0, b"", HEADER)], (0, 4), "a restart point of a block is not the start of a name"),
        ([(0, b"", HEADER)], (), "has no restart points"),
    ],
)
def test_malformed_blocks_are_refused_with_the_reason(tmp_path, rows, restarts, reason):
    index_file(tmp_path / "m").write_bytes(table((b"z", block(*rows, restarts=restarts))))
    with pytest.raises(UserError, match=reason):
        read_index(tmp_path / "m")


def test_bytes_between_blocks_are_refused(tmp_path):
    """No checksum covers these bytes. Blocks may not overlap either."""
    first, second = block((0, b"", HEADER)), block((0, b"a", entry(1, (0,), b"")))
    data_file(tmp_path / "m").write_bytes(b"")
    good = closed(first) + closed(second)
    for data, places in (
        (good, ((0, first), (len(first) + 5, second))),
        (closed(first) + b"?" + closed(second), ((0, first), (len(first) + 6, second))),
        (b"?" + good, ((1, first), (len(first) + 6, second))),
        (good + b"?", ((0, first), (len(first) + 5, second))),
    ):
        index = block(*[(0, bytes([97 + i]), number(at) + number(len(b))) for i, (at, b) in enumerate(places)])
        handles = number(len(data)) + number(8) + number(len(data) + 13) + number(len(index))
        footer = handles.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")
        index_file(tmp_path / "m").write_bytes(data + closed(block()) + closed(index) + footer)
        if data is good:
            assert list(read_index(tmp_path / "m")) == ["a"]
            continue
        with pytest.raises(UserError, match="a block begins at byte"):
            read_index(tmp_path / "m")


def test_other_files_are_refused_with_the_reason(tmp_path):
    prefix = tmp_path / "model.ckpt"
    with pytest.raises(UserError, match=r"model\.ckpt\.index cannot be read: No such file"):
        read_index(prefix)
    for content in (b"", b"text", np.random.default_rng(0).bytes(3000)):
        index_file(prefix).write_bytes(content)
        with pytest.raises(UserError, match="it does not end with the magic number"):
            read_index(prefix)
    index_file(prefix).write_bytes(table((b"z", block((0, b"", HEADER))), kind=2))
    with pytest.raises(UserError, match="compression 2"):
        read_index(prefix)


@pytest.mark.parametrize(("library", "kind"), [("google_crc32c", 0), ("cramjam", 1)])
def test_a_missing_library_is_named_with_the_install_command(tmp_path, monkeypatch, library, kind):
    monkeypatch.setitem(sys.modules, library, None)
    index_file(tmp_path / "m").write_bytes(table((b"z", block((0, b"", HEADER))), kind=kind))
    with pytest.raises(UserError, match=rf"need {library}, which is missing: pip install 'bertsmith\[tf1\]'"):
        read_index(tmp_path / "m")
