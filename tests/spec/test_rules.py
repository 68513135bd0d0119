"""Rules of a user: files, names, errors, and the way from a recipe to a file and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.spec.dialects import DIALECTS, FP8_DIALECTS, MX_DIALECTS
from narrowgauge.spec.recipes import (
    VARIABLE,
    Recipe,
    RuleError,
    find_recipe,
    own_rules,
    read_rules,
    rule_text,
    save_rule,
    use_rules,
)

ELEMENTS = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
NAMED = [
    *(f"nvfp4@{name}" for name in DIALECTS),
    *(f"{base}@{name}" for name in MX_DIALECTS for base in ELEMENTS),
    *(f"fp8-{'block-1x128' if family == 'block' else family}-e4m3{end}@{name}"
      for family, dialects in FP8_DIALECTS.items() for name in dialects
      for end in {"block": ("-fp32", "-pow2"), "static": ("",)}.get(family, ("", "-pow2"))),
]  # fmt: skip
"""Every dialect, of MX for every element, and of FP8 with both kinds of scales."""
OWN = '["nvfp4@own"]\nbase = "modelopt"\nnan_code = 0\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, without rules of earlier tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    yield tmp_path
    use_rules([])


def own(text: str = OWN, name: str = "own.toml") -> str:
    """Name of a file with this text."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_every_dialect_is_equal_after_a_file() -> None:
    assert len(NAMED) > 130
    every = list(map(find_recipe, NAMED))
    own("".join(map(rule_text, every)), "all.toml")
    renamed = [rule_text(replace(r, dialect=f"own-{r.dialect}"), r.dialect) for r in every]
    own("".join(renamed), "copies.toml")
    found, copies = read_rules("all.toml"), read_rules("copies.toml")
    for recipe in every:
        assert found[f"{recipe.name}@{recipe.dialect}"] == recipe
        assert copies[f"{recipe.name}@own-{recipe.dialect}"] == replace(recipe, dialect=f"own-{recipe.dialect}")


def test_a_rule_is_the_recipe_with_its_choices() -> None:
    assert find_recipe(own()) == replace(narrowgauge.recipe("nvfp4@modelopt"), dialect="own", nan_code=0)
    assert str(find_recipe("nvfp4@own")) == "nvfp4@own"
    # A name has the same defaults as any other.
    use_rules([own('["fp8-row@mine"]\nsmallest_amax = 1\n', "fp8.toml")])
    assert find_recipe("fp8-row-e4m3@mine").smallest_amax == 1.0
    assert find_recipe("fp8-row@mine") is find_recipe("fp8-row-e4m3@mine")
    assert [*own_rules()] == ["nvfp4@own", "fp8-row-e4m3@mine"]


def test_an_unknown_name_is_answered_in_full_beside_rules() -> None:
    use_rules([own()])
    with pytest.raises(ValueError, match=r"no recipe is called 'nvfp5@te-2\.8' \(did you mean 'nvfp4'"):
        find_recipe("nvfp5@te-2.8")


def test_processes_inherit_the_rules() -> None:
    use_rules([own()])
    code = "import narrowgauge; print(narrowgauge.recipe('nvfp4@own').nan_code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "0\n"


def test_a_file_with_several_rules_needs_the_name() -> None:
    file = own(OWN + '["mxfp4@own"]\nrounding = "nearest-away"\n')
    with pytest.raises(RuleError, match=r"several rules.*own\.toml:nvfp4@own"):
        find_recipe(file)
    assert find_recipe("own.toml:mxfp4@own").rounding == "nearest-away"
    with pytest.raises(RuleError, match=r"no rule 'mxfp4@won' \(did you mean 'mxfp4@own'\?\)"):
        find_recipe("own.toml:mxfp4@won")


def test_rules_are_added_behind_others() -> None:
    own()
    rule = replace(find_recipe("mxfp8-e4m3@ocp"), dialect="own")
    save_rule(rule, "own.toml", base="ocp", comments=["ours"])
    assert Path("own.toml").read_text(encoding="utf-8") == f'{OWN}\n# ours\n["mxfp8-e4m3@own"]\nbase = "ocp"\n'
    save_rule(rule, "own.toml", base="ocp")  # it is there
    assert len(read_rules("own.toml")) == 2
    with pytest.raises(RuleError, match="has another rule mxfp8-e4m3@own"):
        save_rule(replace(rule, nan="ignore"), "own.toml")


