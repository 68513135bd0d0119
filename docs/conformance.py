"""Makes docs/conformance.md: which rule the quantizers of other libraries follow. Run it by `make conformance`.

Each library has an environment of its own, because libraries pin different versions of torch. An environment has 1 to
4 GB and is removed after the surveys of its library, unless `--environments` gives a folder. A survey is `narrowgauge
dialect` of an adapter and a recipe. Libraries without a package are surveyed in a checkout that somebody gives by
`--checkout`. With `--device cuda` the libraries are those of the interpreter that runs this program. Rows of libraries
that are not surveyed are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WRONG: list[dict[str, Any]] = LIBRARIES.pop("wrong")
PRODUCTS: list[dict[str, Any]] = LIBRARIES.pop("product")
RUNS: list[dict[str, str]] = LIBRARIES.pop("run")
CONTRACTS: list[dict[str, Any]] = LIBRARIES.pop("contract")
REASONS: dict[str, str] = LIBRARIES.pop("contract-reasons")
NOT_RUN: list[dict[str, str]] = LIBRARIES.pop("not-run")
PAGE = Path(__file__).with_suffix(".md")
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
HEAD = """# Conformance

Task: find out which rule the quantizer of a library follows, and where it leaves the rule:

```sh
narrowgauge dialect reference --recipe mxfp4
```

