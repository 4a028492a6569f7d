#!/usr/bin/env python3
"""Compares what we declare of the CUDA driver and of libcufile by hand with NVIDIA's own headers and libraries.

    python tests/abi/check_abi.py DIRECTORY

downloads headers and libraries of many versions into DIRECTORY (packages of NVIDIA's on the package index; some 100 MB
unpacked, and kept), compiles driver_abi.cc and cufile_abi.cc against each of them, asks each libcufile for its version
and its calls, and makes mistakes in copies of our sources, to see that the comparison finds them. `make abi` is the
short way. With --include, the headers in that directory (/usr/local/cuda/include, say) are compared and nothing is
downloaded.

Exit codes: 0: all agree; 1: something differs, and the compiler's words say what.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DEVICE = ROOT / "csrc" / "device"
DOUBLE = ROOT / "tests" / "support" / "cuda_double"

# The last release of each version; "" is the newest there is.
CUDA_HEADERS = {
    "nvidia-cuda-runtime-cu11": ["11.7.99", "11.8.89"],
    "nvidia-cuda-runtime-cu12": [
        *["12.0.146", "12.1.105", "12.2.140", "12.3.101", "12.4.127", "12.5.82", "12.6.77", "12.8.90", "12.9.79"]
    ],
    "nvidia-cuda-runtime": ["13.0.96", "13.1.80", "13.2.86", "13.3.29", "13.4.92", ""],
}
CUFILE_HEADERS = {
    "nvidia-cufile-cu12": ["1.11.1.6", "1.13.1.3", "1.14.1.1"],
    "nvidia-cufile": ["1.15.1.6", "1.16.1.26", "1.17.1.22", "1.18.1.6", "1.19.1.55", ""],
}

LOST = re.compile(r"must be terminated and relaunched|context cannot be used anymore")


class Header(NamedTuple):
    """One version of cuda.h or cufile.h."""

    path: Path
    version: int  # CUDA_VERSION; of cufile.h as cuFileGetVersion tells it; 0: not known

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")


class Mistake(NamedTuple):
    """One that the comparison has to find."""

    file: str  # in csrc/device
    old: str
    new: str


MISTAKES = {
    "driver": [
        Mistake("cuda_driver.cc", "kStubLibrary = 34", "kStubLibrary = 35"),
        Mistake("cuda_driver.cc", "719,  // LAUNCH_FAILED", "720,  // LAUNCH_FAILED"),
        Mistake("cuda_driver.cc", "702,  // LAUNCH_TIMEOUT", "701,  // LAUNCH_OUT_OF_RESOURCES"),
        Mistake("cuda_driver.cc", '"cuMemAlloc_v2"', '"cuMemAlloc"'),
        Mistake("cuda_driver.cc", 'find(driver.MemFree, "cuMemFree_v2")', 'find(driver.MemFree, "cuMemAlloc_v2")'),
        Mistake("cuda_driver.h", "char* text, int size,", "char* text, size_t size,"),
        Mistake("cuda_driver.h", "CudaAddress = uint64_t", "CudaAddress = uint32_t"),
        Mistake("cuda_driver.h", "kCudaCaptureModeRelaxed = 2", "kCudaCaptureModeRelaxed = 1"),
        Mistake("cuda_driver.h", "(*EventQuery)(CudaEvent event)", "(*EventQuery)(CudaEvent* event)"),
    ],
    "cufile": [
        Mistake("cufile_abi.h", "kCuFileCudaDriverError = 5011", "kCuFileCudaDriverError = 5012"),
        Mistake("cufile_abi.cc", '5033, "CU_FILE_NVFS_SETUP_ERROR"', '5032, "CU_FILE_NVFS_SETUP_ERROR"'),
        Mistake("cufile_abi.h", "  int type = 1;", "  int64_t type = 1;"),
        Mistake("cufile_abi.h", "off_t offset_bytes, off_t base_offset_bytes);", "off_t offset_bytes);"),
        Mistake("cufile_abi.h", "(*set_stats_level)(int level);", "(*set_stats_level)(long level);"),
        Mistake("cufile.cc", "{1190, 142}", "{1190, 141}"),
        Mistake("cufile.cc", "kPosixWords = {9, 22}", "kPosixWords = {9, 23}"),
    ],
}


# --- what our sources say ---


def driver_calls(sources: Path = DEVICE) -> dict[str, str]:
    """Return the members of CudaDriver, with the symbols that they are looked up by."""
    found = re.findall(r'find\(driver\.(\w+), "(\w+)"\)', (sources / "cuda_driver.cc").read_text())
    return _once(found)


def cufile_calls(sources: Path = DEVICE) -> dict[str, str]:
    """Return the members of CuFile::Calls, with the symbols that they are looked up by."""
    found = re.findall(r'find\(calls->(\w+), "(\w+)"', (sources / "cufile.cc").read_text())
    return _once(found)


def _once(found: Sequence[tuple[str, str]]) -> dict[str, str]:
    members = dict(found)
    if not members or len(members) != len(found):
        raise SystemExit(f"what is looked up cannot be read from our sources: {found}")
    return members


def double_calls(file: str, prefix: str) -> dict[str, str]:
    """Return the calls that a double exports, with their types, in its own words."""
    found = re.findall(rf"^EXPORT ([\w ]+?) ({prefix}[A-Z]\w*)\(([^)]*)\)", (DOUBLE / file).read_text(), re.MULTILINE)
    return {name: f"{result}({' '.join(arguments.split())})" for result, name, arguments in found}


def lost_errors(sources: Path = DEVICE) -> dict[str, int]:
    """Return kLost, by the names that stand beside the numbers."""
    table = re.search(r" kLost = \{(.*?)\n\};", (sources / "cuda_driver.cc").read_text(), re.DOTALL)
    return {name: int(code) for code, name in re.findall(r"(\d+), +// (\w+)", table[1] if table else "")}


def double_errors() -> dict[str, int]:
    """Return the errors that the double of the driver has words for."""
    found = re.findall(r'\{(\d+), "(CUDA_\w+)"', (DOUBLE / "error_words.h").read_text())
    return {name: int(code) for code, name in found}


# --- what a header says ---


def driver_errors(text: str) -> dict[str, str]:
    """Return the enumerators of CUresult, with what is said of each."""
    enumeration = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", text, re.DOTALL)
    found = re.findall(r"/\*\*(.*?)\*/\s*(CUDA_\w+)\s*=", enumeration[1] if enumeration else "", re.DOTALL)
    return {name: " ".join(comment.replace("*", " ").split()) for comment, name in found}


def documented_as_lost(text: str) -> list[str]:
    """Return the enumerators of CUresult after which, the header says, the process can use CUDA no more."""
    return [name for name, comment in driver_errors(text).items() if LOST.search(comment)]


def declares(text: str, symbol: str) -> bool:
    return re.search(rf"\b{symbol}\b", text) is not None


def cuda_version(path: Path) -> int:
    found = re.search(r"#define CUDA_VERSION (\d+)", path.read_text(errors="replace"))
    return int(found[1]) if found else 0


# --- the comparison ---


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def compile_driver(header: Header, sources: Path = DEVICE) -> str:
    """Compare the driver's calls with cuda.h; return the compiler's words, "" when all agree."""
    errors = driver_errors(header.text)
    lists = {
        "DRIVER_CALLS": driver_calls(sources).items(),
        "DOUBLE_CALLS": double_calls("cuda_double.cc", "cu").items(),
        "LOST_ERRORS": [(name, code) for name, code in lost_errors(sources).items() if f"CUDA_ERROR_{name}" in errors],
        "DOCUMENTED_AS_LOST": [(name,) for name in documented_as_lost(header.text)],
        "DOUBLE_ERRORS": [(name, code) for name, code in double_errors().items() if name in errors],
    }
    empty = [name for name, entries in lists.items() if not entries]
    return f"nothing was found for {empty}" if empty else _compile("driver_abi.cc", lists, [header], sources)


def compile_cufile(header: Header, cuda: Header, sources: Path = DEVICE) -> str:
    """Compare libcufile's calls with cufile.h, which includes that cuda.h; return the compiler's words, or ""."""
    text = header.text
    calls = cufile_calls(sources)
    ours = double_calls("cufile_double.cc", "cuFile")
    lists = {
        "CUFILE_CALLS": calls.items(),
        "DECLARED_CUFILE_CALLS": [entry for entry in calls.items() if declares(text, entry[1])],
        "CUFILE_DOUBLE_CALLS": [entry for entry in ours.items() if declares(text, entry[0])],
    }
    defines = [
        f"-DCUFILE_VERSION={header.version}",
        f"-DCUFILE_HAS_STATISTICS={int(declares(text, 'cuFileGetStatsL3'))}",
    ]
    return _compile("cufile_abi.cc", lists, [header, cuda], sources, defines)


def compile_doubles() -> str:
    """Compare the doubles with what the product calls, without any header of NVIDIA's."""
    doubles = double_calls("cuda_double.cc", "cu") | double_calls("cufile_double.cc", "cuFile")
    called = {**driver_calls(), **cufile_calls()}
    missing = sorted(set(called.values()) - set(doubles))
    if missing:
        return f"the doubles have no {', '.join(missing)}"
    lists = {
        "DRIVER_CALLS": [(member, doubles[symbol]) for member, symbol in driver_calls().items()],
        "CUFILE_CALLS": [(member, doubles[symbol]) for member, symbol in cufile_calls().items()],
    }
    return _compile("doubles_abi.cc", lists, [], DEVICE)


