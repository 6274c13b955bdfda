"""The processor's bfloat16, by the names Linux gives it."""

import pytest

from rlinf_plugins.core.cpu import has_bf16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: X\nflags\t\t: fpu avx2 avx512f avx512_bf16 fma\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx avx2 fma\n", False),
        ("flags\t\t: fpu not_bf16\n", False),
        ("", False),
    ],
)
def test_flags_are_read(tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert has_bf16(path) is expected


def test_a_machine_that_does_not_say_counts_as_without(tmp_path):
    assert not has_bf16(tmp_path / "nowhere")
