"""What pytest makes of the ledger of known failures, of a job of GitHub, and of JUnit's properties."""

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from _pytest.junitxml import LogXML, xml_key

from narrowgauge.harness.pytest_plugin.junit import add_properties
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.report import report
from narrowgauge.harness.running.runner import run_case
from tests.harness import small_toml
from tests.harness.sample_backends import QUANTIZE, backend, quantize
from tests.paths import PLUGIN

pytest_plugins = ["pytester"]

CASES = small_toml.matrix()

KERNELS = """
import os

from narrowgauge.reference import ops


class Wrong:
    def quantize(self, x, recipe):
        if x.shape[1] == 32 and x.element_size() == 2:
            os._exit(3)
        q = ops.quantize(x, recipe)
        if x.shape[1] == 48:
            q.codes[2, 3] ^= 0x10
        return q
"""

BACKEND = "ledger_kernels:Wrong"
EXITS = "https://github.com/me/kernels/issues/13"
LEDGER = (
    small_toml.known(case="quantize/nvfp4/16x48/bf16/*", backend=BACKEND)
    + small_toml.known(case="quantize/nvfp4/16x32/*", backend=BACKEND, issue=EXITS, reason="exits", verdict="crash")
    + small_toml.known(case="quantize/nvfp4/16x32/fp32/normal", backend="another:Backend", reason="not this one's")
)

FP32, BF16 = (f"quantize/nvfp4/16x48/{dtype}/normal" for dtype in ("fp32", "bf16"))
WORDS = ("-p", "no:xdist", "--ng-backend", "ledger_kernels:Wrong")


@pytest.fixture(autouse=True, scope="module")
def everything_is_imported(tmp_path_factory):
    """Sessions in this process forget what they import, and torch, pandas and pyarrow cannot be imported twice."""
    failing = run_case(QUANTIZE, backend(quantize=quantize(lambda q: q.codes.bitwise_xor_(1))))
    report.write([failing.to_dict()], {}, tmp_path_factory.mktemp("report"), elapsed=1.0)


