"""Case files: expansion, selection, messages for mistakes, and the committed matrix."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.case_file import (
    CaseFileError,
    ForeignFile,
    case_path,
    default_cases,
    few_points,
    load,
    load_all,
    shipped_cases,
    unused_default,
)
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.families import FAMILIES
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id
from narrowgauge.harness.cases.sections import KINDS
from narrowgauge.harness.records.record import new_record
from tests.matrix import all_cases
from tests.paths import CASES

QUANTIZE = {"operation": "'quantize'", "tier": "'quick'", "recipe": "'nvfp4'", "shape": "[128, 256]"}
QUANTIZE |= {"dtype": "'bf16'", "inputs": "'normal'"}
GEMM = {"operation": "'gemm'", "tier": "'quick'", "recipe": "'nvfp4'", "shape": "[16, 32, 48]", "inputs": "'normal'"}
GEMM |= {"x": "'bf16'", "w": "'fp32'", "out": "'fp16'"}
GROUPED = QUANTIZE | {"operation": "'quantize-grouped'", "sections": "'even:4'"}
PRODUCT = GEMM | {"operation": "'gemm-grouped'", "sections": "'even:4'"}
AGAIN = GEMM | {"operation": "'gemm-quantized'", "recipe": "'mxfp8-e4m3'", "out_recipe": "'mxfp8-e5m2'"}
TRANSFORM = QUANTIZE | {"operation": "'transform'", "recipe": "'nvfp4-rht'"}
SWIZZLE = {"operation": "'swizzle'", "tier": "'quick'", "shape": "[256, 16]", "inputs": "'position'"}
UPDATE = SWIZZLE | {"operation": "'update-scale'", "recipe": "'fp8-delayed-e4m3'", "inputs": "'amaxes'"}
ROTATED = QUANTIZE | {"recipe": "'nvfp4-rht'"}


def matrix(*tables: dict[str, str]) -> str:
    """TOML of [[matrix]] tables of these keys and literal values."""
    return "\n".join("[[matrix]]\n" + "\n".join(f"{key} = {value}" for key, value in t.items()) for t in tables)


@pytest.fixture
def write(tmp_path):
    def write(*tables: dict[str, str], name: str = "a.toml", text: str | None = None) -> Path:
        path = tmp_path / name
        path.write_text(matrix(*tables) if text is None else text, encoding="utf-8")
        return path

    return write


def ids(cases: list[Case]) -> list[str]:
    return [case.id for case in cases]


# Expansion.


def test_lists_are_a_product_in_order(write):
    lists = {"shape": "[[128, 128], [16, 32]]", "dtype": "['fp32', 'fp16']", "usage": "['rowwise', 'columnwise']"}
    assert ids(load(write(QUANTIZE | lists))) == [
        "quantize/nvfp4/128x128/fp32/normal",
        "quantize/nvfp4/128x128/fp32/normal/columnwise",
        "quantize/nvfp4/128x128/fp16/normal",
        "quantize/nvfp4/128x128/fp16/normal/columnwise",
        "quantize/nvfp4/16x32/fp32/normal",
        "quantize/nvfp4/16x32/fp32/normal/columnwise",
        "quantize/nvfp4/16x32/fp16/normal",
        "quantize/nvfp4/16x32/fp16/normal/columnwise",
    ]


DTYPES_OF = {"quick": "['bf16']", "quick-cuda": "['bf16', 'fp16']", "full": "['bf16', 'fp16', 'fp32']"}


@pytest.mark.parametrize("order", list(itertools.permutations(DTYPES_OF)))
def test_a_case_of_several_tables_has_the_first_tier(write, order):
    cases = load(write(*(QUANTIZE | {"tier": f"'{tier}'", "dtype": DTYPES_OF[tier]} for tier in order)))
    assert {(case.dtype, case.tier) for case in cases} == {("bf16", "quick"), ("fp16", "quick-cuda"), ("fp32", "full")}
    assert len(cases) == 3


def test_a_table_of_values_has_few_quick_cases(write):
    lists = {"recipe": ["nvfp4", "mxfp8-e4m3", "mxfp4"], "dtype": ["fp32", "bf16"], "inputs": ["normal", "zeros"]}
    path = write(QUANTIZE | {"tier": "'quick-values'", **{name: str(values) for name, values in lists.items()}})
    cases = load(path)
    on_cpu, on_gpu = (select(cases, tier="quick", device=device) for device in ("cpu", "cuda"))
    assert len(on_cpu) == 3
    assert len(on_gpu) == len(cases) == 12
    assert {name: {getattr(case, name) for case in on_cpu} for name in lists} == {
        name: set(values) for name, values in lists.items()
    }


@pytest.mark.parametrize("lengths", [(), (1,), (3,), (1, 4), (2, 3), (2, 2, 2, 2), (3, 1, 4, 2), (5, 2, 13)])
def test_few_points_have_every_value_of_lists(lengths):
    points = list(itertools.product(*map(range, lengths)))
    chosen = [points[number] for number in few_points(lengths)]
    assert len(chosen) == max(lengths, default=1)
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == list(lengths)


def test_the_device_decides_the_tier(write):
    cases = load(write(*(QUANTIZE | {"tier": f"'{tier}'", "dtype": DTYPES_OF[tier]} for tier in DTYPES_OF)))
    for device, quick in {"cpu": {"bf16"}, "cuda": {"bf16", "fp16"}}.items():
        assert {case.dtype for case in select(cases, tier="quick", device=device)} == quick
        assert {case.dtype for case in cases if case.tier_on(device) == "full"} == {"bf16", "fp16", "fp32"} - quick
        assert select(cases, tier="full", device=device) == cases
        for case in cases:
            assert new_record(case, backend="b", device=device, seed=0).tier == case.tier_on(device)


# Selection.


def test_folders_and_files(write, tmp_path):
    write(QUANTIZE | {"dtype": "'fp32'"}, name="b.toml")
    write(QUANTIZE, name="a.toml")
    (tmp_path / "README.md").write_text("no case file")
    assert [case.dtype for case in load_all([tmp_path])] == ["bf16", "fp32"]
    assert [case.dtype for case in load_all([tmp_path / "b.toml", str(tmp_path / "a.toml")])] == ["fp32", "bf16"]


def test_select_by_tier_and_keyword(write):
    full = QUANTIZE | {"tier": "'full'", "inputs": "['normal', 'e2m1-ties']", "dtype": "['fp32', 'bf16']"}
    cases = load(write(QUANTIZE, full))
    assert len(select(cases)) == 4
    assert ids(select(cases, tier="quick")) == ["quantize/nvfp4/128x256/bf16/normal"]
    assert ids(select(cases, keyword="e2m1 and not FP32")) == ["quantize/nvfp4/128x256/bf16/e2m1-ties"]
    assert len(select(cases, keyword="(bf16 or fp32) and normal")) == 2
    assert select(cases, tier="quick", keyword="fp32") == []


def test_an_id_is_a_word_of_a_keyword_expression(committed):
    """With the dialect of a recipe, and the rows of sections."""
    for mark in ("mxfp4@ocp", "rows:17,0,79", "steps:3+accumulate"):
        name = next(case.id for case in committed if mark in case.id)
        assert name in ids(select(committed, keyword=name))
        assert all(name in other for other in ids(select(committed, keyword=name)))
    assert all("mxfp4@ocp" in name for name in ids(select(committed, keyword="mxfp4@ocp and not @even")))
    assert select(committed, keyword="mxfp4@ocp and not mxfp4@ocp") == []


# Mistakes: the file, the table, the key, the nearest word.

MISTAKES = [
    (QUANTIZE | {"operation": "'quantise'"}, "operation is 'quantise' (did you mean 'quantize'?)"),
    ({}, "operation is None; it can be gemm, gemm-grouped, gemm-quantized, grouped-linear, layernorm-linear, linear"),
    (QUANTIZE | {"tier": "'quik'"}, "tier is 'quik' (did you mean 'quick'?)"),
    (
        {k: v for k, v in QUANTIZE.items() if k != "tier"},
        "tier is None; it can be quick, quick-values, quick-cuda, full",
    ),
    (QUANTIZE | {"dtpye": "'bf16'"}, "unknown key 'dtpye' (did you mean 'dtype'?)"),
    ({k: v for k, v in QUANTIZE.items() if k != "dtype"}, "dtype is missing; a quantize needs recipe, shape, "),
    ({k: v for k, v in GEMM.items() if k != "out"}, "out is missing; a gemm needs recipe, shape, x, w, out, inputs"),
    (QUANTIZE | {"inputs": "[]"}, "inputs is an empty list, which selects nothing"),
    (QUANTIZE | {"recipe": "'nvpf4'"}, "recipe is 'nvpf4': no recipe is called 'nvpf4' (did you mean 'nvfp4'"),
    (QUANTIZE | {"recipe": "'nvfp4@te-2.9'"}, "recipe nvfp4 has no dialect 'te-2.9' (did you mean 'te-2.8'?)"),
    (QUANTIZE | {"recipe": "[['nvfp4']]"}, "recipe is ['nvfp4'], not a recipe's name"),
    (QUANTIZE | {"shape": "[128]"}, "shape is [128]; a shape is [M, K] or (…, K), 2 to 4 sizes that are not negative"),
    (QUANTIZE | {"shape": "[128, -1]"}, "shape is [128, -1]; "),
    (QUANTIZE | {"shape": "[true, 16]"}, "shape is [True, 16]; "),
    (QUANTIZE | {"shape": "[[128, 128], 128]"}, "shape is 128; "),
    (QUANTIZE | {"dtype": "'bfloat16'"}, "dtype is 'bfloat16' (did you mean 'bf16'?)"),
    (QUANTIZE | {"inputs": "['normal', 'outlier']"}, "inputs is 'outlier' (did you mean 'outliers'?)"),
    (QUANTIZE | {"inputs": "'lattice'"}, "inputs is 'lattice'"),
    (QUANTIZE | {"usage": "'colwise'"}, "usage is 'colwise' (did you mean 'columnwise'?)"),
    (GEMM | {"layout": "'TN'"}, "layout is 'TN'; it can be tn, nn, nt"),
    (GEMM | {"accumulate": "'yes'"}, "accumulate is 'yes'; it can be true or false"),
    (TRANSFORM | {"shape": "[2, 3, 16]"}, "shape is [2, 3, 16]; a shape is [M, K], 2 sizes that are not negative"),
    (QUANTIZE | {"view": "'stride'"}, "view is 'stride' (did you mean 'strided'?)"),
    (QUANTIZE | {"scales": "'swizzle'"}, "scales is 'swizzle' (did you mean 'swizzled'?)"),
    (QUANTIZE | {"random": "'word'"}, "random is 'word' (did you mean 'words'?)"),
    (QUANTIZE | {"random": "'philox'"},
     "random is 'philox', but recipe nvfp4 does not round stochastically; leave it out"),
    (QUANTIZE | {"recipe": "['nvfp4-sr', 'nvfp4-2d']", "random": "'words'"},
     "random is 'words', but recipe nvfp4-2d does not round stochastically; leave it out"),
    (ROTATED | {"dtype": "['bf16', 'fp32']"}, "recipe nvfp4-rht rotates bf16 alone, not fp32"),
    (ROTATED | {"shape": "[16, 24]"}, "recipe nvfp4-rht rotates whole groups of 16; K = 24 is no multiple of it"),
    (ROTATED | {"shape": "[24, 16]", "usage": "['rowwise', 'columnwise']"},
     "recipe nvfp4-rht rotates whole groups of 16; M = 24 is no multiple of it"),
    (TRANSFORM | {"recipe": "'nvfp4'"}, "recipe is 'nvfp4', which has no transform; nvfp4-rht and the like have"),
    (TRANSFORM | {"dtype": "'fp16'"}, "recipe nvfp4-rht rotates bf16 alone, not fp16"),
    (QUANTIZE | {"recipe": "'fp8-block-1x128'", "scales": "'swizzled'"},
     "scales is 'swizzled', but recipe fp8-block-1x128-e4m3-pow2 has float32 scales; the 128x4 layout is of bytes"),
    (QUANTIZE | {"inputs": "'normal-1e-28'", "dtype": "['bf16', 'fp16']"},
     "inputs is 'normal-1e-28', which is 0 in fp16; dtype can be fp32 or bf16"),
    (UPDATE | {"recipe": "'fp8-current-e4m3'"},
     "recipe is 'fp8-current-e4m3', which takes no history; fp8-delayed-e4m3 and the like do"),
    (UPDATE | {"shape": "[0, 4]"}, "shape is [0, N]; a history [H, N] has at least one amax of each tensor"),
    (GROUPED | {"usage": "'both'"}, "usage is 'both'; it can be rowwise, columnwise"),
    (GROUPED | {"recipe": "'nvfp4-rowscaled'"},
     "recipe nvfp4-rowscaled has an amax for every row; sections of one amax each do not apply"),
    (GROUPED | {"sections": "4"}, "sections is 4; sections are a kind and a count, even:4; kinds are even, front, "),
    (GROUPED | {"sections": "'evn:4'"}, "sections is 'evn:4' (did you mean 'even'?)"),
    (GROUPED | {"sections": "'even'"}, "sections is 'even'; there can be 1 to 256 sections"),
    (GROUPED | {"sections": "'even:3'"}, "sections is 'even:3'; M = 128 is no multiple of 3"),
    (GROUPED | {"sections": "'middle:2'"}, "sections is 'middle:2'; middle needs 3 sections or more, of which one is"),
    (GROUPED | {"sections": "'front:1'"}, "sections is 'front:1'; front needs 2 sections or more"),
    (GROUPED | {"sections": "'empty:4'"}, "sections is 'empty:4', sections without a row; M is 128 and has to be 0"),
    (GROUPED | {"sections": "'ragged:1'"}, "sections is 'ragged:1'; M = 128 cannot be divided into 1 ragged"),
    (GROUPED | {"sections": "'ragged:8'", "shape": "[4, 16]"}, "M = 4 cannot be divided into 8 ragged sections of w"),
    (GROUPED | {"recipe": "'nvfp4-rht'", "sections": "'even:16'", "usage": "'columnwise'"},
     "sections is 'even:16'; 8 rows are no whole groups of 16, which the recipe rotates"),
    ({k: v for k, v in AGAIN.items() if k != "out_recipe"}, "out_recipe is missing; a gemm-quantized needs recipe, "),
    (AGAIN | {"out_recipe": "'mxfp8-e5m2-sr'"},
     "out_recipe mxfp8-e5m2-sr rounds stochastically; gemm_quantized takes no random bits"),
    (AGAIN | {"out_recipe": "'nvfp4-rht'"}, "out_recipe nvfp4-rht rotates; gemm_quantized rotates no output"),
    (AGAIN | {"w_recipe": "'nvfp4'"}, "recipe mxfp8-e4m3 and w_recipe nvfp4 cannot be multiplied: scale is E8M0"),
    (GEMM | {"recipe": "'fp8-current-e5m2'"}, "recipe fp8-current-e5m2 and w_recipe fp8-current-e5m2 cannot be multip"),
    (PRODUCT | {"recipe": "'fp8-block-128x128'", "w_recipe": "'fp8-block-1x64'"},
     "cannot be multiplied: block is 128x128 and 1x64"),
    (GEMM | {"recipe": "'nvfp4-rht'", "w": "'bf16'"},
     "layout is 'tn', but recipe nvfp4-rht rotates columnwise operands, and rotations cancel where both operands are: "
     "layout can be nt"),
    (GEMM | {"recipe": "'nvfp4-rht'", "layout": "'nt'", "w": "'bf16'", "shape": "[16, 24, 16]"},
     "recipe nvfp4-rht rotates whole groups of 16; K = 24 is no multiple of it"),
    (GEMM | {"recipe": "'nvfp4-rht'", "w_recipe": "'nvfp4'", "layout": "'nt'", "w": "'bf16'"},
     "recipe nvfp4-rht and w_recipe nvfp4 cannot be multiplied: transform is Hadamard("),
    (GEMM | {"w_recipe": "'nvfp4@te-native'"},
     "recipe nvfp4 and w_recipe nvfp4@te-native cannot be multiplied: alpha is (a*b)/d and (b*a)*(1/d)"),
    (PRODUCT | {"recipe": "'nvfp4-rht'"},
     "recipe nvfp4-rht rotates columnwise operands; those of a gemm-grouped are rowwise"),
    (PRODUCT | {"layout": "'tn'"}, "; a gemm-grouped has operation, tier, recipe, w_recipe, shape, x, w, out, "),
    (QUANTIZE | {"dtype": "'fp32'", "view": "'offset-2'"}, "view is 'offset-2', but the elements of fp32 have 4 bytes"),
    (QUANTIZE | {"recipe": "'mxfp8-e4m3'", "amax": "true"}, "recipe mxfp8-e4m3 has no tensor scale and takes no amax"),
    (QUANTIZE | {"recipe": "'fp8-delayed-e4m3'", "amax": "true"}, "recipe fp8-delayed-e4m3 is given its scale"),
    (QUANTIZE | {"bands": "true"}, "bands is true, but the matrix has 32768 elements; up to 2^31"),
    (GEMM | {"view": "'strided'"}, "view is 'strided'; tensors of a gemm are contiguous, pitched or offset"),
    (GEMM | {"same": "true"}, "same is true, which multiplies x by itself: leave w_recipe out, give w as x, N as M"),
    (GEMM | {"recipe": "'fp8-current-e4m3'", "scales": "'swizzled'"}, "recipe fp8-current-e4m3 has float32 scales"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_names_file_table_key_and_the_nearest_word(write, table, message):
    path = write(QUANTIZE, table)
    with pytest.raises(CaseFileError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: [[matrix]] 2: ")
    assert message in str(error.value)


def test_mistakes_of_the_whole_file(write, tmp_path):
    wrong = {
        "[[matrx]]\noperation = 'gemm'\ntier = 'quick'\n": "unknown key 'matrx' (did you mean 'matrix'?); a case file ",
        "": "is no case file: it has no key, and no [[matrix]] table",
        "[tool]\n[run]\ntier = 1\n": "is no case file: it has 'tool', 'run', and no [[matrix]] table with an operation",
        "matrix = []\n": "no [[matrix]] table",
        "[matrix]\ntier = 'quick'\n": "no [[matrix]] table",
        "matrix = [1]\n": "[[matrix]] 1: is 1; a matrix is a table of keys",
        "[[matrix]\n": "not TOML: ",
        "[[matrix]]\ntier = 'quick'\ntier = 'full'\n": "not TOML: ",
        "[[matrix]]\ntier = 'quik'\nids = ['quantize']\n": "[[matrix]] 1: tier ",
        "[[matrix]]\ntier = 'full'\nids = []\n": "[[matrix]] 1: ids is []; it is a list of ids",
        "[[matrix]]\ntier = 'full'\nids = ['quantize/1']\n": "[[matrix]] 1: 'quantize/1' is no id of a case",
        "[[matrix]]\ntier = 'full'\nids = ['a']\ndtype = 'bf16'\n": "[[matrix]] 1: dtype stands beside ids",
    }
    for text, message in wrong.items():
        path = write(text=text)
        with pytest.raises(CaseFileError) as error:
            load(path)
        assert str(error.value).startswith(f"{path}: {message}")
    path.write_bytes(b"\xff\xfe")
    for unreadable in (path, tmp_path / "missing.toml"):
        with pytest.raises(CaseFileError, match=rf"{re.escape(str(unreadable))}: cannot be read: "):
            load(unreadable)


def test_a_table_of_ids(write):
    ids = [
        "quantize/nvfp4/128x128/bf16/normal/swizzled",
        "gemm/mxfp8-e4m3+mxfp8-e5m2/32x64x48/bf16xbf16-fp32/normal/tn",
        "linear/MXFP8BlockScaling/2x32x128x256/bf16/normal/bias",
    ]
    cases = load(write(text=f"[[matrix]]\ntier = 'full'\nids = {ids}\n"))
    assert [(case.id, case.tier) for case in cases] == [(name, "full") for name in ids]


FOREIGN = {
    "a settings file": "[tool.ruff]\nline-length = 120\n",
    "a matrix of another tool": "[[matrix]]\npython = ['3.11']\n",
    "a table of another tool": "[matrix]\nos = ['linux']\n[step]\noperation = 'build'\n",
    "nothing": "",
    "not TOML": "a = {{ template }}\n",
    "longer than a case file": "a = 1\n" + "# \n" * 100_000,
}
BROKEN = {
    "misspelt head": "[[matrx]]\noperation = 'gemm'\ntier = 'quick'\n",
    "one bracket": "[matrix]\noperation = 'gemm'\n",
    "an empty table": "[[matrix]]\n",
    "no table": "matrix = [1]\n",
    "not TOML": "  [[matrix]\n",
    "longer than a case file": "[[matrix]]\n" + "# \n" * 100_000,
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_toml_file_of_a_folder_is_passed_over(write, tmp_path, text):
    write(QUANTIZE, name="mine.toml")
    other = write(name="other.toml", text=text)
    foreign: list[Path] = []
    assert len(load_all([tmp_path], foreign=foreign)) == 1
    assert foreign == [other]
    with pytest.raises(ForeignFile, match=re.escape(str(other))):
        load_all([tmp_path / "mine.toml", other])
    (tmp_path / "mine.toml").unlink()
    with pytest.raises(CaseFileError, match=r"holds no case file; passed over 1 TOML file .*: .*other\.toml"):
        load_all([tmp_path])


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_case_file_of_a_folder_is_an_error(write, tmp_path, text):
    write(QUANTIZE, name="mine.toml")
    broken = write(name="broken.toml", text=text)
    with pytest.raises(CaseFileError, match=re.escape(str(broken))) as error:
        load_all([tmp_path])
    assert not isinstance(error.value, ForeignFile)


def test_which_cases_a_command_takes_without_a_path(write, tmp_path, monkeypatch):
    """Those of `cases` if a file in it is a case file, correct or not; else the shipped cases."""
    monkeypatch.chdir(tmp_path)
    assert default_cases() == shipped_cases() == CASES
    Path("cases").mkdir()
    Path("cases/other.toml").write_text(FOREIGN["a settings file"])
    assert default_cases() == shipped_cases()
    assert unused_default() == [Path("cases/other.toml")]
    Path("cases/mine.toml").write_text(BROKEN["one bracket"])
    assert default_cases() == Path("cases")
    assert unused_default() == []
    assert case_path(Path("shipped")) == shipped_cases()
    assert case_path(Path("shipped/nvfp4_gemm.toml")).is_file()
    Path("shipped").mkdir()
    assert case_path(Path("shipped")) == Path("shipped")


# The committed matrix.

OF_EDGES = {name for name in FAMILIES if name.startswith("amax-")} | {"codes", "half-edges"}
"""Families with shapes of their own, in cases/edges.toml."""


@pytest.fixture(scope="module")
def committed() -> list[Case]:
    return list(all_cases())


def of(cases: list[Case], operation: str) -> list[Case]:
    return [case for case in cases if case.operation == operation]


def test_no_case_twice(committed):
    assert [case for case, count in Counter(ids(committed)).items() if count > 1] == []


def test_quick_has_every_family_dtype_usage_and_layout(committed):
    quick = select(committed, tier="quick")
    assert len(quick) >= 800
    quantize, gemm = of(quick, "quantize"), of(quick, "gemm")
    for operation, cases in (("quantize", quantize), ("gemm", gemm)):
        assert {case.inputs for case in cases} - OF_EDGES == set(OPERATIONS[operation].families()) - OF_EDGES
    families = [OPERATIONS[operation].families() for operation in ("quantize", "gemm")]
    assert {case.inputs for case in (*quantize, *gemm)} == set(families[0]) | set(families[1])
    assert {case.dtype for case in quantize} == {"fp32", "bf16", "fp16"}
    assert {dtype for case in gemm for dtype in (case.x, case.w, case.out)} == {"fp32", "bf16", "fp16"}
    assert {case.flags for case in quantize} >= {(), ("columnwise",)}
    assert {case.layout for case in gemm} == {"tn", "nn", "nt"}
    assert {(case.accumulate, case.bias) for case in gemm} == {
        (False, False), (False, True), (True, False), (True, True),
    }  # fmt: skip
    assert {case.recipe_label for case in quick} >= {"nvfp4", "nvfp4@te-2.8", "nvfp4@te-native"}


def test_a_case_file_with_products_has_exact_sums(committed):
    """A wrong sum within the bound of any order is found by families whose sums are exact alone."""
    exact: dict[str, bool] = {}
    for case in committed:
        if case.is_product:
            file = Path(case.file).stem
            file = "triples" if file.startswith("triples_") else file  # one table of sets of values in several files
            exact[file] = exact.get(file, False) or case.has_exact_sums
    assert len(exact) >= 2
    assert [file for file, found in exact.items() if not found] == []


def test_the_readme_names_every_key_value_and_family():
    text = (CASES / "README.md").read_text(encoding="utf-8")
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    words = {"quick", "full", *FAMILIES, *OPERATIONS}
    own = {name: cls for name, cls in OPERATIONS.items() if not issubclass(cls, ContractCase)}
    for operation, cls in own.items():
        for name in ("operation", "tier"):
            assert any(f"`{name}`" in cells[0] for cells in table)
        for key in keys_of(cls):
            rows = [cells for cells in table if f"`{key.name}`" in cells[0]]
            assert rows, f"cases/README.md has no row for {key.name} of {operation}"
            if not key.required and key.default is not None:
                shown = str(key.default).lower() if isinstance(key.default, bool) else key.default
                assert rows[0][-1].strip() == f"`{shown}`"
            words.update(key.choices)
    for word in words:
        assert f"`{word}`" in text
    for kind in KINDS:
        assert f"`{kind}:" in text


def test_every_id_gives_its_case_back(committed):
    for case in committed[::7]:
        found = case_from_id(case.id)
        assert found is not None
        assert found.id == case.id
        assert (found.shape, found.recipe_names) == (case.shape, case.recipe_names)


@pytest.mark.parametrize(
    "name",
    [
        "", "quantize", "x/nvfp4/1x16/bf16/normal", "quantize/nvfp9/1x16/bf16/normal", "quantize/nvfp4/1x16/bf16/norml",
        "quantize/nvfp4/1x16/bf16/normal/", "quantize/nvfp4/1x16/bf16/normal/both+both", "quantize/nvfp4/1x16/bf16/a:b",
        "quantize/nvfp4/016x16/bf16/normal", "quantize/nvfp4/16/bf16/normal", "quantize/nvfp4-rht/1x16/fp32/normal",
        "gemm/nvfp4/16x16x16/bf16xbf16-fp32/normal", "gemm-quantized/nvfp4/16x16x16/bf16xbf16-fp32/normal/tn",
        "gemm-grouped/nvfp4/16x16x16/bf16xbf16-fp32/normal", "quantize/nvfp4/9999999999999x16/bf16/normal",
    ],
)  # fmt: skip
def test_what_is_no_id_of_a_case(name):
    assert case_from_id(name) is None


@pytest.mark.parametrize(("operation", "shape", "extent"), [
    ("rmsnorm-quantize", (48, 40), "K = 40"), ("rmsnorm-quantize-both", (40, 48), "M = 40"),
])  # fmt: skip
def test_a_contract_refuses_parts_of_a_rotated_group(operation: str, shape: tuple[int, int], extent: str) -> None:
    case = case_from_id(f"{operation}/nvfp4-rht/48x48/bf16/normal")
    assert case is not None
    assert case.problem() is None
    refused = "recipe nvfp4-rht rotates whole groups of 16; {} is no multiple of it"
    assert replace(case, shape=shape).problem() == refused.format(extent)
