"""C code compiled at run time: once, cached, rebuilt if damaged, and skipped if there is no compiler."""

import errno
import os
import pwd
import resource
import shutil
from pathlib import Path

import pytest

from megatron.kernels import jit_build
from megatron.kernels.jit_build import CompileError, build_library

FULL_DISK = os.strerror(errno.ENOSPC)
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


@needs_compiler
def test_callers_fall_back_if_no_folder_is_writable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a read-only container C code is not available, which is no error."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(jit_build.tempfile, "tempdir", None)
    monkeypatch.setattr(jit_build.tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(CompileError, match="cannot be stored or loaded: no folder is writable"):
        build_library(folder)


@needs_compiler
@pytest.mark.parametrize("is_full", ["home", "both"])
def test_a_full_home_folder_is_replaced_by_the_temporary_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: str
) -> None:
    """The linker's error for a full disk is not an error in the sources."""
    compiler, full = jit_build.find_compiler(), tmp_path / "cache" if is_full == "home" else tmp_path
    script = tmp_path / "cc"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"-o {full}"*)\n'
        f"  echo '/usr/bin/ld: final link failed: {FULL_DISK}' >&2\n"
        "  echo 'collect2: error: ld returned 1 exit status' >&2\n"
        "  exit 1;;\n"
        f'esac\nexec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(jit_build, "find_compiler", lambda: str(script))
    monkeypatch.setattr(jit_build.tempfile, "gettempdir", lambda: str(tmp_path))
    if is_full == "home":
        assert build_library(folder).answer() == 42
        assert list(tmp_path.glob("farfield-*/op-*.so"))
    else:
        with pytest.raises(CompileError, match=f"cannot be stored or loaded: .*{FULL_DISK}"):
            build_library(folder)
    assert _kept(tmp_path) == []


def test_a_full_disk_leaves_no_part_of_a_cached_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            jit_build.store_file(tmp_path / "kernel.cubin", bytes(2 << 20))
        assert list(tmp_path.iterdir()) == []
        jit_build.store_file(tmp_path / "kernel.cubin", b"code")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.cubin"]
    assert (tmp_path / "kernel.cubin").read_bytes() == b"code"
