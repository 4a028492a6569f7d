"""Build the native module `fastpersist._native` from csrc/; everything else is in pyproject.toml.

Four environment variables change the build:

FASTPERSIST_DEBUG=1
    -O1 -g, and warnings are errors.
FASTPERSIST_SANITIZE=address|thread|undefined
    Instrument the module. For address and thread the sanitizer's library must be in LD_PRELOAD when Python
    runs; `make san` instruments whole programs instead, which need no such thing.
FASTPERSIST_FAULT_ENGINE=1
    Compile in the fault engine, by which tests make requests fail. Makefile sets it for a checkout; a wheel has
    none of it.
FASTPERSIST_BUILD_JOBS=N
    So many compilers at once; one for each CPU without it.

A build repeats only what changed: each object has a list of the headers it was made from (-MMD), and each set
of flags has a directory of its own below build/, so switching between two costs a link. The fault engine changes
no flag: its files are compiled and linked, or not, and every other object serves both builds.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from contextlib import suppress
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

SANITIZERS = ("address", "thread", "undefined")
# Nothing else refers to these: they make themselves known when the module is loaded.
FAULT_ENGINE = ("csrc/binding/fault_plan.cc", "csrc/engine/fault_engine.cc")
OBJECTS = Path("build/native")


def source_files() -> list[str]:
    """Return the files of the module, with the fault engine if this is a build for tests."""
    sources = sorted(glob("csrc/**/*.cc", recursive=True))
    missing = set(FAULT_ENGINE) - set(sources)
    if missing:
        sys.exit(f"setup.py names {', '.join(sorted(missing))} of the fault engine, but there is no such file")
    if os.environ.get("FASTPERSIST_FAULT_ENGINE") == "1":
        return sources
    return [source for source in sources if source not in FAULT_ENGINE]


def compile_flags() -> list[str]:
    """Return the compiler flags of this build, which the linker is given as well."""
    flags = ["-pthread", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
    if os.environ.get("FASTPERSIST_DEBUG") == "1":
        flags += ["-O1", "-g", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    else:
        # Line tables only: a crash report or a profile names file and line, at no cost in speed.
        flags += ["-O3", "-g1"]
    sanitizer = os.environ.get("FASTPERSIST_SANITIZE")
    if sanitizer:
        if sanitizer not in SANITIZERS:
            sys.exit(f"FASTPERSIST_SANITIZE={sanitizer} is none of {', '.join(SANITIZERS)}")
        flags += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-g"]
    return flags


def require_python_headers() -> None:
    """End the build with advice when Python's headers are missing; Debian packs them separately."""
    include_dir = Path(sysconfig.get_path("include"))
    if not (include_dir / "Python.h").is_file():
        sys.exit(f"{include_dir}/Python.h is missing; on Debian or Ubuntu: apt install python3-dev")


def is_stale(object_path: str, source_path: str) -> bool:
    """Tell whether an object must be compiled: it or a header is missing, or one of its files is newer."""
    dependency_list = Path(object_path).with_suffix(".d")
    try:
        made_ns = Path(object_path).stat().st_mtime_ns
        # The list is one make rule, "x.o: a.cc b.h \", with spaces in names escaped.
        rule = dependency_list.read_text().replace("\\\n", " ").replace("\\ ", "\0")
        names = [name.replace("\0", " ") for name in rule.partition(": ")[2].split()]
        return any(Path(name).stat().st_mtime_ns > made_ns for name in (source_path, __file__, *names))
    except FileNotFoundError:
        return True


class BuildNative(build_ext):
    """build_ext that keeps its objects; setuptools would give each editable build a fresh directory."""

    def finalize_options(self) -> None:
        """Choose the directory of the objects by what decides their content."""
        super().finalize_options()
        require_python_headers()
        environment = [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
        key = hashlib.sha256(repr([sys.version, compile_flags(), environment]).encode()).hexdigest()[:12]
        self.build_temp = os.path.join("build", f"native-{key}")
        # Link always: "newer than its sources" says nothing about the flags. Objects are judged by is_stale.
        self.force = True

    def run(self) -> None:
        """Build, and say where the objects are: the C++ tests link them."""
        super().run()
        if "FASTPERSIST_SANITIZE" not in os.environ:
            with suppress(OSError):  # another build was faster, or the file system has no links; users need none
                OBJECTS.unlink(missing_ok=True)
                OBJECTS.symlink_to(Path(self.build_temp).name)


ParallelCompile("FASTPERSIST_BUILD_JOBS", needs_recompile=is_stale).install()

setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        Pybind11Extension(
            "fastpersist._native",
            source_files(),
            include_dirs=["csrc"],
            cxx_std=20,
            extra_compile_args=[*compile_flags(), "-MMD"],
            extra_link_args=[*compile_flags(), "-ldl"],
        )
    ],
)
