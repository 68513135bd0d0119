"""Cases in one process under compute-sanitizer: `python -m narrowgauge.harness.tools.sanitize.sanitized_process FILE`.

The file has backend, seed, records (a path) and cases ([file, id] each). Every case of it is run once on the GPU, with
its own memory alone (`harness.backends.guard.bare`), and its record is a line of `records`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    """Run them. Raises BackendError where the backend cannot be loaded."""
    from narrowgauge.harness.backends.backend import load_backend
    from narrowgauge.harness.backends.guard import bare
    from narrowgauge.harness.cases.case import load
    from narrowgauge.harness.running.runner import run_case
    from narrowgauge.harness.running.worker import settle

    asked = json.loads(path.read_text(encoding="utf-8"))
    wanted = [tuple(case) for case in asked["cases"]]
    known = {(file, case.id): case for file in {file for file, _ in wanted} for case in load(Path(file))}
    backend = load_backend(asked["backend"], "cuda")
    with Path(asked["records"]).open("w", encoding="utf-8") as records, bare():
        for key in wanted:
            record = run_case(known[key], backend, device="cuda", seed=asked["seed"])
            usable = settle(record)
            records.write(json.dumps(record.to_dict()) + "\n")
            records.flush()
            if not usable:
                break  # no other case can run in this process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
