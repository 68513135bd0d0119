"""NVRTC without a GPU, a driver or CuPy: through cuda-bindings."""

from __future__ import annotations

import pytest

from narrowgauge.native.runtime import cuda, sources


def missing() -> str | None:
    """Reason why NVRTC cannot be used on this machine, or None."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); pip install 'narrowgauge[test]'"
    try:
        nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        return f"the NVRTC library cannot be loaded ({error}); pip install 'narrowgauge[test]'"
    return None


def cubin_and_ptx(source: str, architecture: str, *flags: str) -> tuple[bytes, str]:
    """`source`.cu for an architecture, sm_…, with the project's flags: the cubin and its PTX."""
    cubin, text = _compiled(source, architecture, flags, "CUBIN", "PTX")
    return cubin, text.decode()


def ptx(source: str, target: str, *flags: str) -> str:
    """`source`.cu for a virtual architecture, compute_…, with the project's flags."""
    return _compiled(source, target, flags, "PTX")[0].decode()


def _compiled(source: str, target: str, flags: tuple[str, ...], *kinds: str) -> list[bytes]:
    """Outputs of a compilation, by their names in NVRTC's functions."""
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

    def given(kind: str) -> bytes:
        out = bytes(checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))  # type: ignore[call-overload]
        checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, out))
        return out

    options = [option.encode() for option in (f"--gpu-architecture={target}", *cuda.FLAGS, *flags)]
    text = sources.text(source).encode()
    program = nvrtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], [])[1]
    try:
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        return [given(kind) for kind in kinds]
    finally:
        nvrtc.nvrtcDestroyProgram(program)
