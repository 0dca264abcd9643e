"""The records of `data/families.json` speak the language that its schema says in words."""

import dataclasses
import json

import jsonschema
import pytest
from settings import ROOT
from vramlab.recipe.families import FAMILIES, LLAMA, Family, Layout, family_of
from vramlab.recipe.shapes import read_shape

SCHEMA = json.loads((ROOT / "data" / "families.schema.json").read_text(encoding="utf-8"))
RECORDS = json.loads((ROOT / "data" / "families.json").read_text(encoding="utf-8"))
WORDS = SCHEMA["additionalProperties"]["properties"]
OF_LAYOUTS = WORDS["layout_options"]["properties"]
# What `layout_of` makes of the other words.
MADE = {"items"}


def test_every_record_is_said_in_these_words():
    jsonschema.validate(RECORDS, SCHEMA)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout_module": []}, "'dropout_module' was unexpected"),
        ({"dropout_modules": ["dropout"]}, "'dropout' is not one of"),
        ({"layout_options": {"causal": "yes"}}, "'yes' is not of type 'boolean'"),
    ],
)
def test_what_is_none_of_these_words_is_refused(change, why):
    with pytest.raises(jsonschema.ValidationError, match=why):
        jsonschema.validate({"llama": {**RECORDS["llama"], **change}}, SCHEMA)


def test_the_schema_has_every_word_that_the_code_reads_and_no_other():
    assert {field.name for field in dataclasses.fields(Family)} == WORDS.keys()
    of_layout = {field.name for field in dataclasses.fields(Layout)} - MADE
    assert LLAMA.keys() | of_layout == OF_LAYOUTS.keys()


def test_each_word_is_explained():
    explained = [*WORDS.values(), *OF_LAYOUTS.values()]
    assert all(len(word["description"].split()) >= 3 for word in explained)


@pytest.mark.parametrize("word", WORDS)
def test_each_word_is_needed_by_a_record(word):
    assert any(word in record for record in RECORDS.values())


def test_a_family_without_a_record_has_an_empty_one():
    shape = read_shape("gpt2")
    assert family_of(shape) is FAMILIES["gpt2"]
    unknown = family_of(dataclasses.replace(shape, family="none"))
    assert (unknown.classes, unknown.dropout_modules, unknown.own_mask) == ({}, (), False)