def test_digests_follow_the_choices_alone() -> None:
    use_rules([own()])
    before = own_rules()["nvfp4@own"].digest
    use_rules([own(f"# a comment\n{OWN}")])
    assert own_rules()["nvfp4@own"].digest == before
    use_rules([own(OWN.replace("0", "8"))])
    assert own_rules()["nvfp4@own"].digest != before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no rule", '["nvfp4@own"]']),
        ("[nvfp4@own]", ["not TOML", "in quotes"]),
        ("rules = 3", ["rules", "3", '["nvfp4@own"]']),
        ("[nvfp4]", ["nvfp4", "no name of a rule", "nvfp4@own"]),
        ('["nvfp4@a b"]', ["nvfp4@a b", "no name of a rule"]),
        ('["nvfp4@x.toml"]', ["no name of a rule"]),
        ('["nvfp5@own"]', ["no recipe is called 'nvfp5@own'", "'nvfp4'"]),
        ('["nvfp4@own"]\nbase = "modleopt"', ["base", "'modleopt'", "modelopt"]),
        ('["nvfp4@own"]\nbase = ["te"]', ["base", "it can be te"]),
        ('["nvfp4@own"]\nnancode = 0', ["unknown key 'nancode'", "did you mean 'nan_code'", "base"]),
        ('["nvfp4@own"]\nnan_code = 9', ["nan_code", "9", "it can be 7, 0"]),
        ('["nvfp4@own"]\nnan_code = false', ["nan_code", "False", "it can be 7, 0"]),
        ('["nvfp4@own"]\nrounding = "nearest"', ["rounding", "'nearest'", "did you mean 'nearest-"]),
        ('["nvfp4@own"]\nsmallest_amax = "1"', ["smallest_amax", "'1'", "finite number"]),
        ('["nvfp4@own"]\nsmallest_amax = inf', ["smallest_amax", "inf", "finite number"]),
        ('["nvfp4@own"]\nblock_scale = "amax/6"', ["block_scale", "amax/6", "tensor_scale max/amax"]),
        ('["nvfp4-sr@own"]\nrounding = "nearest-even"', ["rounding", "'stochastic' by the name nvfp4-sr", "remove"]),
        ('["nvfp4@own"]\nrounding = "stochastic"', ["rounding", "'nearest-even' by the name nvfp4", "remove"]),
        ('["nvfp4@own"]\ngranularity = "row"', ["unknown key 'granularity'"]),
        ('["nvfp4@modelopt"]\nnan_code = 0', ["modelopt is a dialect of narrowgauge", "rename"]),
        ('["fp8-row@a"]\n["fp8-row-e4m3@a"]', ["fp8-row-e4m3@a", "a second time", "remove"]),
    ],
)
def test_a_wrong_file_is_one_error(text: str, words: list[str]) -> None:
    with pytest.raises(RuleError) as caught:
        use_rules([own(text, "wrong.toml")])
    for word in ("wrong.toml", *words):
        assert word in str(caught.value)
    assert not own_rules()


def test_files_that_are_none() -> None:
    with pytest.raises(RuleError, match="no such file of rules; `narrowgauge dialect BACKEND --save gone"):
        narrowgauge.recipe("gone.toml")
    Path("folder.toml").mkdir()
    with pytest.raises(RuleError, match="cannot be read"):
        use_rules(["folder.toml"])
    with pytest.raises(RuleError, match="limit of a file of rules"):
        use_rules([own("#" * (1 << 18) + "\n", "large.toml")])


def test_one_name_has_one_rule() -> None:
    use_rules([own(), own(OWN, "same.toml")])
    with pytest.raises(RuleError, match=r'other\.toml: \["nvfp4@own"\] is another rule in own\.toml'):
        use_rules([own(OWN.replace("0", "8"), "other.toml")])
    assert find_recipe("nvfp4@own").nan_code == 0


@pytest.mark.parametrize("name", ["element", "block", "granularity"])
def test_parts_of_a_name_are_no_rule(name: str) -> None:
    other = {"element": "mxfp8-e5m2", "block": "mxfp8-2d", "granularity": "nvfp4-rowscaled"}[name]
    recipe: Recipe = find_recipe(other)
    base = "nvfp4" if name == "granularity" else "mxfp8-e4m3"
    with pytest.raises(RuleError, match=f"{name} is"):
        rule_text(replace(recipe, name=base, dialect="own"))


def test_an_unknown_rule_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"no dialect 'own'.*--rules FILE"):
        find_recipe("nvfp4@own")
