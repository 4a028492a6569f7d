"""What we declare of the CUDA driver and libcufile by hand, as far as it can be compared without a download.

`make abi` compares it with many versions of NVIDIA's headers (check_abi.py).
"""

from __future__ import annotations

import pytest
from abi import check_abi
from abi.check_abi import Header

pytestmark = [
    pytest.mark.skipif(check_abi.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cuda() -> Header:
    header, _ = check_abi.headers_around()
    if header is None:
        pytest.skip(
            "no cuda.h is among the Python packages, in CUDA_HOME or /usr/local/cuda; `make abi` downloads some"
        )
    return header


@pytest.fixture(scope="module")
def cufile() -> Header:
    _, header = check_abi.headers_around()
    if header is None or header.version == 0:
        pytest.skip("no cufile.h with its library is among the Python packages, in CUDA_HOME or /usr/local/cuda")
    return header


def test_doubles_export_what_is_called() -> None:
    assert check_abi.compile_doubles() == ""


def test_driver_is_declared_as_in_the_header_of_this_machine(cuda: Header) -> None:
    assert check_abi.compile_driver(cuda) == ""


def test_cufile_is_declared_as_in_the_header_of_this_machine(cufile: Header, cuda: Header) -> None:
    assert check_abi.compile_cufile(cufile, cuda) == ""


def test_mistakes_in_what_is_declared_of_the_driver_are_found(cuda: Header) -> None:
    some = check_abi.MISTAKES["driver"][::4]  # a constant, a call, an argument; `make abi` makes them all
    assert list(check_abi.mistakes_not_found("driver", [cuda], some)) == []


def test_calls_are_read_from_our_sources() -> None:
    assert check_abi.driver_calls()["MemFree"] == "cuMemFree_v2"
    assert check_abi.cufile_calls()["buf_deregister"] == "cuFileBufDeregister"
    assert check_abi.lost_errors()["LAUNCH_FAILED"] == 719
    double = check_abi.double_calls("cuda_double.cc", "cu")
    assert double["cuMemGetAddressRange_v2"] == "int(uint64_t* base, size_t* size_bytes, uint64_t address)"


def test_errors_that_end_a_process_are_read_from_a_header() -> None:
    text = """
    typedef enum cudaError_enum {
        /**
         * All is well.
         */
        CUDA_SUCCESS = 0,
        /**
         * To continue using CUDA, the process must be terminated
         * and relaunched.
         */
        CUDA_ERROR_GONE = 7,
        /**
         * The capture must be terminated.
         */
        CUDA_ERROR_NOT_GONE                 = 8
    } CUresult;
    """
    assert list(check_abi.driver_errors(text)) == ["CUDA_SUCCESS", "CUDA_ERROR_GONE", "CUDA_ERROR_NOT_GONE"]
    assert check_abi.documented_as_lost(text) == ["CUDA_ERROR_GONE"]
