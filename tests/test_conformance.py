"""The program of docs/conformance.md: the page follows from its rows, and a library that is missing has a reason."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from narrowgauge.contracts import CONTRACTS
from tests.paths import ROOT

MODULES = ("norm", "activation", "rotary", "training")


@pytest.fixture
def conformance(tmp_path, monkeypatch):
    """The module docs/conformance.py, with a copy of the page."""
    spec = importlib.util.spec_from_file_location("conformance_page", ROOT / "docs" / "conformance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "conformance.md")
    module.PAGE.write_text((ROOT / "docs" / "conformance.md").read_text(encoding="utf-8"), encoding="utf-8")
    return module


def made(conformance, *libraries, products=False):
    return conformance.page(None, list(libraries), {}, products=products, device="cpu")


def test_the_page_is_made_of_its_rows(conformance):
    """Texts, versions and tables of the committed page are those of the program and of conformance.toml."""
    assert made(conformance, products=True) == conformance.PAGE.read_text(encoding="utf-8")


def test_a_library_that_cannot_be_installed_has_a_reason(conformance, monkeypatch):
    def run(command, **_):
        return SimpleNamespace(returncode=int("pip" in command), stderr="ERROR: no wheel", stdout="")

    monkeypatch.setattr(conformance.subprocess, "run", run)
    monkeypatch.setattr(conformance.venv, "create", lambda folder, **_: folder.mkdir())
    page = made(conformance, "gguf")
    assert "| `gguf` | mxfp4 | not run: gguf cannot be installed: ERROR: no wheel | | |" in page
    assert "71 of 72 surveys are explained." in page


def test_the_error_of_a_survey_is_that_of_narrowgauge(conformance, monkeypatch):
    def run(command, **_):
        return SimpleNamespace(returncode=2, stdout="", stderr="narrowgauge: no GPU\n[W1126] a warning of torch")

    monkeypatch.setattr(conformance.subprocess, "run", run)
    assert conformance.survey(sys.executable, "", "jax", "nvfp4", "cpu") == {"error": "narrowgauge: no GPU"}


def test_a_product_that_is_not_confirmed_says_why(conformance):
    one = {"call": "f", "operands": "E4M3", "shapes": ["16x64x16", "16x128x16", "32x64x16"]}
    found = [
        ("16×64×16 float32: in order; 576 outputs predicted to the bit", True),
        ("16×128×16 float32: order not found: tiles differ", False),
        ("32×64×16 float32: in order; 576 outputs predicted to the bit", True),
    ]
    line = conformance.product_row(one, json.loads(json.dumps(found)), "CPU")
    orders = "in order (16×64×16, 32×64×16)<br>not confirmed: order not found: tiles differ (16×128×16)"
    assert line == f"| `f` | E4M3 | CPU | {orders} | 2 of 3 |"


def test_every_contract_of_rows_has_a_cell_for_each_library(conformance):
    """Contracts of norms, activations, rotary embedding and training, each once; a device only where the adapter of the
    library has the method; every letter is explained."""
    rows = [(operation, one) for one in conformance.CONTRACTS for operation in one["operations"]]
    of_modules = {name for name, one in CONTRACTS.items() if one.function.__module__.rpartition(".")[2] in MODULES}
    assert sorted(operation for operation, _ in rows) == sorted(of_modules)
    for operation, one in rows:
        for backend, cell in one.items():
            if backend == "operations":
                continue
            words = cell.replace(" (RMSNorm)", "").replace(" (blocks of the sum)", "").split(", ")
            assert set(words) <= {"CPU", "GPU", *conformance.REASONS}, (operation, backend)
            adapter = importlib.import_module(f"narrowgauge.harness.backends.adapters.{backend.partition(':')[0]}")
            runs = hasattr(adapter.Backend, operation.replace("-", "_"))
            assert runs or not {"CPU", "GPU"} & set(words), (operation, backend)