def _compile(
    program: str,
    lists: dict[str, Iterable[tuple[object, ...]]],
    headers: Sequence[Header],
    sources: Path,
    defines: Sequence[str] = (),
) -> str:
    # -w: an included source warns of what is nothing in its own place, and `make check` looks there.
    command = [compiler() or "c++", "-std=c++20", "-fsyntax-only", "-w", *defines]
    with tempfile.TemporaryDirectory() as folder:
        text = "// Made by check_abi.py.\n#pragma once\n" + "".join(_macro(name, lists[name]) for name in lists)
        text += f"#define FP_ABI_CUFILE_DOUBLE_RECORDS {_cufile_double_records()}\n"
        Path(folder, "abi_symbols.h").write_text(text)
        command += [f"-I{folder}", f"-I{sources.parent}", f"-I{ROOT / 'csrc'}"]
        command += [f"-isystem{header.path.parent}" for header in headers]
        result = subprocess.run([*command, HERE / program], capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stderr or f"{command[0]} exited with {result.returncode}"


def _macro(name: str, entries: Iterable[tuple[object, ...]]) -> str:
    uses = " ".join(f"X({', '.join(map(str, entry))})" for entry in entries)
    return f"#define FP_ABI_{name}(X) {uses}\n"


def _cufile_double_records() -> str:
    found = re.findall(
        r"^struct (?:Error|Description) \{.*?^\};", (DOUBLE / "cufile_double.cc").read_text(), re.S | re.M
    )
    return " ".join(re.sub(r"//.*", "", "\n".join(found)).split())


def mistakes_not_found(
    kind: str, headers: Sequence[Header], mistakes: Sequence[Mistake] | None = None
) -> Iterator[str]:
    """Make each mistake in a copy of our sources; yield those that the comparison with the headers lets pass."""
    for mistake in MISTAKES[kind] if mistakes is None else mistakes:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(DEVICE, Path(folder, "csrc", "device")))
            text = (copy / mistake.file).read_text()
            if mistake.old not in text:
                yield f"{mistake.file} has no {mistake.old!r} any more"
                continue
            (copy / mistake.file).write_text(text.replace(mistake.old, mistake.new))
            words = compile_driver(headers[0], copy) if kind == "driver" else compile_cufile(*headers, sources=copy)
            if "static assertion failed" not in words and "is a macro for another name" not in words:
                yield f"{mistake.old!r} made {mistake.new!r}: {words or 'passes'}"


