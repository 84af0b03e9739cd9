"""A sealed window: read back as written, changed by nobody, leaked by nobody."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.feed.memfd import ALIGN, BadWindow, Draft, SealedWindow, plan_layout, seal

Arrays = dict[str, np.ndarray[Any, Any]]
ARRAYS: Arrays = {
    "tokens": np.arange(1000, dtype=np.int64),
    "mask": np.ones(7, np.float32),
    "empty": np.zeros((0, 3), np.int32),
    "scalar": np.array(5, np.int32),
    "wide": np.arange(12, dtype=np.uint8).reshape(3, 4),
}


def sealed(arrays: Arrays = ARRAYS, meta: dict[str, Any] | None = None) -> int:
    layout = plan_layout(
        meta or {}, {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    )
    fd = seal(layout, arrays)
    assert os.fstat(fd).st_size == layout.size
    return fd


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_read_back_as_written_aligned_and_without_a_copy() -> None:
    window = SealedWindow(sealed(meta={"step": 3, "sequences": ["a", "b"]}))
    assert window.meta == {"step": 3, "sequences": ["a", "b"]}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(window.arrays[name], array)
        assert window.arrays[name].dtype == array.dtype
        assert window.arrays[name].shape == array.shape
        if array.size:
            assert window.arrays[name].ctypes.data % ALIGN == 0
            assert not window.arrays[name].flags.writeable
            assert not window.arrays[name].flags.owndata
    window.close()
    window.close()


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(
            st.sampled_from(["uint8", "uint16", "int32", "int64", "float32"]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
    )
)
def test_any_arrays(specs: dict[str, tuple[str, list[int]]]) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 99, shape).astype(dtype) for name, (dtype, shape) in specs.items()}
    window = SealedWindow(sealed(arrays))
    assert set(window.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(window.arrays[name], array)
    window.close()


def test_the_kernel_refuses_every_change() -> None:
    fd = sealed()
    size = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for length in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.close(fd)


def test_a_write_through_the_private_map_reaches_nobody() -> None:
    fd = sealed()
    one, other = SealedWindow(os.dup(fd)), SealedWindow(fd)
    private = one.private()
    private["tokens"][:] = -1
    assert private["tokens"].sum() == -1000
    for window in (one, other):
        np.testing.assert_array_equal(window.arrays["tokens"], ARRAYS["tokens"])
    one.close()
    other.close()
    with pytest.raises(ValueError, match="closed"):
        one.private()


def test_views_outlive_the_window_and_descriptors_do_not() -> None:
    gc.collect()
    before = open_fds()
    window = SealedWindow(sealed())
    tokens = window.arrays["tokens"]
    window.close()
    assert tokens.sum() == ARRAYS["tokens"].sum()
    del tokens
    gc.collect()
    assert open_fds() == before


def unsealed(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    return fd


def with_seals(data: bytes) -> int:
    fd = unsealed(data)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK,
    )
    return fd


def headed(header: bytes, body: bytes = bytes(1024)) -> bytes:
    head = b"PKTRAIN1" + len(header).to_bytes(8, "little") + header
    return head.ljust(-(-len(head) // ALIGN) * ALIGN, b"\0") + body


def test_an_unsealed_window_is_refused() -> None:
    before = open_fds()
    fd = sealed()
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    with pytest.raises(BadWindow, match="not sealed"):
        SealedWindow(unsealed(content))
    SealedWindow(with_seals(content)).close()
    gc.collect()
    assert open_fds() == before


def test_a_pipe_or_a_file_is_no_window(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(BadWindow):
        SealedWindow(reading)
    with pytest.raises(BadWindow):
        SealedWindow(os.open(tmp_path, os.O_RDONLY))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"PKTRAIN1" + (1 << 60).to_bytes(8, "little") + bytes(100),
        b"OTHER..." + (2).to_bytes(8, "little") + b"{}",
        headed(b"{}"),
        headed(b"[]"),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int32","shape":[257],"offset":0}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int32","shape":[-1],"offset":0}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int32","shape":[-3,-3],"offset":0}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"object","shape":[1],"offset":0}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int32","shape":[1],"offset":4}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int32","shape":[1],"offset":1024}}}'),
        headed(b'{"meta":{},"arrays":{"a":{"dtype":"int64","shape":[4611686018427387904,4],"offset":0}}}'),
    ],
)
def test_a_malformed_window_is_refused_before_it_is_read(data: bytes) -> None:
    before = open_fds()
    with pytest.raises(BadWindow):
        SealedWindow(with_seals(data))
    assert open_fds() == before


def test_rows_written_in_any_order_and_what_is_not_written_is_zero() -> None:
    routed = np.arange(60, dtype=np.uint16).reshape(10, 3, 2)
    draft = Draft(
        plan_layout({}, {"tokens": ("int64", (6,)), "routed": ("uint16", (10, 3, 2)), "n": ("int32", ())})
    )
    draft.write("routed", 7, routed[7:])
    draft.write("routed", 0, routed[:4])
    draft.write("tokens", 2, np.array([5, 6]))
    # Rows that do not lie together in memory.
    draft.write("routed", 4, np.stack([routed, routed], 1)[4:6, 0])
    draft.write("n", 0, np.array(9, np.int32))
    window = SealedWindow(draft.seal())
    draft.close()
    routed[6] = 0
    np.testing.assert_array_equal(window.arrays["routed"], routed)
    assert window.arrays["tokens"].tolist() == [0, 0, 5, 6, 0, 0]
    assert window.arrays["n"] == 9
    window.close()


def test_rows_outside_their_array_or_of_another_form_are_refused_and_a_draft_leaves_nothing() -> None:
    before = open_fds()
    draft = Draft(plan_layout({}, {"a": ("int32", (4, 2)), "n": ("int32", ())}))
    rows = np.ones((2, 2), np.int32)
    for name, first, values in (
        ("a", 3, rows),
        ("a", -1, rows),
        ("a", 0, rows.astype(np.int64)),
        ("a", 0, rows[:, :1]),
        ("a", 0, rows[0]),
        ("n", 1, np.array(1, np.int32)),
    ):
        with pytest.raises(ValueError, match=f"not rows .* of array '{name}'"):
            draft.write(name, first, values)
    draft.close()
    draft.close()
    with pytest.raises(ValueError, match="sealed or dropped"):
        draft.write("a", 0, rows)
    with pytest.raises(ValueError, match="sealed or dropped"):
        draft.seal()
    assert open_fds() == before


def test_nothing_is_left_when_sealing_fails() -> None:
    before = open_fds()
    layout = plan_layout({}, {"a": ("int32", (4,))})
    with pytest.raises(KeyError):
        seal(layout, {})
    assert open_fds() == before
