"""C code compiled at run time: once, cached, rebuilt if damaged, and skipped if there is no compiler."""

import pwd
import shutil
from pathlib import Path

import pytest

from megatron.kernels import jit_build
from megatron.kernels.jit_build import CompileError, build_library

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, jit_build.COMPILERS)), reason=f"no C compiler ({', '.join(jit_build.COMPILERS)})"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a small library, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build_library.cache_clear()
    sources = tmp_path / "op" / "native"
    sources.mkdir(parents=True)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    return sources


def _kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "farfield").iterdir())


@needs_compiler
def test_is_compiled_once_for_each_state_of_its_sources(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_library(folder).answer() == 42
    (first,) = _kept(tmp_path)
    when = first.stat().st_mtime_ns
    build_library.cache_clear()
    assert build_library(folder).answer() == 42
    assert [first] == _kept(tmp_path)
    assert first.stat().st_mtime_ns == when
    (folder / "answer.h").write_text("#define ANSWER 43\n")
    build_library.cache_clear()
    assert build_library(folder).answer() == 43
    assert len(_kept(tmp_path)) == 2


@needs_compiler
def test_a_damaged_library_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    assert build_library(folder).answer() == 42
    (made,) = _kept(tmp_path)
    made.unlink()
    made.write_bytes(b"not a library")
    build_library.cache_clear()
    assert build_library(folder).answer() == 42


@needs_compiler
def test_errors_give_the_reason(folder: Path, tmp_path: Path) -> None:
    (folder / "answer.c").write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(CompileError, match=r"cc failed: .*answer\.c"):
        build_library(folder)
    assert _kept(tmp_path) == []


def test_a_machine_without_a_compiler_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_build.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match=r"no C compiler was found \(cc, gcc, clang\)"):
        build_library(folder)


@needs_compiler
@pytest.mark.parametrize("there_is_one", [True, False])
def test_libraries_are_built_without_a_writable_home_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_is_one: bool
) -> None:
    (tmp_path / "cache").write_text("a file")
    if not there_is_one:
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(jit_build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build_library(folder).answer() == 42
    assert list(tmp_path.glob("farfield-*/op-*.so"))