# --- headers and libraries ---


def headers_in(directory: Path) -> tuple[Header | None, Header | None]:
    """Return cuda.h and cufile.h of an include directory."""
    cuda, cufile = directory / "cuda.h", directory / "cufile.h"
    return (
        Header(cuda, cuda_version(cuda)) if cuda.is_file() else None,
        Header(cufile, _version_of_library(directory)) if cufile.is_file() else None,
    )


def headers_around() -> tuple[Header | None, Header | None]:
    """Return cuda.h and cufile.h as this machine has them, of Python packages or of a toolkit."""
    places = [path for entry in sys.path for path in sorted(Path(entry or ".").glob("nvidia/*/include"))]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"), Path("/usr/include")]
    found = [headers_in(place) for place in places]
    return (next((cuda for cuda, _ in found if cuda), None), next((cufile for _, cufile in found if cufile), None))


def _version_of_library(include: Path) -> int:
    libraries = [*include.parent.glob("lib*/libcufile.so.0"), *include.parent.glob("lib/*/libcufile.so.0")]
    return library_version(libraries[0]) if libraries else 0


class _CuFileError(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("cuda", ctypes.c_int))


def library_version(path: Path) -> int:
    """Return what cuFileGetVersion says of a library; 0 where it has no such call. Starts nothing."""
    library = ctypes.CDLL(str(path))
    get_version = getattr(library, "cuFileGetVersion", None)
    if get_version is None:
        return 0
    get_version.restype = _CuFileError
    version = ctypes.c_int()
    return version.value if get_version(ctypes.byref(version)).code == 0 else 0