@pytest.fixture
def project(compiler, pytester, monkeypatch):
    """A folder with cases/small.toml and ledger_kernels.py; cases run in this process: another takes seconds."""
    (pytester.path / "cases").mkdir()
    (pytester.path / "cases" / "small.toml").write_text(CASES)
    (pytester.path / "cases" / "known.toml").write_text(LEDGER)
    pytester.makepyfile(ledger_kernels=KERNELS)
    pytester.makeini(
        f"[pytest]\naddopts = -p {PLUGIN} -p no:unraisableexception -p no:hypothesispytest\n"
        "narrowgauge_cases = cases\nnarrowgauge_tier = full\n"
    )
    for name in ("PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_WORKER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("narrowgauge.harness.pytest_plugin.session.in_process", lambda config: True)
    return pytester


@pytest.mark.long
def test_known_failures_are_xfailed_and_crashes_not_launched(project, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    result = project.runpytest_inprocess(*WORDS, "-rx", "--junitxml=junit.xml", "--ng-link", "https://ci.example/7")
    result.assert_outcomes(xfailed=3, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random(
        [
            f"XFAIL cases/small.toml::{BF16} - fail: ties (https://github.com/me/kernels/issues/12)*",
            "XFAIL cases/small.toml::*16x32/bf16/normal - crash: exits (https://github.com/me/kernels/issues/13)*",
            "::error file=cases/small.toml,line=2,title=codes wrong%2C no cause known%3A 1 case%2C quantize nvfp4 fp32"
            f"::{FP32}: *",
        ]
    )
    assert result.stdout.str().count("::error ") == 1
    for name in ("step.md", "reports/latest/summary.md"):
        text = (project.path / name).read_text(encoding="utf-8")
        assert "1 of 4 cases did not pass" in text
        assert text.endswith("The whole report: <https://ci.example/7>\n")
    tests = {test.get("name"): test for test in ElementTree.parse(project.path / "junit.xml").iter("testcase")}
    found = {name: {p.get("name"): p.get("value") for p in test.iter("property")} for name, test in tests.items()}
    assert found[BF16].items() >= {
        "verdict": "fail", "stage": "codes", "mismatches": "1", "recipe": "nvfp4", "shape": "16x48", "dtype": "bf16",
        "max_ulp": "1", "budget": "", "known": "ties (https://github.com/me/kernels/issues/12)",
    }.items()  # fmt: skip
    assert found[FP32]["known"] == ""
    assert all(len(properties) == 11 for properties in found.values())
    skipped = tests[BF16].find("skipped")
    assert skipped is not None
    assert skipped.get("type") == "pytest.xfail"


@pytest.mark.long
def test_an_unexpected_pass_is_a_failure_that_names_the_entry(project):
    (project.path / "mine.toml").write_text(LEDGER.replace("16x48/bf16", "16x48").replace("16x32/*", "16x32/bf16/*"))
    result = project.runpytest_inprocess("-p", "no:xdist", "--ng-backend", "reference", "--ng-known", "mine.toml")
    result.assert_outcomes(passed=4)
    text = LEDGER.replace("ledger_kernels:Wrong", "reference")
    (project.path / "mine.toml").write_text(text)
    result = project.runpytest_inprocess("-p", "no:xdist", "--ng-backend", "reference", "--ng-known", "mine.toml")
    result.assert_outcomes(passed=1, failed=1, xfailed=2)
    result.stdout.fnmatch_lines(
        [
            "[[]XPASS(strict)[]] passes, though it is known to fail: delete mine.toml: [[][[]known[]][]] 1, or "
            "narrow its pattern: ties (https://github.com/me/kernels/issues/12)"
        ]
    )
    result = project.runpytest_inprocess(
        "-p", "no:xdist", "--ng-backend", "reference", "--ng-known", "mine.toml", "--runxfail"
    )
    result.assert_outcomes(passed=4)


@pytest.mark.long
def test_a_wrong_ledger_is_one_error(project):
    (project.path / "cases" / "small2.toml").write_text(CASES)
    (project.path / "cases" / "known.toml").write_text(LEDGER.replace("16x48/bf16", "16x49/bf16"))
    result = project.runpytest_inprocess(*WORDS)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*known.toml: [[][[]known[]][]] 1: case 'quantize/nvfp4/16x49/bf16/[*]' matches no case (did you mean *"]
    )
    assert "Traceback" not in result.stdout.str()
    (project.path / "mine.toml").write_text("[[know]]")
    result = project.runpytest_inprocess(*WORDS, "--ng-known", "mine.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*mine.toml: unknown key 'know' (did you mean 'known'?*"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ng-link", "ci/7"), "--ng-link is 'ci/7'; it is the address of a page"),
        (("--ng-seed", "one"), "--ng-seed or narrowgauge_seed is 'one'; it is a whole number"),
        (("--ng-tier", "quik"), "--ng-tier or narrowgauge_tier is 'quik' (did you mean 'quick'?); it can be quick, "),
        (("--ng-device", "metal"), "--ng-device or narrowgauge_device is 'metal'; it can be cpu, cuda"),
        (("--ng-durations", "run"), "--ng-durations divides cases into shards, and no --ng-shard is given"),
    ],
)
def test_a_wrong_option_is_one_error(project, words, message):
    result = project.runpytest_inprocess(*WORDS, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_a_case_whose_pytest_worker_died_has_its_properties(tmp_path):
    xml = LogXML(tmp_path / "junit.xml", None)
    died = pytest.TestReport("cases/a.toml::a", ("cases/a.toml", None, "a"), {}, "failed", "died", "???")
    record = Record("a", "", "quantize", "nvfp4", "16x32", "bf16", "", "", "", "native", "cpu", 0, verdict="crash")
    add_properties(SimpleNamespace(stash={}), died, record.to_dict())
    add_properties(SimpleNamespace(stash={xml_key: xml}), died, record.to_dict())
    result = {p.get("name"): p.get("value") for p in xml.node_reporter(died).to_xml().iter("property")}
    assert (result["verdict"], result["recipe"], len(result)) == ("crash", "nvfp4", 11)
