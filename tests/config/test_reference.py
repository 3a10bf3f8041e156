"""docs/configuration.md is what the schema says."""

from pathlib import Path

from pydantic import BaseModel

from rl_tpu.config import schema
from rl_tpu.config.reference import reference

SECTIONS = [c for c in vars(schema).values() if isinstance(c, type) and issubclass(c, schema.base.Section)]


def test_every_field_has_a_docstring():
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


def test_the_document_is_up_to_date():
    document = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert document.read_text() == reference(), "run `make docs`"


def test_every_field_of_every_section_is_listed():
    text = reference()
    for section in SECTIONS:
        for name in section.model_fields:
            assert f"| `{name}` |" in text


def test_sections_are_strict():
    assert all(section.model_config["extra"] == "forbid" for section in SECTIONS if section is not BaseModel)