def calls_missing(path: Path, version: int) -> list[str]:
    """Return the calls of ours that a libcufile of this version should have, and has not."""
    library = ctypes.CDLL(str(path))
    return [
        symbol
        for symbol in cufile_calls().values()
        if not hasattr(library, symbol) and (version >= 1150 or "Stats" not in symbol)
    ]


def fetch(directory: Path, package: str, version: str) -> Path:
    """Install one package into a directory of its own, unless it is there; return its include directory."""
    place = directory / f"{package}-{version or 'newest'}"
    if not version:
        shutil.rmtree(place, ignore_errors=True)
    if not place.is_dir():
        requirement = f"{package}=={version}" if version else package
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        with tempfile.TemporaryDirectory(dir=directory) as fresh:
            subprocess.run([*pip, "--only-binary", ":all:", "--target", fresh, requirement], check=True)
            shutil.copytree(fresh, place)
    return next(place.glob("nvidia/*/include"))


# --- the command ---


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="where the downloads lie")
    parser.add_argument("--include", action="append", type=Path, default=[], help="compare the headers in here instead")
    arguments = parser.parse_args()
    if (arguments.directory is None) == (not arguments.include):
        parser.error("say either a directory for downloads, or --include")
    includes = arguments.include or list(_fetched(arguments.directory))

    pairs = [headers_in(include) for include in includes]
    cudas = [cuda for cuda, _ in pairs if cuda]
    cufiles = [cufile for _, cufile in pairs if cufile]
    if not cudas:
        parser.error("there is no cuda.h")
    reports = [_report("the doubles and what is called", compile_doubles())]
    for header in cudas:
        what = f"cuda.h {_cuda_words(header)}: {len(driver_calls())} calls, {len(lost_errors())} errors"
        reports.append(_report(f"{what}, {len(documented_as_lost(header.text))} documented", compile_driver(header)))
    newest = max(cudas, key=lambda header: header.version)
    for header in cufiles:
        count = sum(declares(header.text, symbol) for symbol in cufile_calls().values())
        what = f"cufile.h {header.version / 1000:.2f}: {count} calls, their errors and structures"
        reports.append(_report(what, compile_cufile(header, newest)))
        for library in header.path.parent.parent.glob("lib/libcufile.so.0"):
            missing = calls_missing(library, header.version)
            reports.append(_report(f"libcufile {header.version / 1000:.2f}: exports them", " ".join(missing)))
    reports.append(_report(f"{len(MISTAKES['driver'])} mistakes", "\n".join(mistakes_not_found("driver", [newest]))))
    if cufiles:
        last = max(cufiles, key=lambda header: header.version)
        unseen = "\n".join(mistakes_not_found("cufile", [last, newest]))
        reports.append(_report(f"{len(MISTAKES['cufile'])} mistakes", unseen))
    print(f"{reports.count(True)} of {len(reports)} comparisons agree")
    return 0 if all(reports) else 1


def _fetched(directory: Path) -> Iterator[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for package, versions in [*CUDA_HEADERS.items(), *CUFILE_HEADERS.items()]:
        for version in versions:
            yield fetch(directory, package, version)


def _cuda_words(header: Header) -> str:
    return f"{header.version // 1000}.{header.version % 1000 // 10}"


def _report(what: str, words: str) -> bool:
    print(f"{'differs' if words else 'agrees '}  {what}", flush=True)
    if words:
        print(words, flush=True)
    return not words


if __name__ == "__main__":
    sys.exit(main())
