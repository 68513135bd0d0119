"""Contracts of a file, in a process of their own: `python -m narrowgauge.contract.traced_file FILE`.

The process reads requests as JSON from stdin: a list of arguments of `Contract.trace` by the name of a contract. The
process writes an object to stdout: the arguments of the contracts, the steps or the error of every request and of the
usual requests, and the imported files. No judging process imports the file of a user. This module does not import
torch.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowgauge.contract.declaration import Contract, place_of
from narrowgauge.spec.program import ContractError, request_key


def main(path: str) -> dict[str, Any]:
    """The answer for a file and the requests on stdin."""
    requests = json.load(sys.stdin)
    known = set(sys.modules)
    try:
        module = _imported(Path(path))
    except ContractError as error:
        return {"error": str(error)}
    except BaseException as error:
        return {"error": f"{place_of(error, path)}: cannot be imported: {type(error).__name__}: {error}"}
    contracts = {value.name: value for value in vars(module).values() if isinstance(value, Contract)}
    if not contracts:
        return {"error": f"{path}: holds no contract, a function with @contract; see docs/contracts.md"}
    answers = {}
    for name, contract in contracts.items():
        asked = [*contract.usual_requests(), *requests.get(name, ())]
        answers[name] = {request_key(request): contract.answer(request) for request in asked}
    return {
        "contracts": [contract.description for contract in contracts.values()],
        "answers": answers,
        "files": sorted(_own_files(set(sys.modules) - known)),
    }


def _imported(path: Path) -> ModuleType:
    """The module of a file, with imports of modules in its folder, also relative imports if the folder is a package."""
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    sys.path[:0] = [str(folder), os.getcwd()]
    spec = spec_from_file_location(".".join(parts), path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _own_files(modules: set[str]) -> set[str]:
    """Files of modules that belong neither to Python nor to an installed package."""
    installed = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    found = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {os.path.abspath(file) for file in found if file and not file.startswith(installed)}


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # what the file prints is no part of the answer
    with os.fdopen(answer, "w", encoding="utf-8") as out:
        json.dump(main(sys.argv[1]), out)
