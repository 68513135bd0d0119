"""Makes docs/conformance.md: which rule the quantizers of other libraries follow. Run it by `make conformance`.

Each library has an environment of its own, because libraries pin different versions of torch. A survey is `narrowgauge
dialect` of an adapter and a recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
HEAD = """# Conformance

Task: find out which rule the quantizer of a library follows, and where it leaves the rule:

```sh
narrowgauge dialect reference --recipe mxfp4
```

`make conformance` makes this page from one such survey for each library and recipe, on a CPU. Every survey has 95
inputs: families and edge cases in float32, bfloat16 and float16; a library refuses some. The column `equal` counts
inputs with every byte equal to the nearest [dialect](dialects.md). A survey is explained if a dialect and differences
of [known classes](backends.md#dialect-of-a-quantizer) give every byte. The classes are about signs, zeros, ties, NaN,
infinity and the ends of float32.

"""


def python_of(name: str, requirements: list[str], folder: Path) -> Path:
    """The interpreter of a library's environment, which is made and filled if it is missing."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints-cpu.txt")]
        subprocess.run([*install, "-e", str(ROOT), *requirements], check=True)
    return python


def survey(python: Path, backend: str, recipe: str) -> dict[str, Any]:
    """The answer of `narrowgauge dialect`, or its error."""
    command = [str(python), "-m", "narrowgauge", "dialect", backend, "--recipe", recipe, "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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


def page(folder: Path, only: list[str]) -> str:
    """The page."""
    rows: list[str] = []
    versions: list[str] = []
    jobs: list[tuple[Path, str, str]] = []
    for name, library in LIBRARIES.items():
        if only and name not in only:
            continue
        if "reason" in library:
            versions.append(f"| {name} | not run: {library['reason']} |")
            continue
        versions.append(f"| {name} | {', '.join(library['requirements'])} |")
        python = python_of(name, library["requirements"], folder)
        jobs += [(python, *line.split("@")) for line in library["surveys"]]  # type: ignore[misc]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job, answer in zip(jobs, pool.map(lambda job: survey(*job), jobs), strict=True):
            rows.append(row(job[1], job[2], answer))
            print(rows[-1], flush=True)
    explained = sum("| yes" in one for one in rows)
    return (
        HEAD + f"{explained} of {len(rows)} surveys are explained.\n\n"
        "| backend | recipe | dialect | equal | explained, and differences (inputs) |\n|---|---|---|---|---|\n"
        + "\n".join(rows) + "\n\n## Versions\n\n| library | packages |\n|---|---|\n" + "\n".join(versions) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".conformance", help="folder of the environments")
    parser.add_argument("libraries", nargs="*", help="libraries to survey (default: all)")
    given = parser.parse_args()
    text = page(given.environments, given.libraries)
    if given.libraries:
        sys.exit(0)
    (ROOT / "docs" / "conformance.md").write_text(text, encoding="utf-8")