Most readers need this table: the [dialects](dialects.md) of each library on a CPU, and the number of its
[wrong bytes](#wrong-bytes). A library follows its dialect but for rare inputs: signs, zeros, ties, NaN, infinity, the
ends of float32 and arithmetic in float16.

"""
SURVEYS_HEAD = """
## Surveys

`make conformance` makes this page from a survey of every library and recipe, on a CPU. A survey has 95 inputs:
families and edge cases in float32, bfloat16 and float16, less the inputs refused by the library. The column `equal`
counts inputs with every byte equal to the nearest dialect. A survey is explained if a dialect and differences of
[known classes](backends.md#dialect-of-a-quantizer) give every byte.

"""
COLUMNS = "recipe | dialect | equal | explained, and differences (inputs) |\n|---|---|---|---|---|"
GPU_HEAD = """
## On a GPU

Surveys of kernels for a GPU, with the versions that ran. `python docs/conformance.py --device cuda` measures them in
an interpreter that has the libraries.

"""
RUNS_HEAD = """
## Operations judged

Results of `narrowgauge run --backend …` in the quick tier; rows of norms, activations, caches and weights are of
`narrowgauge run docs/libraries.toml --backend …`. FP8 tensor cores of Hopper keep 13 fraction bits, so the adapters
declare [`probe-13`](accumulators.md#declare-the-probe). Cases that an adapter does not take, such as float32 outputs
with scales of rows, are not counted.

| backend | device | cases | passed | remark |
|---|---|---|---|---|
"""
CONTRACTS_HEAD = """
### Norms, activations and rotary embedding

Devices on which a library's own kernel was judged for each [contract](contracts.md#contracts-of-the-package), or why
not.

"""
NOT_RUN_HEAD = """
## Not run

| kernel | reason |
|---|---|
"""
PRODUCTS_HEAD = """
## Products of matrices

The order in which a library adds the products of a GEMM, found by the [probe](accumulators.md#the-order-of-a-gemm). An
order is confirmed if it predicts random products to the bit. The order on a CPU depends on its instructions: these rows
are of an AMD EPYC with AVX-512. `python docs/conformance.py --products torch jax mlx` measures them again, and with
`--device cuda` those of a GPU. On a GPU an order is that of a [model](accumulators.md#models) and its
[composition](accumulators.md#order-of-a-product).

| call | operands | device | order (shapes M×K×N) | shapes confirmed |
|---|---|---|---|---|
"""
WRONG_HEAD = """
## Wrong bytes

A difference from a dialect is no mistake: libraries choose their rules. A row of this table is a byte against the
library's own rule or against the format, with the byte of a third opinion: ml_dtypes for codes of E2M1, for bfloat16
and for NaN, exact rational numbers for powers of two. `tests/harness/backends/test_accusations.py` has every input, and
runs where the library is installed.

| name | input and mistake | library and recipe | its byte | third opinion |
|---|---|---|---|---|
"""
WRONG_END = """
In bfloat16 microxcaling adds 1/2 in bfloat16: 13 of 32 768 normal random elements of MXFP4 go to the wrong side. The
adapter takes float32 alone.
"""


def wrong_rows() -> list[str]:
    """The rows of the table of mistakes."""
    return [
        f"| {one['name']} | {one['mistake']} | `{one['library']}` {one['recipe']} | {one['byte']} | {one['opinion']} |"
        for one in WRONG
    ]


class NotInstalled(Exception):
    """A library cannot be installed. The message is that of pip."""


@contextmanager
def interpreter(name: str, folder: Path | None, device: str) -> Iterator[Path]:
    """The interpreter that has a library: on a GPU that of this program, else that of the library's environment in
    `folder`. Without a folder the environment is removed at the end. Raises NotInstalled."""
    if device == "cuda":
        yield Path(sys.executable)
    elif folder is not None:
        yield python_of(LIBRARIES[name], folder / name)
    else:
        with tempfile.TemporaryDirectory(prefix="conformance-") as new:
            yield python_of(LIBRARIES[name], Path(new) / name)


def python_of(library: dict[str, Any], folder: Path) -> Path:
    """The interpreter of an environment, which is made and filled if it is missing. `alone`: requirements that are
    installed without their own, which need a GPU. Raises NotInstalled."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints-cpu.txt")]
    # A CPU build of torch, if its index can be reached: constraints-cpu.txt says why torch alone.
    cpu_torch = ["--no-deps", "--retries", "1", "--timeout", "15", "--index-url", TORCH_INDEX, "torch"]
    if TORCH_INDEX:
        subprocess.run([*install, *cpu_torch], capture_output=True, check=False)
    commands = [[*install, "-e", str(ROOT), *library.get("requirements", [])]]
    if "alone" in library:
        commands.append([*install, "--no-deps", *library["alone"]])
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            shutil.rmtree(folder)
            raise NotInstalled((result.stderr.strip().splitlines() or ["pip failed"])[-1])
    return python


def survey(python: Path, path: str, backend: str, recipe: str, device: str) -> dict[str, Any]:
    """The answer of `narrowgauge dialect`, or its error. `path`: a checkout of the library, or empty."""
    command = [
        str(python),
        "-m",
        "narrowgauge",
        "dialect",
        backend,
        "--recipe",
        recipe,
        "--format",
        "json",
        "--device",
        device,
    ]
    environment = environment_of(path if device == "cpu" else os.environ.get("PYTHONPATH", ""))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    start = result.stdout.find("{")
    if start < 0:
        lines = result.stderr.strip().splitlines() or ["no answer"]
        return {"error": next((line for line in lines if line.startswith("narrowgauge: ")), lines[-1])}
    answer: dict[str, Any] = json.loads(result.stdout[start:])
    return answer


def environment_of(path: str) -> dict[str, str]:
    """Environment of a measuring process, with this package and `path` among the folders of its modules."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}


def row(backend: str, recipe: str, answer: dict[str, Any], device: str) -> str:
    """A row of the table."""
    if device == "cuda":
        recipe += f" | {on_gpu(answer.get('versions', {}))}"
    if "error" in answer:
        return f"| `{backend}` | {recipe} | not run: {answer['error']} | | |"
    nearest = next(one for one in answer["dialects"] if one["dialect"] == answer["nearest"])
    names = " or ".join(answer["matching"]) or answer["nearest"]
    fields = [f"`{name}` is `{pair['own']}`" for name, pair in answer["changes"].items()]
    classes = [f"{one['class']} ({len(one['inputs'])})" for one in answer["differences"]]
    explained = "yes" if answer["explained"] else "**no**"
    listed = "; ".join(fields + classes) or "none"
    equal = f"{nearest['inputs_explained']}/{answer['inputs']}"
    return f"| `{backend}` | {recipe} | {names} | {equal} | {explained}: {listed} |"


def on_gpu(versions: dict[str, str]) -> str:
    """The GPU, and the versions of the libraries on it."""
    import torch

    listed = [f"{name} {version}" for name, version in versions.items() if name not in ("Python", "narrowgauge")]
    return ", ".join([torch.cuda.get_device_name().removeprefix("NVIDIA ").partition(" ")[0], *listed])


_PROBE = """
import json, sys, torch, narrowgauge
from narrowgauge.harness.tools.dialect.versions import versions
torch.set_num_threads(1)
one, device = json.loads(sys.argv[1]), sys.argv[2]
names = {"torch": torch, "ones": lambda *shape: torch.ones(shape, device=device)}
exec(one.get("setup", ""), names)
function, dtypes = eval(one["function"], names), [getattr(torch, name) for name in one["dtype"].split(" x ")]
dtype = dtypes[0] if len(dtypes) == 1 else tuple(dtypes)
print(json.dumps(versions(one["library"])))
for shape in one["shapes"]:
    order = narrowgauge.accumulation_order(function, *map(int, shape.split("x")), dtype=dtype, device=device)
    print(json.dumps([str(order), order.confirmed]), flush=True)
"""


def product_row(one: dict[str, Any], found: list[tuple[str, bool]], place: str) -> str:
    """A row of the table of products. `found`: the sentence of each shape, and whether it is confirmed. `place`: CPU,
    or the GPU and versions."""
    shapes: dict[str, list[str]] = {}
    for (sentence, sure), shape in zip(found, one["shapes"], strict=True):
        order = sentence.partition(": ")[2]
        order = order.rpartition("; ")[0] if sure else f"not confirmed: {order}"
        shapes.setdefault(order, []).append(shape.replace("x", "×"))
    orders = [f"{order} ({', '.join(named)})" for order, named in shapes.items()]
    confirmed = f"{sum(sure for _, sure in found)} of {len(found)}"
    return f"| `{one['call']}` | {one['operands']} | {place} | {'<br>'.join(orders)} | {confirmed} |"


def measured_product(one: dict[str, Any], python: Path) -> str:
    """The row of a product, measured on its device."""
    device = one.get("device", "cpu")
    environment = environment_of("" if device == "cpu" else os.environ.get("PYTHONPATH", ""))
    command = [str(python), "-c", _PROBE, json.dumps(one), device]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{one['call']} of {one['operands']} cannot be probed:\n{result.stdout}{result.stderr}")
    versions, *found = map(json.loads, result.stdout.splitlines()[-1 - len(one["shapes"]) :])
    line = product_row(one, found, on_gpu(versions) if device == "cuda" else "CPU")
    print(line, flush=True)
    return line


def product_rows(folder: Path | None, libraries: list[str], device: str) -> list[str]:
    """The rows of all products: those of `libraries` on the device are measured, the others are kept."""
    kept = section("Products of matrices")
    measured: dict[int, str] = {}
    for name in libraries:
        asked = [one for one in PRODUCTS if one["library"] == name and one.get("device", "cpu") == device]
        with interpreter(name, folder, device) as python, ThreadPoolExecutor(4 if device == "cuda" else 1) as pool:
            measured.update(
                zip(map(id, asked), pool.map(lambda one: measured_product(one, python), asked), strict=True)
            )
    rows = [measured.get(id(one)) or _kept_product(one, kept) for one in PRODUCTS]
    return [row for row in rows if row]


def _kept_product(one: dict[str, Any], kept: list[str]) -> str:
    """The row of a product on the page as it is; empty if the product is new."""
    start = f"| `{one['call']}` | {one['operands']} | "
    on_cpu = one.get("device", "cpu") == "cpu"
    return next((row for row in kept if row.startswith(start) and row.startswith(f"{start}CPU |") == on_cpu), "")


def section(title: str) -> list[str]:
    """The rows of tables in a section of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = text.split("\n## ")
    found = next((part for part in parts if part.startswith(f"{title}\n")), "")
    return [line for line in found.splitlines() if line.startswith("| `")]


def by_library(lines: list[str]) -> dict[str, list[str]]:
    """Rows of surveys by library."""
    found: dict[str, list[str]] = {name: [] for name in LIBRARIES}
    for line in lines:
        found[line.split("`")[1].partition(":")[0]].append(line)
    return found


def surveyed(name: str, surveys: list[str], folder: Path | None, path: str, device: str) -> list[str]:
    """The rows of a library. `surveys`: backend@recipe. `path`: a checkout of the library, or empty."""
    pairs = [one.split("@") for one in surveys]
    try:
        with interpreter(name, folder, device) as python, ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = list(pool.map(lambda pair: survey(python, path, *pair, device), pairs))
    except NotInstalled as error:
        answers = [{"error": f"{name} cannot be installed: {error}"}] * len(pairs)
    rows = [row(*pair, answer, device) for pair, answer in zip(pairs, answers, strict=True)]
    print("\n".join(rows), flush=True)
    return rows


def page(folder: Path | None, only: list[str], checkouts: dict[str, str], *, products: bool, device: str) -> str:
    """The page. `products`: measure products of matrices in place of quantizers."""
    found = product_rows(folder, only if products else [], device)
    rows = {name: by_library(section(title)) for name, title in (("cpu", "Surveys"), ("cuda", "On a GPU"))}
    for name, library in LIBRARIES.items():
        surveys = library.get("surveys" if device == "cpu" else "gpu", [])
        if products or not surveys or (only and name not in only):
            continue
        if device == "cpu" and "checkout" in library and name not in checkouts:
            continue
        rows[device][name] = surveyed(name, surveys, folder, checkouts.get(name, ""), device)
    return assembled(*([line for lines in rows[name].values() for line in lines] for name in ("cpu", "cuda")), found)


def _run_row(run: dict[str, str]) -> str:
    return f"| `{run['backend']}` | {run['device']} | {run['cases']} | {run['passed']} | {run['remark']} |"


def contract_rows() -> list[str]:
    """The lines of the table of contracts and libraries, and its reasons."""
    backends = [name for name in CONTRACTS[0] if name != "operations"]
    lines = [["contract", *(f"`{name}`" for name in backends)], ["---"] * (len(backends) + 1)]
    lines += [[", ".join(one["operations"]), *(one[name] for name in backends)] for one in CONTRACTS]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in REASONS.items())
    return [
        *(f"| {' | '.join(line)} |".replace("| --- ", "|---").replace("--- |", "---|") for line in lines),
        "",
        f"{reasons}.",
    ]


def summary(rows: list[str]) -> list[str]:
    """Lines of a table: the dialects of each library by kind of recipe, and the number of its wrong bytes."""
    lines = ["| library | NVFP4 | MX | FP8 | wrong bytes |", "|---|---|---|---|---|"]
    for name, surveys in by_library(rows).items():
        kinds: dict[str, list[str]] = {"nvfp4": [], "mx": [], "fp8": []}
        for cells in (survey.split(" | ") for survey in surveys):
            dialects = next(found for kind, found in kinds.items() if cells[1].startswith(kind))
            if not cells[2].startswith("not run") and cells[2] not in dialects:
                dialects.append(cells[2])
        wrong = sum(one["library"] == name for one in WRONG)
        if surveys:
            lines.append(f"| {name} | {' | '.join(', '.join(found) or '–' for found in kinds.values())} | {wrong} |")
    return lines


def assembled(rows: list[str], gpu_rows: list[str], products: list[str]) -> str:
    """The page of its rows."""
    explained = sum("| yes" in one for one in [*rows, *gpu_rows])
    installed = {
        name: ", ".join((*library.get("requirements", []), *library.get("alone", []))) + library.get("note", "")
        for name, library in LIBRARIES.items()
        if "surveys" in library
    }
    versions = [f"| {name} | {packages} |" for name, packages in installed.items()]
    return (
        HEAD + "\n".join(summary(rows)) + "\n" + SURVEYS_HEAD
        + f"{explained} of {len(rows) + len(gpu_rows)} surveys are explained.\n\n| backend | {COLUMNS}\n"
        + "\n".join(rows) + "\n" + GPU_HEAD + f"| backend | {COLUMNS.replace('recipe |', 'recipe | GPU |', 1)}---|\n"
        + "\n".join(gpu_rows) + "\n\n## Versions\n\n| library | packages |\n|---|---|\n" + "\n".join(versions) + "\n"
        + PRODUCTS_HEAD + "\n".join(products) + "\n"
        + RUNS_HEAD + "\n".join(map(_run_row, RUNS)) + "\n"
        + CONTRACTS_HEAD + "\n".join(contract_rows()) + "\n"
        + NOT_RUN_HEAD + "\n".join(f"| {one['kernel']} | {one['reason']} |" for one in NOT_RUN) + "\n"
        + WRONG_HEAD + "\n".join(wrong_rows()) + "\n" + WRONG_END
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, help="folder that keeps the environments (default: none is kept)")
    parser.add_argument("--checkout", action="append", default=[], metavar="LIBRARY=FOLDER", help="folder of a library")
    parser.add_argument("libraries", nargs="*", help="libraries to survey (default: all)")
    parser.add_argument("--products", action="store_true", help="measure products of matrices of these libraries")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: kernels of a GPU, in this Python"
    )
    given = parser.parse_args()
    checkouts = dict(one.split("=", 1) for one in given.checkout)
    PAGE.write_text(
        page(given.environments, given.libraries, checkouts, products=given.products, device=given.device),
        encoding="utf-8",
    )
