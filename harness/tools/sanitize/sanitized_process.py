"""Cases in one process under compute-sanitizer: `python -m narrowgauge.harness.tools.sanitize.sanitized_process FILE`.

FILE is JSON with backend, seed, records (a path) and cases ([file, id] each). Every case runs once on the GPU, in
unguarded memory (`harness.backends.guard.without_guards`), and its record is written as a line of `records`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    """Run the cases of a file. Raises BackendError if the backend cannot be loaded."""
    from narrowgauge.harness.backends.backend import load_backend
    from narrowgauge.harness.backends.guard import without_guards
    from narrowgauge.harness.cases.case_file import load
    from narrowgauge.harness.running.runner import run_case

    request = json.loads(path.read_text(encoding="utf-8"))
    case_keys = [tuple(case) for case in request["cases"]]
    cases_by_key = {(file, case.id): case for file in {file for file, _ in case_keys} for case in load(Path(file))}
    backend = load_backend(request["backend"], "cuda")
    with Path(request["records"]).open("w", encoding="utf-8") as records, without_guards():
        for key in case_keys:
            record = run_case(cases_by_key[key], backend, device="cuda", seed=request["seed"])
            records.write(json.dumps(record.to_dict()) + "\n")
            records.flush()
            if record.verdict == "crash":
                break  # after an error the GPU runs no other case in this process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
