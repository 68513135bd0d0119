"""NVRTC without a GPU, a driver or CuPy: through cuda-bindings."""

from __future__ import annotations

import pytest

from native import cuda, sources


def missing() -> str | None:
    """Why NVRTC cannot be used here; None where it can."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); pip install 'narrowgauge[test]'"
    try:
        nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        return f"the NVRTC library cannot be loaded ({error}); pip install 'narrowgauge[test]'"
    return None


def compiled(source: str, target: str, *flags: str) -> bytes:
    """`source`.cu for `target` with the project's flags: a cubin for sm_…, PTX for compute_…."""
    from cuda.bindings import nvrtc

    def checked(answer: tuple) -> object:  # type: ignore[type-arg]
        result, *rest = answer
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            pytest.fail(f"{source}.cu for {target}: {result.name}\n{log()}")
        return rest[0] if rest else None

    def log() -> str:
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        text = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode(errors="replace")

    options = [option.encode() for option in (f"--gpu-architecture={target}", *cuda.FLAGS, *flags)]
    text = sources.text(source).encode()
    program = nvrtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], [])[1]
    size, get = (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        if target.startswith("sm_")
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    try:
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        out = bytes(checked(size(program)))  # type: ignore[call-overload]
        checked(get(program, out))
        return out
    finally:
        nvrtc.nvrtcDestroyProgram(program)
