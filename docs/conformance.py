"""Makes docs/conformance.md: which rule the quantizers of other libraries follow. Run it by `make conformance`.

Each library has an environment of its own, because libraries pin different versions of torch. A survey is `narrowgauge
dialect` of an adapter and a recipe. Libraries without a package are surveyed in a checkout that somebody gives by
`--checkout`. Rows of libraries that are not surveyed are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WRONG: list[dict[str, Any]] = LIBRARIES.pop("wrong")
PRODUCTS: list[dict[str, Any]] = LIBRARIES.pop("product")
PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Conformance

Task: find out which rule the quantizer of a library follows, and where it leaves the rule:

```sh
narrowgauge dialect reference --recipe mxfp4
```

`make conformance` makes this page from one such survey for each library and recipe, on a CPU. Every survey has 95
inputs: families and edge cases in float32, bfloat16 and float16; a library refuses some. The column `equal` counts
inputs with every byte equal to the nearest [dialect](dialects.md). A survey is explained if a dialect and differences
of [known classes](backends.md#dialect-of-a-quantizer) give every byte. The classes are about signs, zeros, ties, NaN,
infinity, the ends of float32 and arithmetic in float16.

"""
PRODUCTS_HEAD = """
## Products of matrices

The order in which a library adds the products of a GEMM, found by the [probe](accumulators.md#the-order-of-a-gemm). An
order is confirmed if it predicts random products to the bit. The order on a CPU depends on its instructions: these rows
are of an AMD EPYC with AVX-512. `python docs/conformance.py --products torch jax mlx` measures them again. The rows of
the H100 are of a single earlier measurement, which this page does not repeat; its shapes are counted and not listed. On
a GPU an order is that of a [model](accumulators.md#models) and its [composition](accumulators.md#order-of-a-product).

| call | operands | device | order (shapes M×K×N) | shapes confirmed |
|---|---|---|---|---|
"""
WRONG_HEAD = """
## What is wrong

A difference from a dialect is no mistake: libraries choose their rules. Each row here is a byte that contradicts the
library's own rule or the format, with the byte that a third opinion gives: ml_dtypes for codes of E2M1 and for NaN,
exact rational numbers for powers of two. `tests/harness/backends/test_accusations.py` has every input, and runs where
the library is installed.

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


def python_of(name: str, library: dict[str, Any], folder: Path) -> Path:
    """The interpreter of a library's environment, which is made and filled if it is missing. `alone`: requirements
    that are installed without their own, which need a GPU."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints-cpu.txt")]
        subprocess.run([*install, "-e", str(ROOT), *library.get("requirements", [])], check=True)
        if "alone" in library:
            subprocess.run([*install, "--no-deps", *library["alone"]], check=True)
    return python


def survey(python: Path, path: str, backend: str, recipe: str) -> dict[str, Any]:
    """The answer of `narrowgauge dialect`, or its error. `path`: a checkout of the library, or empty."""
    command = [str(python), "-m", "narrowgauge", "dialect", backend, "--recipe", recipe, "--json"]
    searched = os.pathsep.join(filter(None, [str(ROOT), path]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": searched}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    start = result.stdout.find("{")
    if start < 0:
        return {"error": (result.stderr.strip().splitlines() or ["no answer"])[-1]}
    answer: dict[str, Any] = json.loads(result.stdout[start:])
    return answer


def row(backend: str, recipe: str, answer: dict[str, Any]) -> str:
    """A row of the table."""
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


_PROBE = """
import json, sys, torch, narrowgauge
torch.set_num_threads(1)
one, names = json.loads(sys.argv[1]), {"torch": torch}
exec(one.get("setup", ""), names)
function, dtype = eval(one["function"], names), getattr(torch, one["dtype"])
found = [narrowgauge.accumulation_order(function, *map(int, s.split("x")), dtype=dtype) for s in one["shapes"]]
print(json.dumps([[str(order), order.confirmed] for order in found]))
"""


def product_row(one: dict[str, Any], found: list[tuple[str, bool]]) -> str:
    """A row of the table of products. `found`: the sentence of each shape, and whether it is confirmed."""
    if "device" in one:
        return f"{_product_start(one)} {one['order']} | {one['confirmed']} |"
    shapes: dict[str, list[str]] = {}
    for (sentence, _), shape in zip(found, one["shapes"], strict=True):
        order = sentence.partition(": ")[2].rpartition("; ")[0]
        shapes.setdefault(order, []).append(shape.replace("x", "×"))
    orders = [f"{order} ({', '.join(named)})" for order, named in shapes.items()]
    confirmed = f"{sum(sure for _, sure in found)} of {len(found)}"
    return f"{_product_start(one)} {'<br>'.join(orders)} | {confirmed} |"


def _product_start(one: dict[str, Any]) -> str:
    return f"| `{one['call']}` | {one['operands']} | {one.get('device', 'CPU')} |"


def product_rows(folder: Path, libraries: list[str]) -> list[str]:
    """The rows of all products: those of `libraries` on a CPU are measured, the others are kept."""
    kept = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = []
    for one in PRODUCTS:
        if "device" in one:
            rows.append(product_row(one, []))
        elif one["library"] in libraries:
            python = python_of(one["library"], LIBRARIES[one["library"]], folder)
            command = [str(python), "-c", _PROBE, json.dumps(one)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
            rows.append(product_row(one, json.loads(result.stdout.splitlines()[-1])))
        else:
            rows += [line for line in kept if line.startswith(_product_start(one))][:1]
    return rows


def library_of(line: str) -> str:
    """The library of a row of the first table."""
    return line.split("`")[1].partition(":")[0]


def kept_rows() -> dict[str, list[str]]:
    """The rows of the page as it is, by library."""
    found: dict[str, list[str]] = {}
    if PAGE.exists():
        table = PAGE.read_text(encoding="utf-8").split("\n## Versions")[0]
        for line in table.splitlines():
            if line.startswith("| `"):
                found.setdefault(library_of(line), []).append(line)
    return found


def page(folder: Path, only: list[str], checkouts: dict[str, str], *, products: bool) -> str:
    """The page. `products`: measure products of matrices in place of quantizers."""
    found = product_rows(folder, only if products else [])
    rows = kept_rows()
    versions: list[str] = []
    jobs: list[tuple[Path, str, str, str]] = []
    for name, library in LIBRARIES.items():
        versions.append(f"| {name} | {', '.join((*library.get('requirements', []), *library.get('alone', [])))}")
        versions[-1] += f"{library.get('note', '')} |"
        if products or not library["surveys"] or (only and name not in only):
            continue
        if "checkout" in library and name not in checkouts:
            continue
        rows[name] = []
        python = python_of(name, library, folder)
        jobs += [(python, checkouts.get(name, ""), *line.split("@")) for line in library["surveys"]]  # type: ignore[misc]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job, answer in zip(jobs, pool.map(lambda job: survey(*job), jobs), strict=True):
            line = row(job[2], job[3], answer)
            rows[library_of(line)].append(line)
            print(line, flush=True)
    return assembled([line for name in LIBRARIES for line in rows.get(name, [])], versions, found)


def assembled(rows: list[str], versions: list[str], products: list[str]) -> str:
    """The page of its rows."""
    explained = sum("| yes" in one for one in rows)
    return (
        HEAD + f"{explained} of {len(rows)} surveys are explained.\n\n"
        "| backend | recipe | dialect | equal | explained, and differences (inputs) |\n|---|---|---|---|---|\n"
        + "\n".join(rows) + "\n\n## Versions\n\n| library | packages |\n|---|---|\n" + "\n".join(versions) + "\n"
        + PRODUCTS_HEAD + "\n".join(products) + "\n" + WRONG_HEAD + "\n".join(wrong_rows()) + "\n" + WRONG_END
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".conformance", help="folder of the environments")
    parser.add_argument("--checkout", action="append", default=[], metavar="LIBRARY=FOLDER", help="folder of a library")
    parser.add_argument("libraries", nargs="*", help="libraries to survey (default: all)")
    parser.add_argument("--products", action="store_true", help="measure products of matrices of these libraries")
    given = parser.parse_args()
    checkouts = dict(one.split("=", 1) for one in given.checkout)
    PAGE.write_text(page(given.environments, given.libraries, checkouts, products=given.products), encoding="utf-8")
